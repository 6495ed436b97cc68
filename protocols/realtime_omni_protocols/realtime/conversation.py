"""The default conversation: items in order, and how much of what the assistant said was heard.

Owns: order, ids, calls, bounds, the cut of a transcript.  Must not know: events, responses under way, sockets.
Invariant: ids are unique; an item's text is what was heard of it, once a client has said so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from .codes import RealtimeCode, RealtimeError
from .items import FunctionCallItem, FunctionCallOutputItem, InputAudio, Item, MessageItem, OutputAudio, OutputText

MAX_ITEMS = 1_000
MAX_BYTES = 4 * 1024 * 1024
"""Of all items as JSON. Beyond either bound the oldest items are dropped, and the client is told."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Part of a transcript; times in ms of the item's audio. ``end`` is None where only the start is known."""

    text: str
    start: float
    end: float | None


@dataclass(slots=True)
class Spoken:
    """What the assistant said in one item, and when in its audio. ``response_id``: in which response."""

    response_id: str
    audio_ms: float = 0.0
    fragments: list[Fragment] = field(default_factory=list)
    cut_ms: float | None = None
    """Where a client stopped it; it only goes down."""
    _origin_ms: float | None = None
    """The session's clock where the item's audio is at 0."""

    @property
    def text(self) -> str:
        return "".join(fragment.text for fragment in self.fragments)

    def say(self, duration_ms: float, start_ms: float | None) -> None:
        """More audio; ``start_ms``: the session's clock at its start."""
        if start_ms is not None:
            origin = start_ms - self.audio_ms
            if self.audio_ms == 0 and self._origin_ms is not None:  # the text came first and had guessed it
                shift = self._origin_ms - origin
                self.fragments = [_shifted(part, shift) for part in self.fragments]
            self._origin_ms = origin
        self.audio_ms += duration_ms

    def write(self, text: str, start_ms: float | None, end_ms: float | None) -> None:
        """More text, spoken between these times of the session's clock; without them, in the audio that follows."""
        if start_ms is None:
            self.fragments.append(Fragment(text, self.audio_ms, None))
            return
        if self._origin_ms is None:
            self._origin_ms = start_ms - self.audio_ms
        start = max(0.0, start_ms - self._origin_ms)
        self.fragments.append(Fragment(text, start, None if end_ms is None else max(start, end_ms - self._origin_ms)))

    def cut(self, heard_ms: float) -> float:
        """Record that the first ``heard_ms`` were heard; the value that acts, clamped to what there is."""
        limit = self.audio_ms if self.cut_ms is None else self.cut_ms
        self.cut_ms = min(max(0.0, heard_ms), limit)
        return self.cut_ms

    def heard(self) -> str:
        """The text up to the cut. A fragment heard in part is cut in proportion, back to the end of a word."""
        if self.cut_ms is None:
            return self.text
        kept = []
        for index, part in enumerate(self.fragments):
            after = self.fragments[index + 1].start if index + 1 < len(self.fragments) else self.audio_ms
            end = max(part.start, after if part.end is None else part.end)
            if end <= self.cut_ms and self.cut_ms > 0:
                kept.append(part.text)
                continue
            if part.start < self.cut_ms:
                share = (self.cut_ms - part.start) / (end - part.start)
                kept.append(_whole_words(part.text, int(share * len(part.text))))
            break
        return "".join(kept)


def _shifted(part: Fragment, by: float) -> Fragment:
    start = max(0.0, part.start + by)
    return Fragment(part.text, start, None if part.end is None else max(start, part.end + by))


def _whole_words(text: str, chars: int) -> str:
    """The first ``chars`` characters, without the word that they end in the middle of."""
    if chars >= len(text) or text[chars].isspace():
        return text[:chars]
    head = text[:chars]
    while head and not head[-1].isspace():
        head = head[:-1]
    return head.rstrip()


@dataclass(slots=True)
class _Entry:
    item: Item
    spoken: Spoken | None
    size: int


