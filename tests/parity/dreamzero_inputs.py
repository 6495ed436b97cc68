"""What the golden DreamZero is made of and shown: dimensions and inputs drawn from seeds, the same for both sides."""

from __future__ import annotations

import torch
from torch import Tensor

LAYERS, HEADS, HEAD_DIM, MLP, TEXT, FREQUENCIES = 2, 2, 12, 32, 16, 32
CHANNELS, CONDITION, GRID = 4, 8, (4, 6)
FRAMES, BLOCKS, ACTIONS = 2, 4, 5
ACTION_WIDTH, STATE_WIDTH, HIDDEN = 6, 10, 16
TEXT_TOKENS, IMAGE_TOKENS, IMAGE_WIDTH = 512, 257, 1280
VIDEO_T, ACTION_T = 833, 500
TICKS = 3
"""Of one window: the frame that opens it, then two blocks."""


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def text() -> Tensor:
    return draw(1, 1, TEXT_TOKENS, TEXT)


def features() -> Tensor:
    return draw(2, 1, IMAGE_TOKENS, IMAGE_WIDTH)


def condition() -> Tensor:
    """[W, 4 + C, h, w]."""
    return draw(3, 1 + FRAMES * BLOCKS, CONDITION, *GRID)


def seen(tick: int) -> Tensor:
    """The clean latents of a tick [F, C, h, w]; the first has one frame."""
    return draw(10 + tick, 1 if tick == 0 else FRAMES, CHANNELS, *GRID)


def noisy(tick: int) -> Tensor:
    return draw(20 + tick, FRAMES, CHANNELS, *GRID)


def actions(tick: int) -> Tensor:
    return draw(30 + tick, 1, ACTIONS, ACTION_WIDTH)


def state(tick: int) -> Tensor:
    return draw(40 + tick, 1, 1, STATE_WIDTH)
