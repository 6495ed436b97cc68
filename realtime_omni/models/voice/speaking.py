"""How a response becomes sound, frame by frame: clauses of a growing text, one after the other, and the times of their words.

Pure but for what it asks. A clause whose sound is not there yet is a pause; one that is still being made sounds already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from realtime_omni.models.voice.asking import Clip
from realtime_omni.models.voice.speech import RATE, first_clause, take_clause, word_times
from realtime_omni.models.voice.state import Response, Sound, Word

AHEAD = 2
"""Clauses that are made into sound before they are needed."""
LEAD_S = 0.24
"""Of a clause that is still being made: what waits before it begins, against gaps inside it."""
LETTERS_PER_S = 15.0
"""Of English speech, blanks included: 150 to 180 words a minute."""


@dataclass(frozen=True, slots=True)
class Told:
    """A word that begins in this frame: ``start_ms`` and ``end_ms`` from the frame's beginning."""

    text: str
    start_ms: float
    end_ms: float


def take_clauses(response: Response, text: str, *, done: bool) -> Response:
    """Cut clauses from the text as far as it is sure, at most :data:`AHEAD`."""
    while len(response.clauses) < AHEAD:
        clause, left = next_clause(response, text, done=done)
        if not clause:
            break
        response = replace(response, clauses=(*response.clauses, clause), cut=len(text) - len(left))
    return response


def next_clause(response: Response, text: str, *, done: bool) -> tuple[str, str]:
    """(a clause, what is left behind it) of what the response has not taken yet. The embedded language model is slow enough
    for a short first one to be worth its sound; endpoints are not."""
    begins = response.cut == 0 and isinstance(response.prompt, tuple)
    return (first_clause if begins else take_clause)(text[response.cut :], final=done)


def sound(
    response: Response, samples: int, clip_of: Callable[[str], Clip | None]
) -> tuple[Response, Sound | None, list[Told]]:
    """The next ``samples`` of a response at 24 kHz, None where nothing of it sounds; and the words that begin in them."""
    clips = [clip_of(clause) for clause in response.clauses]
    out: Sound = np.zeros(samples, np.float32)
    filled, told, words = 0, list[Told](), response.words
    clauses, offset, known = response.clauses, response.offset, response.told
    while clauses and filled < samples:
        clip = clips[len(response.clauses) - len(clauses)]
        if clip is None or not _flows(clip, offset, samples - filled):
            break
        count = max(0, min(len(clip.audio) - offset, samples - filled))
        out[filled : filled + count] = clip.audio[offset : offset + count]
        over = clip.done and offset + count >= len(clip.audio)
        for text, begins, ends in word_times(clauses[0], _length(clip, clauses[0]))[known:]:
            if begins >= offset + count and not over:
                break
            spaced = text if not words or text.startswith(" ") else f" {text}"
            start_ms = (filled + max(0, min(begins - offset, count))) / RATE * 1000
            told.append(Told(spaced, start_ms, start_ms + (ends - begins) / RATE * 1000))
            words = (*words, Word(spaced, response.sounded_ms + start_ms))
            known += 1
        filled, offset = filled + count, offset + count
        if over:
            clauses, offset, known = clauses[1:], 0, 0
    sounded_ms = response.sounded_ms + (samples / RATE * 1000 if filled else 0.0)
    after = replace(response, clauses=clauses, offset=offset, told=known, words=words, sounded_ms=sounded_ms)
    return after, out if filled else None, told


def _flows(clip: Clip, offset: int, wanted: int) -> bool:
    """Whether there is enough of a clip that still grows: a lead before it begins, then whole frames."""
    return clip.done or len(clip.audio) - offset >= (wanted if offset else max(wanted, int(LEAD_S * RATE)))


def _length(clip: Clip, clause: str) -> int:
    """Samples of the whole clause; guessed from its letters while it grows."""
    return len(clip.audio) if clip.done else max(len(clip.audio), int(len(clause) / LETTERS_PER_S * RATE))
