"""Step rules that steer the flow loop towards the old chunk.

``Guided``: soft, for any network (arXiv 2506.07339). ``TrainedPrefix``: hard, for a network trained to continue a clean
prefix (arXiv 2512.05964). ``OverlapRamp``: GR00T N1.7's (``groot_n1_7.py`` in lerobot 0.6.1). Each satisfies
``models.common.vla.flow.StepRule``.

Shape legend: B rows, H actions per chunk, A action channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from realtime_omni.models.common.vla.flow import Velocity
from realtime_omni.rtc.weights import guidance_weight


class Jacobian(StrEnum):
    """Of the clean estimate with respect to x, in the pull towards the old chunk."""

    IDENTITY = "identity"
    """Taken as 1: no backward pass (what lerobot computes)."""
    VJP = "vjp"
    """The true one, by a vector-Jacobian product: about three times the cost, better at long delays."""


@dataclass(frozen=True, slots=True)
class Guided:
    """Velocity plus a pull of the clean estimate towards the old chunk.

    ``previous`` [B, H, A]; ``weights`` [B, H], 0 in rows and places that are free: those follow the plain rule exactly.
    ``limit``: largest guidance weight (the paper: 5, lerobot: 10). The true Jacobian needs the prefix and the loop to run under
    ``torch.no_grad``: inference mode forbids the backward pass, so ``step`` raises RuntimeError there.
    """

    previous: Tensor
    weights: Tensor
    jacobian: Jacobian = Jacobian.IDENTITY
    limit: float = 5.0

    def start(self, noise: Tensor) -> Tensor:
        return noise

    def step(self, velocity: Velocity, x: Tensor, t: Tensor, dt: float) -> Tensor:
        v, pull = (self._vjp if self.jacobian is Jacobian.VJP else self._identity)(velocity, x, t)
        return x + dt * (v - guidance_weight(t, self.limit)[:, None, None] * pull)

    def _identity(self, velocity: Velocity, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        v = velocity(x, t)
        return v, self._error(x, v, t)

    def _vjp(self, velocity: Velocity, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_inference_mode_enabled():
            raise RuntimeError("a true Jacobian cannot be taken in inference mode; use torch.no_grad")
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            v = velocity(x, t)
            estimate = x - t[:, None, None] * v
            (pull,) = torch.autograd.grad(estimate, x, self._error(x, v, t).detach())
        return v.detach(), pull

    def _error(self, x: Tensor, v: Tensor, t: Tensor) -> Tensor:
        return (self.previous - (x - t[:, None, None] * v)) * self.weights[..., None]


@dataclass(frozen=True, slots=True)
class TrainedPrefix:
    """The first ``delay`` [B] actions are the old ones, clean, at flow time 0 in every step."""

    previous: Tensor
    delay: Tensor

    def start(self, noise: Tensor) -> Tensor:
        return torch.where(self._fixed[..., None], self.previous, noise)

    def step(self, velocity: Velocity, x: Tensor, t: Tensor, dt: float) -> Tensor:
        fixed = self._fixed
        times = torch.where(fixed, 0.0, t[:, None])
        return torch.where(fixed[..., None], self.previous, x + dt * velocity(x, times))

    @property
    def _fixed(self) -> Tensor:
        """bool [B, H]."""
        return torch.arange(self.previous.shape[1], device=self.previous.device) < self.delay[:, None]


@dataclass(frozen=True, slots=True)
class OverlapRamp:
    """The first ``overlap`` actions begin as the old ones; ``strength`` [B, H] says how much the velocity moves each."""

    previous: Tensor
    overlap: Tensor
    strength: Tensor

    def start(self, noise: Tensor) -> Tensor:
        inside = torch.arange(noise.shape[1], device=noise.device) < self.overlap[:, None]
        return torch.where(inside[..., None], self.previous, noise)

    def step(self, velocity: Velocity, x: Tensor, t: Tensor, dt: float) -> Tensor:
        return x + dt * velocity(x, t) * self.strength[..., None]


def ramp(frozen: int, overlap: int, horizon: int, rate: float = 6.0) -> Tensor:
    """Strengths [horizon]: 0 for the frozen actions, (1 - e^(-rate u)) / (1 - e^(-rate)) over the rest of the overlap, then 1.

    u runs over the inner points of ``overlap - frozen + 2`` equal steps from 0 to 1."""
    if not 0 <= frozen <= overlap <= horizon:
        raise ValueError(f"frozen {frozen}, overlap {overlap} and horizon {horizon} must not fall")
    u = torch.linspace(0.0, 1.0, overlap - frozen + 2)
    rising = (1 - torch.exp(-rate * u)) / (1 - torch.exp(torch.tensor(-rate)))
    return torch.cat((torch.zeros(frozen), rising[1:-1], torch.ones(horizon - overlap)))
