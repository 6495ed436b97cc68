"""The few-step sampler of distilled weights (distribution matching; LingBot, Matrix-Game): noise levels, and one step.

A block begins as noise. At each level the network predicts the flow v (noise less clean latents); the clean latents are
``x0 = x - sigma * v``, and fresh noise brings them to the next, lower level: ``x = (1 - next) x0 + next * noise``. After the
last level x0 is the block. Levels are shifted towards noise: ``shift * s / (1 - s + shift * s)``.

Two published forms of LingBot differ in three numbers, so that a recipe says which: with ``table`` false, the levels are the
labels over 1,000, shifted, and timesteps are real numbers; with ``table`` true they are looked up in a table of 1,000 shifted
levels from 0.999 down to 0, whose timesteps are cut to integers: the level that x0 is computed with is the first entry with
the label's timestep, the level that noise is added at is the second where there are two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

TRAINED_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Level:
    """One denoise pass: ``timestep`` is what the network is told, 0..1000, ``sigma`` what x0 is computed with, ``renoise``
    the level at which the step before put its noise (1 for the first: pure noise)."""

    timestep: float
    sigma: float
    renoise: float


def shifted(sigma: float, shift: float) -> float:
    """``shift * sigma / (1 - sigma + shift * sigma)``."""
    return shift * sigma / (1 - sigma + shift * sigma)


def levels(labels: Sequence[int], shift: float, *, table: bool = False) -> tuple[Level, ...]:
    """The passes of a block, noisiest first. ``labels``: 1000 for pure noise, falling, above 0.

    Raises ValueError on labels that do not fall, or outside 1..1000, and on a shift that is not positive."""
    if (
        not labels
        or list(labels) != sorted(set(labels), reverse=True)
        or not 0 < labels[-1] <= labels[0] <= TRAINED_STEPS
    ):
        raise ValueError(f"labels must fall from at most {TRAINED_STEPS} to above 0, got {list(labels)}")
    if shift <= 0:
        raise ValueError(f"shift must be positive, got {shift}")
    if table:
        return _from_table(labels, shift)
    found = []
    for label in labels:
        sigma = shifted(label / TRAINED_STEPS, shift)
        found.append(Level(TRAINED_STEPS * sigma, sigma, sigma))
    return tuple(found)


def _from_table(labels: Sequence[int], shift: float) -> tuple[Level, ...]:
    uniform = np.linspace(0.999, 0.0, TRAINED_STEPS + 1)[:-1]
    sigmas = shift * uniform / (1 + (shift - 1) * uniform)
    timesteps = (sigmas * TRAINED_STEPS).astype(np.int64)
    found = []
    for label in labels:
        timestep = timesteps[TRAINED_STEPS - label]
        matches = np.flatnonzero(timesteps == timestep)
        second = matches[1] if len(matches) > 1 else matches[0]
        found.append(Level(float(timestep), float(sigmas[matches[0]]), float(sigmas[second])))
    return tuple(found)


def after_pass(
    levels: Sequence[Level], index: int, x: Tensor, flow: Tensor, noise: Callable[[int], Tensor]
) -> tuple[Tensor, Tensor]:
    """The clean block that pass ``index`` finds in ``x``, and what the next pass begins with: that with ``noise(index + 1)``;
    after the last, the clean block."""
    found = clean(x, flow, levels[index].sigma)
    if index + 1 == len(levels):
        return found, found
    return found, renoised(found, noise(index + 1), levels[index + 1].renoise)


def clean(x: Tensor, flow: Tensor, sigma: float) -> Tensor:
    """x0 = x - sigma * v, in float32."""
    return x.float() - sigma * flow.float()


def renoised(x0: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """(1 - sigma) x0 + sigma * noise."""
    return (1 - sigma) * x0 + sigma * noise
