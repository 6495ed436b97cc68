"""What is left of the chunk that is being executed, aligned to the ticks of the new one.

Shape legend: B rows, H actions per chunk, A action channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def remaining(chunk: Tensor, start_tick: int, tick: int) -> Tensor:
    """The actions [n, A] of a chunk [H, A] from ``tick`` on, when its action 0 belongs to ``start_tick``; n may be 0."""
    if tick < start_tick:
        raise ValueError(f"tick {tick} lies before the chunk's start {start_tick}")
    return chunk[min(tick - start_tick, len(chunk)) :]


@dataclass(frozen=True, slots=True)
class Previous:
    """``actions`` [B, H, A]: the old chunk's remaining actions, zero where none are left; ``length``: how many are, per row."""

    actions: Tensor
    length: tuple[int, ...]

    @staticmethod
    def of(rows: Sequence[Tensor | None], horizon: int, action_dim: int) -> Previous:
        """From each row's remaining actions [n, A'], A' <= action_dim, or None; what lies beyond the horizon is cut."""
        actions = torch.zeros(len(rows), horizon, action_dim)
        length = [0] * len(rows)
        for row, left in enumerate(rows):
            if left is not None:
                kept = left[:horizon]
                actions[row, : len(kept), : kept.shape[1]] = kept
                length[row] = len(kept)
        return Previous(actions, tuple(length))

    def to(self, device: torch.device | str) -> Previous:
        return Previous(self.actions.to(device), self.length)
