"""The server events of the Realtime protocol as frozen values, and their encoding.

Owns: names and fields of realtime.md section 6.  Must not know: order, sessions.
Invariant: every event has an ``event_id``; an encoded one stays below `MAX_FRAME_BYTES`, because whatever goes in is bounded.
``start_ms`` and ``end_ms`` are our extension: the session clock, as extra keys that every known client ignores.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from .codes import RealtimeError, error_type
from .items import DurationUsage, Item, Usage
from .session import AudioFormat, Metadata, Modality, SessionObject, TokenLimit


class Event(Struct, frozen=True, kw_only=True, tag_field="type"):
    """``server_event_seq``: in the duplex dialect, counts from 1."""

    event_id: str = ""
    server_event_seq: int | UnsetType = UNSET


# ---- session, errors


class SessionCreated(Event, frozen=True, kw_only=True, tag="session.created"):
    session: SessionObject


class SessionUpdated(Event, frozen=True, kw_only=True, tag="session.updated"):
    session: SessionObject


class Conversation(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["realtime.conversation"] = "realtime.conversation"


class ConversationCreated(Event, frozen=True, kw_only=True, tag="conversation.created"):
    conversation: Conversation


class ErrorBody(Struct, frozen=True, kw_only=True):
    """``event_id`` is the client's, of the event that caused it."""

    type: str
    code: str
    message: str
    param: str | None = None
    event_id: str | None = None

    @classmethod
    def of(cls, error: RealtimeError, event_id: str | None = None) -> ErrorBody:
        return cls(
            type=error_type(error.code),
            code=error.code.value,
            message=error.message[:1000],
            param=None if error.param is None else error.param[:256],
            event_id=event_id,
        )


class ErrorEvent(Event, frozen=True, kw_only=True, tag="error"):
    error: ErrorBody


# ---- the input buffer


class SpeechStarted(Event, frozen=True, kw_only=True, tag="input_audio_buffer.speech_started"):
    audio_start_ms: int
    item_id: str


class SpeechStopped(Event, frozen=True, kw_only=True, tag="input_audio_buffer.speech_stopped"):
    audio_end_ms: int
    item_id: str


class TimeoutTriggered(Event, frozen=True, kw_only=True, tag="input_audio_buffer.timeout_triggered"):
    audio_start_ms: int
    audio_end_ms: int
    item_id: str


class Committed(Event, frozen=True, kw_only=True, tag="input_audio_buffer.committed"):
    item_id: str
    previous_item_id: str | None


class Cleared(Event, frozen=True, kw_only=True, tag="input_audio_buffer.cleared"):
    pass


# ---- items


class ItemAdded(Event, frozen=True, kw_only=True, tag="conversation.item.added"):
    item: Item
    previous_item_id: str | None


class ItemDone(Event, frozen=True, kw_only=True, tag="conversation.item.done"):
    item: Item
    previous_item_id: str | None


class ItemRetrieved(Event, frozen=True, kw_only=True, tag="conversation.item.retrieved"):
    item: Item


class ItemDeleted(Event, frozen=True, kw_only=True, tag="conversation.item.deleted"):
    item_id: str


class ItemTruncated(Event, frozen=True, kw_only=True, tag="conversation.item.truncated"):
    item_id: str
    audio_end_ms: int
    content_index: int = 0


class TranscriptionDelta(Event, frozen=True, kw_only=True, tag="conversation.item.input_audio_transcription.delta"):
    item_id: str
    delta: str
    content_index: int = 0
    start_ms: int | UnsetType = UNSET
    end_ms: int | UnsetType = UNSET


class TranscriptionCompleted(
    Event, frozen=True, kw_only=True, tag="conversation.item.input_audio_transcription.completed"
):
    item_id: str
    transcript: str
    usage: DurationUsage
    content_index: int = 0


class TranscriptionFailed(Event, frozen=True, kw_only=True, tag="conversation.item.input_audio_transcription.failed"):
    item_id: str
    error: ErrorBody
    content_index: int = 0


# ---- responses


class StatusError(Struct, frozen=True, kw_only=True):
    type: str
    code: str
    message: str
    """Extra key: the hosted object has type and code only."""


class StatusDetails(Struct, frozen=True, kw_only=True):
    type: Literal["completed", "cancelled", "incomplete", "failed"]
    reason: Literal["turn_detected", "client_cancelled", "max_output_tokens", "content_filter"] | UnsetType = UNSET
    error: StatusError | UnsetType = UNSET


class ResponseAudioFormat(Struct, frozen=True, kw_only=True):
    format: AudioFormat
    voice: str


class ResponseAudioShown(Struct, frozen=True, kw_only=True):
    output: ResponseAudioFormat


