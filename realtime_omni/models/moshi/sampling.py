"""From logits to tokens: the likeliest, or by chance that depends on (seed, step) alone.

Chance is an exponential race: with q ~ Exp(1) independent per candidate, ``argmax(p / q)`` is distributed as p. The q of a
step are drawn at once, per row, from a counter-based key, so that batch, order and retries never change a call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from realtime_omni.models.common.noise import noise_key


@dataclass(frozen=True, slots=True)
class Chance:
    """How one kind of token is drawn. ``temperature`` 0: the likeliest. ``top_k`` 0: among all."""

    temperature: float
    top_k: int

    def width(self, card: int) -> int:
        """Candidates of a draw; 0 where nothing is drawn."""
        if not self.temperature:
            return 0
        return min(self.top_k, card) if self.top_k else card


TEXT = Chance(0.7, 25)
AUDIO = Chance(0.8, 250)
"""Kyutai's defaults."""


def races(seed: int, chunk_index: int, draws: int, width: int) -> Tensor:
    """float32 [draws, width] ~ Exp(1) for one step of one row."""
    generator = torch.Generator().manual_seed(noise_key(seed, chunk_index, 0))
    return torch.empty(draws, width, device="cpu").exponential_(generator=generator)


def draw(logits_BV: Tensor, chance: Chance, races_BW: Tensor | None) -> Tensor:
    """Tokens int64 [B] from float32 logits; the first ``width`` columns of ``races_BW`` are used."""
    if not chance.temperature:
        return logits_BV.argmax(dim=-1)
    assert races_BW is not None
    width = chance.width(logits_BV.shape[-1])
    scaled, candidates = (logits_BV / chance.temperature).topk(width, dim=-1)
    winner = (scaled - races_BW[:, :width].log()).argmax(dim=-1, keepdim=True)  # log(p / q), up to a constant
    return candidates.gather(-1, winner).squeeze(-1)
