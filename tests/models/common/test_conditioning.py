"""What a session is conditioned on: encoded once, whole or not at all, its own, and counted by storage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from models.lingbot.tiny import tiny_lingbot
from realtime_omni.engine import commands as c
from realtime_omni.engine.accounting import storages
from realtime_omni.errors import TickError
from realtime_omni.models.common.conditioning import Conditioning, Encoded, KeysValues, Parts
from realtime_omni.models.lingbot.model import PROMPTED
from realtime_omni.session.values import SessionId
from realtime_omni.testing.faults import inject
from realtime_omni.testing.inline import InlineEngine, small_config

LAYERS = 3
EMPTY = Conditioning(LAYERS, parts=("text", "tables"))


def layers(value: float, count: int = LAYERS) -> list[KeysValues]:
    return [(torch.full((2, 1, 4), value + i), torch.full((2, 1, 4), -value - i)) for i in range(count)]


def both(value: float) -> Parts:
    return {"text": layers(value), "tables": layers(value / 2, LAYERS)}


@pytest.mark.req("AC-28")
def test_what_was_captured_comes_back_layer_by_layer_and_by_reference() -> None:
    given = both(1.0)
    held = EMPTY.capture("conditional", "a prompt", lambda: given)
    assert EMPTY.get("conditional") is None
    found = held.find("conditional", "a prompt")
    assert found is not None
    assert all(k is mine and v is other for (k, v), (mine, other) in zip(found["text"], given["text"], strict=True))
    assert held.find("conditional", "another prompt") is None
    assert held.find("unconditional", "a prompt") is None


@pytest.mark.req("AC-29")
def test_a_second_capture_of_the_same_key_encodes_nothing_and_another_key_replaces_whole() -> None:
    calls = []

    def encode() -> Parts:
        calls.append(1)
        return both(float(len(calls)))

    held = EMPTY.capture("conditional", "one", encode)
    assert held.capture("conditional", "one", encode) is held
    assert len(calls) == 1
    other = held.capture("conditional", "two", encode)
    assert len(calls) == 2
    assert other.find("conditional", "one") is None
    assert held.find("conditional", "one") is not None


@pytest.mark.req("AC-29")
@pytest.mark.parametrize(
    "parts",
    [
        {"text": layers(1.0)},
        {"text": layers(1.0), "tables": layers(1.0, LAYERS - 1)},
        {"text": layers(1.0, LAYERS + 1), "tables": layers(1.0)},
        {**both(1.0), "image": layers(1.0)},
    ],
    ids=["without tables", "a layer short", "a layer too many", "a part too many"],
)
def test_a_branch_that_is_not_whole_is_refused_and_leaves_the_old_one(parts: Parts) -> None:
    held = EMPTY.capture("conditional", "old", lambda: both(1.0))
    for where in ("conditional", "unconditional"):
        with pytest.raises(ValueError, match="partially initialized"):
            held.capture(where, "new", lambda: parts)
    assert held.find("conditional", "old") is not None
    assert held.get("unconditional") is None


def test_an_encoding_that_fails_half_way_leaves_the_branch_as_it_was() -> None:
    def failing() -> Iterator[KeysValues]:
        yield layers(1.0)[0]
        raise RuntimeError("the device is gone")

    held = EMPTY.capture("conditional", "old", lambda: both(1.0))
    with pytest.raises(RuntimeError, match="gone"):
        held.capture("conditional", "new", lambda: {"text": failing(), "tables": layers(1.0)})
    assert held.find("conditional", "old") is not None


@pytest.mark.req("AC-29")
def test_a_branch_that_was_reset_in_part_cannot_be_held() -> None:
    held = EMPTY.capture("conditional", "a", lambda: both(1.0))
    broken = Encoded("a", {"text": held.branches["conditional"]["text"]})
    with pytest.raises(ValueError, match="partially initialized: tables"):
        replace(held, branches={"conditional": broken})
    ragged = Encoded("a", {"text": (*layers(1.0, 2), (torch.zeros(5, 1, 4),) * 2), "tables": tuple(layers(1.0))})
    with pytest.raises(ValueError, match="differ in shape"):
        replace(held, branches={"conditional": ragged})


@pytest.mark.req("AC-28")
def test_branches_do_not_touch_each_other_and_both_can_be_dropped() -> None:
    held = EMPTY.capture("conditional", "a", lambda: both(1.0)).capture("unconditional", "b", lambda: both(2.0))
    one, other = (held.branches[name]["text"][0][0] for name in ("conditional", "unconditional"))
    assert not torch.equal(one, other)
    assert set(held.without("conditional").branches) == {"unconditional"}
    assert not held.without().branches
    assert len(held.branches) == 2


def test_an_empty_one_is_true_so_that_or_never_swaps_it() -> None:
    other = EMPTY.capture("conditional", "a", lambda: both(1.0))
    assert (EMPTY or other) is EMPTY


@pytest.mark.req("AC-31")
def test_bytes_are_those_of_the_storage_behind_a_view_and_a_shared_storage_counts_once() -> None:
    padded = torch.zeros(2, 1024)
    view = [(padded[0, :4].view(4, 1, 1), padded[1, :4].view(4, 1, 1))] * LAYERS
    one = Conditioning(LAYERS).capture("conditional", "a", lambda: {"text": view})
    assert sum(storages(one).values()) == padded.nbytes
    two = one.capture("unconditional", "a", lambda: {"text": view})
    assert sum(storages((one, two)).values()) == padded.nbytes
    assert not storages(two.without())


# ---- in the engine, with LingBot's prompt


def engine_with(*names: str) -> InlineEngine:
    engine = InlineEngine(tiny_lingbot(), small_config(dtype="float32"))
    for name in names:
        engine.create(name, seed=1, prompt=f"the room of {name}")
    return engine


@pytest.mark.req("AC-28")
def test_sessions_have_their_own_and_keep_it_from_tick_to_tick() -> None:
    engine = engine_with("a", "b")
    engine.next_all("ab")
    first = {name: engine.state_of(name).conditioning.branches[PROMPTED] for name in "ab"}
    assert first["a"].key != first["b"].key
    assert not torch.equal(first["a"]["text"][0][0], first["b"]["text"][0][0])
    engine.next_all("ab")
    assert all(engine.state_of(name).conditioning.branches[PROMPTED] is first[name] for name in "ab")
    engine.reset("a")
    assert engine.state_of("a").conditioning.get(PROMPTED) is None
    assert engine.state_of("b").conditioning.branches[PROMPTED] is first["b"]


@pytest.mark.req("AC-30", "AC-31")
def test_an_evicted_sessions_conditioning_stays_readable_for_who_holds_it_and_is_counted_no_more() -> None:
    engine = InlineEngine(tiny_lingbot(), small_config(dtype="float32", sessions=2, policy="lru"))
    for name in "ab":
        engine.create(name, seed=1, prompt=f"the room of {name}")
    engine.next_all("ab")
    state, before = engine.state_of("a"), engine.runner.memory().states
    held = state.conditioning.branches[PROMPTED]
    copy = held["text"][0][0].clone()
    engine.next("b")
    engine.create("c", seed=1)
    assert "a" not in engine.engine.registry
    engine.next("c")
    assert torch.equal(held["text"][0][0], copy)
    for name in "bc":
        engine.close(name)
    assert engine.runner.memory().states == 0 < before


@pytest.mark.req("AC-32")
@pytest.mark.parametrize("point", ["forward:1", "forward:2", "commit"])
def test_a_session_whose_first_tick_fails_has_captured_nothing_and_leaves_nothing(point: str) -> None:
    engine = engine_with("a")
    with inject(engine, point), pytest.raises(TickError):
        engine.next("a")
    assert engine.state_of("a").conditioning.get(PROMPTED) is None
    engine.ask(c.Close(ticket=0, session_id=SessionId("a")))
    assert engine.runner.memory().states == 0
    assert engine.runner.pages()[0] == 0
