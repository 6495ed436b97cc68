"""Bytes: what is counted is what the allocator has handed out, and a state beyond its budget costs its own tick only."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed
from torch.profiler import ProfilerActivity, profile

from realtime_omni.config import load
from realtime_omni.engine.accounting import Census, Holding, _what, measure, storages
from realtime_omni.errors import ErrorCode, OmniError, TickError
from realtime_omni.models.base import SessionSetup, Step, StepBatch
from realtime_omni.testing.inline import InlineEngine, small_config
from realtime_omni.testing.models import TinyKVWorld
from realtime_omni.testing.recurrent import WIDTH, RecurrentState, TinyRecurrentWorld

HIDDEN_BYTES = 8 * WIDTH


def allocated(build: Callable[[], InlineEngine]) -> tuple[InlineEngine, int]:
    """What ``build`` returns, and how many bytes the CPU allocator has handed out in it and not taken back."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        made = build()
        made._answers.clear()  # the chunks that were handed out are the caller's
        gc.collect()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    return made, sum(e.nbytes() for e in events)


def recurrent() -> InlineEngine:
    engine = InlineEngine(TinyRecurrentWorld(), sessions=8)
    for name in "abc":
        engine.create(name, seed=1)
        for _ in range(3):
            engine.next(name)
    engine.fork("a", "d")
    engine.next("d")
    engine.close("b")
    return engine


def paged() -> InlineEngine:
    engine = InlineEngine(TinyKVWorld(branches=("cond", "free"), prefill=True))
    for name in "ab":
        engine.create(name, seed=1)
        for _ in range(7):
            engine.next(name)
    engine.fork("a", "c")
    engine.next("c")
    return engine


def bundled() -> InlineEngine:
    engine = InlineEngine(None, load("tiny-world", {}, ["kv.requested_sessions=3", "session.max_sessions=3"]))
    engine.create("a", seed=1)
    engine.next("a")
    engine.fork("a", "b")
    engine.next("b")
    engine.cycle()
    return engine


@pytest.mark.parametrize("build", [recurrent, paged, bundled])
def test_the_bytes_by_owner_add_up_to_what_the_allocator_says(build: Callable[[], InlineEngine]) -> None:
    engine, held = allocated(build)
    memory = engine.runner.memory()
    assert memory.total == memory.kv_pool + memory.scratch + memory.weights + memory.states + memory.caches
    assert abs(memory.total - held) <= 0.01 * held, f"{memory} against {held}"


def test_storage_that_forks_and_moments_share_is_counted_once() -> None:
    engine = InlineEngine(TinyRecurrentWorld())
    engine.create("a")
    engine.next("a")
    before = engine.runner.memory()
    assert before.states == engine.view("a").state_bytes == 2 * HIDDEN_BYTES  # the present state, and one to go back to
    engine.fork("a", "b")
    assert engine.runner.memory().states == before.states
    assert engine.view("b").state_bytes == 2 * HIDDEN_BYTES
    engine.next("b")
    assert engine.runner.memory().states == 3 * HIDDEN_BYTES
    engine.close("a")
    engine.close("b")
    assert engine.runner.memory().states == 0


def test_pages_that_forks_share_are_told_apart() -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("a")
    engine.next("a")
    page = engine.runner.book.spec.page_bytes
    engine.fork("a", "b")
    memory = engine.runner.memory()
    assert (memory.kv_used, memory.kv_shared) == (2 * page, 2 * page)
    assert engine.view("a").kv_bytes == engine.view("b").kv_bytes == 2 * page
    engine.next("b")
    assert engine.runner.memory().kv_used == 4 * page


def test_a_view_counts_with_the_storage_behind_it() -> None:
    whole = torch.zeros(100, dtype=torch.float64)
    array = np.zeros(50)
    assert sum(storages((whole[:1], whole[1:2])).values()) == 800
    assert sum(storages({"x": array[:1], "y": array[1:]}).values()) == 400

    @dataclass(frozen=True, slots=True)
    class Nested:
        parts: tuple[Any, ...]
        again: Any

    nested = Nested((whole, [array, {"z": torch.zeros(1)}]), None)
    assert sum(storages(nested).values()) == 800 + 400 + 4
    circle: list[Any] = [whole]
    circle.append(circle)
    assert sum(storages(circle).values()) == 800
    assert sum(storages(torch.nn.Linear(3, 2)).values()) == 4 * 8
    assert not storages((1, "text", None, torch.zeros(0), len, dict))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 5))), max_size=30))
def test_the_census_is_the_union_of_what_is_held(changes: list[tuple[int, set[int]]]) -> None:
    census, held = Census(), {n: {} for n in range(4)}
    for holder, keys in changes:
        census.remove(held[holder])
        held[holder] = {key: 10 + key for key in keys}
        census.add(held[holder])
        union = {key: size for each in held.values() for key, size in each.items()}
        assert census.bytes == sum(union.values())
        census.check(held.values())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.sets(st.integers(0, 5)), max_size=4)), max_size=20))
def test_a_holding_that_changes_part_by_part_is_the_union_of_its_parts(
    changes: list[tuple[int, list[set[int]]]],
) -> None:
    """Sessions whose moments come and go; every second change keeps the parts there were and adds new ones."""
    census, holdings = Census(), [Holding() for _ in range(3)]
    parts: list[list[dict[int, int]]] = [[], [], []]
    for number, (holder, sets) in enumerate(changes):
        new = [{key: 10 + key for key in keys} for keys in sets]
        parts[holder] = [*parts[holder][1:], *new] if number % 2 else new
        holdings[holder].update(parts[holder], census)
        union = {key: size for each in parts[holder] for key, size in each.items()}
        assert holdings[holder].storages == union
        census.check([holding.storages for holding in holdings])


