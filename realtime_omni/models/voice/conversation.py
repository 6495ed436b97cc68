"""The conversation as it is remembered: where texts go, what stays of what was not heard, what a language model reads.

Pure functions over tuples of entries.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from realtime_omni.models.voice.speaker import Called, Returned, Said
from realtime_omni.models.voice.state import KEPT_ENTRIES, MOST_ENTRIES, Entry, Word

MOST_CHARS = 2000
"""Of one entry; what is longer could not be read by a model of 512 tokens anyway."""

Entries = tuple[Entry, ...]


def add(entries: Entries, entry: Entry, after: str | None = None) -> Entries:
    """With one more at the end, behind the one named ``after``, or (``""``) at the beginning. The oldest one may go for it,
    but in a talk :func:`shorten` made room before."""
    where = len(entries)
    if after is not None:
        where = 0 if after == "" else next((i + 1 for i, e in enumerate(entries) if e.id == after), where)
    if entry.kind != "call":  # whose arguments are JSON, which an endpoint reads back and refuses when it is cut
        entry = replace(entry, text=entry.text[:MOST_CHARS])
    grown = (*entries[:where], entry, *entries[where:])
    return grown[-MOST_ENTRIES:]


def remove(entries: Entries, name: str) -> Entries:
    return tuple(e for e in entries if e.id != name)


def settle(entries: Entries, response: str, text: str, words: tuple[Word, ...]) -> Entries:
    """With what a response came to; without it when that is nothing."""
    if not text:
        return remove(entries, response)
    text = text[:MOST_CHARS]
    return tuple(
        replace(e, text=text, words=words) if e.id == response and e.role == "assistant" else e for e in entries
    )


def shorten(entries: Entries) -> Entries:
    """Without the oldest ones once there are many, between two exchanges, and many at once. What goes while a question is
    asked changes what the language model was about to read."""
    return entries if len(entries) <= (KEPT_ENTRIES + MOST_ENTRIES) // 2 else entries[-KEPT_ENTRIES:]


def cut(entries: Entries, response: str, heard_ms: float) -> Entries:
    """Of that response only the words that began within ``heard_ms`` of sound stay; texts that were not spoken stay whole."""
    return tuple(_heard(e, heard_ms) if e.id == response and e.words else e for e in entries)


def joined(words: Sequence[Word]) -> str:
    return "".join(word.text for word in words)


def heard(words: Sequence[Word], heard_ms: float) -> tuple[Word, ...]:
    return tuple(w for w in words if w.at_ms < heard_ms)


def asked(entries: Sequence[Entry]) -> Entry | None:
    """What waits for an answer: the last message or tool result, unless the assistant said something, or called, since."""
    for entry in reversed(entries):
        if entry.kind == "result" or entry.role == "user":
            return entry if entry.text else None
        if entry.role == "assistant" and entry.text:
            return None
    return None


def last_said(entries: Sequence[Entry]) -> str:
    said = (e.text for e in reversed(entries) if e.role == "assistant" and e.kind == "message" and e.text)
    return next(said, "")


def reading(instructions: str | None, entries: Sequence[Entry]) -> tuple[str | None, list[Said]]:
    """(system text, turns) for the language model: instructions and what the agent knows go into the system text."""
    knows = [
        e.text
        for e in entries
        if (e.role == "system" or e.kind in ("instructions", "thinking", "commentary")) and e.text
    ]
    system = "\n".join(text for text in (instructions, *knows) if text) or None
    return system, [said for e in entries if (said := _said(e)) is not None]


def _said(entry: Entry) -> Said | None:
    match entry.kind:
        case "call":
            return Called(entry.id, entry.name, entry.text)
        case "result":
            return Returned(entry.id, entry.text)
        case "message" if entry.role != "system" and entry.text:
            return entry.role, entry.text
        case _:
            return None


def _heard(entry: Entry, heard_ms: float) -> Entry:
    words = heard(entry.words, heard_ms)
    return replace(entry, words=words, text=joined(words))
