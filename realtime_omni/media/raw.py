"""Formats without compression: RGB24 for bit-exact clients and tests, float16 latents for clients that decode themselves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from realtime_omni.media.pixels import packed


class Rgb24Encoder:
    """``height * width * 3`` bytes, row by row."""

    codec: str | None = None
    is_quick = True

    def encode(self, frame: npt.NDArray[np.generic]) -> tuple[bytes, bool]:
        return packed(frame).tobytes(), True

    def request_key(self) -> None:
        """Every frame is a key frame."""

    def close(self) -> None:
        """Holds nothing."""


class LatentEncoder:
    """Little-endian float16, C order; the shape travels beside it. Values beyond float16's range become infinite."""

    codec: str | None = None
    is_quick = True

    def encode(self, frame: npt.NDArray[np.generic]) -> tuple[bytes, bool]:
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(frame).astype("<f2").tobytes(), True

    def request_key(self) -> None:
        """Every frame is a key frame."""

    def close(self) -> None:
        """Holds nothing."""
