"""Three-dimensional rotary positions of the Wan family, computed when they are needed.

Angles are float64 until the cosine, so a frame number in the tens of millions is as exact as the first; there is no table
that could end. Layout: the channels of a head are split into (time, row, column) as ``d - 4 * (d // 6), 2 * (d // 6),
2 * (d // 6)``, base 10,000, and *interleaved* pairs (2i, 2i + 1) are turned (Wan 2.1, arXiv 2503.20314).
"""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10_000.0


def axis_channels(head_dim: int) -> tuple[int, int, int]:
    """Channels of one head for (time, row, column). Raises ValueError on an odd head size or one below 6."""
    if head_dim % 2 or head_dim < 6:
        raise ValueError(f"head_dim must be even and at least 6, got {head_dim}")
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def _angles(position: Tensor, channels: int) -> Tensor:
    """float64 [..., channels / 2] of integer positions [...]."""
    exponent = torch.arange(0, channels, 2, dtype=torch.float64, device=position.device) / channels
    return position.to(torch.float64)[..., None] * BASE**-exponent


def rotary(frames: Tensor, rows: int, columns: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [B, F * rows * columns, 1, head_dim / 2], of absolute frame numbers ``frames``, int64 [B, F]."""
    time, row, column = axis_channels(head_dim)
    B, F = frames.shape
    shape = (B, F, rows, columns, -1)
    angles = torch.cat(
        (
            _angles(frames, time)[:, :, None, None].expand(shape),
            _angles(torch.arange(rows, device=frames.device), row)[:, None].expand(shape),
            _angles(torch.arange(columns, device=frames.device), column).expand(shape),
        ),
        dim=-1,
    ).reshape(B, F * rows * columns, 1, head_dim // 2)
    return angles.cos().float(), angles.sin().float()


def rotary_line(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [B, T, 1, head_dim / 2], of tokens on one axis, positions int64 [B, T]: all channels turn by it."""
    angles = _angles(positions, head_dim)[:, :, None]
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs (2i, 2i + 1) of x [B, T, heads, head_dim]; computed in float32, returned in x's dtype."""
    first, second = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)
