"""The eleven client events of the Realtime protocol as frozen values, and the door every text passes.

Owns: names and fields of realtime.md section 5, sizes, the translation of a decoder's complaint to code + param.
Must not know: what an event does.
Invariant: `parse_client` returns an event or raises `RealtimeError` in time linear in the size of the text. Unknown fields
are ignored: the hosted service grows them.
"""

from __future__ import annotations

import base64
import binascii
from typing import TypeAlias

import msgspec
from msgspec import Struct

from ..envelope import check_depth
from ..errors import WireError
from .codes import RealtimeCode, RealtimeError
from .items import Id, Item, ItemReference
from .session import JsonObject, ResponseOverrides, convert

MAX_AUDIO_BYTES = 15 * 1024 * 1024
"""Of one append, decoded: the hosted service's bound."""


class ClientEvent(Struct, frozen=True, kw_only=True, tag_field="type"):
    event_id: str | None = None


class SessionUpdate(ClientEvent, frozen=True, kw_only=True, tag="session.update"):
    session: JsonObject


class AudioAppend(ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.append"):
    audio: str


class AudioCommit(ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.commit"):
    pass


class AudioClear(ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.clear"):
    pass


class ItemCreate(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.create"):
    item: Item
    previous_item_id: str | None = None


class ItemRetrieve(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.retrieve"):
    item_id: Id


class ItemDelete(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.delete"):
    item_id: Id


class ItemTruncate(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.truncate"):
    item_id: Id
    audio_end_ms: int | float
    content_index: int = 0


class ResponseRequest(ResponseOverrides, frozen=True, kw_only=True):
    input: tuple[Item | ItemReference, ...] | None = None


class ResponseCreate(ClientEvent, frozen=True, kw_only=True, tag="response.create"):
    response: ResponseRequest | None = None


class ResponseCancel(ClientEvent, frozen=True, kw_only=True, tag="response.cancel"):
    response_id: str | None = None


class OutputClear(ClientEvent, frozen=True, kw_only=True, tag="output_audio_buffer.clear"):
    pass


class Heartbeat(ClientEvent, frozen=True, kw_only=True, tag="session.heartbeat"):
    """Duplex dialect, as those below."""


class SessionClose(ClientEvent, frozen=True, kw_only=True, tag="session.close"):
    pass


class PlaybackAck(ClientEvent, frozen=True, kw_only=True, tag="playback.ack"):
    """So much of an item was played by now."""

    item_id: Id
    played_ms: int | float


class BargeIn(ClientEvent, frozen=True, kw_only=True, tag="barge_in"):
    """The client's own detector found that the user speaks."""


DuplexEvent: TypeAlias = Heartbeat | SessionClose | PlaybackAck | BargeIn
AnyClientEvent: TypeAlias = (
    SessionUpdate
    | AudioAppend
    | AudioCommit
    | AudioClear
    | ItemCreate
    | ItemRetrieve
    | ItemDelete
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
    | OutputClear
    | DuplexEvent
)
_BY_TYPE: dict[str, type[AnyClientEvent]] = {str(kind.__struct_config__.tag): kind for kind in AnyClientEvent.__args__}
_DUPLEX_TYPES = frozenset(str(kind.__struct_config__.tag) for kind in DuplexEvent.__args__)


def parse_object(text: str) -> JsonObject:
    """The JSON object of a frame.

    Raises:
        RealtimeError: ``invalid_json``.
    """
    try:
        check_depth(text)
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, WireError, ValueError, RecursionError):
        raise RealtimeError(RealtimeCode.INVALID_JSON, "the frame is not a JSON text, or nested too deep") from None
    if not isinstance(value, dict):
        raise RealtimeError(RealtimeCode.INVALID_JSON, "an event is a JSON object")
    return value


def event_id_of(value: JsonObject) -> str | None:
    """The client's id of an event that may not parse; a long one is cut, so that an error fits in a frame."""
    event_id = value.get("event_id")
    return event_id[:512] if isinstance(event_id, str) else None


def parse_client(value: JsonObject, *, duplex: bool = False) -> AnyClientEvent:
    """The event of a decoded object; ``duplex``: those of the duplex dialect too.

    Raises:
        RealtimeError: ``invalid_value``, ``missing_required_parameter``.
    """
    kind = value.get("type")
    if kind is None:
        raise RealtimeError(RealtimeCode.MISSING_PARAMETER, "an event has a type", "type")
    known = [name for name in _BY_TYPE if duplex or name not in _DUPLEX_TYPES]
    if not isinstance(kind, str) or kind not in known:
        raise RealtimeError(RealtimeCode.INVALID_VALUE, f"no such event; there are {', '.join(known)}", "type")
    if not isinstance(value.get("event_id"), str):
        value = {key: member for key, member in value.items() if key != "event_id"}
    return convert(value, _BY_TYPE[kind], "")


def decode_audio(text: str, param: str = "audio") -> bytes:
    """Base64 to bytes.

    Raises:
        RealtimeError: ``invalid_value``, ``message_too_large``.
    """
    if len(text) > MAX_AUDIO_BYTES // 3 * 4 + 4:
        raise RealtimeError(
            RealtimeCode.TOO_LARGE, f"one event carries at most {MAX_AUDIO_BYTES} bytes of audio", param
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RealtimeError(RealtimeCode.INVALID_VALUE, "audio is base64", param) from None
