"""Temporal ensembling: every action is the weighted mean of what all overlapping chunks say about its tick.

Zhao et al. 2023 (arXiv 2304.13705): weight exp(-decay * i), i = 0 for the oldest chunk. Needs a chunk per tick to be smooth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stamped:
    """A chunk [H, A] whose action 0 belongs to tick ``start``."""

    start: int
    actions: Tensor

    @property
    def end(self) -> int:
        return self.start + len(self.actions)


def ensemble(chunks: Sequence[Stamped], tick: int, decay: float = 0.01) -> Tensor:
    """Actions [n, A] for every tick from ``tick`` to the end of the newest chunk. ``chunks``: oldest first, at least one.

    Raises ValueError when the newest chunk does not cover ``tick``."""
    newest = chunks[-1]
    if not newest.start <= tick < newest.end:
        raise ValueError(f"tick {tick} is not covered by the newest chunk, {newest.start} to {newest.end - 1}")
    return torch.stack(
        [_mean([c for c in chunks if c.start <= at < c.end], at, decay) for at in range(tick, newest.end)]
    )


def _mean(chunks: Sequence[Stamped], tick: int, decay: float) -> Tensor:
    said = torch.stack([chunk.actions[tick - chunk.start] for chunk in chunks])
    weights = torch.exp(-decay * torch.arange(len(chunks), dtype=said.dtype, device=said.device))
    return (weights[:, None] * said).sum(dim=0) / weights.sum()
