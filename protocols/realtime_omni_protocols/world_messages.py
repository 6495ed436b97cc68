"""The control messages of the world protocol as frozen values (world.md sections 2 and 3).

Owns: names, fields, ranges.  Must not know: order of messages, sessions, sockets.
Invariant: a value that came out of `parse_client` or `parse_server` fulfils every bound written here; building one by hand
checks only the rules between fields (`WireError`; msgspec checks types and ranges when decoding), so the machines build
messages only from values they own, and check what a user gave them.
Optional fields are ``None`` when absent; on the wire an absent field and ``null`` mean the same. Lists are
tuples: values stay frozen.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from .envelope import MAX_SAFE_INT, JsonObject, check_data, check_size, decode_text, semantic
from .envelope import Format as Format
from .errors import CloseCode, WireCode, WireError

PROTOCOL: Final = "realtime-omni.world.v1"
KEY_SUBPROTOCOL_PREFIX = "realtime-omni.key."
PATH = "/v1/realtime/world"

MAX_START_BYTES = 4 * 1024 * 1024
"""Bound of `session.start` and `session.reset`, which may carry a picture, and of `session.replay`, which carries a log."""
MAX_MESSAGE_BYTES = 64 * 1024
"""Bound of every other client message."""
MAX_SERVER_MESSAGE_BYTES = MAX_START_BYTES
"""Bound a client puts on a server's text: a log is the largest thing that a server sends."""
MAX_LOG_CHARS = MAX_START_BYTES - 1024
"""Of a log in a message."""
MAX_PROMPT_CHARS = 2_000
MAX_CONTROLS = 16
MAX_OUTSTANDING_NEXT = 4
MAX_ERROR_CHARS = 1_000
"""Our own error texts are cut to this; a reader takes up to 4,000."""
U32_MAX = 2**32 - 1

Seq: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_SAFE_INT)]
SeqOrNone: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SAFE_INT)]
EventId: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SAFE_INT)]
NextEventId: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SAFE_INT + 1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SAFE_INT)]
Epoch: TypeAlias = Annotated[int, Meta(ge=0, le=U32_MAX)]
ChunkIndex: TypeAlias = Annotated[int, Meta(ge=0, le=U32_MAX)]
FrameCount: TypeAlias = Annotated[int, Meta(ge=1, le=255)]
Seed: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SAFE_INT)]
Pixels: TypeAlias = Annotated[int, Meta(ge=1, le=16_384)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Milliseconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]
Fps: TypeAlias = Annotated[float, Meta(gt=0, le=240)]
# The look-ahead refuses the trailing newline that `$` alone would let through in Python; it is valid ECMA 262 too.
SessionId: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}(?!\n)$", max_length=64)]
MessageId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
Token: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]
Prompt: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_PROMPT_CHARS, pattern=r"\S")]
ImageBase64: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_START_BYTES)]
LogBase64: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_LOG_CHARS)]
Text: TypeAlias = Annotated[str, Meta(max_length=4_000)]
EventIds: TypeAlias = Annotated[tuple[EventId, ...], Meta(min_length=1, max_length=4_096)]
AppliedIds: TypeAlias = Annotated[tuple[EventId, ...], Meta(max_length=4_096)]

Cadence: TypeAlias = Literal["paced", "on_demand"]
AcceptStatus: TypeAlias = Literal["accepted", "duplicate", "discarded"]
DiscardReason: TypeAlias = Literal["reset", "rewind", "closed"]
LiveState: TypeAlias = Literal["playing", "paused", "failed"]
Remedy: TypeAlias = Literal["rollback", "reset", "close"]
CloseReason: TypeAlias = Literal[
    "client", "detached_expired", "stalled", "evicted", "shutdown", "failed", "taken_over", "operator"
]


