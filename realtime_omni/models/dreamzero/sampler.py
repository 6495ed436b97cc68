"""The sampler: UniPC (Zhao et al. 2023, arXiv 2302.04867) for flow matching, order two, with its corrector.

Owns the schedule and the arithmetic of a step. Pictures and actions have a solver each; what a solver remembers is a value.
With ``x_s = (1 - s) x0 + s noise`` and half the log signal-to-noise ratio ``l_s = log((1 - s) / s)``, a step from level ``s``
to ``t`` with ``h = l_t - l_s`` and ``r = (l_s' - l_s) / h``, from the predictions ``m`` of x0 at ``s`` and ``m'`` at the level
``s'`` before it (variant B2; the first and the last step without ``m'``)::

    predict   x_t = t / s x_s - (1 - t) (e^-h - 1) (m + (m' - m) / 2 r)
    correct   the same step again once x0 was predicted at ``t``, too: a weighted sum of both differences takes the place of
              ``(m' - m) / 2 r``; what is predicted next goes on from there

The schedule: N levels of ``linspace(0.999, 0, N + 1)[:-1]`` shifted by ``k s / (1 + (k - 1) s)``, then 0; the network is told
``trunc(1000 s)``. Held in the tests to diffusers' ``UniPCMultistepScheduler``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

TRAINED_STEPS = 1000
HIGHEST = 0.999
"""Level of pure noise, before it is shifted: that of the first of the trained steps."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """``sigmas``: one level more than there are steps, falling."""

    sigmas: tuple[float, ...]

    @classmethod
    def of(cls, steps: int, shift: float, *, final_noise: float = 0.0) -> Schedule:
        """``final_noise``: the level at which the last step ends; the others are squeezed in front of it.

        Raises ValueError on a number that makes no schedule."""
        if steps < 1 or shift <= 0 or not 0 <= final_noise < 1:
            raise ValueError(f"no schedule of {steps} steps, shift {shift}, final noise {final_noise}")
        uniform = np.linspace(HIGHEST, 0.0, steps + 1)
        sigmas = shift * uniform / (1 + (shift - 1) * uniform)
        sigmas = sigmas * (sigmas[0] - final_noise) / sigmas[0] + final_noise
        return cls(tuple(float(sigma) for sigma in sigmas))

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    def timestep(self, step: int) -> int:
        """What the network is told, 0..999."""
        return int(TRAINED_STEPS * self.sigmas[step])

    def log_ratio(self, step: int) -> float:
        """l at one of the levels; infinite at 0."""
        sigma = self.sigmas[step]
        return math.log((1 - sigma) / sigma) if sigma else math.inf


@dataclass(frozen=True, slots=True)
class Memory:
    """Between two steps: the (corrected) sample that the last one went on from, predictions of x0 with the latest last, and
    the order of the last prediction."""

    sample: Tensor
    clean: tuple[Tensor, ...]
    order: int


def step(schedule: Schedule, index: int, x: Tensor, flow: Tensor, memory: Memory | None) -> tuple[Tensor, Memory]:
    """From level ``index`` to the next: x and flow of any shape, computed in float32. ``memory``: of step ``index - 1``."""
    x, flow = x.float(), flow.float()
    clean = x - schedule.sigmas[index] * flow
    past: tuple[Tensor, ...] = ()
    order = 1
    if memory is not None:
        x = _corrected(schedule, index, clean, memory)
        past = memory.clean[-1:]
        order = min(2, schedule.steps - index)
    return _predicted(schedule, index, x, clean, past, order), Memory(x, (*past, clean), order)


def _predicted(
    schedule: Schedule, index: int, x: Tensor, clean: Tensor, past: tuple[Tensor, ...], order: int
) -> Tensor:
    sigma, target = schedule.sigmas[index], schedule.sigmas[index + 1]
    h = schedule.log_ratio(index + 1) - schedule.log_ratio(index)
    weight = (1 - target) * math.expm1(-h)
    following = target / sigma * x - weight * clean
    if order == 2:
        ratio = (schedule.log_ratio(index - 1) - schedule.log_ratio(index)) / h
        following = following - weight * 0.5 * (past[-1] - clean) / ratio
    return following


def _corrected(schedule: Schedule, index: int, clean: Tensor, memory: Memory) -> Tensor:
    """The sample at level ``index``, now that x0 was predicted there."""
    before = index - 1
    sigma, target = schedule.sigmas[before], schedule.sigmas[index]
    h = schedule.log_ratio(index) - schedule.log_ratio(before)
    weight = (1 - target) * math.expm1(-h)
    base = memory.clean[-1]
    difference = 0.5 * (clean - base)
    if memory.order == 2:
        ratio = (schedule.log_ratio(before - 1) - schedule.log_ratio(before)) / h
        outer, inner = _weights(ratio, -h)
        difference = outer * (memory.clean[-2] - base) / ratio + inner * (clean - base)
    return target / sigma * memory.sample - weight * base - weight * difference


def _weights(ratio: float, hh: float) -> tuple[float, float]:
    """Of the two differences in a corrector of order two: the solution of the 2 x 2 system of the paper's equation for B2."""
    first = math.expm1(hh) / hh - 1
    second = first / hh - 0.5
    b1, b2 = first / math.expm1(hh), 2 * second / math.expm1(hh)
    outer = (b2 - b1) / (ratio - 1)
    return outer, b1 - outer
