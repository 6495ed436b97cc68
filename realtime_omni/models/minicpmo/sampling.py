"""From logits to tokens: the likeliest, or by chance that depends on (seed, unit) alone.

Source of the rules: OpenBMB's duplex runtime (Apache-2.0), read as facts. A draw needs one uniform number: the candidate in
whose share of the sum it falls. All numbers of a unit are drawn at once from a counter-based key, so that batch, order and
retries never change a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realtime_omni.models.common.noise import noise_key
from realtime_omni.models.minicpmo.network import sent
from realtime_omni.models.minicpmo.vocabulary import Marks

REMEMBERED = 512
"""Words that make themselves less likely."""
RECENT_CODES = 16


@dataclass(frozen=True, slots=True)
class TextChance:
    """``temperature`` 0: the likeliest. ``repetition`` divides logits of words that were chosen lately; ``length`` those of
    the end of a turn: above 1 it makes turns longer."""

    temperature: float = 0.7
    top_k: int = 20
    top_p: float = 0.8
    repetition: float = 1.05
    length: float = 1.1


@dataclass(frozen=True, slots=True)
class CodeChance:
    """``temperature`` 0: the likeliest. ``repetition`` to the power of how often a code came among the last 16."""

    temperature: float = 0.8
    repetition: float = 1.05


TEXT, CODES = TextChance(), CodeChance()
"""OpenBMB's defaults."""


def uniforms(seed: int, chunk_index: int, draws: int) -> list[float]:
    """Numbers in [0, 1) for one unit of one call."""
    generator = torch.Generator().manual_seed(noise_key(seed, chunk_index, 0))
    numbers: list[float] = torch.rand(draws, generator=generator, dtype=torch.float64, device="cpu").tolist()
    return numbers


def choose_words(
    logits_BV: Tensor,
    marks: Marks,
    chance: TextChance,
    chosen: Sequence[Sequence[int]],
    draws: Sequence[tuple[float, float]],
) -> list[int]:
    """One token a row from float32 logits. ``chosen``: what each row chose before, newest last; ``draws``: two a row.

    Whether the unit ends (``<|chunk_eos|>``) is drawn first, from the model's own shares; if not, a word among the best."""
    ends = logits_BV.softmax(-1)[:, marks.chunk_eos] if chance.temperature else None
    greedy = logits_BV.argmax(-1) == marks.chunk_eos if ends is None else None
    never = sent([*marks.forbidden, marks.chunk_eos], logits_BV.device)
    logits = logits_BV.index_fill(1, never, -torch.inf)
    known = _times([before[-REMEMBERED:] for before in chosen], logits) > 0
    logits = torch.where(known, logits / chance.repetition, logits)  # where below 0 likelier, as the reference does
    turn_end = logits[:, marks.turn_eos]
    logits[:, marks.turn_eos] = torch.where(turn_end > 0, turn_end / chance.length, turn_end * chance.length)
    if greedy is not None:
        best = logits.argmax(-1)
        return torch.where(greedy, marks.chunk_eos, best).tolist()
    assert ends is not None
    values, candidates = (logits / chance.temperature).topk(min(chance.top_k, logits.shape[-1]), dim=-1)
    shares = values.softmax(-1)
    kept = shares.cumsum(-1) - shares <= chance.top_p  # the one that crosses the bound stays
    shares = (shares * kept).double()
    drawn = sent(draws, logits.device, torch.float64)
    words = candidates.gather(-1, _fallen(shares, drawn[:, 1])[:, None])[:, 0]
    return torch.where(drawn[:, 0] < ends, marks.chunk_eos, words).tolist()


def choose_codes(
    logits_BV: Tensor,
    chance: CodeChance,
    chosen: Sequence[Sequence[int]],
    may_end: Sequence[bool],
    draws: Sequence[float],
) -> list[int]:
    """One code a row from float32 logits; the last of V ends the speech, where it may. ``chosen``: a row's codes of
    this unit."""
    logits = logits_BV / chance.temperature if chance.temperature else logits_BV.clone()
    if chance.repetition != 1:
        factor = chance.repetition ** _times([before[-RECENT_CODES:] for before in chosen], logits)
        logits = torch.where(logits < 0, logits * factor, logits / factor)
    stays = sent([not may for may in may_end], logits.device, torch.bool)
    logits[:, -1] = logits[:, -1].masked_fill(stays, -torch.inf)
    if not chance.temperature:
        return logits.argmax(-1).tolist()
    draw = sent(draws, logits.device, torch.float64)
    return _fallen(logits.double().softmax(-1), draw).tolist()


def _times(chosen: Sequence[Sequence[int]], like_BV: Tensor) -> Tensor:
    """How often each token was chosen, [B, V]."""
    width, size = max(map(len, chosen)), like_BV.shape[1]
    padded = sent([[*before, *[size] * (width - len(before))] for before in chosen], like_BV.device)
    counts = like_BV.new_zeros(len(chosen), size + 1)
    return counts.scatter_add_(1, padded, torch.ones_like(padded, dtype=counts.dtype))[:, :size]


def _fallen(shares_BN: Tensor, draw_B: Tensor) -> Tensor:
    """Which share each number in [0, 1) falls into, int64 [B]; never one of 0."""
    edges = shares_BN.cumsum(-1)
    place = torch.searchsorted(edges, (draw_B * edges[:, -1])[:, None], right=True)[:, 0]
    return torch.where(
        place == shares_BN.shape[1], shares_BN.argmax(-1), place
    )  # a product that was rounded up to the sum
