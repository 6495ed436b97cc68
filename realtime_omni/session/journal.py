"""What made a session's world: how it began, and which events each chunk applied. Enough to make it again.

Owns the journal of one session (bounded; the oldest chunks fall off) and its portable form, :class:`EventLog`. Must not know
what runs the chunks. A chunk is a function of (model, origin, events up to it, chunk index), so the journal names only the
line that still stands: a reset begins it anew, a rewind cuts it.

``lineage`` is a SHA-256 over the origin and every applied event with its chunk, ids left out. Two sessions of one model with
equal chunk index and lineage are in the same state; that is how a log knows where it may be played on.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import msgspec

from realtime_omni.errors import ArgumentError, OmniError
from realtime_omni.session.values import (
    MAX_EVENT_ID,
    ChunkIndex,
    ControlInput,
    EventId,
    SessionEvent,
    canonical_json,
    check_event_id,
    check_prompt,
)

FORMAT: Literal["realtime_omni.event_log.v1"] = "realtime_omni.event_log.v1"
MAX_ENTRIES = 8192
"""Chunks with events that one session remembers: an hour of two a second."""
MAX_BYTES = 1 << 20
"""Payload of the remembered events; typed words and held keys are some hundred bytes each."""
MAX_LOG_BYTES = 8 * MAX_BYTES
"""Of a log's JSON: the payload, ids and names around small events, and escaped text."""


@dataclass(frozen=True, slots=True)
class Origin:
    """How a line of chunks began, and begins again after a reset. ``image`` is the SHA-256 (hex) of a client's own picture."""

    prompt: str | None
    seed: int = 0
    start: str | None = None
    image: str | None = None

    @property
    def lineage(self) -> str:
        return _digest(canonical_json([self.prompt, self.seed, self.start, self.image]))


@dataclass(frozen=True, slots=True)
class Applied:
    """A committed chunk and the events that it applied, at least one."""

    epoch: int
    chunk_index: ChunkIndex
    events: tuple[SessionEvent, ...]

    def extend(self, lineage: str) -> str:
        """The lineage after this chunk."""
        return _digest(":".join([lineage, str(self.chunk_index), *(e.fingerprint for e in self.events)]))


class Journal:
    """The journal of one session, since ``first_chunk``; ``lineage`` is that of the session's next chunk."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.lineage = origin.lineage
        self.first_chunk = ChunkIndex(0)
        self._first_lineage = self.lineage
        self._entries: deque[tuple[Applied, str]] = deque()
        self._bytes = 0

    @classmethod
    def of(cls, log: EventLog) -> Journal:
        """The journal that would hand out ``log``."""
        journal = cls(log.origin)
        journal.first_chunk, journal.lineage, journal._first_lineage = log.first_chunk, log.lineage, log.lineage
        for entry in log.chunks:
            journal.record(entry.epoch, entry.chunk_index, entry.events)
        return journal

    def record(self, epoch: int, chunk_index: ChunkIndex, events: tuple[SessionEvent, ...]) -> None:
        """A chunk was committed. One without events leaves no trace but its number."""
        if not events:
            return
        applied = Applied(epoch, chunk_index, events)
        self.lineage = applied.extend(self.lineage)
        self._entries.append((applied, self.lineage))
        self._bytes += _size(applied)
        while len(self._entries) > MAX_ENTRIES or self._bytes > MAX_BYTES:
            oldest, lineage = self._entries.popleft()
            self._bytes -= _size(oldest)
            self.first_chunk, self._first_lineage = ChunkIndex(oldest.chunk_index + 1), lineage

    def rewind(self, chunk_index: ChunkIndex, lineage: str) -> None:
        """The chunks from ``chunk_index`` on are undone; ``lineage`` was the one before it."""
        while self._entries and self._entries[-1][0].chunk_index >= chunk_index:
            undone, _ = self._entries.pop()
            self._bytes -= _size(undone)
        if chunk_index < self.first_chunk:  # what led to it has fallen off already
            self.first_chunk, self._first_lineage = chunk_index, lineage
        self.lineage = lineage

    def lineage_at(self, chunk_index: int) -> str | None:
        """The lineage before chunk ``chunk_index``; None when what led to it has fallen off."""
        if chunk_index < self.first_chunk:
            return None
        before = (lineage for applied, lineage in reversed(self._entries) if applied.chunk_index < chunk_index)
        return next(before, self._first_lineage)

    def copy(self) -> Journal:
        """For a fork."""
        twin = Journal(self.origin)
        twin.lineage, twin.first_chunk, twin._first_lineage = self.lineage, self.first_chunk, self._first_lineage
        twin._entries, twin._bytes = self._entries.copy(), self._bytes
        return twin

    def log(self, model: str, next_chunk: ChunkIndex) -> EventLog:
        """Everything that is still remembered of the chunks before ``next_chunk``, the session's next one."""
        chunks = tuple(applied for applied, _ in self._entries)
        return EventLog(model, self.origin, self.first_chunk, next_chunk, self._first_lineage, chunks)

    def check(self, next_chunk: int) -> None:
        """Raises AssertionError when an invariant is broken."""
        indices = [applied.chunk_index for applied, _ in self._entries]
        assert all(a < b for a, b in pairwise([self.first_chunk - 1, *indices, next_chunk])), "chunks out of order"
        assert self._bytes == sum(_size(applied) for applied, _ in self._entries), "the journal's bytes do not add up"
        assert self.lineage == (self._entries[-1][1] if self._entries else self._first_lineage), (
            "lineage is not the last"
        )


