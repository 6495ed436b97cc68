"""Has the speaker finished? smart-turn v3.2 over the last eight seconds, on Whisper's log-mel picture of them.

The picture (Radford et al. 2022; its constants are those of the published Whisper front end): zero mean and unit variance,
a periodic Hann window of 400 samples every 160, power spectrum, 80 triangular filters on Slaney's mel scale, log10, floor at
8 below the maximum, ``(x + 4) / 4``. smart-turn is by Daily (BSD-2-Clause).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from realtime_omni.models.voice.onnx import open_session

SAMPLES = 8 * 16_000
_FFT, _HOP, _MELS, _RATE = 400, 160, 80, 16_000


class EndOfTurn:
    """The probability that what was said is complete."""

    def __init__(self, path: Path) -> None:
        self._session = open_session(path)

    def __call__(self, audio: np.ndarray) -> float:
        """``audio``: float32 [n] at 16 kHz, a turn so far with the silence after it. Safe to call from several threads."""
        (probability,) = self._session.run(None, {"input_features": log_mel(last_eight_seconds(audio))[None]})
        return float(probability[0, 0])


def last_eight_seconds(audio: np.ndarray) -> np.ndarray:
    """The end of ``audio``, with silence in front where it is shorter."""
    tail = audio[-SAMPLES:].astype(np.float32)
    return np.concatenate((np.zeros(SAMPLES - len(tail), np.float32), tail))


def log_mel(audio: np.ndarray) -> np.ndarray:
    """float32 [80, 800] of float32 [128000]; see the module."""
    centred = (audio - audio.mean()) / np.sqrt(audio.var() + 1e-7)
    padded = np.pad(centred, _FFT // 2, mode="reflect")
    frames = sliding_window_view(padded, _FFT)[::_HOP][:-1]
    power = np.abs(np.fft.rfft(frames * _WINDOW)) ** 2
    decibel = np.log10(np.maximum(power @ _FILTERS, 1e-10)).T
    picture: np.ndarray = (np.maximum(decibel, decibel.max() - 8.0) + 4.0) / 4.0
    return picture.astype(np.float32)


def _slaney_filters() -> np.ndarray:
    """[201, 80]: triangles of equal area, linear below 1 kHz and logarithmic above (Slaney 1998, Auditory Toolbox)."""
    linear, step = 200.0 / 3, np.log(6.4) / 27  # hertz a mel below 1 kHz (mel 15), and log ratio a mel above
    top = 15.0 + np.log(_RATE / 2 / 1000.0) / step
    mel = np.linspace(0.0, top, _MELS + 2)
    hertz = np.where(mel < 15.0, mel * linear, 1000.0 * np.exp(step * (mel - 15.0)))
    left, centre, right = hertz[:-2], hertz[1:-1], hertz[2:]
    bins = np.linspace(0.0, _RATE / 2, _FFT // 2 + 1)[:, None]
    triangles = np.minimum((bins - left) / (centre - left), (right - bins) / (right - centre))
    filters: np.ndarray = np.maximum(triangles, 0.0) * 2.0 / (right - left)
    return filters


_WINDOW = np.hanning(_FFT + 1)[:-1]
_FILTERS = _slaney_filters()
