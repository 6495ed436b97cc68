"""One session's transaction, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from realtime_omni.errors import ArgumentError, ChunkMetadataError, SessionGoneError, StateError
from realtime_omni.session.controls import ControlReducer, LatestWinsReducer, PreparedControls
from realtime_omni.session.journal import Origin
from realtime_omni.session.lifecycle import SessionState, Trigger
from realtime_omni.session.session import Session
from realtime_omni.session.values import (
    ChunkIndex,
    ChunkMetadata,
    ControlInput,
    EventId,
    Generation,
    SessionEvent,
    SessionId,
)


def session(reducer: ControlReducer | None = None, **changes: Any) -> Session:
    return Session(
        SessionId("a"),
        Generation(1),
        origin=Origin("red"),
        reducer=reducer if reducer is not None else LatestWinsReducer(),
        max_pending_events=4,
        request_ids=lambda session_id, chunk: f"ar-{session_id}-{chunk}",
        **changes,
    )


def control(track: str, value: int) -> ControlInput:
    return ControlInput(track, "test.v1", {"value": value})


def say(s: Session, event_id: int, prompt: str | None = None, *controls: ControlInput) -> str:
    event = SessionEvent(EventId(event_id), prompt, controls)
    return str(s.accept_event(event, lambda e: e.prompt).status)


def test_a_tick_is_a_frozen_snapshot_of_prompt_controls_events_and_index() -> None:
    s = session()
    say(s, 3, "green", control("hand", 1), control("camera", 1))
    say(s, 5, None, control("camera", 2))
    tick = s.begin_tick(("frames",))
    assert (tick.request_id, tick.chunk_index, tick.prompt) == ("ar-a-0", 0, "green")
    assert tick.applied_event_ids == (3, 5)
    assert [(c.track, c.data["value"]) for c in tick.controls] == [("camera", 2), ("hand", 1)]  # sorted by track
    say(s, 6, "blue")
    assert (tick.prompt, s.prompt, s.chunk_index, s.intake.pending_count) == ("green", "red", 0, 3)
    s.verify(ChunkMetadata.from_tick(tick))
    s.commit_tick()
    assert (s.prompt, s.chunk_index, [e.event_id for e in s.intake.snapshot()]) == ("green", 1, [6])
    assert s.begin_tick(()).prompt == "blue"


@pytest.mark.req("AC-05")
@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("session_id", "b"),
        ("request_id", "ar-a-1"),
        ("chunk_index", 1),
        ("applied_event_ids", ()),
        ("applied_event_ids", (3, 4)),
        ("applied_event_ids", [3]),
    ],
)
def test_metadata_must_be_exactly_equal(field: str, wrong: Any) -> None:
    s = session()
    say(s, 3, "green")
    tick = s.begin_tick(())
    with pytest.raises(ChunkMetadataError, match=field) as refused:
        s.verify(replace(ChunkMetadata.from_tick(tick), **{field: wrong}))
    assert refused.value.path == field
    s.fail_tick()
    assert (s.state, s.chunk_index, s.intake.pending_count, s.in_flight) == (SessionState.FAILED, 0, 1, None)
    s.check()


def test_an_aborted_tick_leaves_no_trace() -> None:
    s = session()
    say(s, 0, "green", control("camera", 1))
    first = s.begin_tick(())
    s.abort_tick()
    assert (s.state, s.prompt, s.controls, s.chunk_index) == (SessionState.ACTIVE, "red", {}, 0)
    assert s.begin_tick(()) == first


def test_two_ticks_at_once_are_impossible() -> None:
    s = session()
    s.begin_tick(())
    with pytest.raises(StateError, match="is running"):
        s.begin_tick(())


def test_what_the_reducer_carries_and_what_it_shows_may_differ() -> None:
    class Once:
        """Shows a control for one block and keeps a total of its own."""

        total = 0

        def prepare(
            self, current: Mapping[str, ControlInput], events: Sequence[SessionEvent], chunk_index: int
        ) -> PreparedControls:
            shown = tuple(c for e in events for c in e.controls)
            return PreparedControls(shown, carried=(), private=self.total + len(shown))

        def commit(self, prepared: PreparedControls) -> None:
            self.total = prepared.private

        def reset(self) -> None:
            self.total = 0

    reducer = Once()
    s = session(reducer)
    say(s, 0, None, control("camera", 1))
    s.begin_tick(())
    s.abort_tick()
    assert reducer.total == 0
    tick = s.begin_tick(())
    s.commit_tick()
    assert (len(tick.controls), s.controls, reducer.total) == (1, {}, 1)
    assert s.begin_tick(()).controls == ()


@pytest.mark.req("AC-08")
def test_a_reducer_that_raises_in_commit_has_changed_nothing() -> None:
    class Stuck(LatestWinsReducer):
        def commit(self, prepared: PreparedControls) -> None:
            raise RuntimeError("stuck")

    s = session(Stuck())
    say(s, 0, "green", control("camera", 1))
    s.begin_tick(())
    with pytest.raises(RuntimeError):
        s.commit_tick()
    assert (s.prompt, s.controls, s.chunk_index, s.intake.pending_count) == ("red", {}, 0, 1)


def test_a_reducer_that_cannot_reset_leaves_the_session_in_its_epoch() -> None:
    class Stuck(LatestWinsReducer):
        def reset(self) -> None:
            raise RuntimeError("stuck")

    s = session(Stuck())
    say(s, 0, "green")
    s.begin_reset()
    with pytest.raises(RuntimeError):
        s.finish_reset(Origin("red"))
    assert (s.state, s.epoch, s.intake.pending_count) == (SessionState.RESETTING, 0, 1)


def test_an_event_that_the_model_refuses_is_not_queued() -> None:
    s = session()

    def refuse(event: SessionEvent) -> str:
        raise ArgumentError("no such place", path="prompt")

    with pytest.raises(ArgumentError):
        s.accept_event(SessionEvent(EventId(0), "moon"), refuse)
    assert (s.intake.pending_count, s.intake.floor) == (0, -1)
    assert say(s, 0, "green") == "accepted"


def test_the_model_is_not_asked_about_a_duplicate() -> None:
    s = session()
    event = SessionEvent(EventId(0), "green")
    assert s.accept_event(event, lambda e: "a meadow").understood_prompt == "a meadow"
    again = s.accept_event(event, lambda e: pytest.fail("asked again"))
    assert (again.status, again.understood_prompt) == ("duplicate", None)


@pytest.mark.req("AC-09")
def test_a_reset_starts_an_epoch_and_keeps_the_floor() -> None:
    s = session()
    say(s, 7, "green")
    s.begin_tick(())
    s.fail_tick()
    s.begin_reset()
    assert s.finish_reset(Origin("red")) == (7,)
    assert (s.state, s.epoch, s.chunk_index, s.prompt, s.intake.floor) == (SessionState.ACTIVE, 1, 0, "red", 7)
    assert say(s, 7, "green") == "discarded"


def test_the_horizon_counts_whole_blocks() -> None:
    s = session(frames_per_block=3, horizon_frames=7)
    for index in (0, 1):
        assert s.begin_tick(()).chunk_index == index
        s.commit_tick()
    with pytest.raises(StateError) as refused:
        s.begin_tick(())
    assert refused.value.code == "horizon"
    assert s.in_flight is None


def test_a_tombstone_stays_a_tombstone_for_every_call() -> None:
    s = session()
    s.lifecycle.move(Trigger.CLOSE)
    with pytest.raises(SessionGoneError):
        say(s, 0, "green")
    s.lifecycle.move(Trigger.RELEASE_FAILED)
    for call in (lambda: say(s, 0, "green"), lambda: s.begin_tick(()), s.begin_reset):
        with pytest.raises(StateError) as refused:
            call()
        assert refused.value.code == "cleanup_failed"
    assert s.chunk_index == ChunkIndex(0)


def test_the_default_reducer_keeps_the_latest_control_of_each_track() -> None:
    reducer = LatestWinsReducer()
    events = [
        SessionEvent(EventId(0), controls=(control("camera", 1), control("hand", 1))),
        SessionEvent(EventId(1), controls=(control("camera", 2),)),
    ]
    before = {"camera": control("camera", 0), "light": control("light", 9)}
    prepared = reducer.prepare(before, events, 0)
    assert {c.track: c.data["value"] for c in prepared.controls} == {"camera": 2, "hand": 1, "light": 9}
    assert prepared.after == prepared.controls
    assert before["camera"].data["value"] == 0


# ---------------------------------------------------------------------- a session as a value


class Total(LatestWinsReducer):
    """Adds up the values of everything that it was told."""

    def __init__(self) -> None:
        self.total = 0

    def prepare(
        self, current: Mapping[str, ControlInput], events: Sequence[SessionEvent], chunk_index: int
    ) -> PreparedControls:
        total = self.total + sum(c.data["value"] for e in events for c in e.controls)
        return PreparedControls((control("total", total),), carried=(), private=total)

    def commit(self, prepared: PreparedControls) -> None:
        self.total = prepared.private

    def save(self) -> Any:
        return self.total

    def load(self, memory: Any) -> None:
        self.total = memory


def loaded(memory: Any) -> Total:
    reducer = Total()
    reducer.load(memory)
    return reducer


def walked(chunks: int, **changes: Any) -> Session:
    """A session whose chunk number i had one event, with id i, prompt p<i> and value i + 1."""
    s = session(Total(), rewind_blocks=2, **changes)
    for i in range(chunks):
        say(s, i, f"p{i}", control("step", i + 1))
        s.begin_tick(())
        s.commit_tick()
    return s


def total_of(s: Session) -> int:
    tick = s.begin_tick(())
    s.abort_tick()
    total: int = tick.controls[0].data["value"]
    return total


def test_the_last_boundaries_are_remembered_as_they_were() -> None:
    s = walked(4)
    assert [(m.chunk_index, m.prompt, m.memory) for m in s.past] == [(2, "p1", 3), (3, "p2", 6)]
    assert s.moment(3) is s.past[-1]
    assert (s.moment(4).prompt, s.moment(4).memory) == ("p3", 10)
    s.check()


def test_a_tick_that_did_not_commit_leaves_no_boundary() -> None:
    s = walked(1)
    s.begin_tick(())
    s.abort_tick()
    s.begin_tick(())
    s.fail_tick()
    assert [m.chunk_index for m in s.past] == [0]


@pytest.mark.parametrize("failed", [False, True])
def test_a_rewind_goes_back_in_everything_but_the_floor_and_the_epoch(failed: bool) -> None:
    s = walked(4)
    say(s, 9, "later")
    if failed:
        s.begin_tick(())
        s.fail_tick()
    moment = s.moment(3)
    assert s.rewind(moment, loaded(moment.memory)) == (9,)
    assert (s.state, s.chunk_index, s.prompt, s.epoch, s.intake.floor) == (SessionState.ACTIVE, 3, "p2", 1, 9)
    assert (total_of(s), [m.chunk_index for m in s.past]) == (6, [2])
    assert say(s, 9, "later") == "discarded"
    s.check()


@pytest.mark.parametrize(("target", "code"), [(1, "not_retained"), (0, "not_retained"), (5, "invalid_argument")])
def test_a_boundary_that_is_not_retained_is_refused(target: int, code: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        walked(4).moment(target)
    assert (refused.value.code, refused.value.path) == (code, "chunk_index")


def test_a_fork_has_the_memory_but_not_the_queue_and_then_a_life_of_its_own() -> None:
    s = walked(3)
    say(s, 9, "later")
    s.begin_tick(())
    twin = s.fork(SessionId("b"), Generation(2), loaded(s.memento().memory))
    assert (twin.id, twin.generation, twin.in_flight, twin.intake.pending_count) == ("b", 2, None, 0)
    assert (twin.chunk_index, twin.prompt, twin.epoch, twin.intake.floor) == (3, "p2", 0, 9)
    assert (twin.past, twin.journal.lineage, total_of(twin)) == (s.past, s.journal.lineage, 6)
    s.commit_tick()
    assert (s.chunk_index, s.prompt, twin.chunk_index, twin.prompt) == (4, "later", 3, "p2")
    assert twin.journal.lineage != s.journal.lineage
    for one in (s, twin):
        one.check()


def test_a_reset_forgets_the_past() -> None:
    s = walked(3)
    s.begin_reset()
    assert s.past == ()
    s.finish_reset(Origin("red"))
    s.check()


def test_without_rewind_the_reducer_is_never_asked_to_save() -> None:
    class Deaf(LatestWinsReducer):
        def save(self) -> None:
            raise AssertionError("asked")

    s = session(Deaf())
    s.begin_tick(())
    s.commit_tick()
    assert s.past == ()


def test_a_reducer_without_memory_loads_none_and_nothing_else() -> None:
    reducer = LatestWinsReducer()
    reducer.load(reducer.save())
    with pytest.raises(ArgumentError):
        reducer.load([])
