"""The robot's side of DreamZero: cameras to one picture, states into the network's units, actions out of them.

Owns the layouts and the formulas. Facts are those of DreamZero's own code and of vllm-omni's adapter (both Apache-2.0): each
view is cut to its middle 95 %, squeezed to a quarter of the canvas and cut off to whole numbers; states become
``2 (x - q01) / (q99 - q01) - 1``, clamped to [-1, 1], a constant channel only clamped; actions go back by
``(a + 1) / 2 (q99 - q01) + q01``, and those that are relative are added to the state that was observed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from realtime_omni.errors import ArgumentError, ErrorCode

Layout = Literal["droid", "single"]
LAYOUTS: Mapping[str, int] = {"droid": 3, "single": 1}
"""How many cameras a layout has."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The 1st and 99th percentile of every channel, float32 [D]."""

    low: NDArray[np.float32]
    high: NDArray[np.float32]

    @property
    def middle(self) -> NDArray[np.float32]:
        return ((self.low + self.high) / 2).astype(np.float32)

    def normalised(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        spread = self.high - self.low
        scaled = np.where(spread != 0, 2 * (x - self.low) / np.where(spread != 0, spread, 1) - 1, x)
        return np.clip(scaled, -1, 1).astype(np.float32)

    def restored(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        return ((x + 1) / 2 * (self.high - self.low) + self.low).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Robot:
    """One embodiment. ``cameras``: in the layout's order (droid: the wrist above, left and right exterior below).

    ``relative``: for each action channel the state channel that it is added to, or None where it is absolute."""

    cameras: tuple[str, ...]
    layout: Layout
    state: Quantiles
    actions: Quantiles
    relative: tuple[int | None, ...]
    crop: float = 0.95

    def __post_init__(self) -> None:
        if len(self.cameras) != LAYOUTS[self.layout]:
            raise ValueError(f"the layout {self.layout} has {LAYOUTS[self.layout]} cameras, not {len(self.cameras)}")
        width = len(self.state.low)
        if len(self.relative) != len(self.actions.low) or any(c is not None and c >= width for c in self.relative):
            raise ValueError("relative names a state channel, or None, for every action channel")

    def canvas(self, images: Mapping[str, NDArray[np.uint8]], height: int, width: int) -> Tensor:
        """One clip uint8 [T, 3, height, width] of all cameras; one that is absent is black.

        Each of ``images`` is [H, W, 3] or [T, H, W, 3]; raises ArgumentError when they have different numbers of pictures."""
        clips = {name: image if image.ndim == 4 else image[None] for name, image in images.items()}
        counts = sorted({len(clip) for clip in clips.values()})
        if len(counts) != 1:
            raise ArgumentError(
                f"cameras with {counts} pictures: they must have as many", code=ErrorCode.IMAGE_INVALID, path="images"
            )
        out = torch.zeros(counts[0], 3, height, width, dtype=torch.uint8)
        for name, clip in clips.items():
            rows, columns = self._place(self.cameras.index(name), height, width)
            target = out[:, :, rows, columns]
            parts = 1 if self.layout == "single" else 2
            view = self._squeezed(clip, target.shape[2], width // parts)
            target.copy_(view.repeat_interleave(target.shape[3] // view.shape[3], dim=3))
        return out

    def act(self, actions: NDArray[np.float32], state: NDArray[np.float32]) -> NDArray[np.float32]:
        """Actions [N, A] in the robot's units from the network's, for a robot that was in ``state`` [D]."""
        out = self.actions.restored(actions[:, : len(self.relative)])
        for channel, source in enumerate(self.relative):
            if source is not None:
                out[:, channel] += state[source]
        return out

    def _place(self, camera: int, height: int, width: int) -> tuple[slice, slice]:
        if self.layout == "single":
            return slice(None), slice(None)
        above, below = slice(0, height // 2), slice(height // 2, None)
        return ((above, slice(None)), (below, slice(0, width // 2)), (below, slice(width // 2, None)))[camera]

    def _squeezed(self, clip: NDArray[np.uint8], height: int, width: int) -> Tensor:
        """uint8 [T, 3, height, width] of a clip [T, H, W, 3]."""
        tall, wide = int(clip.shape[1] * self.crop), int(clip.shape[2] * self.crop)
        if min(tall, wide) < 1:
            raise ArgumentError("a picture is too small", code=ErrorCode.IMAGE_INVALID, path="images")
        top, left = round((clip.shape[1] - tall) / 2), round((clip.shape[2] - wide) / 2)
        x = torch.from_numpy(np.ascontiguousarray(clip[:, top : top + tall, left : left + wide]))
        x = x.permute(0, 3, 1, 2).float() / 255
        x = functional.interpolate(x, (height, width), mode="bilinear", antialias=True, align_corners=False)
        return (x * 255).clamp(0, 255).to(torch.uint8)
