"""What a session is made of, as plain checked values: the form in which it is saved.

Owns the record types and their bounds. Must not know files, tensors or engines. Every type refuses unknown fields, so that
a record that was read back is exactly what some version of this page has written.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from realtime_omni.session.values import (
    MAX_EVENT_ID,
    MAX_NAME_CHARS,
    MAX_PROMPT_CHARS,
    MAX_TRACKS,
    ControlInput,
    EventId,
    SessionEvent,
    thaw_json,
)

Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_EVENT_ID)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_PROMPT_CHARS)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Digest: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of saved values."""


class ControlRecord(Record, frozen=True, kw_only=True):
    """One :class:`~realtime_omni.session.values.ControlInput`."""

    track: Name
    schema: Name
    data: dict[str, Any]

    @classmethod
    def of(cls, control: ControlInput) -> ControlRecord:
        return cls(track=control.track, schema=control.schema, data=thaw_json(control.data))

    def value(self) -> ControlInput:
        """Raises ArgumentError when the data are not what a control may hold."""
        return ControlInput(self.track, self.schema, self.data)


Controls: TypeAlias = Annotated[tuple[ControlRecord, ...], Meta(max_length=MAX_TRACKS)]


class EventRecord(Record, frozen=True, kw_only=True):
    """One event that waits."""

    event_id: Count
    prompt: Text | None
    controls: Controls

    @classmethod
    def of(cls, event: SessionEvent) -> EventRecord:
        controls = tuple(ControlRecord.of(c) for c in event.controls)
        return cls(event_id=event.event_id, prompt=event.prompt, controls=controls)

    def value(self) -> SessionEvent:
        """Raises ArgumentError when this is no event."""
        return SessionEvent(EventId(self.event_id), self.prompt, tuple(c.value() for c in self.controls))


class FateRecord(Record, frozen=True, kw_only=True):
    """A remembered event id: the fingerprint of its payload, and whether a reset discarded it."""

    event_id: Count
    fingerprint: Digest
    discarded: bool


class IntakeRecord(Record, frozen=True, kw_only=True):
    """The queue of events: what waits, the highest accepted id (-1: none) and the remembered ones, oldest first."""

    floor: Annotated[int, Meta(ge=-1, le=MAX_EVENT_ID)]
    pending: tuple[EventRecord, ...]
    remembered: tuple[FateRecord, ...]


class MomentRecord(Record, frozen=True, kw_only=True):
    """A session at the boundary before chunk ``chunk_index``. ``memory`` is the control reducer's own, as JSON; ``lineage``
    says which events led here."""

    chunk_index: Count
    prompt: Text | None
    controls: Controls
    memory: Any
    lineage: Digest


class SessionRecord(Record, frozen=True, kw_only=True):
    """A session between two ticks: as it is, as it was at the boundaries that it can be rewound to (oldest first), and the
    text of its event log."""

    epoch: Count
    present: MomentRecord
    past: tuple[MomentRecord, ...]
    intake: IntakeRecord
    journal: str
