"""Synthetic pictures of the fake world server, and their encoders (raw RGB, JPEG with Pillow, H.264 with av)."""

from __future__ import annotations

import colorsys
import hashlib
import io
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from realtime_omni_protocols.world_messages import Control, Format

FRAMES = 3
STEP = 2  # pixels a held key pans per frame
_MOVES = {"a": (-1, 0), "d": (1, 0), "j": (-2, 0), "l": (2, 0), "w": (0, -1), "s": (0, 1), "i": (0, -2), "k": (0, 2)}


class Picture:
    """A gradient that pans with the held keys; a white bar moves one pixel per frame, so that every frame differs."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.x = self.y = self.frame = 0
        self.held: set[str] = set()

    def block(self, controls: Sequence[Control], prompt: str | None, seed: int) -> list[NDArray[np.uint8]]:
        script: list[list[str]] | None = None
        pressed: set[str] = set()
        for control in controls:
            if "frames" in control.data:
                script = control.data["frames"]
            else:
                self.held = set(control.data["keys"])
                pressed |= self.held
        frames = []
        for index in range(FRAMES):
            keys = (
                set(script[index]) if script and index < len(script) else self.held | (pressed if index == 0 else set())
            )
            for key in keys:
                dx, dy = _MOVES[key]
                self.x, self.y = self.x + dx * STEP, self.y + dy * STEP
            frames.append(self._draw(prompt, seed))
            self.frame += 1
        return frames

    def _draw(self, prompt: str | None, seed: int) -> NDArray[np.uint8]:
        hue = hashlib.sha256(f"{prompt}{seed}".encode()).digest()[0] / 255
        colour = np.array(colorsys.hsv_to_rgb(hue, 0.7, 1.0))
        u = (np.arange(self.width) + self.x)[None, :, None] * (2 * np.pi / self.width)
        v = (np.arange(self.height) + self.y)[:, None, None] * (2 * np.pi / self.height)
        light = 0.5 + 0.25 * np.sin(u * 2) + 0.25 * np.cos(v * 3)
        picture: NDArray[np.uint8] = (light * colour[None, None, :] * 255).astype(np.uint8)
        picture[: max(2, self.height // 16), self.frame % self.width] = 255
        return picture


class Encoder(Protocol):
    """Frames to payloads. ``codec`` is the WebCodecs string, None where there is none."""

    codec: str | None

    def encode(self, picture: object, key: bool) -> tuple[bytes, bool]: ...


class RawEncoder:
    codec: str | None = None

    def encode(self, picture: object, key: bool) -> tuple[bytes, bool]:
        assert isinstance(picture, np.ndarray)
        return picture.tobytes(), True


class JpegEncoder:
    codec: str | None = None

    def encode(self, picture: object, key: bool) -> tuple[bytes, bool]:
        from PIL import Image

        assert isinstance(picture, np.ndarray)
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, "JPEG", quality=85)
        return buffer.getvalue(), True


class H264Encoder:
    """One access unit per frame, no reordering; a key frame carries SPS and PPS."""

    def __init__(self, width: int, height: int, fps: float) -> None:
        self._size = (width, height, fps)
        self._open()
        first, _ = self.encode(np.zeros((height, width, 3), np.uint8), True)
        sps = first[first.index(b"\x00\x00\x01\x67") + 4 :]
        self.codec: str | None = f"avc1.{sps[:3].hex().upper()}"
        self._open()

    def _open(self) -> None:
        from fractions import Fraction

        import av

        width, height, fps = self._size
        self._context = av.CodecContext.create("libx264", "w")
        self._context.width, self._context.height = width, height
        self._context.pix_fmt = "yuv420p"
        self._context.time_base = Fraction(1, 1000)
        self._context.framerate = Fraction(fps).limit_denominator(1000)
        self._context.options = {
            "preset": "ultrafast",
            "tune": "zerolatency",
            "crf": "23",
            "profile": "baseline",
            "g": "100000",
        }
        self._pts = 0

    def encode(self, picture: object, key: bool) -> tuple[bytes, bool]:
        import av

        assert isinstance(picture, np.ndarray)
        if key and self._pts:
            self._open()
        frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
        frame.pts = self._pts
        self._pts += 50
        packets = self._context.encode(frame)
        assert len(packets) == 1
        return bytes(packets[0]), bool(packets[0].is_keyframe)


def make_encoder(kind: Format, width: int, height: int, fps: float) -> Encoder | None:
    """The encoder, or None when the format (or its library) is not here."""
    try:
        if kind == "h264":
            return H264Encoder(width, height, fps)
        if kind == "jpeg":
            import PIL  # noqa: F401

            return JpegEncoder()
    except ImportError:
        return None
    return RawEncoder() if kind == "rgb24" else None
