"""What a server says.

Owns: names and fields of the server events (live.md section 5), and their JSON.  Must not know: states, order.
Times are milliseconds on the session's timeline. Optional fields without a value are left out. `OutputAudioDelta` and
the reflected `InputAudio` have no ``event_id``: they are many, and nothing refers to them.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from .config import SessionResource

CloseReason: TypeAlias = Literal["close_requested", "expired", "content", "remote_hangup", "connection_lost"]


class Part(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of objects inside events."""


class Usage(Part, frozen=True, kw_only=True):
    """``seconds``: of the session so far, whole; cumulative."""

    seconds: int


class ContextWindow(Part, frozen=True, kw_only=True):
    """``usage_ratio``: of the model's window that is full, 0 to 1."""

    usage_ratio: float


class DelegationInfo(Part, frozen=True, kw_only=True):
    id: str
    target: Literal["client", "responses"]
    type: Literal["delegation"]
    response_id: str | None = None


class ErrorBody(Part, frozen=True, kw_only=True):
    type: str
    code: str
    message: str
    param: str | None = None
    client_event_id: str | None = None


class ServerEvent(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of the numbered events. ``client_event_id``: on the connection whose event it answers, there only."""

    event_id: str
    client_event_id: str | None = None


class Timed(ServerEvent, frozen=True, kw_only=True):
    start_ms: int
    end_ms: int


class SessionStarted(ServerEvent, frozen=True, kw_only=True, tag="session.started"):
    session: SessionResource


class SessionUpdated(ServerEvent, frozen=True, kw_only=True, tag="session.updated"):
    session: SessionResource


class SessionClosed(ServerEvent, frozen=True, kw_only=True, tag="session.closed"):
    reason: CloseReason
    session: SessionResource
    usage: Usage


class InputAudioMuted(ServerEvent, frozen=True, kw_only=True, tag="session.input_audio.muted"):
    pass


class InputAudioUnmuted(ServerEvent, frozen=True, kw_only=True, tag="session.input_audio.unmuted"):
    pass


class FixturePlaying(ServerEvent, frozen=True, kw_only=True, tag="session.output_audio.fixture.playing"):
    pass


class FixturePlayed(ServerEvent, frozen=True, kw_only=True, tag="session.output_audio.fixture.played"):
    pass


class InstructionsAppended(Timed, frozen=True, kw_only=True, tag="session.instructions.appended"):
    pass


class ThinkingAppended(Timed, frozen=True, kw_only=True, tag="session.thinking.appended"):
    pass


class CommentaryAppended(Timed, frozen=True, kw_only=True, tag="session.commentary.appended"):
    pass


class InputTranscriptDelta(Timed, frozen=True, kw_only=True, tag="session.input_transcript.delta"):
    delta: str


class OutputTranscriptDelta(Timed, frozen=True, kw_only=True, tag="session.output_transcript.delta"):
    delta: str


class DelegationCreated(ServerEvent, frozen=True, kw_only=True, tag="session.delegation.created"):
    delegation: DelegationInfo
    offset_ms: int


class ResponseEvent(ServerEvent, frozen=True, kw_only=True, tag="response.event"):
    """An event of the Responses API, from the backend."""

    event: dict[str, Any]
    delegation_id: str | None = None


class UsageUpdated(ServerEvent, frozen=True, kw_only=True, tag="session.usage.updated"):
    usage: Usage
    context_window: ContextWindow | None = None


class ErrorEvent(ServerEvent, frozen=True, kw_only=True, tag="error"):
    error: ErrorBody


class Info(ServerEvent, frozen=True, kw_only=True, tag="info"):
    code: str
    message: str


class OutputAudioDelta(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="session.output_audio.delta"
):
    """``delta``: in the session's format (on the wire base64); on a sideband PCM16 at 24 kHz, with its times."""

    delta: bytes
    start_ms: int | None = None
    end_ms: int | None = None


class InputAudio(Struct, frozen=True, kw_only=True, tag_field="type", tag="session.input_audio.append"):
    """What the primary connection sent, reflected to sidebands: PCM16 at 24 kHz (on the wire base64)."""

    audio: bytes


AnyServerEvent: TypeAlias = (
    SessionStarted
    | SessionUpdated
    | SessionClosed
    | InputAudioMuted
    | InputAudioUnmuted
    | FixturePlaying
    | FixturePlayed
    | InstructionsAppended
    | ThinkingAppended
    | CommentaryAppended
    | InputTranscriptDelta
    | OutputTranscriptDelta
    | DelegationCreated
    | ResponseEvent
    | UsageUpdated
    | ErrorEvent
    | Info
    | OutputAudioDelta
    | InputAudio
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyServerEvent] = msgspec.json.Decoder(AnyServerEvent)


def encode(event: AnyServerEvent) -> str:
    """The event as the text of one frame."""
    return _encoder.encode(event).decode()


def parse_server(text: str) -> AnyServerEvent:
    """What `encode` wrote. Raises `msgspec.ValidationError`."""
    return _decoder.decode(text)
