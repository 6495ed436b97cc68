"""Whether what comes in can be what the client means to send: a microphone that is off, a rate that was not agreed.

Pure; only measures. A wrong rate can be seen only in a stream that comes at the pace of speech.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SILENT_AFTER_S = 5.0
SILENT_RMS = 1e-4
"""-80 dBFS: below the noise of any open microphone."""
RATE_WINDOW_S = 4.0
RATE_ERROR = 0.1
"""Clocks differ by a thousandth, wrong rates by a tenth (44.1 against 48 kHz: 8.8 % is missed) or by factors."""
PAUSE_S = 0.5


@dataclass(slots=True)
class InputWatch:
    """Of one session; ``rate_hz`` is what the samples are taken to be."""

    rate_hz: int
    _quiet: int = 0
    _silent_said: bool = False
    _rate_said: bool = False
    _began_s: float | None = None
    _last_s: float = 0.0
    _samples: int = 0

    def silent(self, audio: NDArray[np.float32]) -> bool:
        """True once, when the microphone has been silent long enough."""
        if not audio.size:
            return False
        if float(np.dot(audio, audio)) > SILENT_RMS**2 * audio.size:
            self._quiet, self._silent_said = 0, False
            return False
        self._quiet += audio.size
        if self._silent_said or self._quiet < SILENT_AFTER_S * self.rate_hz:
            return False
        self._silent_said = True
        return True

    def measured_hz(self, samples: int, now_s: float) -> float | None:
        """The rate at which samples come, once, when it is not the agreed one. The window's first packet only starts it."""
        if self._began_s is None or now_s - self._last_s > PAUSE_S:
            self._began_s, self._last_s, self._samples = now_s, now_s, 0
            return None
        self._last_s = now_s
        self._samples += samples
        elapsed_s = now_s - self._began_s
        if elapsed_s < RATE_WINDOW_S:
            return None
        measured = self._samples / elapsed_s
        self._began_s, self._samples = now_s, 0
        if self._rate_said or abs(measured / self.rate_hz - 1) <= RATE_ERROR:
            return None
        self._rate_said = True
        return measured
