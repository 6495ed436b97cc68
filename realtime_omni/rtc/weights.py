"""How strongly each action of a new chunk is held to the old one (Black, Galliker, Levine 2025, arXiv 2506.07339)."""

from __future__ import annotations

import math
from enum import StrEnum

import torch
from torch import Tensor


class Schedule(StrEnum):
    """The shape of the soft part, between ``delay`` and ``end``."""

    EXP = "exp"
    """c (e^c - 1) / (e - 1) of the linear value c: the paper's."""
    LINEAR = "linear"
    """c = (end - i) / (end - delay + 1): lerobot's default."""
    ONES = "ones"
    """Hard up to ``end``."""
    ZEROS = "zeros"
    """Hard up to ``delay``, nothing after it."""


def prefix_weights(delay: int, end: int, horizon: int, schedule: Schedule = Schedule.EXP) -> Tensor:
    """Weights [horizon] float32: 1 before ``delay``, falling until ``end``, 0 from there on.

    ``end`` is the paper's H - s, with s the actions executed before the next chunk starts; lerobot calls it
    ``execution_horizon``. It never reaches beyond the actions that are left of the old chunk. ``delay`` is cut to ``end``."""
    if not 0 <= end <= horizon or delay < 0:
        raise ValueError(f"delay {delay} and end {end} do not fit into a horizon of {horizon}")
    delay = min(delay, end)
    index = torch.arange(horizon, dtype=torch.float32)
    linear = (end - index) / (end - delay + 1)
    soft = {
        Schedule.EXP: linear * torch.expm1(linear) / (math.e - 1),
        Schedule.LINEAR: linear,
        Schedule.ONES: torch.ones_like(linear),
        Schedule.ZEROS: torch.zeros_like(linear),
    }[schedule]
    return torch.where(index < delay, 1.0, torch.where(index < end, soft, 0.0))


def guidance_weight(t: Tensor, limit: float) -> Tensor:
    """min(limit, (1 - tau) / (tau r^2)) at flow time t = 1 - tau [B], with r^2 = (1 - tau)^2 / (tau^2 + (1 - tau)^2).

    Equation 2 of the paper, which simplifies to (tau^2 + t^2) / (tau t); infinite at both ends, hence the limit."""
    tau = 1.0 - t
    return torch.nan_to_num((tau * tau + t * t) / (tau * t), nan=limit, posinf=limit).clamp(max=limit)