class Value(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Part of a message."""


class Message(Value, frozen=True, tag_field="type", kw_only=True):
    """One control message; ``type`` tells which."""


class ClientMessage(Message, frozen=True, kw_only=True):
    """``id`` is repeated as ``re`` in the direct answer."""

    id: MessageId | None = None


class ServerMessage(Message, frozen=True, kw_only=True):
    """What a server says about its connection; not numbered."""


class SessionMessage(ServerMessage, frozen=True, kw_only=True):
    """What a server says about the session; numbered, kept until acknowledged, sent again on resume."""

    seq: Seq


def _increasing(ids: tuple[int, ...], where: str) -> None:
    if any(later <= earlier for earlier, later in itertools.pairwise(ids)):
        raise semantic(where, "event ids are strictly increasing")


# ---- client to server -------------------------------------------------------------------------------------------------


class Control(Value, frozen=True, kw_only=True):
    """One control of one track. ``data`` is judged by the model's own schema; here only its size, depth and numbers."""

    track: Name
    schema: Name
    data: JsonObject

    def __post_init__(self) -> None:
        check_data(self.data, ".data")


class SessionStart(ClientMessage, frozen=True, kw_only=True, tag="session.start"):
    format: Format
    model: Name | None = None
    session_id: SessionId | None = None
    prompt: Prompt | None = None
    seed: Seed | None = None
    image: ImageBase64 | None = None
    start: Name | None = None
    fps: Fps | None = None
    cadence: Cadence = "paced"
    lead_frames: Annotated[int, Meta(ge=0, le=1_020)] | None = None

    def __post_init__(self) -> None:
        if self.image is not None and self.start is not None:
            raise semantic(".start", "image and start exclude each other")


class SessionResume(ClientMessage, frozen=True, kw_only=True, tag="session.resume"):
    session_id: SessionId
    resume_token: Token
    last_seq: SeqOrNone
    format: Format | None = None
    takeover: bool = False


class SessionEvent(ClientMessage, frozen=True, kw_only=True, tag="session.event"):
    event_id: EventId
    prompt: Prompt | None = None
    controls: Annotated[tuple[Control, ...], Meta(min_length=1, max_length=MAX_CONTROLS)] | None = None

    def __post_init__(self) -> None:
        if self.prompt is None and self.controls is None:
            raise semantic("", "an event has a prompt, controls or both")


class SessionNext(ClientMessage, frozen=True, kw_only=True, tag="session.next"):
    pass


class SessionAck(ClientMessage, frozen=True, kw_only=True, tag="session.ack"):
    seq: SeqOrNone
    displayed: Count
    epoch: Epoch


class SessionPause(ClientMessage, frozen=True, kw_only=True, tag="session.pause"):
    pass


class SessionResumePlay(ClientMessage, frozen=True, kw_only=True, tag="session.resume_play"):
    pass


class SessionReset(ClientMessage, frozen=True, kw_only=True, tag="session.reset"):
    prompt: Prompt | None = None
    seed: Seed | None = None
    image: ImageBase64 | None = None
    start: Name | None = None

    def __post_init__(self) -> None:
        if self.image is not None and self.start is not None:
            raise semantic(".start", "image and start exclude each other")


class SessionFork(ClientMessage, frozen=True, kw_only=True, tag="session.fork"):
    session_id: SessionId | None = None


class SessionRewind(ClientMessage, frozen=True, kw_only=True, tag="session.rewind"):
    """To the moment when ``chunk_index`` was the next chunk."""

    chunk_index: ChunkIndex


class SessionLog(ClientMessage, frozen=True, kw_only=True, tag="session.log"):
    pass


class SessionReplay(ClientMessage, frozen=True, kw_only=True, tag="session.replay"):
    log: LogBase64


class SessionAbort(ClientMessage, frozen=True, kw_only=True, tag="session.abort"):
    pass


class SessionRollback(ClientMessage, frozen=True, kw_only=True, tag="session.rollback"):
    pass


class SessionClose(ClientMessage, frozen=True, kw_only=True, tag="session.close"):
    pass


class Ping(ClientMessage, frozen=True, kw_only=True, tag="ping"):
    t: float | None = None


# ---- server to client -------------------------------------------------------------------------------------------------


class Hello(ServerMessage, frozen=True, kw_only=True, tag="hello"):
    protocol: Literal["realtime-omni.world.v1"]
    server: Text
    models: tuple[Name, ...]
    handshake_timeout_s: Seconds


class Pong(ServerMessage, frozen=True, kw_only=True, tag="pong"):
    server_ms: Milliseconds
    t: float | None = None
    re: MessageId | None = None


class ErrorMessage(ServerMessage, frozen=True, kw_only=True, tag="error"):
    code: WireCode
    message: Text
    fatal: bool
    path: Text | None = None
    event_id: EventId | None = None
    re: MessageId | None = None


class Limits(Value, frozen=True, kw_only=True):
    max_pending_events: Count
    max_message_bytes: Count
    max_events_per_s: Annotated[float, Meta(gt=0, le=1e6)]
    grace_s: Seconds
    stall_timeout_s: Seconds
    horizon_frames: Count | None


class ControlInfo(Value, frozen=True, kw_only=True):
    """One kind of control the session's model takes, with its JSON schema."""

    track: Name
    schema: Name
    json_schema: JsonObject
    description: Text


class SessionStarted(SessionMessage, frozen=True, kw_only=True, tag="session.started"):
    session_id: SessionId
    resume_token: Token
    model: Name
    prompt: Prompt | None
    seed: Seed
    format: Format
    codec: Name | None
    width: Pixels
    height: Pixels
    fps: Fps
    frames_per_block: FrameCount
    cadence: Cadence
    lead_frames: Count
    limits: Limits
    controls: tuple[ControlInfo, ...]
    prompts: tuple[Prompt, ...]
    starts: tuple[Name, ...]
    next_event_id: NextEventId
    can_fork: bool
    oldest_rewind: ChunkIndex | None
    re: MessageId | None = None


class SessionResumed(ServerMessage, frozen=True, kw_only=True, tag="session.resumed"):
    """Not numbered, so that the numbers of what is sent again stay contiguous."""

    session_id: SessionId
    resume_token: Token
    replayed_from: Seq
    state: LiveState
    epoch: Epoch
    next_frame: Count
    next_event_id: NextEventId
    format: Format
    codec: Name | None
    re: MessageId | None = None


class SessionLogged(ServerMessage, frozen=True, kw_only=True, tag="session.logged"):
    """Not numbered and not kept: who lost it asks again. ``log`` is base64 of the log's JSON text (protocols/sessions.md)."""

    log: LogBase64
    re: MessageId | None = None


class EventAccepted(SessionMessage, frozen=True, kw_only=True, tag="event.accepted"):
    event_id: EventId
    status: AcceptStatus
    pending: Count
    prompt: Prompt | None = None
    re: MessageId | None = None


class EventApplied(SessionMessage, frozen=True, kw_only=True, tag="event.applied"):
    event_ids: EventIds
    chunk_index: ChunkIndex
    first_frame: Count

    def __post_init__(self) -> None:
        _increasing(self.event_ids, ".event_ids")


class EventDiscarded(SessionMessage, frozen=True, kw_only=True, tag="event.discarded"):
    event_ids: EventIds
    reason: DiscardReason

    def __post_init__(self) -> None:
        _increasing(self.event_ids, ".event_ids")


class Timings(Value, frozen=True, kw_only=True):
    """Milliseconds: the model's tick, encoding, and waiting between due and start."""

    tick: Milliseconds
    encode: Milliseconds
    wait: Milliseconds


class KvUse(Value, frozen=True, kw_only=True):
    """KV pages this session holds, and pages of the whole pool (both 0 for a model without KV)."""

    pages_used: Count
    pages_total: Count


class Chunk(SessionMessage, frozen=True, kw_only=True, tag="chunk"):
    epoch: Epoch
    chunk_index: ChunkIndex
    first_frame: Count
    frames: FrameCount
    applied_event_ids: AppliedIds
    prompt: Prompt | None
    timings_ms: Timings
    kv: KvUse
    oldest_rewind: ChunkIndex | None
    latent_shape: Annotated[tuple[Pixels, ...], Meta(min_length=1, max_length=8)] | None = None

    def __post_init__(self) -> None:
        _increasing(self.applied_event_ids, ".applied_event_ids")

    @property
    def parts(self) -> int:
        """How many binary frames follow: one per video frame, or a single one for latents."""
        return self.frames if self.latent_shape is None else 1


class ChunkAborted(SessionMessage, frozen=True, kw_only=True, tag="chunk.aborted"):
    chunk_index: ChunkIndex | None
    re: MessageId | None = None


class SessionPaused(SessionMessage, frozen=True, kw_only=True, tag="session.paused"):
    re: MessageId | None = None


class SessionPlaying(SessionMessage, frozen=True, kw_only=True, tag="session.playing"):
    re: MessageId | None = None


class SessionResetDone(SessionMessage, frozen=True, kw_only=True, tag="session.reset_done"):
    epoch: Epoch
    prompt: Prompt | None
    seed: Seed
    re: MessageId | None = None


class SessionForked(SessionMessage, frozen=True, kw_only=True, tag="session.forked"):
    """The branch, as its client needs it; its own numbers begin with 1, which stands for this message."""

    session_id: SessionId
    resume_token: Token
    grace_s: Seconds
    epoch: Epoch
    chunk_index: ChunkIndex
    next_frame: Count
    prompt: Prompt | None
    seed: Seed
    next_event_id: NextEventId
    oldest_rewind: ChunkIndex | None
    re: MessageId | None = None


class SessionRewound(SessionMessage, frozen=True, kw_only=True, tag="session.rewound"):
    epoch: Epoch
    chunk_index: ChunkIndex
    next_frame: Count
    prompt: Prompt | None
    oldest_rewind: ChunkIndex | None
    re: MessageId | None = None


class SessionReplaying(SessionMessage, frozen=True, kw_only=True, tag="session.replaying"):
    """The next ``chunks`` chunks, from ``chunk_index`` on, are those of the log."""

    chunk_index: ChunkIndex
    chunks: Seq
    re: MessageId | None = None


class SessionReplayed(SessionMessage, frozen=True, kw_only=True, tag="session.replayed"):
    """``complete`` false: it ended early, by an abort, a failure or a lost connection."""

    complete: bool
    next_event_id: NextEventId


class SessionFailed(SessionMessage, frozen=True, kw_only=True, tag="session.failed"):
    code: WireCode
    message: Text
    chunk_index: ChunkIndex
    can: tuple[Remedy, ...]


class SessionRecovered(SessionMessage, frozen=True, kw_only=True, tag="session.recovered"):
    chunk_index: ChunkIndex
    re: MessageId | None = None


class SessionClosed(ServerMessage, frozen=True, kw_only=True, tag="session.closed"):
    """The terminal message. Numbered, except ``taken_over``: that one ends a connection, the session and its numbers go on."""

    reason: CloseReason
    seq: Seq | None = None
    code: WireCode | None = None
    message: Text | None = None
    re: MessageId | None = None

    def __post_init__(self) -> None:
        if (self.seq is None) != (self.reason == "taken_over"):
            raise semantic(".seq", "session.closed is numbered unless the reason is taken_over")


AnyClientMessage: TypeAlias = (
    SessionStart
    | SessionResume
    | SessionEvent
    | SessionNext
    | SessionAck
    | SessionPause
    | SessionResumePlay
    | SessionReset
    | SessionFork
    | SessionRewind
    | SessionLog
    | SessionReplay
    | SessionAbort
    | SessionRollback
    | SessionClose
    | Ping
)
AnySessionMessage: TypeAlias = (
    SessionStarted
    | EventAccepted
    | EventApplied
    | EventDiscarded
    | Chunk
    | ChunkAborted
    | SessionPaused
    | SessionPlaying
    | SessionResetDone
    | SessionForked
    | SessionRewound
    | SessionReplaying
    | SessionReplayed
    | SessionFailed
    | SessionRecovered
    | SessionClosed
)
AnyServerMessage: TypeAlias = Hello | Pong | ErrorMessage | SessionResumed | SessionLogged | AnySessionMessage

_client_decoder: msgspec.json.Decoder[AnyClientMessage] = msgspec.json.Decoder(AnyClientMessage)
_server_decoder: msgspec.json.Decoder[AnyServerMessage] = msgspec.json.Decoder(AnyServerMessage)


def message_type(message: Message | type[Message]) -> str:
    """The wire's ``type`` string."""
    return str(message.__struct_config__.tag)


def parse_client(
    data: str | bytes, *, max_start_bytes: int = MAX_START_BYTES, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> AnyClientMessage:
    """One client message, or `WireError`."""
    message = decode_text(data, _client_decoder, max_start_bytes)
    if (
        not isinstance(message, SessionStart | SessionReset | SessionReplay)
        and check_size(data, max_start_bytes) > max_message_bytes
    ):
        raise WireError(
            WireCode.MESSAGE_TOO_LARGE,
            f"the message is larger than {max_message_bytes} bytes",
            path="$",
            close=CloseCode.TOO_LARGE,
        )
    return message


def parse_server(data: str | bytes, *, max_bytes: int = MAX_SERVER_MESSAGE_BYTES) -> AnyServerMessage:
    """One server message, or `WireError`."""
    return decode_text(data, _server_decoder, max_bytes)