class Conversation:
    def __init__(self) -> None:
        self._order: list[str] = []
        self._entries: dict[str, _Entry] = {}
        self._bytes = 0

    def __contains__(self, item_id: object) -> bool:
        return item_id in self._entries

    def __len__(self) -> int:
        return len(self._order)

    @property
    def last_id(self) -> str | None:
        return self._order[-1] if self._order else None

    def previous(self, item_id: str) -> str | None:
        at = self._order.index(item_id)
        return self._order[at - 1] if at else None

    def items(self) -> tuple[Item, ...]:
        """In order, with what was heard."""
        return tuple(self.get(item_id) for item_id in self._order)

    def get(self, item_id: str) -> Item:
        """Raises KeyError."""
        entry = self._entries[item_id]
        return entry.item if entry.spoken is None else with_transcript(entry.item, entry.spoken.heard())

    def spoken(self, item_id: str) -> Spoken | None:
        """How the assistant said it; None for an item without speech. Raises KeyError."""
        return self._entries[item_id].spoken

    def check_place(self, item_id: str | None, previous: str | None, reserved: str | None) -> None:
        """Whether an item of a client can be added there. ``reserved``: an id announced for an item to come.

        Raises:
            RealtimeError: ``item_create_duplicate_item_id``, ``item_create_invalid_previous_item_id``.
        """
        if item_id is not None and (item_id in self._entries or item_id == reserved):
            raise RealtimeError(RealtimeCode.DUPLICATE_ITEM, "an item with this id exists", "item.id")
        if previous not in (None, "root") and previous not in self._entries:
            text = "there is no item with this id; the new one was not added"
            raise RealtimeError(RealtimeCode.INVALID_PREVIOUS_ITEM, text, "previous_item_id")

    def check_output(self, item: FunctionCallOutputItem) -> None:
        """Whether a call waits for this output.

        Raises:
            RealtimeError: ``invalid_tool_call_id``.
        """
        entries = [entry.item for entry in self._entries.values()]
        if not any(isinstance(known, FunctionCallItem) and known.call_id == item.call_id for known in entries):
            raise RealtimeError(RealtimeCode.INVALID_CALL, "no call in the conversation has this id", "item.call_id")
        if any(isinstance(known, FunctionCallOutputItem) and known.call_id == item.call_id for known in entries):
            raise RealtimeError(RealtimeCode.INVALID_CALL, "this call has its output already", "item.call_id")

    def add(self, item: Item, previous: str | None = None, spoken: Spoken | None = None) -> None:
        """At the end; after ``previous``; or first, where that is ``root``. The item has an id that is not taken."""
        assert item.id is not None
        assert item.id not in self._entries
        at = len(self._order) if previous is None else 0 if previous == "root" else self._order.index(previous) + 1
        self._order.insert(at, item.id)
        size = _size(item)
        self._entries[item.id] = _Entry(item, spoken, size)
        self._bytes += size

    def replace(self, item: Item) -> None:
        """A newer value of an item; nothing where it was deleted meanwhile."""
        entry = self._entries.get(item.id or "")
        if entry is not None:
            self._bytes -= entry.size
            entry.item, entry.size = item, _size(item)
            self._bytes += entry.size

    def remove(self, item_id: str) -> None:
        """Raises KeyError."""
        self._bytes -= self._entries.pop(item_id).size
        self._order.remove(item_id)

    def overflow(self, keep: str) -> list[str]:
        """Drop the oldest items beyond the bounds, never ``keep``; their ids."""
        dropped = []
        while (len(self._order) > MAX_ITEMS or self._bytes > MAX_BYTES) and self._order[0] != keep:
            dropped.append(self._order[0])
            self.remove(self._order[0])
        return dropped

    def transcribe(self, item_id: str, transcript: str) -> None:
        """What a user's audio item says; nothing where it is gone or has no audio."""
        entry = self._entries.get(item_id)
        if entry is None or not isinstance(entry.item, MessageItem):
            return
        content = tuple(InputAudio(transcript) if isinstance(part, InputAudio) else part for part in entry.item.content)
        self.replace(msgspec.structs.replace(entry.item, content=content))


def with_transcript(item: Item, transcript: str) -> Item:
    """An assistant's item that says this."""
    assert isinstance(item, MessageItem)
    speech = any(isinstance(part, OutputAudio) for part in item.content)
    return msgspec.structs.replace(item, content=(OutputAudio(transcript) if speech else OutputText(transcript),))


def _size(item: Item) -> int:
    return len(msgspec.json.encode(item))