@dataclass(frozen=True, slots=True)
class EventLog:
    """A part of a session's line: chunks ``first_chunk .. next_chunk - 1`` of ``model``; see ``Session.replay``.

    ``origin``: how the line began. ``lineage``: of the moment before ``first_chunk``. ``chunks``: those that applied events,
    in order; every other one applied none. Raises ArgumentError when these contradict each other."""

    model: str
    origin: Origin
    first_chunk: ChunkIndex
    next_chunk: ChunkIndex
    lineage: str
    chunks: tuple[Applied, ...]

    def __post_init__(self) -> None:
        indices = [applied.chunk_index for applied in self.chunks]
        if any(a >= b for a, b in pairwise([self.first_chunk - 1, *indices, max(self.next_chunk, self.first_chunk)])):
            raise ArgumentError("chunks must rise from first_chunk to below next_chunk", path="log.chunks")
        if self.next_chunk < self.first_chunk or self.first_chunk < 0:
            raise ArgumentError("next_chunk must not be below first_chunk", path="log.next_chunk")
        ids = [event.event_id for applied in self.chunks for event in applied.events]
        if any(a >= b for a, b in pairwise(ids)) or not all(applied.events for applied in self.chunks):
            raise ArgumentError("every chunk needs events, with rising ids", path="log.chunks")
        if self.first_chunk == 0 and self.lineage != self.origin.lineage:
            raise ArgumentError("the lineage is not that of the origin", path="log.lineage")

    def to_json(self) -> str:
        """JSON text; see ``protocols/sessions.md``."""
        origin = self.origin
        return canonical_json(
            {
                "format": FORMAT,
                "model": self.model,
                "origin": {
                    "prompt": origin.prompt,
                    "seed": origin.seed,
                    "start": origin.start,
                    "image": origin.image,
                },
                "first_chunk": self.first_chunk,
                "next_chunk": self.next_chunk,
                "lineage": self.lineage,
                "chunks": [
                    {
                        "epoch": applied.epoch,
                        "chunk_index": applied.chunk_index,
                        "events": [
                            {
                                "event_id": event.event_id,
                                "prompt": event.prompt,
                                "controls": [control.to_dict() for control in event.controls],
                            }
                            for event in applied.events
                        ],
                    }
                    for applied in self.chunks
                ],
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> EventLog:
        """The log of a JSON text.

        Raises ArgumentError: too large, another version, or a field that is missing, unknown or wrong."""
        if len(text) > MAX_LOG_BYTES:
            raise ArgumentError(f"the log is larger than {MAX_LOG_BYTES} bytes", path="log")
        try:
            return msgspec.json.decode(text, type=_LogText).value()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ArgumentError(f"not an event log: {error}", path="log") from None
        except OmniError as error:
            path = error.path or ""
            raise ArgumentError(
                error.message, code=error.code, path=path if path.startswith("log") else "log"
            ) from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _size(applied: Applied) -> int:
    return sum(event.payload_bytes for event in applied.events)


class _Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the JSON text."""


class _ControlText(_Text, frozen=True):
    track: str
    schema: str
    data: dict[str, Any]


class _EventText(_Text, frozen=True):
    event_id: int
    prompt: str | None
    controls: list[_ControlText]

    def value(self) -> SessionEvent:
        controls = tuple(ControlInput(c.track, c.schema, c.data) for c in self.controls)
        return SessionEvent(EventId(self.event_id), self.prompt, controls)


class _ChunkText(_Text, frozen=True):
    epoch: int
    chunk_index: int
    events: list[_EventText]


class _OriginText(_Text, frozen=True):
    prompt: str | None
    seed: int
    start: str | None
    image: str | None

    def value(self) -> Origin:
        if self.prompt is not None:
            check_prompt(self.prompt, "log.origin.prompt")
        if self.image is not None:
            _check_hex(self.image, "log.origin.image")
        return Origin(self.prompt, int(check_event_id(self.seed, "log.origin.seed")), self.start, self.image)


class _LogText(_Text, frozen=True):
    format: Literal["realtime_omni.event_log.v1"]
    model: str
    origin: _OriginText
    first_chunk: int
    next_chunk: int
    lineage: str
    chunks: list[_ChunkText]

    def value(self) -> EventLog:
        _check_hex(self.lineage, "log.lineage")
        return EventLog(
            self.model,
            self.origin.value(),
            _count(self.first_chunk, "log.first_chunk"),
            _count(self.next_chunk, "log.next_chunk"),
            self.lineage,
            tuple(self._applied()),
        )

    def _applied(self) -> Iterable[Applied]:
        for chunk in self.chunks:
            epoch = _count(chunk.epoch, "log.chunks.epoch")
            yield Applied(
                epoch, _count(chunk.chunk_index, "log.chunks.chunk_index"), tuple(e.value() for e in chunk.events)
            )


def _count(value: int, path: str) -> ChunkIndex:
    if not 0 <= value <= MAX_EVENT_ID:
        raise ArgumentError(f"{path} must lie in 0..2^53", path=path)
    return ChunkIndex(value)


def _check_hex(value: str, path: str) -> None:
    if len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise ArgumentError(f"{path} must be a SHA-256 in lower-case hex", path=path)
