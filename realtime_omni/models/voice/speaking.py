"""How a response becomes sound, frame by frame: clauses of a growing text, one after the other, and the times of their words.

Pure but for what it asks the workshop. A clause whose sound is not there yet is a pause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from msgspec.structs import replace

from realtime_omni.models.voice.speech import RATE, take_clause, word_times
from realtime_omni.models.voice.state import Response, Sound, Word
from realtime_omni.models.voice.work import Workshop

AHEAD = 2
"""Clauses that are made into sound before they are needed."""
_NOTHING: Sound = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Told:
    """A word that begins in this frame: ``start_ms`` and ``end_ms`` from the frame's beginning."""

    text: str
    start_ms: float
    end_ms: float


def take_clauses(response: Response, text: str, *, done: bool) -> Response:
    """Cut clauses from the text as far as it is sure, at most :data:`AHEAD`."""
    while len(response.clauses) < AHEAD:
        rest = text[response.cut :]
        clause, left = take_clause(rest, final=done)
        if not clause:
            break
        response = replace(response, clauses=(*response.clauses, clause), cut=len(text) - len(left))
    return response


def sound(
    response: Response, samples: int, workshop: Workshop, say: Callable[[str], Sound]
) -> tuple[Response, Sound | None, list[Told]]:
    """The next ``samples`` of a response at 24 kHz, None where nothing of it sounds; and the words that begin in them."""
    made = [workshop.look(("say", clause), partial(say, clause), _NOTHING) for clause in response.clauses]
    out: Sound = np.zeros(samples, np.float32)
    filled, told, words = 0, list[Told](), response.words
    clauses, offset = response.clauses, response.offset
    while clauses and filled < samples:
        audio = made[len(response.clauses) - len(clauses)]
        if audio is None:
            break
        count = min(len(audio) - offset, samples - filled)
        out[filled : filled + count] = audio[offset : offset + count]
        for text, begins, ends in word_times(clauses[0], len(audio)):
            if offset <= begins < offset + count or (len(audio) == 0):
                spaced = text if not words or text.startswith(" ") else f" {text}"
                start_ms = (filled + begins - offset) / RATE * 1000
                told.append(Told(spaced, start_ms, start_ms + (ends - begins) / RATE * 1000))
                words = (*words, Word(spaced, response.sounded_ms + start_ms))
        filled, offset = filled + count, offset + count
        if offset >= len(audio):
            clauses, offset = clauses[1:], 0
    sounded_ms = response.sounded_ms + (samples / RATE * 1000 if filled else 0.0)
    after = replace(response, clauses=clauses, offset=offset, words=words, sounded_ms=sounded_ms)
    return after, out if filled else None, told
