"""`ReplayBuffer` and `EventLedger`: what a session's stream must remember.

Owns: the entries nobody has acknowledged, in order and bounded; which accepted events have no terminal receipt yet.
Must not know: connections, credit, time.
Invariants: entries are contiguous and follow ``acked_seq``; an event is opened once and settled once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterable

from .errors import LocalError, WireCode, WireError
from .world_entries import Entry, FrameEntry, Standing
from .world_messages import SessionAck
from .world_table import WireState


class ReplayBuffer:
    """Entries after ``acked_seq``; past ``max_entries``, or ``max_bytes`` of media, the oldest is forgotten as if it had been
    acknowledged. The newest entry always stays."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.media_bytes = 0
        self.acked_seq = 0
        self.standing = Standing(WireState.STARTING, 0, 0)  # where the session stood at `acked_seq`
        self.forgotten = self.peak = 0
        self._entries: deque[Entry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def begin_after(self, seq: int, standing: Standing) -> None:
        """Everything up to ``seq`` has arrived by another way; the session stands there."""
        self.acked_seq, self.standing = seq, standing

    def keep(self, entry: Entry) -> None:
        self._entries.append(entry)
        self.media_bytes += _media_bytes(entry)
        while len(self._entries) > self.max_entries or (self.media_bytes > self.max_bytes and len(self._entries) > 1):
            self.forgotten += 1
            self.forget_to(self._entries[0].seq)
        self.peak = max(self.peak, len(self._entries))

    def forget_to(self, seq: int) -> None:
        while self._entries and self._entries[0].seq <= seq:
            entry = self._entries.popleft()
            self.media_bytes -= _media_bytes(entry)
            self.standing, self.acked_seq = entry.after, entry.seq

    def shown_to(self, epoch: int, displayed: int) -> int:
        """The last ``seq`` of the last chunk that was shown to its end.

        Not of the last frame shown: a page that is reloaded goes on from the last complete chunk it knows.
        """
        return max(
            (
                entry.seq
                for entry in self._entries
                if isinstance(entry, FrameEntry) and entry.last and (entry.epoch, entry.frame) < (epoch, displayed)
            ),
            default=0,
        )

    def after(self, last_seq: int, newest: int) -> tuple[Entry, ...]:
        """What a client that has everything up to ``last_seq`` lacks, or `WireError` resume_refused."""
        if last_seq < 1 or last_seq > newest:
            raise WireError(WireCode.RESUME_REFUSED, "last_seq was never sent", path="$.last_seq")
        if last_seq < self.acked_seq:
            raise WireError(WireCode.RESUME_REFUSED, "last_seq is already forgotten", path="$.last_seq")
        return tuple(entry for entry in self._entries if entry.seq > last_seq)

    def check(self, newest: int) -> None:
        if [entry.seq for entry in self._entries] != list(range(self.acked_seq + 1, newest + 1)):
            raise LocalError("the replay buffer has a gap")
        if len(self._entries) > self.max_entries:
            raise LocalError("the replay buffer is over its bound")
        if self.media_bytes != sum(map(_media_bytes, self._entries)):
            raise LocalError("the replay buffer has lost count of its bytes")


def _media_bytes(entry: Entry) -> int:
    return entry.media_bytes if isinstance(entry, FrameEntry) else 0


class EventLedger:
    """Accepted events and their terminal receipts. Checks before it changes."""

    def __init__(self, next_event_id: int) -> None:
        self.next_event_id = next_event_id
        self.accepted = self.applied = self.discarded = 0
        self._open: dict[int, None] = {}  # in the order of acceptance

    def __len__(self) -> int:
        return len(self._open)

    @property
    def open_ids(self) -> tuple[int, ...]:
        return tuple(self._open)

    def require_new(self, event_id: int) -> None:
        if event_id < self.next_event_id:
            raise LocalError(f"event {event_id} is accepted again")

    def accept(self, event_id: int) -> None:
        self._open[event_id] = None
        self.next_event_id = event_id + 1
        self.accepted += 1

    def skip_to(self, next_event_id: int) -> None:
        """Ids below this one were used by somebody else."""
        self.next_event_id = max(self.next_event_id, next_event_id)

    def require_open(self, event_ids: Iterable[int]) -> tuple[int, ...]:
        ids = tuple(event_ids)
        if any(later <= earlier for earlier, later in itertools.pairwise(ids)):
            raise LocalError("event ids are not strictly increasing")
        unknown = [event_id for event_id in ids if event_id not in self._open]
        if unknown:
            raise LocalError(f"events {unknown} are not open: never accepted, or their receipt was sent")
        return ids

    def settle(self, ids: tuple[int, ...], *, applied: bool) -> None:
        for event_id in ids:
            del self._open[event_id]
        if applied:
            self.applied += len(ids)
        else:
            self.discarded += len(ids)

    def check(self) -> None:
        if self.accepted != self.applied + self.discarded + len(self._open):
            raise LocalError("an event has not exactly one receipt")


def check_ack(ack: SessionAck, *, last_seq: int, epoch: int, generated: int) -> None:
    """Refuse an ack of what was not sent."""
    if ack.seq > last_seq:
        raise WireError(WireCode.INVALID_ARGUMENT, "seq was not sent yet", path="$.seq", re=ack.id)
    if ack.epoch > epoch:
        raise WireError(WireCode.INVALID_ARGUMENT, "this epoch has not begun", path="$.epoch", re=ack.id)
    if ack.epoch == epoch and ack.displayed > generated:
        raise WireError(WireCode.INVALID_ARGUMENT, "more frames than were sent", path="$.displayed", re=ack.id)


def token_digest(token: str) -> bytes:
    """What is kept of a resume token."""
    return hashlib.sha256(token.encode("utf-8")).digest()
