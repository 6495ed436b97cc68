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

from realtime_omni.errors import ArgumentError, EventConflictError, EventQueueFullError, StaleEventError
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
