"""The sampler of tiny-world: pure functions on noise levels and pictures.

Owns: the list of noise levels and one update. It draws no random numbers: the caller gives
the noise, a function of (seed, block, step), so that a rollout can be repeated exactly.

A block is sampled as:

    x = noise                                  # level 1
    for level, following in pairs(schedule(steps, shift)):
        x0 = net(x, level, ...)
        x = step(x, x0, level, following)      # after the last pair, x is x0

and then one pass at `context_noise` (0) writes the block's keys and values.
"""

from __future__ import annotations

from torch import Tensor


def schedule(steps: int, shift: float) -> tuple[float, ...]:
    """`steps + 1` falling noise levels from 1 to 0.

    The uniform levels u are shifted towards noise, shift * u / (1 + (shift - 1) * u), as for
    rectified flow at higher resolutions (Esser et al. 2024, arXiv 2403.03206, eq. 23).
    """
    if steps < 1 or shift <= 0:
        raise ValueError("steps must be at least 1 and shift positive")
    uniform = [1 - i / steps for i in range(steps + 1)]
    return tuple(shift * u / (1 + (shift - 1) * u) for u in uniform)


def step(x: Tensor, x0: Tensor, level: float, following: float) -> Tensor:
    """One Euler step of the rectified flow from `level` to the lower level `following`.

    With x = (1 - level) * x0 + level * noise, the velocity is (x - x0) / level, so the step
    is a blend of the present picture and the prediction; at `following` 0 it is x0 itself.
    """
    keep = following / level
    return x0 + keep * (x - x0)


def add_noise(x0: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """(1 - level) * x0 + level * noise, level [B, F] broadcast over the picture."""
    level = level[..., None, None, None].to(x0.dtype)
    return (1 - level) * x0 + level * noise
