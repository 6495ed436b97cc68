"""Payloads to pictures.

Owns: one decoder per format.  Must not know: sockets, sessions.  Pillow and av are asked for only when their format is used.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from realtime_omni_protocols.world_messages import Format

from .errors import MediaUnavailableError, ProtocolViolation

if TYPE_CHECKING:
    import av

Picture = NDArray[np.uint8]


class Decoder(Protocol):
    """Decodes the frames of one connection, in order."""

    def decode(self, payload: memoryview) -> Picture:
        """One frame as uint8 [H, W, 3]."""
        ...


class RawDecoder:
    def __init__(self, width: int, height: int) -> None:
        self._shape = (height, width, 3)

    def decode(self, payload: memoryview) -> Picture:
        if len(payload) != self._shape[0] * self._shape[1] * 3:
            raise ProtocolViolation(f"a raw frame has {len(payload)} bytes, not {self._shape[0] * self._shape[1] * 3}")
        return np.frombuffer(payload, np.uint8).reshape(self._shape).copy()


class JpegDecoder:
    def __init__(self, width: int, height: int) -> None:
        try:
            from PIL import Image
        except ImportError:
            raise MediaUnavailableError(
                "format jpeg needs Pillow: pip install pillow (or use format='rgb24')"
            ) from None
        self._image = Image
        self._shape = (height, width, 3)

    def decode(self, payload: memoryview) -> Picture:
        try:
            with self._image.open(io.BytesIO(payload), formats=("JPEG",)) as image:
                if image.size != (self._shape[1], self._shape[0]):  # before a pixel is decoded: it may be a bomb
                    raise ProtocolViolation(f"a frame of {image.width} x {image.height} pixels")
                picture = np.asarray(image.convert("RGB"))
        except (OSError, ValueError, SyntaxError, self._image.DecompressionBombError):
            raise ProtocolViolation("a JPEG frame cannot be decoded") from None
        return _checked(picture, self._shape)


class H264Decoder:
    def __init__(self, width: int, height: int) -> None:
        try:
            import av
        except ImportError:
            raise MediaUnavailableError("format h264 needs PyAV: pip install av (or use format='jpeg')") from None
        self._av = av
        self._shape = (height, width, 3)
        self._context: av.VideoCodecContext = av.VideoCodecContext.create("h264", "r")
        # One access unit in, one frame out: without this the decoder waits for frames that could be reordered.
        self._context.flags |= av.codec.context.Flags.low_delay
        self._context.thread_count = 1

    def decode(self, payload: memoryview) -> Picture:
        try:
            frames = self._context.decode(self._av.Packet(bytes(payload)))
            if len(frames) != 1:
                raise ProtocolViolation(f"an access unit decoded to {len(frames)} frames")
            picture = frames[0].to_ndarray(format="rgb24")
        except (OSError, ValueError, self._av.FFmpegError):
            raise ProtocolViolation("an H.264 frame cannot be decoded") from None
        return _checked(picture, self._shape)


def _checked(picture: NDArray[np.generic], shape: tuple[int, int, int]) -> Picture:
    if picture.shape != shape or picture.dtype != np.uint8:
        raise ProtocolViolation(f"a frame decoded to shape {picture.shape}, not {shape}")
    return np.asarray(picture, dtype=np.uint8)


def make_decoder(format: Format, width: int, height: int) -> Decoder | None:  # noqa: A002 (the wire's name)
    """A fresh decoder; None for latents. `MediaUnavailableError` when its library is missing."""
    if format == "jpeg":
        return JpegDecoder(width, height)
    if format == "h264":
        return H264Decoder(width, height)
    return RawDecoder(width, height) if format == "rgb24" else None


def latent(payload: memoryview, shape: tuple[int, ...]) -> NDArray[np.float16]:
    """A latent payload as float16 of the chunk's shape."""
    if len(payload) != 2 * math.prod(shape):
        raise ProtocolViolation(f"a latent has {len(payload)} bytes, its shape {shape} needs others")
    return np.frombuffer(payload, "<f2").reshape(shape).astype(np.float16)
