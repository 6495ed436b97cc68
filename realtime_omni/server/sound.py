"""Sound on a wire to sound for a model and back: PCM16 and G.711 at any rate, as streams.

Owns the formats, G.711 (ITU-T G.711, tables) and the resamplers (soxr), which have a state: one decoder or encoder per stream
and direction. Must not know protocols, sessions, models. Samples of a model are float32, mono, -1..1; a PCM16 sample is its
value / 32768, so PCM16 that is not resampled comes back bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import soxr  # type: ignore[import-untyped]
from numpy.typing import NDArray

Encoding: TypeAlias = Literal["pcm16", "pcmu", "pcma"]
QUALITY = "LQ"
"""Of the resampler: passes 80 % of the band, 12 ms late between 16 and 24 kHz. The higher ones are for music and up to 40 ms
late, which every answer would be."""
LANDING_S = 0.005
"""Too short to be heard as sound, long enough not to click."""
QUIET = 10 ** (-50 / 20)
"""A step from below -50 dBFS is not heard."""


@dataclass(frozen=True, slots=True)
class SoundFormat:
    """Mono sound on a wire: PCM16 little-endian, or G.711 µ-law or A-law, at ``rate_hz``."""

    encoding: Encoding
    rate_hz: int

    @property
    def bytes_per_sample(self) -> int:
        return 2 if self.encoding == "pcm16" else 1


PCM_24K: Final = SoundFormat("pcm16", 24_000)


class SoundDecoder:
    """A stream from a client: whole samples in ``form`` to samples at ``rate_hz``."""

    def __init__(self, form: SoundFormat, rate_hz: int) -> None:
        self.form = form
        self._resampler = _resampler(form.rate_hz, rate_hz)

    def feed(self, data: bytes) -> NDArray[np.float32]:
        """Float32 [N]; what the resampler holds back comes with the next call."""
        match self.form.encoding:
            case "pcm16":
                integers = np.frombuffer(data, "<i2")
            case "pcmu":
                integers = MU_LAW[np.frombuffer(data, np.uint8)]
            case "pcma":
                integers = A_LAW[np.frombuffer(data, np.uint8)]
        samples = integers.astype(np.float32) / np.float32(32768)
        return samples if self._resampler is None else self._resampler.resample_chunk(samples)


class SoundEncoder:
    """A stream to a client: samples at ``rate_hz`` to bytes in ``form``."""

    def __init__(self, rate_hz: int, form: SoundFormat) -> None:
        self.form = form
        self._resampler = _resampler(rate_hz, form.rate_hz)
        self._last, self._last_encoded = b"", b""

    def feed(self, samples: NDArray[np.float32]) -> bytes:
        """Of float32 [N], clipped to -1..1."""
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples)
        return self._encode(samples)

    def end(self) -> bytes:
        """What the resampler still holds back; the stream is over."""
        if self._resampler is None:
            return b""
        return self._encode(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))

    def _encode(self, samples: NDArray[np.float32]) -> bytes:
        data = samples.tobytes()
        if data != self._last:  # an agent is silent most of the time: the same samples again
            self._last, self._last_encoded = data, self._convert(samples)
        return self._last_encoded

    def _convert(self, samples: NDArray[np.float32]) -> bytes:
        scaled = samples * np.float32(32768)
        np.rint(scaled, out=scaled)
        integers = np.clip(scaled, -32768, 32767, out=scaled).astype("<i2")
        match self.form.encoding:
            case "pcm16":
                return integers.tobytes()
            case "pcmu":
                return _encode_mu_law(integers).tobytes()
            case "pcma":
                return _encode_a_law(integers).tobytes()


class Landing:
    """A stream that is heard on and on: where sound is cut off, silence begins with 5 ms down from its last sample, because a
    step clicks. Sound that ends near zero by itself is left as it is."""

    def __init__(self, rate_hz: int) -> None:
        self._ramp = np.linspace(1.0, 0.0, round(LANDING_S * rate_hz), endpoint=False, dtype=np.float32)
        self._last = 0.0

    def smooth(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of float32 [N], one frame after the other; a frame that is changed is another array."""
        if not samples.size:
            return samples
        cut = abs(self._last) > QUIET and not samples.any()
        if cut:
            landing = self._ramp[: samples.size] * np.float32(self._last)
            samples = np.concatenate((landing, samples[landing.size :]))
        self._last = float(samples[-1])
        return samples


def _resampler(rate_in: int, rate_out: int) -> soxr.ResampleStream | None:
    return None if rate_in == rate_out else soxr.ResampleStream(rate_in, rate_out, 1, "float32", QUALITY)


def _mu_law() -> NDArray[np.int16]:
    """All 256 codes: sign, three bits of exponent, four of mantissa, all inverted; the bias is 33 in steps of 4."""
    code = ~np.arange(256)
    magnitude = (((code & 15) << 3) + 132 << (code >> 4 & 7)) - 132
    return np.where(code & 128, -magnitude, magnitude).astype(np.int16)


def _a_law() -> NDArray[np.int16]:
    """All 256 codes: even bits inverted; a set sign bit is positive."""
    code = np.arange(256) ^ 0x55
    exponent, mantissa = code >> 4 & 7, (code & 15) << 4
    magnitude = np.where(exponent == 0, mantissa + 8, mantissa + 264 << np.maximum(exponent - 1, 0))
    return np.where(code & 128, magnitude, -magnitude).astype(np.int16)


def _encode_mu_law(samples: NDArray[np.int16]) -> NDArray[np.uint8]:
    wide = samples.astype(np.int32) >> 2  # 14 bits, as the recommendation counts
    magnitude = np.minimum(np.abs(wide), 8158) + 33
    exponent = _bit_length(magnitude) - 6
    code = exponent << 4 | magnitude >> exponent + 1 & 15
    inverted: NDArray[np.uint8] = (~np.where(wide < 0, code | 128, code)).astype(np.uint8)
    return inverted


def _encode_a_law(samples: NDArray[np.int16]) -> NDArray[np.uint8]:
    wide = samples.astype(np.int32) >> 3  # 13 bits
    magnitude = np.where(wide < 0, ~wide, wide)
    exponent = np.maximum(_bit_length(magnitude) - 5, 0)
    code = exponent << 4 | magnitude >> np.maximum(exponent, 1) & 15
    encoded: NDArray[np.uint8] = (np.where(wide < 0, code, code | 128) ^ 0x55).astype(np.uint8)
    return encoded


def _bit_length(values: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.frexp(values.astype(np.float32))[1]


MU_LAW: Final = _mu_law()
A_LAW: Final = _a_law()

__all__ = ["PCM_24K", "Encoding", "Landing", "SoundDecoder", "SoundEncoder", "SoundFormat"]
