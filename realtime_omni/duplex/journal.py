"""What a session has told, numbered, for whoever reads it now, later or again.

Owns the outputs that are kept: at most ``max_bytes`` and ``max_age_s`` of them. Sound is the first to go, the oldest before
the newer; only when none is left do other outputs go, and who had not read those is told to begin anew (``Lost``). Reading
never changes anything, so any number of readers may, each with a cursor of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec import Struct

T = TypeVar("T")

ENTRY_BYTES = 256
"""What an output counts beside its sound and ``other_bytes``: some small objects."""


@dataclass(frozen=True, slots=True)
class JournalLimits:
    max_bytes: int = 1024 * 1024
    max_age_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Lost:
    """In place of outputs that are not kept any more: the reader goes on behind ``seq``."""

    seq: int


class _Entry(Struct, Generic[T], eq=False, gc=False):
    """Thousands are kept, and an output knows nothing of its entry: no cycle that the garbage collector could find."""

    seq: int
    at_s: float
    output: T
    sound_bytes: int
    other_bytes: int
    """Of what stays when the sound goes."""
    mute: T | None
    """The same without its sound; None: then nothing is left of it."""


class Journal(Generic[T]):
    """The outputs of one session. ``seq`` counts from 1."""

    def __init__(self, limits: JournalLimits = JournalLimits()) -> None:
        self.limits = limits
        self.last_seq = 0
        self.sound_dropped = 0
        self._lost = 0
        """The highest number of an output without sound that was dropped."""
        self._entries: deque[_Entry[T]] = deque()
        self._sounding: deque[_Entry[T]] = deque()
        self._bytes = 0

    def put(self, output: T, now_s: float, *, sound_bytes: int = 0, other_bytes: int = 0, mute: T | None = None) -> int:
        """Append an output; ``mute``: what stays of it when its sound goes; ``other_bytes``: of what is no sound, where that
        may be more than some small objects. Returns its number."""
        self.last_seq += 1
        entry = _Entry(self.last_seq, now_s, output, sound_bytes, ENTRY_BYTES + other_bytes, mute)
        self._entries.append(entry)
        if sound_bytes:
            self._sounding.append(entry)
        self._bytes += sound_bytes + entry.other_bytes
        self._trim(now_s)
        return self.last_seq

    def after(self, seq: int, most: int | None = None) -> list[tuple[int, T | Lost]]:
        """The outputs behind a cursor, in order, with their numbers; at most ``most``. The first may be :class:`Lost`."""
        found: list[tuple[int, T | Lost]] = []
        if seq < self._lost:
            found.append((self._lost, Lost(self._lost)))
            seq = self._lost
        newer: list[tuple[int, T | Lost]] = []
        for entry in reversed(self._entries):
            if entry.seq <= seq:
                break
            newer.append((entry.seq, entry.output))
        newer.reverse()
        found += newer
        return found if most is None else found[:most]

    def silence(self) -> None:
        """The sound of everything that is kept goes: what was told before an interruption is not to be heard any more."""
        while self._sounding:
            self._drop_sound()

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        seqs = [e.seq for e in self._entries]
        assert seqs == sorted(set(seqs)), "numbers are out of order"
        assert all(seq <= self.last_seq for seq in seqs), "a number was given twice"
        assert self._bytes == sum(e.sound_bytes + e.other_bytes for e in self._entries), "bytes were miscounted"
        assert self._bytes <= self.limits.max_bytes + ENTRY_BYTES, "the journal is over its bound"
        assert [e.seq for e in self._sounding] == [e.seq for e in self._entries if e.sound_bytes]

    def _trim(self, now_s: float) -> None:
        oldest_s = now_s - self.limits.max_age_s
        while self._sounding and self._sounding[0].at_s < oldest_s:
            self._drop_sound()
        while self._entries and self._entries[0].at_s < oldest_s:
            self._drop_oldest()
        while self._bytes > self.limits.max_bytes and self._sounding:
            self._drop_sound()
        while self._bytes > self.limits.max_bytes and self._entries:
            self._drop_oldest()

    def _drop_sound(self) -> None:
        entry = self._sounding.popleft()
        self._bytes -= entry.sound_bytes
        entry.sound_bytes = 0
        self.sound_dropped += 1
        if entry.mute is not None:
            entry.output = entry.mute
            return
        self._bytes -= entry.other_bytes
        if self._entries[0] is entry:
            self._entries.popleft()
        else:
            self._entries.remove(entry)

    def _drop_oldest(self) -> None:
        entry = self._entries.popleft()
        if entry.sound_bytes:
            self._sounding.popleft()
        self._bytes -= entry.sound_bytes + entry.other_bytes
        self._lost = entry.seq
