"""What a client may send, and the strict door it passes: JSON text to a typed event, or a coded refusal.

Owns: names, fields and bounds of the client events (live.md section 4).  Must not know: states, connections' roles.
``session`` objects refuse unknown fields; elsewhere an unknown field is ignored, so that a newer client's extra key
cannot end a call.
"""

from __future__ import annotations

import binascii
import re
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from ..envelope import check_depth, check_size, to_text
from ..errors import WireCode, WireError
from .config import AudioFormat, ForkConfig, SessionConfig, UpdateConfig
from .errors import LiveCode, LiveError

MAX_EVENT_BYTES = 2 * 1024 * 1024
"""A fixture of 30 s is 1.44 MB, and base64 adds a third."""
MAX_APPEND_S = 10.0
"""Of audio in one append. Clients send 20 to 100 ms at a time; more than real time is refused anyhow."""
MAX_FIXTURE_S = 30.0
MAX_CONTENT_CHARS = 4_000
"""500 tokens are the protocol's bound; only a model can count them."""
MAX_EVENT_ID_CHARS = 512

EventId: TypeAlias = Annotated[str, Meta(max_length=MAX_EVENT_ID_CHARS)]
Content: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_CONTENT_CHARS)]


class ClientEvent(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of all. ``event_id``: the client's own; answers carry it as ``client_event_id``."""

    event_id: EventId | None = None


class SessionStart(ClientEvent, frozen=True, kw_only=True, tag="session.start"):
    session: SessionConfig


class ForkStart(ClientEvent, frozen=True, kw_only=True, tag="session.start"):
    """`session.start` on a fork's connection."""

    session: ForkConfig


class SessionUpdate(ClientEvent, frozen=True, kw_only=True, tag="session.update"):
    session: UpdateConfig


class InputAudioAppend(ClientEvent, frozen=True, kw_only=True, tag="session.input_audio.append"):
    """``audio``: base64 of raw audio in the session's format. No answer."""

    audio: str


class PlainAppend(ClientEvent, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="session.input_audio.append"):
    """An `InputAudioAppend` without anything unusual, read in one pass; ``audio`` is decoded."""

    audio: bytes


class InputAudioMute(ClientEvent, frozen=True, kw_only=True, tag="session.input_audio.mute"):
    pass


class InputAudioUnmute(ClientEvent, frozen=True, kw_only=True, tag="session.input_audio.unmute"):
    pass


class FixturePlay(ClientEvent, frozen=True, kw_only=True, tag="session.output_audio.fixture.play"):
    """``audio``: base64 of mono PCM16 at 24 kHz, whatever the session's format is."""

    audio: str


class ContextAppend(ClientEvent, frozen=True, kw_only=True):
    """Base of the three that add text at the next tick. ``delegation_id``: whose result it is."""

    content: Content
    delegation_id: str | None = None


class InstructionsAppend(ContextAppend, frozen=True, kw_only=True, tag="session.instructions.append"):
    """Developer instructions."""


class ThinkingAppend(ContextAppend, frozen=True, kw_only=True, tag="session.thinking.append"):
    """Silent context."""


class CommentaryAppend(ContextAppend, frozen=True, kw_only=True, tag="session.commentary.append"):
    """What the model is to say."""


class SessionClose(ClientEvent, frozen=True, kw_only=True, tag="session.close"):
    pass


class ResponseItemCreate(ClientEvent, frozen=True, kw_only=True, tag="response.item.create"):
    """Add an item to the backend's conversation: what a function returned. No answer."""

    item: dict[str, Any]


class ResponseCreate(ClientEvent, frozen=True, kw_only=True, tag="response.create"):
    """The backend goes on: every call is answered."""


class Unsupported(ClientEvent, frozen=True, kw_only=True):
    """An event of the protocol that this server does not carry out."""


class DecisionCreate(Unsupported, frozen=True, kw_only=True, tag="decision.create"):
    pass


class DecisionItemCreate(Unsupported, frozen=True, kw_only=True, tag="decision.item.create"):
    pass


class DecisionItemDelete(Unsupported, frozen=True, kw_only=True, tag="decision.item.delete"):
    pass


class DtmfSend(Unsupported, frozen=True, kw_only=True, tag="transport.dtmf.send"):
    pass


AnyContextAppend: TypeAlias = InstructionsAppend | ThinkingAppend | CommentaryAppend
AnyUnsupported: TypeAlias = DecisionCreate | DecisionItemCreate | DecisionItemDelete | DtmfSend
AnyPrimaryEvent: TypeAlias = (
    SessionStart
    | SessionUpdate
    | InputAudioAppend
    | InputAudioMute
    | InputAudioUnmute
    | FixturePlay
    | AnyContextAppend
    | SessionClose
    | ResponseItemCreate
    | ResponseCreate
    | AnyUnsupported
)
AnyClientEvent: TypeAlias = AnyPrimaryEvent | PlainAppend | ForkStart


def event_type(event: type[ClientEvent] | ClientEvent) -> str:
    return str(event.__struct_config__.tag)


_KINDS: dict[str, type[AnyClientEvent]] = {
    event_type(kind): kind
    for kind in (
        SessionStart,
        SessionUpdate,
        InputAudioAppend,
        InputAudioMute,
        InputAudioUnmute,
        FixturePlay,
        InstructionsAppend,
        ThinkingAppend,
        CommentaryAppend,
        SessionClose,
        ResponseItemCreate,
        ResponseCreate,
        DecisionCreate,
        DecisionItemCreate,
        DecisionItemDelete,
        DtmfSend,
    )
}
_plain_append = msgspec.json.Decoder(PlainAppend)
_AT = re.compile(r"^(?P<text>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_FIELD = re.compile(r"field `(?P<name>[^`]{1,64})`")


def parse_client(frame: str | bytes, *, fork: bool = False) -> AnyClientEvent:
    """One frame of a client. ``fork``: a `session.start` is a fork's.

    Raises:
        LiveError: with the event's ``client_event_id`` where the frame was an object that had one.
    """
    plain = _read_plain(frame)
    if plain is not None:
        return plain
    value = _read(frame)
    event_id = value.get("event_id")
    if not (event_id is None or (isinstance(event_id, str) and len(event_id) <= MAX_EVENT_ID_CHARS)):
        raise LiveError(
            LiveCode.INVALID_VALUE, f"an id is a text of at most {MAX_EVENT_ID_CHARS} characters", "event_id"
        )
    try:
        return _convert(value, fork)
    except LiveError as error:
        error.client_event_id = event_id
        raise


def _read_plain(frame: str | bytes) -> PlainAppend | None:
    """Sound is nearly all that a client sends, twelve times a second and more, so it takes the short way: 8 us instead of 50
    for 80 ms. None: whatever it is, the long way says what of it is wrong."""
    if not isinstance(frame, str) or len(frame) > MAX_EVENT_BYTES:
        return None
    try:
        return _plain_append.decode(frame)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):  # a type that is none may be deep
        return None


def _read(frame: str | bytes) -> dict[str, Any]:
    if isinstance(frame, bytes):
        raise LiveError(LiveCode.INVALID_JSON, "an event is a text frame")
    try:
        check_size(frame, MAX_EVENT_BYTES)
        text = to_text(frame)
        check_depth(text)
        value = msgspec.json.decode(text)
    except WireError as error:
        too_large = error.code is WireCode.MESSAGE_TOO_LARGE
        raise LiveError(LiveCode.EVENT_TOO_LARGE if too_large else LiveCode.INVALID_JSON, error.message) from None
    except (ValueError, RecursionError):
        raise LiveError(LiveCode.INVALID_JSON, "the text is not JSON") from None
    if not isinstance(value, dict):
        raise LiveError(LiveCode.INVALID_JSON, "an event is one JSON object")
    return value


def _convert(value: dict[str, Any], fork: bool) -> AnyClientEvent:
    name = value.get("type")
    if not isinstance(name, str):
        raise LiveError(LiveCode.MISSING_PARAMETER, "an event has a type", "type")
    kind = _KINDS.get(name)
    if kind is None:
        raise LiveError(LiveCode.UNKNOWN_EVENT, "this type is not one of the protocol's", "type")
    if kind is SessionStart and fork:
        kind = ForkStart
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as complaint:
        raise _translate(str(complaint), kind) from None


def _translate(complaint: str, kind: type[ClientEvent]) -> LiveError:
    """A decoder's complaint as code and path; the field's name joins the path for unknown and missing fields."""
    match = _AT.match(complaint)
    assert match is not None  # the pattern matches any text
    text, path = match["text"], match["path"] or ""
    field = _FIELD.search(text)
    code = LiveCode.INVALID_VALUE
    if field is not None and ("unknown field" in text or "required field" in text):
        path = f"{path}.{field['name']}" if path else field["name"]
        code = LiveCode.UNKNOWN_PARAMETER if "unknown field" in text else LiveCode.MISSING_PARAMETER
        if code is LiveCode.UNKNOWN_PARAMETER and kind in (SessionUpdate, ForkStart) and path in _IMMUTABLE:
            return LiveError(LiveCode.IMMUTABLE_PARAMETER, "this cannot change any more", path)
    elif text.startswith("Expected") and ", got" in text:
        code = LiveCode.INVALID_TYPE
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return LiveError(code, printable[:200], path or None)


_IMMUTABLE = frozenset(f"session.{field}" for field in SessionConfig.__struct_fields__) | {"session.audio.output"}


def decode_audio(text: str, form: AudioFormat, max_s: float) -> bytes:
    """Base64 to raw audio: at least one sample, whole samples, at most ``max_s`` seconds.

    Raises:
        LiveError: ``invalid_audio`` at ``audio``.
    """
    size = form.bytes_per_sample
    if len(text) > 4 * (int(max_s * form.rate) * size // 3 + 2):
        raise LiveError(LiveCode.INVALID_AUDIO, f"audio is longer than {max_s:g} s", "audio")
    try:
        audio = binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError):
        raise LiveError(LiveCode.INVALID_AUDIO, "audio is not base64", "audio") from None
    return check_audio(audio, form, max_s)


def check_audio(audio: bytes, form: AudioFormat, max_s: float) -> bytes:
    """Raises LiveError as `decode_audio` does."""
    size = form.bytes_per_sample
    if not audio or len(audio) % size:
        raise LiveError(LiveCode.INVALID_AUDIO, "audio is not a whole number of samples", "audio")
    if len(audio) > max_s * form.rate * size:
        raise LiveError(LiveCode.INVALID_AUDIO, f"audio is longer than {max_s:g} s", "audio")
    return audio
