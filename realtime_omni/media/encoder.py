"""The one interface of all encoders, and the choice between them.

An encoder belongs to one stream of frames of one size and is not thread safe: :class:`~realtime_omni.media.lane.EncodeLane`
keeps its calls in order. Invariant: one frame in gives exactly one payload out, at once (no look-ahead, no reordering).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from realtime_omni.errors import ArgumentError, ErrorCode
from realtime_omni.media.raw import LatentEncoder, Rgb24Encoder

FORMATS = ("h264", "jpeg", "rgb24", "latent")


class EncodedFrame(NamedTuple):
    """One frame on the wire. ``is_key``: a decoder can start here."""

    payload: bytes
    is_key: bool


class Encoder(Protocol):
    """Encodes the frames of one stream."""

    @property
    def codec(self) -> str | None:
        """The WebCodecs codec string, or None when a browser needs none."""
        ...

    @property
    def is_quick(self) -> bool:
        """Whether a small block takes less time than the way to a thread and back."""
        ...

    def encode(self, frame: npt.NDArray[np.generic]) -> tuple[bytes, bool]:
        """One frame, uint8 RGB [H, W, 3] (any float array for ``latent``) → (payload, is a key frame)."""
        ...

    def request_key(self) -> None:
        """The next frame becomes a key frame."""
        ...

    def close(self) -> None:
        """Free what the encoder holds; it is not used afterwards."""
        ...


def open_encoder(format_name: str, width: int, height: int, fps: float) -> Encoder:
    """An encoder for frames of ``width`` x ``height``.

    Raises:
        ArgumentError: ``unsupported`` for a format that is unknown or whose library is not installed.
    """
    if format_name == "rgb24":
        return Rgb24Encoder()
    if format_name == "latent":
        return LatentEncoder()
    if format_name == "jpeg":
        try:
            from realtime_omni.media.jpeg import JpegEncoder
        except ModuleNotFoundError:
            raise _missing("jpeg", "simplejpeg") from None
        return JpegEncoder()
    if format_name == "h264":
        try:
            from realtime_omni.media.h264 import H264Encoder
        except ImportError:
            raise _missing("h264", "av") from None
        return H264Encoder(width, height, fps)
    raise ArgumentError(f"format must be one of {', '.join(FORMATS)}", code=ErrorCode.UNSUPPORTED, path="format")


@lru_cache(maxsize=64)
def codec_string(format_name: str, width: int, height: int, fps: float) -> str | None:
    """The WebCodecs string of a format at a size; opens a throwaway encoder once per size."""
    encoder = open_encoder(format_name, width, height, fps)
    try:
        return encoder.codec
    finally:
        encoder.close()


def _missing(format_name: str, package: str) -> ArgumentError:
    return ArgumentError(
        f"format {format_name} needs the Python package {package}, which this server does not have",
        code=ErrorCode.UNSUPPORTED,
        path="format",
    )
