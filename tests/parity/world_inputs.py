"""What the golden networks of ``make_world_golden.py`` were shown, drawn from seeds again by the tests. Knows torch and numpy.

Shape legend: F latent frames of a block, C channels, h w the latent grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TIMESTEP = 714.0
CAMERA_FRAME = 2
"""Whose channels are kept, every eighth."""


@dataclass(frozen=True)
class World:
    """``visible``: frames that a block sees, itself and the sink included."""

    context_width: int
    context_tokens: int
    channels: int
    condition_channels: int
    visible: int
    sink: int = 0
    frames: int = 3
    blocks: int = 5
    grid: tuple[int, int] = (4, 6)


MATRIX_GAME = World(context_width=20, context_tokens=5, channels=12, condition_channels=0, visible=6)
LINGBOT = World(context_width=20, context_tokens=5, channels=4, condition_channels=8, visible=9, sink=3)


def block(world: World, number: int, what: str) -> tuple[Tensor, Tensor]:
    """Latents [F, channels, h, w] and condition [F, condition_channels, h, w] of a ``noise`` or ``clean`` pass."""
    generator = torch.Generator().manual_seed(100 + 2 * number + (what == "clean"))
    shape = (world.frames, world.channels + world.condition_channels, *world.grid)
    drawn = torch.randn(shape, generator=generator)
    return drawn[:, : world.channels], drawn[:, world.channels :]


def context(world: World) -> Tensor:
    """[context_tokens, context_width] of a picture or a text."""
    generator = torch.Generator().manual_seed(99)
    return torch.randn(world.context_tokens, world.context_width, generator=generator)


def actions(world: World) -> tuple[Tensor, Tensor]:
    """Mouse [frames, 2] (pitch, yaw) and keyboard [frames, 4] of every latent frame."""
    generator = torch.Generator().manual_seed(98)
    count = world.blocks * world.frames
    mouse = torch.randint(-1, 2, (count, 2), generator=generator) * 0.1
    return mouse, torch.randint(0, 2, (count, 4), generator=generator).float()


def picture_actions(per_frame: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same for every picture: latent frame 0 is one, every later one four."""
    return tuple(torch.cat((part[:1], part[1:].repeat_interleave(4, dim=0))) for part in per_frame)  # type: ignore[return-value]


def camera_path(world: World) -> tuple[np.ndarray, np.ndarray]:
    """Camera-to-world poses float64 [1 + frames, 4, 4], the first of them where the walk begins, and fx, fy, cx, cy in pixels.

    The longest step is 0.05, so that dividing by the longest and dividing by LingBot's unit are the same."""
    count = world.blocks * world.frames
    poses = [np.eye(4)]
    for index in range(count):
        angle, step = np.radians(6.0 * np.sin(index)), 0.05 if index == 4 else 0.05 * (0.3 + 0.05 * index)
        turn = np.eye(4)
        turn[:3, :3] = [[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]]
        turn[:3, 3] = np.array([0.6, 0.0, 0.8]) * min(step, 0.05)
        poses.append(poses[-1] @ turn)
    rows, columns = world.grid
    return np.stack(poses), np.array([40.0, 44.0, 4.0 * columns, 4.0 * rows])
