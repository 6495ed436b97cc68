"""Flow matching: the time embedding and the Euler loop from noise to actions.

Time runs from 1 (noise) to 0 (actions); x_t = t * noise + (1 - t) * action and the network predicts noise - action
(Black et al. 2024, arXiv 2410.24164). Owns the loop; must not know the network, nor how a previous chunk steers it: a
:class:`StepRule` does that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

Velocity = Callable[[Tensor, Tensor], Tensor]
"""``velocity(x, t)``: x [B, H, A]; t [B], or [B, H] for a time of its own per action; returns x's shape."""

MIN_PERIOD, MAX_PERIOD = 4e-3, 4.0


class StepRule(Protocol):
    """How one chunk is integrated; a new object per chunk."""

    def start(self, noise: Tensor) -> Tensor:
        """The x that the loop begins with, from noise [B, H, A]."""
        ...

    def step(self, velocity: Velocity, x: Tensor, t: Tensor, dt: float) -> Tensor:
        """x at time t + dt from x at time t [B]; ``dt`` is negative."""
        ...


class Euler:
    """The plain rule: x + dt * v."""

    def start(self, noise: Tensor) -> Tensor:
        return noise

    def step(self, velocity: Velocity, x: Tensor, t: Tensor, dt: float) -> Tensor:
        return x + dt * velocity(x, t)


def time_of(step: int, steps: int) -> float:
    """The time at which step ``step`` of ``steps`` evaluates the velocity."""
    return 1.0 - step / steps


def integrate(velocity: Velocity, noise: Tensor, steps: int, rule: StepRule | None = None) -> Tensor:
    """Actions [B, H, A] from noise of the same shape by ``steps`` Euler steps."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    rule = rule or Euler()
    x = rule.start(noise)
    for step in range(steps):
        t = torch.full((noise.shape[0],), time_of(step, steps), dtype=torch.float32, device=noise.device)
        x = rule.step(velocity, x, t, -1.0 / steps)
    return x


def time_embedding(t: Tensor, width: int, *, min_period: float = MIN_PERIOD, max_period: float = MAX_PERIOD) -> Tensor:
    """sin then cos [..., width] of times [...] at ``width / 2`` log-spaced periods; float64 inside, float32 out."""
    if width % 2:
        raise ValueError(f"width must be even, not {width}")
    speeds = _speeds.__wrapped__ if torch.compiler.is_compiling() else _speeds  # as in ``attention.rope``
    angle = t.double()[..., None] * speeds(width // 2, min_period, max_period, t.device)
    return torch.cat((angle.sin(), angle.cos()), dim=-1).float()


@lru_cache(8)
def _speeds(count: int, min_period: float, max_period: float, device: torch.device) -> Tensor:
    fraction = torch.linspace(0.0, 1.0, count, dtype=torch.float64, device=device)
    return 2.0 * math.pi / (min_period * (max_period / min_period) ** fraction)
