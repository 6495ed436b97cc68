"""A chunk is delivered before its clean pass; whatever happens to that pass, the chunk stands and the history is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from realtime_omni.engine import commands as c
from realtime_omni.errors import CapacityError, SessionGoneError, StateError, TickError
from realtime_omni.session.values import SessionId
from realtime_omni.testing.faults import at, inject
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import FRAMES, TOKENS, WIDTH, TinyKVWorld, move

CHUNKS = 6
"""Enough for the window to roll."""


def engine_of(names: str, *, deferred: bool = True, work: list[Any] | None = None, **how: Any) -> InlineEngine:
    trace = None if work is None else lambda what, who: work.append((what, *who))
    engine = InlineEngine(TinyKVWorld(deferred=deferred, trace=trace), **how)
    for name in names:
        engine.create(name, seed=ord(name))
    return engine


def frames(chunk: Any) -> bytes:
    data: bytes = chunk.artifacts["frames"].data.tobytes()
    return data


def carries(engine: InlineEngine, name: str) -> bool:
    return engine.state_of(name).unwritten is not None


def play(engine: InlineEngine, name: str, chunks: int = CHUNKS) -> list[bytes]:
    """A walk with controls and a change of prompt."""
    seen = []
    for number in range(chunks):
        engine.accept(name, number, prompt="blue" if number == 2 else None, controls=[move(number)])
        seen.append(frames(engine.next(name)))
    return seen


@pytest.mark.parametrize("variant", [{}, {"prefill": True}, {"branches": ("cond", "free")}], ids=str)
def test_deferred_or_not_the_pictures_and_the_history_are_the_same_bit_for_bit(variant: dict[str, Any]) -> None:
    engines = [InlineEngine(TinyKVWorld(deferred=deferred, **variant)) for deferred in (False, True)]
    for engine in engines:
        engine.create("a", seed=3)
    at_once, deferred = (play(engine, "a") for engine in engines)
    assert at_once == deferred
    for engine in engines:
        engine.rest()
    assert engines[0].kv_bits("a") == engines[1].kv_bits("a")
    assert engines[0].state_of("a").drift == engines[1].state_of("a").drift


def test_the_chunk_is_answered_before_its_clean_pass_and_the_pass_follows_without_being_asked_for() -> None:
    work: list[Any] = []
    engine = engine_of("a", work=work)
    ticket = engine.post_next("a")
    engine.cycle()
    assert engine.result(ticket).chunk_index == 0
    assert work == [("forward:1", "a"), ("forward:2", "a"), ("decode", "a")]
    assert carries(engine, "a")
    assert engine.engine.has_work()
    engine.cycle()
    assert work[3:] == [("prefill", "a")]
    assert not carries(engine, "a")
    assert not engine.engine.has_work()


def test_pages_are_counted_when_they_are_history() -> None:
    engine = engine_of("a")
    for number in range(2):
        chunk = engine.next("a")
        assert chunk.pages_used == engine.view("a").pages_used == FRAMES * number
    assert engine.runner.book.statistics().in_flight == 0
    carried = engine.view("a").state_bytes
    engine.rest()
    assert engine.view("a").pages_used == 2 * FRAMES
    assert carried - engine.view("a").state_bytes == FRAMES * TOKENS * WIDTH * 8


def test_the_position_of_a_block_is_the_same_in_its_tick_and_in_its_clean_pass() -> None:
    seen: list[tuple[str, int]] = []

    class Model(TinyKVWorld):
        def step(self, batch: Any) -> Any:
            seen.append(("step", batch.rows[0].frame_index))
            return super().step(batch)

        def prefill(self, batch: Any) -> Any:
            seen.append(("prefill", batch.rows[0].frame_index))
            return super().prefill(batch)

    engine = InlineEngine(Model(deferred=True, prefill=True))
    engine.create("a")
    for _ in range(2):
        engine.next("a")
    engine.rest()
    assert seen == [("prefill", 0), ("step", 2), ("prefill", 2), ("step", 4), ("prefill", 4)]


# ---------------------------------------------------------------------- order of work


def test_a_session_whose_next_tick_is_asked_for_is_prefilled_first_and_the_others_share_the_pass() -> None:
    work: list[Any] = []
    engine = engine_of("abc", work=work)
    engine.next_all("ab")
    work.clear()
    engine.next("a")
    assert work == [("prefill", "a", "b"), ("forward:1", "a"), ("forward:2", "a"), ("decode", "a")]


def test_a_due_tick_that_nothing_stands_in_the_way_of_goes_before_the_clean_passes_of_others() -> None:
    work: list[Any] = []
    engine = engine_of("ab", work=work)
    engine.next("a")
    work.clear()
    engine.next("b")
    assert [w[0] for w in work] == ["forward:1", "forward:2", "decode"]
    engine.rest()
    assert work[3:] == [("prefill", "a", "b")]


def test_a_tick_asked_for_during_a_clean_pass_of_others_waits_for_that_pass_only() -> None:
    work: list[Any] = []
    engine = engine_of("abc", work=work, max_batch=1)
    for name in "ab":
        engine.next(name)
        engine.rest()
        engine.next(name)
    work.clear()
    asked: list[int] = []
    with at(engine, "prefill:1", lambda: asked.append(engine.post_next("c"))):
        engine.cycle()
    assert engine.result(asked[0]).chunk_index == 0
    assert [w[0] for w in work] == ["prefill", "forward:1", "forward:2", "decode"]


def test_more_sessions_than_a_batch_holds_are_all_served_in_the_order_in_which_they_asked() -> None:
    engine = engine_of("abcd", max_batch=2)
    order: list[str] = []
    for _ in range(3):
        tickets = {name: engine.post_next(name) for name in "abcd"}
        while len(tickets):
            engine.cycle()
            served = [n for n, t in tickets.items() if engine.answered(t)]
            order += served
            for name in served:
                del tickets[name]
    assert "".join(order) == "abcd" * 3


@pytest.mark.parametrize("names", ["ab", "abcd"])
def test_a_batch_of_clean_passes_equals_clean_passes_one_by_one(names: str) -> None:
    together, alone = engine_of(names), engine_of(names)
    for number in range(CHUNKS):
        for engine in (together, alone):
            for name in names[: number + 1]:
                engine.accept(name, number, controls=[move(ord(name) % 5 + number)])
        batch = together.next_all(names)
        assert [frames(chunk) for chunk in batch] == [frames(alone.next(name)) for name in names]
    together.rest()
    alone.rest()
    assert [together.kv_bits(n) for n in names] == [alone.kv_bits(n) for n in names]
    assert together.engine.counters.isolated_reruns == 0


@pytest.mark.parametrize(
    ("asked_at_s", "wait_ms", "model_ms"),
    [(0.5, 590, 90), (1.06, 30, 30), (None, 0, 0)],
    ids=["before", "during", "after"],
)
def test_the_part_of_a_clean_pass_that_a_chunk_waited_for_counts_as_its_model_time(
    asked_at_s: float | None, wait_ms: float, model_ms: float
) -> None:
    engine = engine_of("a")
    engine.next("a")
    engine.clock.advance(1)
    command = c.Next(ticket=0, session_id=SessionId("a"), asked_at_s=asked_at_s)
    tickets: list[int] = []

    def work() -> None:
        engine.clock.advance(0.09)
        tickets.append(engine.send(command))

    with at(engine, "prefill:1", work):
        engine.cycle()
    timings = engine.result(tickets[0]).timings
    assert (timings.wait_ms, timings.model_ms, timings.tick_ms) == pytest.approx((wait_ms, model_ms, 0))


# ---------------------------------------------------------------------- what can happen meanwhile


@pytest.mark.parametrize("when", ["carrying", "during the pass"])
def test_a_session_that_closes_takes_its_unwritten_block_along(when: str) -> None:
    engine = engine_of("ab")
    free = engine.free_pages
    engine.next_all("ab")
    if when == "carrying":
        engine.post_close("a")
        engine.rest()
    else:
        with at(engine, "prefill:1", lambda: engine.post_close("a")):
            engine.rest()
    assert "a" not in engine.engine.registry
    assert engine.free_pages == free - FRAMES
    assert engine.next("b").chunk_index == 1


@pytest.mark.parametrize("when", ["carrying", "during the pass"])
def test_a_reset_forgets_the_unwritten_block(when: str) -> None:
    engine = engine_of("a")
    first = play(engine, "a", 2)
    reset = c.Reset(ticket=0, session_id=SessionId("a"))
    if when == "carrying":
        engine.send(reset)
        engine.rest()
    else:
        with at(engine, "prefill:1", lambda: engine.send(reset)):
            engine.rest()
    assert (engine.view("a").epoch, engine.view("a").pages_used, carries(engine, "a")) == (1, 0, False)
    for number, want in enumerate(first):
        engine.accept("a", 10 + number, controls=[move(number)])
        assert frames(engine.next("a")) == want


def test_there_is_nothing_to_abort_once_the_chunk_is_delivered() -> None:
    engine, control = engine_of("a"), engine_of("a")
    for e in (engine, control):
        e.next("a")
    abort = c.Abort(ticket=0, session_id=SessionId("a"))
    tickets: list[int] = []
    with at(engine, "prefill:1", lambda: tickets.append(engine.send(abort))):
        engine.rest()
    assert engine.result(tickets[0]) is None
    assert frames(engine.next("a")) == frames(control.next("a"))


def test_a_cancelled_call_does_not_cost_the_clean_pass_that_it_waits_for() -> None:
    engine, control = engine_of("a"), engine_of("a")
    for e in (engine, control):
        e.next("a")
    ticket = engine.post_next("a")
    cancel = c.Cancel(ticket=0, session_id=SessionId("a"), target=ticket)
    with at(engine, "prefill:1", lambda: engine.send(cancel)):
        engine.rest()
    assert engine.error(ticket) is not None
    assert not carries(engine, "a")
    chunk = engine.next("a")
    assert (chunk.chunk_index, frames(chunk)) == (1, frames(control.next("a")))


def test_an_idle_session_is_evicted_with_its_unwritten_block() -> None:
    engine = engine_of("ab", sessions=2, policy="lru")
    engine.next_all("ab")
    engine.create("c")
    assert [n for n in "abc" if n in engine.engine.registry] == ["b", "c"]
    engine.rest()
    assert engine.view("b").pages_used == FRAMES


def test_a_session_in_a_clean_pass_is_not_evicted() -> None:
    engine = engine_of("a", sessions=1, policy="lru")
    engine.next("a")
    tickets: list[int] = []
    create = c.Create(ticket=0, session_id="b", prompt=None, seed=1)
    with at(engine, "prefill:1", lambda: tickets.append(engine.send(create))):
        engine.rest()
    assert isinstance(engine.error(tickets[0]), CapacityError)
    assert engine.next("a").chunk_index == 1


@pytest.mark.parametrize("when", ["carrying", "during the pass"])
def test_a_fork_writes_the_block_for_itself_and_the_parent_does_too(when: str) -> None:
    engine, control = engine_of("a"), engine_of("a")
    for e in (engine, control):
        play(e, "a")
    fork = c.Fork(ticket=0, session_id=SessionId("a"), name="b")
    tickets: list[int] = []
    if when == "carrying":
        tickets.append(engine.send(fork))
        engine.absorb()
        assert engine.result(tickets[0]).chunk_index == CHUNKS
    else:
        with at(engine, "prefill:1", lambda: tickets.append(engine.send(fork))):
            engine.rest()
    assert engine.result(tickets[0]).chunk_index == CHUNKS
    want = frames(control.next("a"))
    assert [frames(engine.next(name)) for name in "ba"] == [want, want]
    engine.rest()
    control.rest()
    assert engine.kv_bits("a") == engine.kv_bits("b") == control.kv_bits("a")


@pytest.mark.parametrize("when", ["carrying", "during the pass"])
@pytest.mark.parametrize("target", [CHUNKS - 1, CHUNKS])
def test_a_rewind_gives_up_the_block_of_a_chunk_that_it_takes_back_and_no_other(target: int, when: str) -> None:
    engine, control = engine_of("a"), engine_of("a")
    play(engine, "a")
    want = [*play(control, "a"), frames(control.next("a"))]
    rewind = c.Rewind(ticket=0, session_id=SessionId("a"), chunk_index=target)
    tickets: list[int] = []
    if when == "carrying":
        tickets.append(engine.send(rewind))
        engine.absorb()
        assert carries(engine, "a") == (target == CHUNKS)
    else:
        with at(engine, "prefill:1", lambda: tickets.append(engine.send(rewind))):
            engine.rest()
    assert engine.result(tickets[0]).chunk_index == target
    if target < CHUNKS:
        engine.accept("a", 10, controls=[move(target)])
        assert frames(engine.next("a")) == want[target]
    assert frames(engine.next("a")) == want[CHUNKS]
    engine.rest()
    control.rest()
    assert engine.kv_bits("a") == control.kv_bits("a")


def test_a_session_is_saved_with_the_block_that_it_carries() -> None:
    engine, control, other = engine_of("a"), engine_of("a"), engine_of("x")
    for e in (engine, control):
        play(e, "a")
    ticket = engine.send(c.Save(ticket=0, session_id=SessionId("a")))
    engine.absorb()
    assert carries(engine, "a")
    assert other.restore(engine.result(ticket)).chunk_index == CHUNKS
    assert frames(other.next("a")) == frames(control.next("a"))
    other.rest()
    control.rest()
    assert other.kv_bits("a") == control.kv_bits("a")


# ---------------------------------------------------------------------- a clean pass that fails


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("point", ["prefill:1", "sync", "commit"])
def test_a_clean_pass_that_fails_leaves_the_chunk_and_rollback_writes_the_same_block(point: str, waiting: bool) -> None:
    engine, control = engine_of("ab"), engine_of("ab")
    for e in (engine, control):
        e.next_all("ab")
        e.rest()
        e.next_all("ab")
    bits, free = engine.kv_bits("a"), engine.free_pages
    tickets = [engine.post_next("a"), engine.post_next("a")] if waiting else []
    with inject(engine, point, "a", times=None) as fault:
        engine.cycle()
    assert fault.hits
    view = engine.view("a")
    assert (view.state, view.chunk_index, view.can_rollback) == ("failed", 2, True)
    assert [type(engine.error(t)) for t in tickets] == ([TickError, StateError] if waiting else [])
    assert [(n.kind, n.code) for n in engine.notices if n.session_id == "a"] == [("failed", "tick_failed")]
    assert engine.engine.counters.chunks_committed == 4
    assert engine.kv_bits("a") == bits
    assert carries(engine, "a")
    assert not engine.engine.has_work()
    engine.rest()
    control.rest()
    assert engine.kv_bits("b") == control.kv_bits("b")
    engine.rollback("a")
    chunk = engine.next("a")
    assert (chunk.chunk_index, frames(chunk)) == (2, frames(control.next("a")))
    engine.rest()
    control.rest()
    assert engine.kv_bits("a") == control.kv_bits("a")
    assert engine.free_pages == free - 3 * FRAMES


def test_a_batch_of_clean_passes_that_fails_as_a_whole_is_run_again_row_by_row() -> None:
    engine, control = engine_of("abc"), engine_of("abc")
    for e in (engine, control):
        e.next_all("abc")
    with inject(engine, "prefill:1"):
        engine.rest()
    control.rest()
    assert engine.engine.counters.isolated_reruns == 3
    assert [engine.kv_bits(n) for n in "abc"] == [control.kv_bits(n) for n in "abc"]


STICKY = RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize(("how", "error"), [({}, STICKY), ({"on_failure": "release"}, None)], ids=["sticky", "release"])
def test_a_clean_pass_that_breaks_the_device_releases_the_session(how: dict[str, Any], error: Exception | None) -> None:
    engine = engine_of("a", **how)
    free = engine.free_pages
    play(engine, "a", 2)
    with inject(engine, "prefill:1", error=error, times=None):
        engine.rest()
    view = engine.view("a")
    assert (view.state, view.can_rollback, view.state_bytes) == ("failed", False, 0)
    assert engine.free_pages == free
    with pytest.raises(StateError, match="released"):
        engine.rollback("a")
    engine.reset("a")
    assert engine.next("a").chunk_index == 0


@pytest.mark.parametrize("then", ["close", "reset"])
def test_a_session_whose_clean_pass_failed_can_be_closed_and_reset(then: str) -> None:
    engine = engine_of("a")
    engine.next("a")
    with inject(engine, "prefill:1"):
        engine.rest()
    acts: dict[str, Callable[[], object]] = {"close": lambda: engine.close("a"), "reset": lambda: engine.reset("a")}
    acts[then]()
    engine.rest()
    if then == "close":
        assert engine.runner.pages()[0] == 0
        with pytest.raises(SessionGoneError):
            engine.next("a")
    else:
        assert engine.next("a").chunk_index == 0


def test_a_failed_tick_after_a_clean_pass_keeps_that_block() -> None:
    engine, control = engine_of("a"), engine_of("a")
    for e in (engine, control):
        e.next("a")
    with inject(engine, "forward:2"), pytest.raises(TickError):
        engine.next("a")
    assert engine.view("a").pages_used == FRAMES
    engine.rollback("a")
    assert frames(engine.next("a")) == frames(control.next("a"))
