"""How sessions begin and begin again: places, eviction, prefill, reset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from realtime_omni.engine import commands as c
from realtime_omni.errors import (
    ArgumentError,
    CapacityError,
    ErrorCode,
    OmniError,
    SessionGoneError,
    StateError,
    TickError,
)
from realtime_omni.models.base import ControlReducer, LatestWinsReducer
from realtime_omni.session.values import SessionId
from realtime_omni.testing.faults import at, inject
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import TinyKVWorld, move


def picture(chunk: Any) -> bytes:
    data: bytes = chunk.artifacts["frames"].data.tobytes()
    return data


def engine_with(*names: str, model: TinyKVWorld | None = None, **how: Any) -> InlineEngine:
    engine = InlineEngine(model if model is not None else TinyKVWorld(), **how)
    for seed, name in enumerate(names):
        engine.create(name, seed=seed)
        engine.next(name)
    return engine


# ---------------------------------------------------------------------- full


def test_a_full_server_refuses_one_more_session_and_nobody_notices() -> None:
    engine = engine_with("a", "b", sessions=2)
    with pytest.raises(CapacityError) as refused:
        engine.create("c")
    assert refused.value.code == "capacity"
    assert engine.kinds("a") == engine.kinds("b") == []
    assert [engine.next(s).chunk_index for s in "ab"] == [1, 1]
    engine.close("a")
    engine.create("c")


@pytest.mark.req("AC-25")
def test_with_two_places_a_third_session_evicts_the_oldest_once_and_its_owner_is_told() -> None:
    closed: list[Any] = []

    class Model(TinyKVWorld):
        def close(self, state: Any) -> None:
            closed.append(state)

    engine = InlineEngine(Model(), sessions=2, policy="lru")
    free = engine.free_pages
    engine.create("a")
    engine.next("a")
    held_by_one, state = free - engine.free_pages, engine.state_of("a")
    engine.create("b")
    engine.next("b")
    engine.create("c")
    assert sum(s is state for s in closed) == 1
    assert engine.free_pages == free - held_by_one
    assert "a" not in engine.engine.registry
    assert engine.runner.book.cross.entries_of("a") == ()
    told = [(n.kind, n.reason, n.view.state) for n in engine.notices if n.session_id == "a"]
    assert told == [("evicted", "evicted", "closed")]
    with pytest.raises(SessionGoneError, match="evicted"):
        engine.next("a")
    engine.next("c")
    engine.close("b")
    engine.close("c")
    assert engine.free_pages == free


@pytest.mark.req("AC-24")
def test_interleaved_sessions_have_disjoint_pages_and_the_last_used_is_evicted_last() -> None:
    engine = InlineEngine(TinyKVWorld(window_frames=12, sink_frames=0), sessions=2, policy="lru")
    engine.create("a")
    engine.create("b")
    for name in "aaabbaab":
        engine.next(name)
    pages = {name: set(engine.runner.book.pages_of(name)) for name in "ab"}
    assert (len(pages["a"]), len(pages["b"])) == (10, 6)
    assert not pages["a"] & pages["b"]
    assert engine.runner.book.sessions == ("a", "b")
    engine.create("c")
    assert engine.kinds("a") == ["evicted"]
    assert engine.next("b").chunk_index == 3


def test_a_session_that_waits_for_a_chunk_is_never_evicted() -> None:
    engine = engine_with("a", "b", sessions=2, policy="lru", max_batch=1)
    tickets = [engine.post_next("a"), engine.post_next("b")]
    create = c.Create(ticket=0, session_id="c", prompt=None, seed=0)
    created: list[int] = []
    with at(engine, "forward:2", lambda: created.append(engine.send(create))):
        engine.cycle(3)
    assert isinstance(engine.error(created[0]), CapacityError)
    assert [engine.result(t).chunk_index for t in tickets] == [1, 1]


def test_a_setup_that_the_model_refuses_evicts_nobody() -> None:
    engine = engine_with("a", "b", sessions=2, policy="lru")
    with pytest.raises(ArgumentError) as refused:
        engine.create("c", prompt="a castle of glass")
    assert refused.value.code == ErrorCode.PROMPT_UNKNOWN
    assert [engine.next(s).chunk_index for s in "ab"] == [1, 1]


def test_a_victim_whose_cleanup_fails_does_not_cost_the_newcomer_its_place() -> None:
    engine = engine_with("a", "b", sessions=2, policy="lru")
    with inject(engine, "release", "a", times=None):
        view = engine.create("c")
        assert view.state == "active"
        assert engine.kinds("a") == ["cleanup_failed"]
        assert engine.kinds("b") == ["evicted"]
        assert engine.next("c").chunk_index == 0


def test_when_no_victim_can_be_cleaned_up_the_newcomer_is_refused_and_leaves_nothing() -> None:
    engine = engine_with("a", sessions=1, policy="lru")
    with inject(engine, "release", "a"), pytest.raises(CapacityError):
        engine.create("c")
    assert "c" not in engine.engine.registry
    engine.advance(1)  # the tombstone is retried
    engine.create("c")
    assert engine.next("c").chunk_index == 0


def test_a_failed_session_that_holds_nothing_any_more_can_be_evicted_too() -> None:
    engine = engine_with("a", "b", sessions=2, policy="lru", on_failure="release")
    with inject(engine, "forward:1", "b"), pytest.raises(TickError):
        engine.next("b")
    engine.create("c")
    assert engine.kinds("b") == ["failed", "evicted"]
    assert engine.next("a").chunk_index == 1


def test_a_reducer_that_cannot_be_made_takes_no_place() -> None:
    class Broken(TinyKVWorld):
        broken = True

        def new_reducer(self) -> ControlReducer:
            if self.broken:
                raise RuntimeError("no reducer today")
            return LatestWinsReducer()

    model = Broken()
    engine = InlineEngine(model, sessions=1)
    with pytest.raises(OmniError) as refused:
        engine.create("a")
    assert "today" not in refused.value.message
    model.broken = False
    assert engine.runner.book.sessions == ()
    engine.create("a")


def test_a_taken_id_is_refused_and_its_owner_goes_on() -> None:
    engine = engine_with("a")
    with pytest.raises(StateError) as refused:
        engine.create("a")
    assert refused.value.code == "session_exists"
    assert engine.next("a").chunk_index == 1


@pytest.mark.parametrize(
    ("how", "path"),
    [
        ({"seed": True}, "seed"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**53 + 1}, "seed"),
        ({"prompt": "  "}, "prompt"),
        ({"prompt": "unheard of"}, "prompt"),
        ({"start": ["snow"]}, "start"),
        ({"start": 3}, "start"),
        ({"outputs": ()}, "outputs"),
        ({"outputs": ("frames", "frames")}, "outputs"),
        ({"outputs": ("depth",)}, "outputs"),
        ({"image": np.zeros((4, 4, 3), np.uint8)}, "image"),
    ],
    ids=str,
)
def test_a_setup_that_cannot_be_is_refused_by_field_and_takes_no_place(how: dict[str, Any], path: str) -> None:
    engine = InlineEngine(TinyKVWorld(), sessions=1)
    with pytest.raises(ArgumentError) as refused:
        engine.create("a", **how)
    assert refused.value.path == path
    assert engine.runner.book.sessions == ()
    engine.create("a")


# ---------------------------------------------------------------------- unknown ids and earlier lives

ADDRESSED: dict[str, Any] = {
    "accept": lambda e, **k: e.accept("a", 0, prompt="red", **k),
    "next": lambda e, **k: e.next("a", **k),
    "abort": lambda e, **k: e.ask(c.Abort(ticket=0, session_id=SessionId("a"), **k)),
    "rollback": lambda e, **k: e.ask(c.Rollback(ticket=0, session_id=SessionId("a"), **k)),
    "reset": lambda e, **k: e.ask(c.Reset(ticket=0, session_id=SessionId("a"), **k)),
    "close": lambda e, **k: e.close("a", **k),
    "detach": lambda e, **k: e.ask(c.Detach(ticket=0, session_id=SessionId("a"), grace_s=1.0, **k)),
    "attach": lambda e, **k: e.ask(c.Attach(ticket=0, session_id=SessionId("a"), **k)),
}


@pytest.mark.parametrize("call", ADDRESSED)
def test_an_unknown_id_never_creates_a_session(call: str) -> None:
    engine = InlineEngine(TinyKVWorld())
    with pytest.raises(SessionGoneError) as refused:
        ADDRESSED[call](engine)
    assert refused.value.code == "session_not_found"
    assert len(engine.engine.registry) == 0
    assert engine.runner.book.sessions == ()


@pytest.mark.parametrize("call", ADDRESSED)
def test_a_late_call_for_an_earlier_life_of_an_id_is_answered_gone_and_touches_nothing(call: str) -> None:
    engine = engine_with("a")
    first = engine.view("a").generation
    engine.close("a")
    engine.create("a")
    engine.next("a")
    before = engine.view("a")
    with pytest.raises(SessionGoneError) as refused:
        ADDRESSED[call](engine, generation=first)
    assert refused.value.code == "session_gone"
    assert engine.view("a") == before
    assert engine.next("a", generation=before.generation).chunk_index == 1


# ---------------------------------------------------------------------- prefill


def test_a_prefilled_session_is_answered_when_its_start_block_is_committed() -> None:
    engine = InlineEngine(TinyKVWorld(prefill=True))
    ticket = engine.send(c.Create(ticket=0, session_id="a", prompt=None, seed=1))
    engine.absorb()
    assert not engine.answered(ticket)
    engine.prefill()
    assert engine.result(ticket).chunk_index == 0
    assert engine.runner.book.completed_frames("a") == 2
    chunk = engine.next("a")
    assert (chunk.chunk_index, chunk.first_frame) == (0, 0)


def test_the_start_picture_is_used_once_and_is_seen_by_what_follows() -> None:
    worlds = []
    for value in (1, 2):
        engine = InlineEngine(TinyKVWorld(prefill=True))
        engine.create("a", seed=1, image=np.full((2, 2, 3), value, np.uint8))
        assert engine.state_of("a").unwritten is None
        worlds.append([picture(engine.next("a")) for _ in range(2)])
    assert worlds[0] != worlds[1]


def test_a_failing_prefill_of_one_newcomer_does_not_touch_the_other() -> None:
    engine = InlineEngine(TinyKVWorld(prefill=True))
    free = engine.free_pages
    with inject(engine, "prefill:1", "b", times=None):
        tickets = {n: engine.send(c.Create(ticket=0, session_id=n, prompt=None, seed=1)) for n in "abc"}
        engine.cycle()
    assert [type(engine.error(tickets[n])) for n in "abc"] == [type(None), TickError, type(None)]
    assert "b" not in engine.engine.registry
    assert engine.free_pages == free - 2 * 2
    engine.create("b", seed=1)
    assert engine.next("b").chunk_index == 0


@pytest.mark.parametrize("how", ["close", "detach"])
def test_a_session_closed_during_its_prefill_is_gone_and_its_pages_too(how: str) -> None:
    engine = InlineEngine(TinyKVWorld(prefill=True))
    end = {"ticket": 0, "session_id": SessionId("a")}
    command = c.Close(**end) if how == "close" else c.Detach(**end, grace_s=0)
    with at(engine, "prefill:1", lambda: engine.send(command)), pytest.raises(SessionGoneError):
        engine.create("a")
    assert engine.runner.pages()[0] == 0
    assert engine.kinds("a") == ["closed"]


def test_a_reset_whose_prefill_fails_is_failed_and_can_be_reset_again() -> None:
    engine = engine_with("a", model=TinyKVWorld(prefill=True))
    with inject(engine, "prefill:1"), pytest.raises(TickError):
        engine.reset("a")
    assert engine.view("a").state == "failed"
    assert engine.runner.pages()[0] == 0
    with pytest.raises(StateError, match="released"):
        engine.rollback("a")
    engine.reset("a")
    assert engine.next("a").chunk_index == 0


# ---------------------------------------------------------------------- reset


@pytest.mark.parametrize("prefill", [False, True])
def test_a_reset_world_runs_again_as_it_ran_the_first_time(prefill: bool) -> None:
    engine = InlineEngine(TinyKVWorld(prefill=prefill))
    engine.create("a", seed=7, prompt="green")
    first = [picture(engine.next("a")) for _ in range(4)]
    engine.reset("a")
    assert (engine.view("a").epoch, engine.view("a").chunk_index, engine.view("a").pages_used) == (1, 0, 2 * prefill)
    assert [picture(engine.next("a")) for _ in range(4)] == first
    engine.reset("a", seed=8)
    assert [picture(engine.next("a")) for _ in range(4)] != first


def test_the_first_tick_after_a_reset_has_the_prompt_of_the_beginning_and_no_controls() -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("a", prompt="green")
    engine.accept("a", 0, prompt="blue", controls=[move(5)])
    engine.next("a")
    engine.reset("a")
    chunk = engine.next("a")
    assert chunk.prompt == "green"
    assert engine.engine.registry.get("a").session.controls == {}
    engine.reset("a", prompt="blue")
    assert engine.next("a").prompt == "blue"
    assert engine.next("a").prompt == "blue"


def test_a_session_without_any_prompt_ticks_after_a_reset() -> None:
    engine = InlineEngine()  # the null model has a default prompt; take it away
    engine.create("a")
    engine.engine.registry.get("a").setup = type(engine.engine.registry.get("a").setup)(SessionId("a"), None, 0)
    engine.reset("a")
    assert engine.next("a").chunk_index == 0


def test_a_refused_reset_changes_nothing_and_lets_the_running_tick_finish() -> None:
    engine = engine_with("a")
    tickets: list[int] = []
    bad = c.Reset(ticket=0, session_id=SessionId("a"), prompt="unheard of")
    running, waiting = engine.post_next("a"), engine.post_next("a")
    with at(engine, "forward:2", lambda: tickets.append(engine.send(bad))):
        engine.cycle(2)
    assert isinstance(engine.error(tickets[0]), ArgumentError)
    assert [engine.result(t).chunk_index for t in (running, waiting)] == [1, 2]
    assert engine.view("a").epoch == 0


def test_a_start_that_is_no_name_is_refused_by_a_reset_too() -> None:
    engine = engine_with("a")
    with pytest.raises(ArgumentError) as refused:
        engine.reset("a", start=["snow"])
    assert refused.value.path == "start"
    assert engine.next("a").chunk_index == 1


def test_a_reset_tells_everybody_who_waited_for_a_chunk() -> None:
    engine = engine_with("a")
    tickets = [engine.post_next("a") for _ in range(3)]
    reset = c.Reset(ticket=0, session_id=SessionId("a"))
    with at(engine, "forward:2", lambda: engine.send(reset)):
        engine.cycle(2)
    assert [engine.error(t).code for t in tickets] == ["aborted"] * 3  # type: ignore[union-attr]


def test_a_reducer_that_cannot_reset_costs_its_session_and_nobody_else() -> None:
    class Stuck(LatestWinsReducer):
        def reset(self) -> None:
            raise RuntimeError("stuck")

    class Model(TinyKVWorld):
        def new_reducer(self) -> ControlReducer:
            return Stuck()

    engine = engine_with("a", "b", model=Model())
    with pytest.raises(TickError):
        engine.reset("a")
    assert engine.view("a").state == "failed"
    assert engine.next("b").chunk_index == 1
    engine.close("a")