class Response(Struct, frozen=True, kw_only=True):
    id: str
    status: Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]
    conversation_id: str | None
    output_modalities: tuple[Modality, ...]
    max_output_tokens: TokenLimit
    audio: ResponseAudioShown
    output: tuple[Item, ...] = ()
    status_details: StatusDetails | None = None
    metadata: Metadata | None = None
    usage: Usage | None = None
    object: Literal["realtime.response"] = "realtime.response"


class ResponseCreated(Event, frozen=True, kw_only=True, tag="response.created"):
    response: Response


class ResponseDone(Event, frozen=True, kw_only=True, tag="response.done"):
    response: Response


class ResponseEvent(Event, frozen=True, kw_only=True):
    """Of one output item of a response."""

    response_id: str
    output_index: int


class OutputItemAdded(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    item: Item


class OutputItemDone(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    item: Item


class ContentEvent(ResponseEvent, frozen=True, kw_only=True):
    item_id: str
    content_index: int = 0


class AudioPart(Struct, frozen=True, kw_only=True, tag_field="type", tag="audio"):
    transcript: str = ""


class TextPart(Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str = ""


class ContentPartAdded(ContentEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: AudioPart | TextPart


class ContentPartDone(ContentEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: AudioPart | TextPart


class AudioDelta(ContentEvent, frozen=True, kw_only=True, tag="response.output_audio.delta"):
    """``delta``: base64 in the response's format; written as text once, here."""

    delta: bytes
    start_ms: int | UnsetType = UNSET
    end_ms: int | UnsetType = UNSET


class AudioDone(ContentEvent, frozen=True, kw_only=True, tag="response.output_audio.done"):
    pass


class TranscriptDelta(ContentEvent, frozen=True, kw_only=True, tag="response.output_audio_transcript.delta"):
    delta: str
    start_ms: int | UnsetType = UNSET
    end_ms: int | UnsetType = UNSET


class TranscriptDone(ContentEvent, frozen=True, kw_only=True, tag="response.output_audio_transcript.done"):
    transcript: str


class TextDelta(ContentEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str


class TextDone(ContentEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str


class ArgumentsDelta(ResponseEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    item_id: str
    call_id: str
    delta: str


class ArgumentsDone(ResponseEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    item_id: str
    call_id: str
    name: str
    arguments: str


class OutputCleared(Event, frozen=True, kw_only=True, tag="output_audio_buffer.cleared"):
    response_id: str


# ---- the duplex dialect


class SessionResumable(Event, frozen=True, kw_only=True, tag="session.resumable"):
    """Who lost the connection may come back with this token, within ``grace_s`` seconds."""

    resume_token: str
    grace_s: float


class SessionResumed(Event, frozen=True, kw_only=True, tag="session.resumed"):
    session_id: str
    resume_token: str


class SessionReplaced(Event, frozen=True, kw_only=True, tag="session.replaced"):
    pass


class HeartbeatAck(Event, frozen=True, kw_only=True, tag="session.heartbeat_ack"):
    pass


class SessionClosed(Event, frozen=True, kw_only=True, tag="session.closed"):
    reason: Literal["client"]


class PlaybackAcknowledged(Event, frozen=True, kw_only=True, tag="playback.acknowledged"):
    """The value that acts: never more than was sent."""

    item_id: str
    played_ms: int


class InputReport(Event, frozen=True, kw_only=True, tag="input_audio_buffer.report"):
    kind: Literal["silent_microphone", "wrong_rate"]
    at_ms: int
    measured_hz: float | None


class ContextUsage(Event, frozen=True, kw_only=True, tag="session.context_usage"):
    usage_ratio: float


DuplexServerEvent: TypeAlias = (
    SessionResumable
    | SessionResumed
    | SessionReplaced
    | HeartbeatAck
    | SessionClosed
    | PlaybackAcknowledged
    | InputReport
    | ContextUsage
)
ServerEvent: TypeAlias = (
    SessionCreated
    | SessionUpdated
    | ConversationCreated
    | ErrorEvent
    | SpeechStarted
    | SpeechStopped
    | TimeoutTriggered
    | Committed
    | Cleared
    | ItemAdded
    | ItemDone
    | ItemRetrieved
    | ItemDeleted
    | ItemTruncated
    | TranscriptionDelta
    | TranscriptionCompleted
    | TranscriptionFailed
    | ResponseCreated
    | ResponseDone
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | AudioDelta
    | AudioDone
    | TranscriptDelta
    | TranscriptDone
    | TextDelta
    | TextDone
    | ArgumentsDelta
    | ArgumentsDone
    | OutputCleared
    | DuplexServerEvent
)
_ENCODER = msgspec.json.Encoder()


def event_type(event: ServerEvent) -> str:
    return str(event.__struct_config__.tag)


def encode(event: ServerEvent) -> bytes:
    """The event as JSON (UTF-8)."""
    return _ENCODER.encode(event)


def wire(event: ServerEvent) -> dict[str, Any]:
    """The event as plain values, for tests and tools."""
    value: dict[str, Any] = msgspec.json.decode(encode(event))
    return value
