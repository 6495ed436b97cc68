"""The ordered queue of one session's events: order, duplicates, bounds.

Owns the events that wait, the floor (highest id ever accepted, which no reset lowers) and a bounded memory of what became
of recent ids. Knows nothing of ticks; the session tells it which events a commit applied.

Fates: pending -> applied | discarded. The same id with the same payload is answered from memory (idempotent retry); the
same id with another payload is a conflict; an id at or below the floor that is no longer remembered is stale.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from realtime_omni.errors import ArgumentError, EventConflictError, EventQueueFullError, StaleEventError
from realtime_omni.session.record import EventRecord, FateRecord, IntakeRecord
from realtime_omni.session.values import AcceptStatus, EventId, SessionEvent

REMEMBERED_PER_PENDING = 8
"""Remembered ids per queue place: a client that retries after a reconnect is a few blocks late at most."""


@dataclass(slots=True)
class _Memory:
    fingerprint: str
    discarded: bool = False


class Intake:
    """Events of one session, in id order."""

    def __init__(self, max_pending: int) -> None:
        if max_pending < 1:
            raise ArgumentError("max_pending_events must be at least 1", path="max_pending_events")
        self.max_pending = max_pending
        self.floor = -1
        self._pending: dict[EventId, SessionEvent] = {}
        self._memory: OrderedDict[EventId, _Memory] = OrderedDict()

    @property
    def pending_count(self) -> int:
        return len(self._pending)

    def recall(self, event: SessionEvent) -> AcceptStatus | None:
        """DUPLICATE or DISCARDED for an id that is remembered with this payload, None for a fresh one; changes nothing.

        Raises:
            EventConflictError: the id is remembered with another payload.
            StaleEventError: the id is not above the floor.
            EventQueueFullError: it would be accepted, but no place is left.
        """
        known = self._memory.get(event.event_id)
        if known is not None:
            if known.fingerprint != event.fingerprint:
                raise EventConflictError(
                    f"event {event.event_id} was sent before with another payload", path="event_id"
                )
            return AcceptStatus.DISCARDED if known.discarded else AcceptStatus.DUPLICATE
        if event.event_id <= self.floor:
            raise StaleEventError(
                f"event {event.event_id} is not above {self.floor}, the highest accepted id", path="event_id"
            )
        if len(self._pending) >= self.max_pending:
            raise EventQueueFullError(f"{self.max_pending} events are waiting already")
        return None

    def accept(self, event: SessionEvent) -> AcceptStatus:
        """Queue an event, or answer from memory; raises as :meth:`recall` does and then changes nothing."""
        status = self.recall(event)
        if status is not None:
            return status
        self._pending[event.event_id] = event
        self.floor = event.event_id
        self._memory[event.event_id] = _Memory(event.fingerprint)
        self._forget()
        return AcceptStatus.ACCEPTED

    def snapshot(self) -> tuple[SessionEvent, ...]:
        """Everything that waits, in id order."""
        return tuple(self._pending.values())

    def applied(self, ids: Collection[EventId]) -> None:
        """A commit reflects these events."""
        for event_id in ids:
            del self._pending[event_id]

    def discard_pending(self) -> tuple[EventId, ...]:
        """A reset throws the waiting events away; they are remembered as discarded and the floor stays."""
        ids = tuple(self._pending)
        for event_id in ids:
            if event_id in self._memory:
                self._memory[event_id].discarded = True
        self._pending.clear()
        return ids

    def save(self) -> IntakeRecord:
        """The queue and its memory as values."""
        return IntakeRecord(
            floor=self.floor,
            pending=tuple(EventRecord.of(e) for e in self._pending.values()),
            remembered=tuple(
                FateRecord(event_id=i, fingerprint=m.fingerprint, discarded=m.discarded)
                for i, m in self._memory.items()
            ),
        )

    def load(self, record: IntakeRecord) -> None:
        """Take over a saved queue; the newest of its remembered ids that fit into this one's memory are kept.

        Raises EventQueueFullError when more events wait than this queue admits, ArgumentError when the record is no
        queue; nothing has changed then.
        """
        if len(record.pending) > self.max_pending:
            raise EventQueueFullError(
                f"{len(record.pending)} events wait in the record, allowed are {self.max_pending}"
            )
        pending = [event.value() for event in record.pending]
        fates = {EventId(f.event_id): _Memory(f.fingerprint, f.discarded) for f in record.remembered}
        for event in pending:
            fate = fates.get(event.event_id)
            if fate is None or fate.discarded or fate.fingerprint != event.fingerprint:
                raise ArgumentError("an event that waits is not the remembered one", path="pending")
        for ids in ([e.event_id for e in pending], [f.event_id for f in record.remembered]):
            if any(b <= a for a, b in pairwise(ids)) or (ids and ids[-1] > record.floor):
                raise ArgumentError("event ids do not rise up to the floor", path="event_id")
        self.floor = record.floor
        self._pending = {event.event_id: event for event in pending}
        self._memory = OrderedDict(fates)
        self._forget()

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        ids = list(self._pending)
        assert ids == sorted(ids), "pending events are out of order"
        assert len(ids) <= self.max_pending, "the queue is over its bound"
        assert not ids or ids[-1] <= self.floor, "the floor is below an accepted event"
        assert set(ids) <= set(self._memory), "a pending event is not remembered"
        assert len(self._memory) <= self.max_pending * REMEMBERED_PER_PENDING, "the memory is over its bound"

    def _forget(self) -> None:
        while len(self._memory) > self.max_pending * REMEMBERED_PER_PENDING:
            self._memory.popitem(last=False)