class Grows(TinyRecurrentWorld):
    """From its second chunk on, its state is larger than declared; only for sessions of seed 1."""

    def step(self, batch: StepBatch) -> Step:
        results = yield from super().step(batch)
        for row, output in results.items():
            if batch.rows[row].seed == 1 and batch.rows[row].state.chunks:
                hidden = torch.zeros(WIDTH + 1, dtype=torch.float64)[:WIDTH].copy_(output.next_state.hidden)
                results[row] = changed(output, next_state=RecurrentState(hidden, output.next_state.chunks))
        return results


class BornLarge(TinyRecurrentWorld):
    def open(self, setup: SessionSetup) -> RecurrentState:
        return RecurrentState(torch.zeros(2 * WIDTH, dtype=torch.float64), 0)


def test_a_state_beyond_its_budget_fails_its_tick_and_nobody_elses() -> None:
    engine = InlineEngine(Grows())
    engine.create("a", seed=1)
    engine.create("b", seed=2)
    engine.next_all("ab")
    before = engine.runner.memory()
    failed, fine = engine.next_all("ab")
    assert isinstance(failed, TickError)
    assert failed.code == ErrorCode.STATE_TOO_LARGE
    assert not isinstance(fine, Exception)
    assert (engine.view("a").state, engine.view("a").chunk_index) == ("failed", 1)
    assert engine.view("a").state_bytes == before.states // 2
    engine.cycle()
    engine.reset("a", seed=2)
    engine.next("a")


def test_a_session_that_would_begin_beyond_its_budget_is_refused() -> None:
    engine = InlineEngine(BornLarge())
    free = engine.free_pages
    with pytest.raises(OmniError) as refused:
        engine.create("a")
    assert refused.value.code == ErrorCode.STATE_TOO_LARGE
    assert (engine.free_pages, engine.runner.memory().states, len(engine.engine.registry)) == (free, 0, 0)
    engine.cycle()


def test_a_saved_state_beyond_the_budget_is_refused() -> None:
    engine = InlineEngine(TinyRecurrentWorld())
    engine.create("a")
    engine.next("a")
    snapshot = engine.snapshot("a")

    class Padded(TinyRecurrentWorld):
        def unpack(self, packed: Any) -> RecurrentState:
            state = super().unpack(packed)
            return replace(state, hidden=torch.cat([state.hidden, state.hidden])[:WIDTH])

    other = InlineEngine(Padded())
    with pytest.raises(OmniError) as refused:
        other.restore(snapshot)
    assert refused.value.code == ErrorCode.STATE_TOO_LARGE
    other.cycle()


def test_a_create_beyond_the_budget_of_bytes_is_refused() -> None:
    config = small_config(sessions=8)
    room = 3 * 2 * HIDDEN_BYTES  # three sessions, each with its state and one to go back to
    config = changed(config, kv=changed(config.kv, memory_bytes=room + HIDDEN_BYTES))
    engine = InlineEngine(TinyRecurrentWorld(), config)
    for name in "abc":
        engine.create(name)
        engine.next(name)
        engine.next(name)
    with pytest.raises(OmniError) as refused:
        engine.create("d")
    assert refused.value.code == ErrorCode.CAPACITY
    assert engine.runner.memory().states <= room


class _Plain(msgspec.Struct, frozen=True):
    name: str | None = None
    mode: Literal["a", "b"] = "a"
    level: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    parts: tuple[_Plain, ...] = ()


class _Open(msgspec.Struct, frozen=True):
    parts: tuple[_Plain, ...] = ()
    held: Any = None


def test_a_struct_of_plain_values_is_judged_by_its_type_and_any_other_by_what_it_holds() -> None:
    assert _what(_Plain) == "leaf"
    assert _what(_Open) == "object"
    assert storages(_Plain(parts=(_Plain("x"),))) == {}
    data = np.zeros(5, np.float32)
    assert list(storages(_Open((_Plain(),), [data])).values()) == [20]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=8), min_size=2, max_size=6))
def test_what_the_state_before_is_known_to_hold_changes_no_measure(states: list[list[tuple[int, bool]]]) -> None:
    """States of tensors and arrays that come and go, some of them as new views of what others hold."""
    held: list[Any] = [torch.zeros(4 + n) for n in range(4)] + [np.zeros(3 + n) for n in range(2)]
    before = measure(None)
    for picks in states:
        state = tuple((held[n][1:] if view else held[n],) for n, view in picks)
        extent = measure(state, before)
        assert extent.storages == storages(state)
        assert set(extent.places) == {id(each) for (each,) in state}
        kept, before = state, extent  # `kept`, because what follows is measured while it lives
    assert len(kept) == len(states[-1])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(st.none(), st.sets(st.integers(0, 5))), max_size=30))
def test_a_holding_whose_moments_come_and_go_one_by_one_is_the_union_of_those_that_are_left(
    steps: list[set[int] | None],
) -> None:
    """None: the oldest goes, where it is not the only one."""
    census, holding = Census(), Holding()
    moments: list[dict[int, int]] = [{7: 17}]
    holding.update(moments, census)
    for keys in steps:
        if keys is not None:
            moments.append({key: 10 + key for key in keys})
            holding.push(moments[-1], census)
        elif len(moments) > 1:
            del moments[0]
            holding.drop_oldest(census)
        union = {key: size for each in moments for key, size in each.items()}
        assert (holding.storages, holding.bytes) == (union, sum(union.values()))
        census.check([holding.storages])
    holding.update((), census)
    assert (holding.storages, holding.bytes, census.bytes) == ({}, 0, 0)
