"""Whisper's log-mel spectrogram of a stream, unit by unit, the same numbers as MiniCPM-o's processor makes.

A unit is a second: 100 frames of 10 ms, given with two frames of its neighbours on either side, which the convolutions need.
The right neighbours need 30 ms of sound that comes later, so the stream begins with 35 ms of silence and every unit ends
that much earlier. Loudness is relative: nothing may be more than 8 powers of ten below the loudest of the last 20 to 30
seconds (below 5 s of sound: of nothing), so a unit's numbers depend on that much of the past. Source of the rules: OpenBMB's
``StreamingMelProcessorExact`` (Apache-2.0), read as facts; of the filters: Slaney 1998, "Auditory Toolbox".
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

RATE = 16_000
UNIT = 16_000
"""Samples of a second."""
LEAD = 560
"""Samples of silence before the first: 35 ms."""
HOP, WINDOW, BINS = 160, 400, 80
FRAMES = UNIT // HOP
CONTEXT = 2
"""Frames of either neighbour."""
_FIRST = 16_480
"""Samples of the stream that the first unit needs: 35 ms more than a second, in whole hops."""
_LOUDNESS_FROM = 5 * RATE
_LONGEST, _DROPPED = 30 * RATE, 10 * RATE
_FLOOR, _RANGE = 1e-10, 8.0
KEPT_UNITS = 31
"""So many of the last seconds decide a unit."""


def reach(unit: int) -> tuple[int, int]:
    """The samples of the stream [begin, end) that unit number ``unit`` is computed from: all up to 30 s, then ten seconds of
    the oldest go at once."""
    end = _FIRST + unit * UNIT
    first = -(-(_LONGEST - _FIRST) // UNIT)  # the unit at which 30 s are reached
    if unit < first:
        return 0, end
    return (1 + (unit - first) * UNIT // _DROPPED) * _DROPPED, end


def features(unit: int, seconds: Tensor) -> Tensor:
    """float32 [80, 102 or 104]: the mel frames of a unit with its neighbours'; the very first has none on its left.

    ``seconds`` float32 [n, 16000]: the newest seconds, this one last; all that there are, or ``KEPT_UNITS``."""
    begin, end = reach(unit)
    origin = LEAD + (unit + 1 - len(seconds)) * UNIT  # where in the stream ``seconds`` begin
    sound = seconds.reshape(-1)
    if origin == LEAD:
        sound, origin = torch.cat((sound.new_zeros(LEAD), sound)), 0
    buffer = sound[begin - origin : end - origin]
    log = spectrogram(buffer)
    relative = end - begin >= _LOUDNESS_FROM
    log = torch.maximum(log, log.max() - _RANGE) if relative else log
    start, base = unit * FRAMES, begin // HOP
    scaled = (log + 4.0) / 4.0
    return scaled[:, max(0, start - CONTEXT - base) : start + FRAMES + CONTEXT - base]


def whole(sound: Tensor) -> Tensor:
    """float32 [80, T] of a clip float32 [N], a frame for every 10 ms."""
    log = spectrogram(sound)
    return (torch.maximum(log, log.max() - _RANGE) + 4.0) / 4.0


def spectrogram(sound: Tensor) -> Tensor:
    """Powers of ten, [80, N // 160], of frames around every 160th sample; edges are reflected."""
    window = torch.hann_window(WINDOW, device=sound.device)
    bins = torch.stft(sound, WINDOW, HOP, window=window, return_complex=True)[:, :-1]
    power = bins.real.square() + bins.imag.square()
    return (filters(sound.device) @ power).clamp_min(_FLOOR).log10()


@lru_cache(4)
def filters(device: torch.device) -> Tensor:
    """float32 [80, 201]."""
    return triangles(RATE, WINDOW, BINS, RATE / 2).to(device)


def triangles(rate: int, window: int, bins: int, top_hz: float) -> Tensor:
    """Triangles of equal area on the mel scale up to ``top_hz``, float32 [bins, window // 2 + 1]."""
    edges = _hz(torch.linspace(0, float(_mel(torch.tensor(top_hz))), bins + 2, dtype=torch.float64))
    at = torch.linspace(0, rate / 2, window // 2 + 1, dtype=torch.float64)
    width = edges.diff()
    slopes = edges[:, None] - at[None]
    rising, falling = -slopes[:-2] / width[:-1, None], slopes[2:] / width[1:, None]
    return (torch.minimum(rising, falling).clamp_min(0) * (2 / (edges[2:] - edges[:-2]))[:, None]).float()


def _mel(hz: Tensor) -> Tensor:
    """Slaney's scale: linear up to 1 kHz (15 mel), then 27 steps for a factor of 6.4."""
    hz = hz.double()
    return torch.where(
        hz < 1000, 3 * hz / 200, 15 + 27 * (hz.clamp_min(1000) / 1000).log() / torch.tensor(6.4).double().log()
    )


def _hz(mel: Tensor) -> Tensor:
    step = torch.tensor(6.4).double().log() / 27
    return torch.where(mel < 15, 200 * mel / 3, 1000 * (step * (mel - 15)).exp())
