"""Turn-taking, as a function: when the user began to speak, and when it is the other's turn. No network, no thread.

Two windows in a row (64 ms) above the threshold are speech; it goes on while windows stay within 0.15 below it. After
``ASK_MS`` of silence it is worth asking what was said and whether it was all; that makes a turn end after ``QUICK_MS`` when
it was, after ``SLOW_MS`` when it may have been, and else when patience ends (smart-turn's judgement is unsure of flat voices).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from realtime_omni.models.voice.activity import WINDOW_MS
from realtime_omni.models.voice.state import Ears, Manners

ONSET_WINDOWS = 2
HYSTERESIS = 0.15
ASK_MS = 96.0
QUICK_MS = 192.0
SLOW_MS = 800.0
SURE, UNSURE = 0.5, 0.05
MIN_VOICED = 5
"""Windows of speech (160 ms) in a turn: what is shorter is a noise, for which a recogniser would invent words."""


def listen(ears: Ears, probabilities: Sequence[float], end_ms: float, manners: Manners, name: str) -> Ears:
    """The ears after windows of which the last one ends at ``end_ms``; an utterance that begins is called ``name``."""
    for number, p in enumerate(probabilities):
        until_ms = end_ms - (len(probabilities) - 1 - number) * WINDOW_MS
        floor = manners.threshold - (HYSTERESIS if ears.utterance is not None else 0.0)
        if p < floor:
            ears = replace(ears, run=0)
            continue
        run = ears.run + 1
        if ears.utterance is None and run >= ONSET_WINDOWS:
            began_ms = max(0.0, until_ms - run * WINDOW_MS)
            ears = replace(ears, run=run, utterance=name, began_ms=began_ms, last_ms=until_ms, voiced=ears.voiced + run)
        elif ears.utterance is not None:
            ears = replace(ears, run=run, last_ms=until_ms, voiced=ears.voiced + 1)
        else:
            ears = replace(ears, run=run)
    return ears


def silence_limit_ms(finished: float | None, manners: Manners) -> float:
    """How much silence ends the turn in mode ``semantic``. ``finished``: the judgement, 0..1, None while it is not known."""
    if finished is None:
        return manners.patience_ms
    if finished > SURE:
        return QUICK_MS
    return min(SLOW_MS, manners.patience_ms) if finished > UNSURE else manners.patience_ms
