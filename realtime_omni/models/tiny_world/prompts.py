"""From a prompt to a place of tiny-world: the nearest known one by its words, or a refusal.

Owns the matching. A prompt names a place when it holds one of its words; the place with the most words wins, the
first mentioned breaks a tie. Misspelled words count when they are close (difflib ratio 0.8).
"""

from __future__ import annotations

import difflib
import re

from realtime_omni.errors import ArgumentError, ErrorCode
from realtime_omni.models.tiny_world.places import PLACES, Place

CLOSE_ENOUGH = 0.8
MIN_FUZZY_CHARS = 4
"""Shorter words are too easily close to something."""


def _vocabulary() -> dict[str, list[int]]:
    words: dict[str, list[int]] = {}
    for index, place in enumerate(PLACES):
        for phrase in (place.name, place.title.lower(), *place.words):
            words.setdefault(phrase.lower(), []).append(index)
    return words


_WORDS = _vocabulary()


def nearest_place(prompt: str) -> tuple[int, Place]:
    """Index and place that the prompt means. Raises ArgumentError (``prompt_unknown``) naming the known ones."""
    text = prompt.lower()
    tokens = re.findall(r"[a-z]+", text)
    score = [0.0] * len(PLACES)
    first = [len(text)] * len(PLACES)
    for phrase, places in _WORDS.items():
        found = re.search(rf"\b{re.escape(phrase)}\b", text)
        if found:
            for index in places:
                score[index] += 1.0 + phrase.count(" ")
                first[index] = min(first[index], found.start())
    if not any(score):
        for token in (t for t in tokens if len(t) >= MIN_FUZZY_CHARS):
            for near in difflib.get_close_matches(token, _WORDS, n=1, cutoff=CLOSE_ENOUGH):
                for index in _WORDS[near]:
                    score[index] += 0.5
                    first[index] = min(first[index], text.find(token))
    if not any(score):
        known = ", ".join(p.title.lower() for p in PLACES)
        raise ArgumentError(
            f"this world knows {known}; the prompt names none of them", code=ErrorCode.PROMPT_UNKNOWN, path="prompt"
        )
    best = max(range(len(PLACES)), key=lambda i: (score[i], -first[i]))
    return best, PLACES[best]
