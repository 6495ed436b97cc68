"""`ResponseStream`: the events of one response, in the one order that clients accept.

Owns: output items and content parts of a response, their indices, the terminal events.  Must not know: which response
may start, turns, sockets.
Invariant (realtime.md section 7): created, then per item: added, parts, deltas, done; then done, once. Whatever
was opened is closed, also when the response ends early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from ..errors import LocalError
from .conversation import Conversation, Spoken, with_transcript
from .items import FunctionCallItem, Item, ItemStatus, MessageItem, OutputAudio, OutputText, Usage
from .server_events import (
    ArgumentsDelta,
    ArgumentsDone,
    AudioDelta,
    AudioDone,
    AudioPart,
    ContentPartAdded,
    ContentPartDone,
    ItemAdded,
    ItemDone,
    OutputItemAdded,
    OutputItemDone,
    Response,
    ResponseAudioFormat,
    ResponseAudioShown,
    ResponseCreated,
    ResponseDone,
    ServerEvent,
    StatusDetails,
    TextDelta,
    TextDone,
    TextPart,
    TranscriptDelta,
    TranscriptDone,
)
from .session import ResponseConfig, bytes_per_ms

MAX_DELTA_BYTES = 96 * 1024
"""Of audio in one delta (two seconds of PCM); base64 makes it 128 KiB."""
MAX_TEXT_BYTES = 96 * 1024
"""Of all text and arguments of a response as JSON: the last event carries them all."""

Status: TypeAlias = Literal["completed", "cancelled", "incomplete", "failed"]


class ResponseStream:
    """One response. ``conversation``: what it writes to, None for an out-of-band one."""

    def __init__(
        self,
        response_id: str,
        config: ResponseConfig,
        *,
        conversation: Conversation | None,
        conversation_id: str | None,
        mint: Callable[[str], str],
    ) -> None:
        self.id = response_id
        self.config = config
        self.spoke = False
        """Whether audio went out."""
        self._conversation = conversation
        self._conversation_id = conversation_id
        self._mint = mint
        self._output: list[Item] = []
        self._message: MessageItem | None = None
        self._spoken = Spoken(self.id)
        self._text_bytes = 0
        self._over = False

    @property
    def out_of_band(self) -> bool:
        return self._conversation is None

    def created(self) -> ServerEvent:
        return ResponseCreated(response=self._object("in_progress"))

    def fits(self, text: str) -> bool:
        """Whether this much more text stays within the bound."""
        return self._text_bytes + len(msgspec.json.encode(text)) <= MAX_TEXT_BYTES

    def speech(self, audio: bytes, start_ms: float | None, end_ms: float | None) -> list[ServerEvent]:
        """More audio, in deltas of bounded size; nothing where the answer is a text."""
        if self.config.modality == "text" or not audio:
            return []
        events, item_id = self._open()
        self.spoke = True
        rate = bytes_per_ms(self.config.format)
        self._spoken.say(len(audio) / rate, start_ms)
        for at in range(0, len(audio), MAX_DELTA_BYTES):
            piece = audio[at : at + MAX_DELTA_BYTES]
            first, last = at / len(audio), (at + len(piece)) / len(audio)
            events.append(
                AudioDelta(
                    response_id=self.id,
                    output_index=self._index,
                    item_id=item_id,
                    delta=piece,
                    start_ms=_time(start_ms, end_ms, first),
                    end_ms=_time(start_ms, end_ms, last),
                )
            )
        return events

    def text(self, text: str, start_ms: float | None, end_ms: float | None) -> list[ServerEvent]:
        """More text: of the transcript, or of the answer where it is a text."""
        if not text:
            return []
        self._text_bytes += len(msgspec.json.encode(text))
        events, item_id = self._open()
        self._spoken.write(text, start_ms, end_ms)
        at, index = self.id, self._index
        if self.config.modality == "text":
            return [*events, TextDelta(response_id=at, output_index=index, item_id=item_id, delta=text)]
        start, end = _time(start_ms, end_ms, 0), _time(start_ms, end_ms, 1)
        said = TranscriptDelta(
            response_id=at, output_index=index, item_id=item_id, delta=text, start_ms=start, end_ms=end
        )
        return [*events, said]

    def tool_call(self, name: str, arguments: str, call_id: str | None) -> list[ServerEvent]:
        """A function call: an item of its own, after the message that was open."""
        self._text_bytes += len(msgspec.json.encode(arguments)) + len(msgspec.json.encode(name))
        events = self._close("completed")
        item = FunctionCallItem(
            id=self._mint("item"),
            name=name,
            arguments="",
            call_id=call_id or self._mint("call"),
            status="in_progress",
        )
        assert item.id is not None
        assert item.call_id is not None
        events += self._added(item, item, None)
        done = msgspec.structs.replace(item, arguments=arguments, status="completed")
        events += [
            ArgumentsDelta(
                response_id=self.id,
                output_index=self._index,
                item_id=item.id,
                call_id=item.call_id,
                delta=arguments,
            ),
            ArgumentsDone(
                response_id=self.id,
                output_index=self._index,
                item_id=item.id,
                call_id=item.call_id,
                name=name,
                arguments=arguments,
            ),
        ]
        return events + self._done(done)

    def finish(self, status: Status, details: StatusDetails, usage: Usage) -> list[ServerEvent]:
        """The terminal events, once."""
        if self._over:
            raise LocalError(f"response {self.id} has ended already")
        self._over = True
        events = self._close("completed" if status == "completed" else "incomplete")
        return [*events, ResponseDone(response=self._object(status, details, usage))]

    # ---- inside

    @property
    def _index(self) -> int:
        return len(self._output)

    def _open(self) -> tuple[list[ServerEvent], str]:
        """The message under way and the events that open it, if it is new."""
        if self._message is not None:
            assert self._message.id is not None
            return [], self._message.id
        item_id = self._mint("item")
        self._spoken = Spoken(self.id)
        speech = self.config.modality == "audio"
        self._message = MessageItem(
            role="assistant",
            id=item_id,
            status="in_progress",
            content=(OutputAudio("") if speech else OutputText(""),),
        )
        events = self._added(msgspec.structs.replace(self._message, content=()), self._message, self._spoken)
        part = AudioPart() if speech else TextPart()
        events.append(ContentPartAdded(response_id=self.id, output_index=self._index, item_id=item_id, part=part))
        return events, item_id

    def _close(self, status: ItemStatus) -> list[ServerEvent]:
        """End the message under way, if there is one."""
        if self._message is None:
            return []
        item, text = self._message, self._spoken.text
        assert item.id is not None
        self._message = None
        at, index, events = self.id, self._index, list[ServerEvent]()
        if self.config.modality == "audio":
            events = [
                AudioDone(response_id=at, output_index=index, item_id=item.id),
                TranscriptDone(response_id=at, output_index=index, item_id=item.id, transcript=text),
            ]
            part: AudioPart | TextPart = AudioPart(transcript=text)
        else:
            events = [TextDone(response_id=at, output_index=index, item_id=item.id, text=text)]
            part = TextPart(text=text)
        events.append(ContentPartDone(response_id=at, output_index=index, item_id=item.id, part=part))
        return events + self._done(with_transcript(msgspec.structs.replace(item, status=status), text))

    def _added(self, shown: Item, kept: Item, spoken: Spoken | None) -> list[ServerEvent]:
        """``shown``: as the events have it; ``kept``: as the conversation does."""
        events: list[ServerEvent] = [OutputItemAdded(response_id=self.id, output_index=self._index, item=shown)]
        if self._conversation is not None:
            events.append(ItemAdded(item=shown, previous_item_id=self._conversation.last_id))
            self._conversation.add(kept, spoken=spoken)
        return events

    def _done(self, item: Item) -> list[ServerEvent]:
        events: list[ServerEvent] = [OutputItemDone(response_id=self.id, output_index=self._index, item=item)]
        self._output.append(item)
        if self._conversation is not None and item.id in self._conversation:
            assert item.id is not None
            self._conversation.replace(item)
            kept = self._conversation.get(item.id)
            events.append(ItemDone(item=kept, previous_item_id=self._conversation.previous(item.id)))
        return events

    def _object(
        self,
        status: Literal["in_progress"] | Status,
        details: StatusDetails | None = None,
        usage: Usage | None = None,
    ) -> Response:
        return Response(
            id=self.id,
            status=status,
            status_details=details,
            conversation_id=self._conversation_id,
            output_modalities=(self.config.modality,),
            max_output_tokens=self.config.max_output_tokens,
            audio=ResponseAudioShown(output=ResponseAudioFormat(format=self.config.format, voice=self.config.voice)),
            output=tuple(self._output),
            metadata=self.config.metadata,
            usage=usage,
        )


def _time(start_ms: float | None, end_ms: float | None, share: float) -> int | UnsetType:
    """A moment at this share of an interval, as the wire's extra key; unset where the interval is not known."""
    if start_ms is None or end_ms is None:
        return UNSET
    return round(start_ms + share * (end_ms - start_ms))
