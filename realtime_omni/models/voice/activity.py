"""Is somebody speaking? Silero VAD over 32 ms windows, all calls in one batch; what a call remembers is a value.

A window is 512 samples at 16 kHz with the 64 samples before it in front, and a recurrent state of 2 x 1 x 128
(https://github.com/snakers4/silero-vad, MIT). Audio that fills no window waits in the value for the next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from realtime_omni.models.voice.onnx import open_session

RATE = 16_000
WINDOW = 512
WINDOW_MS = 32
_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Hearing:
    """What a call's VAD remembers: recurrent state [2, 128], the last samples of the last window, samples not yet used."""

    recurrent: np.ndarray
    context: np.ndarray
    waiting: np.ndarray


SILENCE = Hearing(np.zeros((2, 128), np.float32), np.zeros(_CONTEXT, np.float32), np.zeros(0, np.float32))


class VoiceActivity:
    """Speech probabilities of many calls at once."""

    def __init__(self, path: Path) -> None:
        self._session = open_session(path)
        self._rate = np.array(RATE, np.int64)

    def hear(
        self, before: Sequence[Hearing], audio: Sequence[np.ndarray]
    ) -> tuple[list[Hearing], list[tuple[float, ...]]]:
        """``audio``: float32 at 16 kHz, any length, one per call. Returns what each call remembers now and the probability
        of speech of each window that became full, oldest first."""
        waiting = [np.concatenate((b.waiting, a)) for b, a in zip(before, audio, strict=True)]
        state = [b.recurrent for b in before]
        context = [b.context for b in before]
        heard: list[list[float]] = [[] for _ in before]
        for step in range(max((len(w) // WINDOW for w in waiting), default=0)):
            calls = [i for i, w in enumerate(waiting) if len(w) // WINDOW > step]
            windows = [waiting[i][step * WINDOW : (step + 1) * WINDOW] for i in calls]
            feed = np.stack([np.concatenate((context[i], w)) for i, w in zip(calls, windows, strict=True)])
            recurrent = np.stack([state[i] for i in calls], axis=1)
            probabilities, after = self._session.run(None, {"input": feed, "state": recurrent, "sr": self._rate})
            for row, i in enumerate(calls):
                heard[i].append(float(probabilities[row, 0]))
                state[i], context[i] = after[:, row].copy(), feed[row, -_CONTEXT:].copy()
        rest = [w[len(w) // WINDOW * WINDOW :].copy() for w in waiting]
        return [Hearing(*parts) for parts in zip(state, context, rest, strict=True)], [tuple(h) for h in heard]
