"""Messages of our own subprotocol `realtime-omni.vla.v1`: msgpack maps with a ``type``, arrays in the openpi dialect.

Owns: the fields and their bounds (openpi.md section 6).  Must not know: states, sessions.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from .codec import MAX_FRAME_BYTES, pack, unpack
from .errors import PolicyCode, PolicyError

Count = Annotated[int, Meta(ge=0, le=2**53)]
Seq = Annotated[int, Meta(ge=1, le=2**53)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Label = Annotated[str, Meta(min_length=1, max_length=128)]
Token = Annotated[str, Meta(min_length=1, max_length=256)]
MAX_ERROR_CHARS = 400


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", omit_defaults=True):
    """Base of all messages. Optional fields without a value are left out."""


# ---- client to server


class Start(Message, frozen=True, kw_only=True, tag="start"):
    """Begin a session. ``session_id``: a label for the server's log; the session's real id is the server's."""

    session_id: Label | None = None
    control_hz: Annotated[float, Meta(gt=0, le=10_000)] | None = None


class Resume(Message, frozen=True, kw_only=True, tag="resume"):
    """``last_chunk``: ``seq`` of the latest chunk that came."""

    session_id: Label
    resume_token: Token
    last_chunk: Seq | None = None


class Observe(Message, frozen=True, kw_only=True, tag="observation"):
    """The newest observation. ``seq`` rises over the life of the session; ``tick``: the control step it was captured
    at; ``captured_ms``: the client's clock then; ``consumed``: actions of the chunk before that were executed until
    now; ``rtc``: how the chunk continues the one before, one of ``rtc_modes`` in the handshake map."""

    seq: Seq
    epoch: Count
    tick: Count
    observation: dict[str, Any]
    captured_ms: float | None = None
    consumed: Count | None = None
    seed: Seed | None = None
    steps: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    rtc: Annotated[str, Meta(min_length=1, max_length=32)] | None = None


class ResetEpisode(Message, frozen=True, kw_only=True, tag="reset"):
    """A new episode: the epoch rises, the observation under way is cancelled, the session's state is dropped."""


class Bye(Message, frozen=True, kw_only=True, tag="close"):
    """End the session."""


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    t: float | None = None


# ---- server to client


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message. ``metadata`` is the deployment's handshake map, ``contract`` what an observation is judged by."""

    protocol: Literal["realtime-omni.vla.v1"]
    server: str
    policy: str
    metadata: dict[str, Any]
    contract: dict[str, Any]
    handshake_timeout_s: float


class Started(Message, frozen=True, kw_only=True, tag="started"):
    session_id: str
    resume_token: str
    epoch: Count
    grace_s: float


class Resumed(Message, frozen=True, kw_only=True, tag="resumed"):
    """``last_seq``: the highest observation received so far; the next one is above it. Chunks are not repeated."""

    resume_token: str
    epoch: Count
    last_seq: Count


class ActionChunk(Message, frozen=True, kw_only=True, tag="chunk"):
    """The answer to observation ``seq``. ``actions``: float32 ``[H, A]``; row i is for control step ``start_tick + i``;
    rows below ``valid_from`` repeat what was committed already; ``delay_used``: control steps of delay the policy
    planned for."""

    seq: Seq
    epoch: Count
    start_tick: Count
    valid_from: Count
    delay_used: Count
    actions: Any
    timing: dict[str, float]


class Superseded(Message, frozen=True, kw_only=True, tag="superseded"):
    """Observation ``seq`` was replaced by ``by`` before it was begun; it gets no chunk."""

    seq: Seq
    by: Seq


class ResetDone(Message, frozen=True, kw_only=True, tag="reset_done"):
    """Everything of an epoch below this one is void, answered or not."""

    epoch: Count


class ErrorMessage(Message, frozen=True, kw_only=True, tag="error"):
    """``seq``: the observation that gets no chunk. Without ``fatal`` the connection and the session go on."""

    code: str
    message: str
    path: str | None = None
    seq: Seq | None = None
    fatal: bool = False


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    server_ms: float
    t: float | None = None


class Closed(Message, frozen=True, kw_only=True, tag="closed"):
    """The session is over; the last message."""

    reason: Literal["client", "shutdown", "taken_over", "failed", "evicted"]


AnyClientMessage: TypeAlias = Start | Resume | Observe | ResetEpisode | Bye | Ping
AnyServerMessage: TypeAlias = (
    Hello | Started | Resumed | ActionChunk | Superseded | ResetDone | ErrorMessage | Pong | Closed
)

_AT = re.compile(r"^(?P<text>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)


def parse_client(frame: str | bytes, max_bytes: int = MAX_FRAME_BYTES) -> AnyClientMessage:
    """One frame of a client. Raises `PolicyError`."""
    message: AnyClientMessage = _parse(frame, AnyClientMessage, max_bytes)
    return message


def parse_server(frame: str | bytes, max_bytes: int = MAX_FRAME_BYTES) -> AnyServerMessage:
    """One frame of a server. Raises `PolicyError`."""
    message: AnyServerMessage = _parse(frame, AnyServerMessage, max_bytes)
    return message


def encode(message: AnyClientMessage | AnyServerMessage) -> bytes:
    """The message as one binary frame."""
    return pack({"type": type(message).__struct_config__.tag} | _members(message))


def _members(message: Message) -> dict[str, object]:
    """The fields that are not left out."""
    fields = msgspec.structs.fields(type(message))
    members = {field.name: getattr(message, field.name) for field in fields}
    return {
        field.name: members[field.name] for field in fields if field.required or members[field.name] != field.default
    }


def _parse(frame: str | bytes, kind: Any, max_bytes: int) -> Any:
    if isinstance(frame, str):
        raise PolicyError(PolicyCode.BAD_MESSAGE, "a message is a binary frame")
    value = unpack(frame, max_bytes)
    if not isinstance(value, dict):
        raise PolicyError(PolicyCode.BAD_MESSAGE, "a message is a map")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as complaint:
        found = _AT.match(str(complaint))
        assert found is not None  # the pattern matches any text
        text = "".join(char if char.isprintable() else "?" for char in found["text"])
        raise PolicyError(PolicyCode.BAD_MESSAGE, text[:200], found["path"] or "$") from None
