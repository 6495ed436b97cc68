"""Speech of a puppet: every word a tone of known length, so that who measures knows when each begins and ends.

Pure functions of the text: no state, no chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

LETTER_MS = 40
SHORTEST_MS = 120
PAUSE_MS = 40
"""Between words."""
LEVEL = 0.25
"""-12 dBFS at the peaks."""
PITCHES_HZ = (200, 250, 300, 350, 400)
"""Word n sounds at pitch n, over and over."""
PERIODS_PER_S = 50
"""All of them repeat after 20 ms."""


@dataclass(frozen=True, slots=True)
class Word:
    """``text`` with the space before it; it sounds from ``start_ms`` to ``end_ms`` of its line."""

    text: str
    start_ms: int
    end_ms: int


@lru_cache(maxsize=1024)
def words(line: str) -> tuple[Word, ...]:
    """The words of a line and when they sound."""
    found: list[Word] = []
    at_ms = 0
    for number, text in enumerate(line.split()):
        end_ms = at_ms + max(SHORTEST_MS, LETTER_MS * len(text))
        found.append(Word(f" {text}" if number else text, at_ms, end_ms))
        at_ms = end_ms + PAUSE_MS
    return tuple(found)


def length_ms(line: str) -> int:
    """Up to the end of its last word."""
    spoken = words(line)
    return spoken[-1].end_ms if spoken else 0


def heard(line: str, heard_ms: float) -> str:
    """The words that had begun when the user had heard so much of it."""
    return "".join(w.text for w in words(line) if w.start_ms < heard_ms)


@lru_cache(maxsize=64)
def _tone(pitch_hz: int, rate_hz: int, length: int) -> NDArray[np.float32]:
    """``length`` samples from a zero on, and enough more to begin anywhere in a period."""
    at_s = np.arange(length + rate_hz // PERIODS_PER_S) / rate_hz
    return (LEVEL * np.sin(2 * np.pi * pitch_hz * at_s)).astype(np.float32)


def sound(line: str, from_ms: float, length: int, rate_hz: int) -> NDArray[np.float32]:
    """``length`` samples of a line that began ``from_ms`` ago."""
    out = np.zeros(length, np.float32)
    first = round(from_ms * rate_hz / 1000)
    for number, word in enumerate(words(line)):
        begin, end = (ms * rate_hz // 1000 - first for ms in (word.start_ms, word.end_ms))
        if begin >= length:
            break
        if end > 0:
            start, stop = max(begin, 0), min(end, length)
            tone = _tone(PITCHES_HZ[number % len(PITCHES_HZ)], rate_hz, length)
            offset = (start - begin) % (rate_hz // PERIODS_PER_S)
            out[start:stop] = tone[offset : offset + stop - start]
    return out
