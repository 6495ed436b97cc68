"""Order, duplicates and bounds of one session's events."""

from __future__ import annotations

import pytest

from realtime_omni.errors import ArgumentError, EventConflictError, EventQueueFullError, StaleEventError
from realtime_omni.session.intake import REMEMBERED_PER_PENDING, Intake
from realtime_omni.session.values import AcceptStatus, EventId, SessionEvent


def event(number: int, prompt: str = "red") -> SessionEvent:
    return SessionEvent(EventId(number), prompt=prompt)


def filled(*numbers: int, max_pending: int = 4) -> Intake:
    intake = Intake(max_pending)
    for number in numbers:
        intake.accept(event(number))
    return intake


def ids(intake: Intake) -> list[int]:
    return [e.event_id for e in intake.snapshot()]


@pytest.mark.req("AC-01")
def test_an_id_that_does_not_rise_is_stale_and_the_queue_is_unchanged() -> None:
    intake = filled(3, 7)
    for number in (0, 2, 4, 6):
        with pytest.raises(StaleEventError, match="not above 7"):
            intake.accept(event(number))
    assert ids(intake) == [3, 7]
    assert intake.floor == 7
    intake.check()


@pytest.mark.req("AC-02")
def test_a_full_queue_refuses_the_fifth_event_and_keeps_the_four_in_order() -> None:
    intake = filled(0, 1, 2, 3)
    with pytest.raises(EventQueueFullError) as refused:
        intake.accept(event(4))
    assert refused.value.code == "queue_full"
    assert ids(intake) == [0, 1, 2, 3]
    assert intake.floor == 3
    intake.applied([EventId(n) for n in range(4)])
    assert intake.accept(event(4)) is AcceptStatus.ACCEPTED  # the refusal left no trace


def test_the_same_event_again_is_a_duplicate_also_when_the_queue_is_full() -> None:
    intake = filled(0, 1, 2, 3)
    assert intake.accept(event(2)) is AcceptStatus.DUPLICATE
    assert ids(intake) == [0, 1, 2, 3]


def test_the_same_event_again_is_a_duplicate_also_after_it_was_applied() -> None:
    intake = filled(0)
    intake.applied([EventId(0)])
    assert intake.accept(event(0)) is AcceptStatus.DUPLICATE
    assert intake.pending_count == 0


def test_the_same_id_with_another_payload_is_a_conflict_before_and_after_it_was_applied() -> None:
    intake = filled(0)
    with pytest.raises(EventConflictError) as refused:
        intake.accept(event(0, "green"))
    assert refused.value.code == "event_conflict"
    intake.applied([EventId(0)])
    with pytest.raises(EventConflictError):
        intake.accept(event(0, "green"))


def test_an_event_that_a_reset_discarded_is_told_so_and_never_comes_back() -> None:
    intake = filled(0, 1)
    assert intake.discard_pending() == (0, 1)
    assert intake.accept(event(1)) is AcceptStatus.DISCARDED
    assert intake.pending_count == 0


@pytest.mark.req("AC-01")
def test_the_floor_survives_a_reset() -> None:
    intake = filled(5)
    intake.discard_pending()
    with pytest.raises(StaleEventError):
        intake.accept(event(4))
    assert intake.accept(event(6)) is AcceptStatus.ACCEPTED


def test_an_applied_event_stays_a_duplicate_across_a_reset() -> None:
    intake = filled(0)
    intake.applied([EventId(0)])
    intake.discard_pending()
    assert intake.accept(event(0)) is AcceptStatus.DUPLICATE


def test_memory_is_bounded_and_an_id_that_fell_out_of_it_is_stale() -> None:
    intake = Intake(2)
    window = 2 * REMEMBERED_PER_PENDING
    for number in range(10 * window):
        intake.accept(event(number))
        intake.applied([EventId(number)])
        intake.check()
    assert intake.accept(event(10 * window - window)) is AcceptStatus.DUPLICATE
    with pytest.raises(StaleEventError):
        intake.accept(event(10 * window - window - 1))


def test_gaps_between_ids_are_allowed() -> None:
    assert ids(filled(0, 10, 1000)) == [0, 10, 1000]


def test_a_queue_without_room_cannot_be_built() -> None:
    with pytest.raises(ArgumentError):
        Intake(0)
