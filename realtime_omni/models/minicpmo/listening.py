"""Does the user speak? By energy, in blocks of 10 ms: what a server needs to interrupt a model that does not yield by itself.

The threshold follows the noise: speech is so many decibels above the quietest that was heard lately, and above a floor. Pure
functions of a state and a second of sound; it knows loud from quiet, not voices from music.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from realtime_omni.models.minicpmo.mel import RATE
from realtime_omni.session.frame import Configure, Directive
from realtime_omni.session.signals import Signal, SpeechStarted, SpeechStopped, TurnCommitted

BLOCK_MS = 10
SHORTEST_MS = 120
"""Of sound in a row that counts as speech: a click, a cough are shorter."""
LOUDEST_DB, QUIETEST_DB = -20.0, -60.0
"""The floors that the thresholds 1 and 0 of ``Turns`` mean; 0.5 is -40 dBFS."""
ABOVE_NOISE_DB = 9.0
NOISE_RISES_DB = 0.02
"""A block: 2 dB a second, so that a noise that stays is soon none, and a sentence stays speech."""

Milliseconds = Annotated[float, Meta(ge=0)]


class Ear(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``threshold`` and ``silence_ms``: see :class:`~realtime_omni.session.frame.Turns`. ``noise_db``: the quietest lately.
    ``loud_ms``: sound in a row up to now. ``speaking``: since ``began_ms``, heard last before ``last_ms``.
    ``utterances``: so far."""

    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    silence_ms: Milliseconds = 500.0
    noise_db: Annotated[float, Meta(ge=-200, le=0)] = QUIETEST_DB
    loud_ms: Annotated[int, Meta(ge=0)] = 0
    speaking: bool = False
    began_ms: Milliseconds = 0.0
    last_ms: Milliseconds = 0.0
    utterances: Annotated[int, Meta(ge=0)] = 0


def listen(ear: Ear, second: NDArray[np.float32], start_ms: float, signals: list[Signal]) -> Ear:
    """The ear after a second that begins at ``start_ms``; an utterance is told when it begins, and when it has ended."""
    blocks = second.reshape(-1, RATE * BLOCK_MS // 1000).astype(np.float64)
    levels = 10 * np.log10(np.maximum(np.square(blocks).mean(axis=1), 1e-20))
    floor = QUIETEST_DB + ear.threshold * (LOUDEST_DB - QUIETEST_DB)
    noise, loud_ms, speaking = ear.noise_db, ear.loud_ms, ear.speaking
    began_ms, last_ms, utterances = ear.began_ms, ear.last_ms, ear.utterances
    for number, level in enumerate(levels.tolist()):
        now_ms = start_ms + (number + 1) * BLOCK_MS
        noise = min(max(level, -200.0), noise + NOISE_RISES_DB, 0.0)
        loud = level > max(floor, noise + ABOVE_NOISE_DB)
        loud_ms = loud_ms + BLOCK_MS if loud else 0
        last_ms = now_ms if loud else last_ms
        if not speaking and loud_ms >= SHORTEST_MS:
            speaking, began_ms = True, now_ms - loud_ms
            signals.append(SpeechStarted(f"heard-{utterances}", began_ms))
        elif speaking and not loud and now_ms - last_ms >= ear.silence_ms:
            name = f"heard-{utterances}"
            signals += [SpeechStopped(name, last_ms), TurnCommitted(name, began_ms, last_ms)]
            speaking, utterances = False, utterances + 1
    return msgspec.structs.replace(
        ear,
        noise_db=noise,
        loud_ms=loud_ms,
        speaking=speaking,
        began_ms=began_ms,
        last_ms=last_ms,
        utterances=utterances,
    )


def tuned(ear: Ear, directives: Sequence[Directive]) -> Ear:
    """With what a client wants of it."""
    for directive in directives:
        if isinstance(directive, Configure) and directive.turns is not None:
            wanted = directive.turns
            ear = msgspec.structs.replace(ear, threshold=wanted.threshold, silence_ms=wanted.silence_ms)
    return ear
