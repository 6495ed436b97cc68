"""Conversation items and usage as frozen values: the same types for what a client creates and what a server shows.

Owns: names and shapes of realtime.md section 4.  Must not know: order, sessions, audio.
Invariant: an item that a server shows has an id, and carries no audio and no picture (a frame stays below
`MAX_FRAME_BYTES`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from .codes import RealtimeCode, RealtimeError

MAX_FRAME_BYTES = 256 * 1024
"""Bound of every frame that a server sends; the strictest client's default is 1 MiB."""
MAX_ITEM_BYTES = 64 * 1024
"""Bound of an item as JSON."""
MAX_ID_CHARS = 128

Id: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
ItemStatus: TypeAlias = Literal["completed", "incomplete", "in_progress"]


class InputText(Struct, frozen=True, tag_field="type", tag="input_text"):
    text: str


class InputAudio(Struct, frozen=True, tag_field="type", tag="input_audio"):
    """``transcript`` is None until it is known. Audio that a client puts in is dropped: its transcript says it all."""

    transcript: str | None = None


class InputImage(Struct, frozen=True, tag_field="type", tag="input_image"):
    image_url: str | None = None


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str


class OutputAudio(Struct, frozen=True, tag_field="type", tag="output_audio"):
    transcript: str | None = None


Content: TypeAlias = InputText | InputAudio | InputImage | OutputText | OutputAudio
_ALLOWED: Final[dict[str, tuple[type[Content], ...]]] = {
    "system": (InputText,),
    "user": (InputText, InputAudio),
    "assistant": (OutputText,),
}


class MessageItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    role: Literal["system", "user", "assistant"]
    content: tuple[Content, ...]
    id: Id | None = None
    object: Literal["realtime.item"] = "realtime.item"
    status: ItemStatus = "completed"

    @property
    def text(self) -> str:
        """All that was said or written in it, as far as it is known."""
        parts = (part.text if isinstance(part, InputText | OutputText) else _spoken(part) for part in self.content)
        return " ".join(part for part in parts if part)


class FunctionCallItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    name: str
    arguments: str
    call_id: Id | None = None
    id: Id | None = None
    object: Literal["realtime.item"] = "realtime.item"
    status: ItemStatus = "completed"


class FunctionCallOutputItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    call_id: Id
    output: str
    id: Id | None = None
    object: Literal["realtime.item"] = "realtime.item"
    status: ItemStatus = "completed"


Item: TypeAlias = MessageItem | FunctionCallItem | FunctionCallOutputItem


class ItemReference(Struct, frozen=True, tag_field="type", tag="item_reference"):
    """In ``response.create.input``: an item of the conversation."""

    id: Id


def _spoken(part: Content) -> str:
    return part.transcript or "" if isinstance(part, InputAudio | OutputAudio) else ""


def check_item(item: Item, param: str = "item") -> None:
    """What may be in an item that a client creates.

    Raises:
        RealtimeError: ``invalid_value``, ``message_too_large``.
    """
    if isinstance(item, MessageItem):
        for index, part in enumerate(item.content):
            if not isinstance(part, _ALLOWED[item.role]):
                kind = msgspec.to_builtins(part)["type"]
                text = f"a {item.role} message of a client cannot have content of type {kind} here"
                raise RealtimeError(RealtimeCode.INVALID_VALUE, text, f"{param}.content[{index}].type")
            if isinstance(part, InputAudio) and part.transcript is None:
                text = "audio of an item needs its transcript here; what is to be heard goes into the input buffer"
                raise RealtimeError(RealtimeCode.MISSING_PARAMETER, text, f"{param}.content[{index}].transcript")
    if len(msgspec.json.encode(item)) > MAX_ITEM_BYTES:
        raise RealtimeError(RealtimeCode.TOO_LARGE, f"an item has at most {MAX_ITEM_BYTES} bytes", param)


def kept_item(item: Item, mint: Callable[[str], str]) -> Item:
    """A client's item as a conversation holds it: with an id, whole."""
    status: ItemStatus = "incomplete" if item.status == "incomplete" else "completed"
    made = msgspec.structs.replace(item, id=item.id or mint("item"), status=status)
    if isinstance(made, FunctionCallItem) and made.call_id is None:
        return msgspec.structs.replace(made, call_id=mint("call"))
    return made


class CachedDetails(Struct, frozen=True, kw_only=True):
    text_tokens: int = 0
    audio_tokens: int = 0
    image_tokens: int = 0


class InputDetails(Struct, frozen=True, kw_only=True):
    text_tokens: int = 0
    audio_tokens: int = 0
    image_tokens: int = 0
    cached_tokens: int = 0
    cached_tokens_details: CachedDetails = CachedDetails()


class OutputDetails(Struct, frozen=True, kw_only=True):
    text_tokens: int = 0
    audio_tokens: int = 0


class Usage(Struct, frozen=True, kw_only=True):
    """Of a response, in the model's own tokens."""

    total_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    input_token_details: InputDetails = InputDetails()
    output_token_details: OutputDetails = OutputDetails()

    @classmethod
    def of(
        cls, *, text_in: int = 0, audio_in: int = 0, cached: int = 0, text_out: int = 0, audio_out: int = 0
    ) -> Usage:
        """``cached``: how many of the tokens that went in came from a cache."""
        return cls(
            total_tokens=text_in + audio_in + text_out + audio_out,
            input_tokens=text_in + audio_in,
            output_tokens=text_out + audio_out,
            input_token_details=InputDetails(text_tokens=text_in, audio_tokens=audio_in, cached_tokens=cached),
            output_token_details=OutputDetails(text_tokens=text_out, audio_tokens=audio_out),
        )


class DurationUsage(Struct, frozen=True, tag_field="type", tag="duration"):
    """Of a transcription."""

    seconds: float
