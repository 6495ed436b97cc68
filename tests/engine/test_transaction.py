"""A tick is a transaction: order of events, who runs, what commits, what a failure leaves."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace as changed

from realtime_omni.engine import commands as c
from realtime_omni.errors import (
    ArtifactError,
    ChunkMetadataError,
    EventConflictError,
    EventQueueFullError,
    StaleEventError,
    StateError,
    TickError,
)
from realtime_omni.session.values import AcceptStatus, EventId, SessionEvent, SessionId
from realtime_omni.testing.faults import at, inject
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import Knobs, TinyKVWorld, move


def post_accept(engine: InlineEngine, session_id: str, event_id: int, prompt: str) -> int:
    event = SessionEvent(EventId(event_id), prompt=prompt)
    return engine.send(c.Accept(ticket=0, session_id=SessionId(session_id), event=event))


def watched(**how: Any) -> tuple[InlineEngine, TinyKVWorld, list[tuple[str, tuple[str, ...]]]]:
    """An engine, its model, and what the model was asked to do."""
    work: list[tuple[str, tuple[str, ...]]] = []
    model = TinyKVWorld(trace=lambda what, sessions: work.append((what, sessions)))
    return InlineEngine(model, **how), model, work


def committed(engine: InlineEngine, session_id: str) -> tuple[Any, ...]:
    """Everything a failed tick must leave alone."""
    entry = engine.engine.registry.get(session_id)
    session = entry.session
    return (
        session.chunk_index,
        session.epoch,
        session.prompt,
        dict(session.controls),
        session.intake.snapshot(),
        session.intake.floor,
    )


# ---------------------------------------------------------------------- events


@pytest.mark.req("AC-01")
def test_ids_must_rise_also_right_after_a_reset_and_a_refusal_changes_nothing() -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("a")
    engine.accept("a", 5, prompt="green")
    engine.next("a")
    engine.reset("a")
    before = committed(engine, "a")
    with pytest.raises(StaleEventError):
        engine.accept("a", 4, prompt="blue")
    assert committed(engine, "a") == before
    assert engine.accept("a", 6, prompt="blue").status is AcceptStatus.ACCEPTED


@pytest.mark.req("AC-02")
def test_the_fifth_waiting_event_is_refused_and_the_first_four_apply_in_order() -> None:
    engine = InlineEngine(TinyKVWorld(), max_pending_events=4)
    engine.create("a")
    for event_id in range(4):
        engine.accept("a", event_id, controls=[move(event_id)])
    with pytest.raises(EventQueueFullError):
        engine.accept("a", 4, controls=[move(4)])
    assert engine.view("a").pending_event_count == 4
    assert engine.next("a").metadata.applied_event_ids == (0, 1, 2, 3)
    assert engine.accept("a", 4, controls=[move(4)]).status is AcceptStatus.ACCEPTED


@pytest.mark.req("AC-03")
@pytest.mark.parametrize("point", ["forward:1", "forward:2", "forward:3", "decode", "sync"])
def test_an_event_that_arrives_during_a_tick_waits_for_the_next_one(point: str) -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("a")
    engine.accept("a", 0, prompt="green")
    tickets: list[int] = []
    with at(engine, point, lambda: tickets.append(post_accept(engine, "a", 1, "blue"))):
        first = engine.next("a")
    engine.cycle()
    assert engine.result(tickets[0]).status is AcceptStatus.ACCEPTED
    assert (first.metadata.applied_event_ids, first.prompt) == ((0,), "green")
    second = engine.next("a")
    assert (second.metadata.applied_event_ids, second.prompt) == ((1,), "blue")


@pytest.mark.req("AC-03")
def test_an_event_between_plan_and_run_is_not_in_the_frozen_tick() -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("a")
    ticket = engine.post_next("a")
    engine.absorb()
    engine.plan()
    post_accept(engine, "a", 0, "blue")
    engine.absorb()
    engine.run()
    engine.settle()
    assert engine.result(ticket).metadata.applied_event_ids == ()
    assert engine.next("a").metadata.applied_event_ids == (0,)


def test_a_repeated_event_is_a_duplicate_also_after_it_was_applied_and_acts_once() -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("a")
    engine.accept("a", 0, prompt="green")
    assert engine.accept("a", 0, prompt="green").status is AcceptStatus.DUPLICATE
    assert engine.next("a").metadata.applied_event_ids == (0,)
    assert engine.accept("a", 0, prompt="green").status is AcceptStatus.DUPLICATE
    assert engine.next("a").metadata.applied_event_ids == ()
    with pytest.raises(EventConflictError):
        engine.accept("a", 0, prompt="blue")


def test_an_event_discarded_by_a_reset_is_told_and_reported_as_discarded() -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("a", prompt="red")
    engine.accept("a", 3, prompt="blue")
    engine.reset("a")
    assert [(n.kind, n.event_ids) for n in engine.notices] == [("events_discarded", (3,))]
    assert engine.accept("a", 3, prompt="blue").status is AcceptStatus.DISCARDED
    chunk = engine.next("a")
    assert (chunk.metadata.applied_event_ids, chunk.prompt) == ((), "red")


def test_the_latest_control_of_a_track_stays_until_it_is_replaced() -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("a")
    engine.accept("a", 0, controls=[move(1)])
    engine.accept("a", 1, controls=[move(2)])
    engine.next("a")
    assert engine.engine.registry.get("a").session.controls == {"move": move(2)}
    engine.next("a")
    assert engine.engine.registry.get("a").session.controls == {"move": move(2)}


# ---------------------------------------------------------------------- one tick at a time


@pytest.mark.req("AC-04")
def test_two_calls_of_next_chunk_never_share_a_batch_and_get_successive_chunks() -> None:
    engine, _, work = watched()
    engine.create("a")
    tickets = [engine.post_next("a"), engine.post_next("a")]
    engine.cycle()
    assert [engine.answered(t) for t in tickets] == [True, False]
    engine.cycle()
    assert [engine.result(t).chunk_index for t in tickets] == [0, 1]
    assert [sessions for what, sessions in work if what == "forward:1"] == [("a",), ("a",)]


@pytest.mark.parametrize("point", [None, "forward:1", "sync"])
def test_a_cancelled_call_costs_no_chunk_wherever_its_command_is(point: str | None) -> None:
    """None: still in the inbox, where the cancel, being control, overtakes it."""
    engine, _, work = watched()
    engine.create("a")
    first, second = engine.post_next("a"), engine.post_next("a")
    cancel = c.Cancel(ticket=0, session_id=SessionId("a"), target=first)
    if point is None:
        engine.send(cancel)
        engine.cycle(2)
        assert [what for what, _ in work].count("forward:1") == 1
    else:
        with at(engine, point, lambda: engine.send(cancel)):
            engine.cycle(3)
    assert engine.error(first).code == "aborted"  # type: ignore[union-attr]
    assert engine.result(second).chunk_index == 0


def test_a_cancel_that_comes_too_late_changes_nothing_and_is_not_kept() -> None:
    engine, _, _ = watched()
    engine.create("a")
    for index in range(100):
        ticket = engine.post_next("a")
        engine.cycle()
        engine.send(c.Cancel(ticket=0, session_id=SessionId("a"), target=ticket))
        engine.cycle()
        assert engine.result(ticket).chunk_index == index
    assert len(engine.engine.registry.get("a").cancelled) <= 1


# ---------------------------------------------------------------------- what commits


@pytest.mark.req("AC-05")
@pytest.mark.parametrize("field", ["session_id", "request_id", "chunk_index", "applied_event_ids"])
def test_an_output_that_names_another_tick_is_refused_by_field_and_the_session_fails_unchanged(field: Any) -> None:
    engine, model, _ = watched()
    engine.create("a")
    engine.next("a")
    engine.accept("a", 0, prompt="green")
    before, bits = committed(engine, "a"), engine.kv_bits("a")
    model.knobs = Knobs(misreport=field)
    with pytest.raises(ChunkMetadataError, match=field) as refused:
        engine.next("a")
    assert refused.value.code == "metadata_mismatch"
    assert engine.view("a").state == "failed"
    assert engine.view("a").pending_event_count == 1
    assert committed(engine, "a") == before
    assert engine.kv_bits("a") == bits


def test_an_output_without_metadata_is_a_metadata_error() -> None:
    class Mute(TinyKVWorld):
        def _result(self, row: Any, x: Any) -> Any:
            return changed(super()._result(row, x), metadata=None)

    engine = InlineEngine(Mute())
    engine.create("a")
    with pytest.raises(ChunkMetadataError, match="metadata"):
        engine.next("a")


@pytest.mark.req("AC-07")
def test_the_models_error_wins_over_the_metadata_it_would_have_returned() -> None:
    engine, model, _ = watched()
    engine.create("a")
    model.knobs = Knobs(row_result=TickError("the decoder ran out of memory"), misreport="request_id")
    with pytest.raises(TickError, match="ran out of memory") as failed:
        engine.next("a")
    assert not isinstance(failed.value, ChunkMetadataError)


@pytest.mark.req("AC-08")
@pytest.mark.parametrize("point", ["reducer.prepare", "reducer.commit"])
@pytest.mark.parametrize(
    "error", [None, StateError("a reducer's own"), ValueError("bad")], ids=["fault", "omni", "value"]
)
def test_a_reducer_that_raises_fails_the_tick_and_changes_nothing(point: str, error: Exception | None) -> None:
    engine, _, _ = watched()
    engine.create("a", prompt="red")
    engine.accept("a", 0, controls=[move(3)])
    engine.next("a")
    engine.accept("a", 1, prompt="green", controls=[move(4)])
    before, bits = committed(engine, "a"), engine.kv_bits("a")
    with inject(engine, point, error=error), pytest.raises(Exception):  # noqa: B017 — which one is not the point
        engine.next("a")
    assert engine.view("a").state == "failed"
    assert committed(engine, "a") == before
    assert engine.kv_bits("a") == bits
    engine.rollback("a")
    chunk = engine.next("a")
    assert (chunk.chunk_index, chunk.metadata.applied_event_ids, chunk.prompt) == (1, (1,), "green")


@pytest.mark.req("AC-09")
def test_a_failed_session_never_reaches_the_model_until_reset_which_keeps_the_floor() -> None:
    engine, _, work = watched()
    engine.create("a")
    engine.accept("a", 4, prompt="green")
    with inject(engine, "forward:1"), pytest.raises(TickError):
        engine.next("a")
    work.clear()
    with pytest.raises(StateError) as refused:
        engine.next("a")
    assert refused.value.code == "session_failed"
    with pytest.raises(StateError):
        engine.accept("a", 5, prompt="blue")
    assert work == []
    engine.reset("a")
    assert engine.view("a").chunk_index == 0
    assert engine.view("a").epoch == 1
    with pytest.raises(StaleEventError):
        engine.accept("a", 3, prompt="blue")
    assert engine.next("a").chunk_index == 0


def test_everybody_who_waited_behind_a_failed_tick_is_told() -> None:
    engine, _, _ = watched()
    engine.create("a")
    tickets = [engine.post_next("a") for _ in range(3)]
    with inject(engine, "sync"):
        engine.cycle()
    codes = [engine.error(t).code for t in tickets]  # type: ignore[union-attr]
    assert codes == ["tick_failed", "session_failed", "session_failed"]
    assert engine.kinds("a") == ["failed"]


def test_a_clean_pass_that_leaves_a_layer_unwritten_never_commits() -> None:
    engine, model, _ = watched()
    engine.create("a")
    model.knobs = Knobs(skip_layer=True)
    with pytest.raises(TickError, match="every layer"):
        engine.next("a")
    assert engine.runner.pages()[0] == 0


def test_nothing_internal_is_shown_to_the_caller_of_a_failed_tick() -> None:
    engine, _, _ = watched()
    engine.create("a")
    with inject(engine, "forward:1", error=RuntimeError("/secret/path.py in Model")), pytest.raises(TickError) as shown:
        engine.next("a")
    assert "secret" not in shown.value.message


def test_rollback_runs_the_same_chunk_again_with_the_same_events_and_the_same_picture() -> None:
    engine, _, _ = watched()
    control = InlineEngine(TinyKVWorld())
    for e in (engine, control):
        e.create("a", seed=5)
        e.next("a")
        e.accept("a", 0, prompt="blue", controls=[move(2)])
    with inject(engine, "decode"), pytest.raises(TickError):
        engine.next("a")
    engine.rollback("a")
    again, expected = engine.next("a"), control.next("a")
    assert again.metadata == expected.metadata
    assert again.artifacts["frames"].data.tobytes() == expected.artifacts["frames"].data.tobytes()
    assert engine.kv_bits("a") == control.kv_bits("a")


def test_rollback_is_refused_where_worker_state_is_gone_and_where_nothing_failed() -> None:
    engine = InlineEngine(TinyKVWorld(), on_failure="release")
    engine.create("a")
    with pytest.raises(StateError):
        engine.rollback("a")
    with inject(engine, "forward:1"), pytest.raises(TickError):
        engine.next("a")
    with pytest.raises(StateError, match="released"):
        engine.rollback("a")
    assert not engine.view("a").can_rollback


def test_an_artifact_error_fails_the_tick_and_changes_nothing() -> None:
    engine, model, _ = watched()
    engine.create("a")
    engine.next("a")
    before = committed(engine, "a")
    model.knobs = Knobs(artifact="missing")
    with pytest.raises(ArtifactError):
        engine.next("a")
    assert committed(engine, "a") == before


def test_the_horizon_ends_a_session_with_a_code_and_without_failing_it() -> None:
    engine = InlineEngine(TinyKVWorld(horizon_frames=5))
    engine.create("a")
    tickets = [engine.post_next("a") for _ in range(3)]
    engine.cycle(4)
    assert [engine.result(t).chunk_index for t in tickets[:2]] == [0, 1]
    assert engine.error(tickets[2]).code == "horizon"  # type: ignore[union-attr]
    with pytest.raises(StateError, match="horizon"):
        engine.next("a")
    assert engine.view("a").state == "active"
    engine.reset("a")
    assert engine.next("a").chunk_index == 0
