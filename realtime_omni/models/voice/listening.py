"""Turn-taking, as a function: when the user began to speak, and when it is the other's turn. No network, no thread.

Two windows in a row (64 ms) above the threshold are speech; it goes on while windows stay within 0.15 below it and are not
much softer than what was just said: the detector takes about 0.1 s to notice that a voice has ended. After
``HEAR_MS`` of silence it is worth asking what was said, after ``JUDGE_MS`` whether it was all. A turn ends after
``QUICK_MS`` when it sounds finished, after ``SLOW_MS`` when it does not (smart-turn takes flat voices for unfinished ones),
and only when patience ends while its last word cannot be the last one of a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from realtime_omni.models.voice.activity import WINDOW_MS
from realtime_omni.models.voice.state import Ears, Manners

ONSET_WINDOWS = 2
HYSTERESIS = 0.15
SOFT, FADE = 10 ** (-30 / 20), 10 ** (-0.9 / 20)
"""A window is soft 30 dB below the loudest one, which is forgotten by 28 dB a second: who lowers the voice is heard again, and
a slammed door does not silence anybody."""
HEAR_MS, JUDGE_MS = 64.0, 96.0
"""A recogniser needs less silence behind the words than smart-turn: after both, 33 of 591 words by flite's two voices were
wrong; smart-turn took 27 and 33 of 54 questions for finished."""
QUICK_MS = 192.0
SLOW_MS, SLOWEST_MS = 832.0, 1032.0
SURE, UNSURE = 0.5, 0.05
_OPEN_WORDS = frozenset(
    "a an the my your his its our their every no and or but because if when while that which whose than as"  # noqa: SIM905
    " very um uh i he she we they".split()
)
"""No English sentence ends with one of these: more is to come."""
_PREPOSITIONS = frozenset("to of in on at by for from with about into".split())  # noqa: SIM905
_QUESTION_WORDS = frozenset("what who where which when how why whose is are was do does did can".split())  # noqa: SIM905
"""A question may end with a preposition: "where does chocolate come from"."""
MIN_VOICED = 5
"""Windows of speech (160 ms) in a turn: what is shorter is a noise, for which a recogniser would invent words."""


def listen(
    ears: Ears, probabilities: Sequence[float], levels: Sequence[float], end_ms: float, manners: Manners, name: str
) -> Ears:
    """The ears after windows of which the last one ends at ``end_ms``; an utterance that begins is called ``name``.
    ``levels``: the windows' root mean squares."""
    for number, (p, level) in enumerate(zip(probabilities, levels, strict=True)):
        until_ms = end_ms - (len(probabilities) - 1 - number) * WINDOW_MS
        floor = manners.threshold - (HYSTERESIS if ears.utterance is not None else 0.0)
        ears = replace(ears, loudest=ears.loudest * FADE)
        if p < floor or (ears.utterance is not None and level < ears.loudest * SOFT):
            ears = replace(ears, run=0)
            continue
        ears = replace(ears, loudest=max(ears.loudest, level))
        run = ears.run + 1
        if ears.utterance is None and run >= ONSET_WINDOWS:
            began_ms = max(0.0, until_ms - run * WINDOW_MS)
            ears = replace(ears, run=run, utterance=name, began_ms=began_ms, last_ms=until_ms, voiced=ears.voiced + run)
        elif ears.utterance is not None:
            ears = replace(ears, run=run, last_ms=until_ms, voiced=ears.voiced + 1)
        else:
            ears = replace(ears, run=run)
    return ears


def silence_limit_ms(finished: float | None, words: str | None, manners: Manners) -> float:
    """How much silence ends the turn in mode ``semantic``. ``finished``: the judgement of the sound, 0..1; ``words``: what was
    said; None while they are not known."""
    if finished is None or words is None or is_open(words):
        return manners.patience_ms
    if finished > SURE:
        return QUICK_MS
    return min(SLOW_MS if finished > UNSURE else SLOWEST_MS, manners.patience_ms)


def is_open(words: str) -> bool:
    """Whether a text cannot be a whole sentence, by its last word. A question mark does not count: a recogniser guesses it."""
    found = re.findall(r"[a-z']+", words.lower())
    if not found:
        return False
    return found[-1] in _OPEN_WORDS or (found[-1] in _PREPOSITIONS and found[0] not in _QUESTION_WORDS)
