"""Counter-based noise: a pure function of (seed, chunk, step), so that order, batch and retries never change a world.

The three counters are mixed into one 64-bit key with SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable
pseudorandom number generators", the finaliser's constants) and the key seeds a generator that is used once. Drawn on
the CPU and moved, so that every device sees the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def noise_key(seed: int, chunk_index: int, step: int) -> int:
    """The 64-bit key of one draw."""
    return _mix(_mix(_mix(seed & _MASK) ^ chunk_index) ^ step)


def block_noise(
    seed: int,
    chunk_index: int,
    step: int,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Standard normal numbers of ``shape`` for one denoise step of one chunk: the same on every device. To a CUDA device
    they are copied without waiting for what it does."""
    generator = torch.Generator().manual_seed(noise_key(seed, chunk_index, step))
    paged = torch.device(device).type != "cuda"
    noise = torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu", pin_memory=not paged)
    return noise.to(device=device, non_blocking=not paged).to(dtype)
