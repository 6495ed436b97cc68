"""H.264 through PyAV (libx264): constrained baseline, zero latency, Annex B with parameter sets in band.

Owns one libx264 context. One packet per frame, no reordering. There are no periodic key frames: the transport loses
nothing, so a key frame is sent only where a decoder starts (first frame, reset, resume). Odd sizes are padded to even ones
by repeating the last row or column; the client crops to the size announced in ``session.started``.
"""

from __future__ import annotations

from fractions import Fraction

import av
import numpy as np
import numpy.typing as npt
from av.video.frame import PictureType
from av.video.reformatter import ColorRange, Colorspace, VideoReformatter

from realtime_omni.errors import ArgumentError, ErrorCode
from realtime_omni.media.pixels import packed

MAX_SIDE = 4096
CRF = "20"
"""Constant quality; 20 keeps small text-like structure and costs about 1.4 times the bits of x264's default 23."""
_TIME_BASE = Fraction(1, 90_000)
_OPTIONS = {
    "preset": "ultrafast",
    "tune": "zerolatency",
    "profile": "baseline",
    "crf": CRF,
    "forced-idr": "1",
    # One thread: latency of one frame matters, and the pool runs one session per thread.
    "x264-params": "keyint=infinite:scenecut=0:repeat-headers=1:annexb=1:sliced-threads=0:threads=1",
}
# Written into the parameter sets, so that no player has to guess: BT.601 matrix, BT.709 primaries, sRGB transfer.
_MATRIX_BT601 = 6
_PRIMARIES_BT709 = 1
_TRANSFER_SRGB = 13


class H264Encoder:
    """One H.264 stream."""

    is_quick = False

    def __init__(self, width: int, height: int, fps: float) -> None:
        if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
            raise ArgumentError(
                f"h264 needs frames of 1 to {MAX_SIDE} pixels a side", code=ErrorCode.UNSUPPORTED, path="format"
            )
        self._height, self._width = height, width
        self._pad = ((0, height % 2), (0, width % 2), (0, 0))
        self._interval = round(1 / (fps * _TIME_BASE)) if fps > 0 else 1
        self._reformatter = VideoReformatter()  # kept: making one per frame costs as much as encoding a small frame
        self._count = 0
        self._want_key = True
        self._codec: str | None = None
        self._context = self._open(fps)

    def _open(self, fps: float) -> av.VideoCodecContext:
        context = av.CodecContext.create("libx264", "w")
        assert isinstance(context, av.VideoCodecContext)
        context.width, context.height = self._width + self._width % 2, self._height + self._height % 2
        context.pix_fmt = "yuv420p"
        context.time_base = _TIME_BASE
        context.framerate = Fraction(fps).limit_denominator(1001)
        context.thread_count = 1
        context.max_b_frames = 0
        context.color_range = ColorRange.MPEG
        context.colorspace = _MATRIX_BT601
        context.color_primaries = _PRIMARIES_BT709
        context.color_trc = _TRANSFER_SRGB
        context.options = dict(_OPTIONS)
        context.open()
        return context

    @property
    def codec(self) -> str | None:
        """``avc1.PPCCLL`` from the sequence parameter set. Before the first frame, a throwaway encoder is asked."""
        if self._codec is None:
            probe = H264Encoder(self._width, self._height, float(self._context.framerate or 1))
            probe.encode(np.zeros((self._height, self._width, 3), np.uint8))
            self._codec = probe._codec
            probe.close()
        return self._codec

    def encode(self, frame: npt.NDArray[np.generic]) -> tuple[bytes, bool]:
        pixels = packed(frame)
        if pixels.shape != (self._height, self._width, 3):
            raise ValueError(f"a frame of shape {pixels.shape} in a {self._height} x {self._width} stream")
        if self._height % 2 or self._width % 2:
            pixels = np.pad(pixels, self._pad, mode="edge")
        picture = self._reformatter.reformat(
            av.VideoFrame.from_ndarray(pixels, format="rgb24"),
            format="yuv420p",
            dst_colorspace=Colorspace.ITU601,
            dst_color_range=ColorRange.MPEG,
        )
        picture.pts = self._count * self._interval
        picture.time_base = _TIME_BASE
        picture.pict_type = PictureType.I if self._want_key else PictureType.NONE
        self._count += 1
        packets = self._context.encode(picture)
        if len(packets) != 1:
            raise RuntimeError(f"libx264 gave {len(packets)} packets for one frame")
        payload, is_key = bytes(packets[0]), bool(packets[0].is_keyframe)
        self._want_key = self._want_key and not is_key
        if is_key and self._codec is None:
            self._codec = _codec_from(payload)
        return payload, is_key

    def request_key(self) -> None:
        self._want_key = True

    def close(self) -> None:
        """Dropping the context frees libx264's state; what it holds was already sent."""
        del self._context


def _codec_from(access_unit: bytes) -> str:
    """Read profile, constraints and level from the first sequence parameter set (NAL unit type 7)."""
    start = 0
    while (start := access_unit.find(b"\0\0\1", start)) != -1:
        start += 3
        if access_unit[start] & 0x1F == 7:
            profile, constraints, level = access_unit[start + 1 : start + 4]
            return f"avc1.{profile:02x}{constraints:02x}{level:02x}"
    raise RuntimeError("a key frame without a sequence parameter set")
