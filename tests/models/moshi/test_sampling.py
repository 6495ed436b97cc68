"""Tokens by chance: the right distribution, and the same for the same seed whoever shares the batch."""

from __future__ import annotations

import torch

from realtime_omni.models.moshi.sampling import Chance, draw, races


def test_frequencies_are_the_probabilities_of_the_best_candidates() -> None:
    """20,000 draws among the best three of five, at temperature 0.5: p ~ exp(logit / 0.5)."""
    logits = torch.tensor([1.0, 0.5, 0.8, -3.0, 0.0])
    chance = Chance(0.5, 3)
    many = 20_000
    won = draw(logits.expand(many, -1), chance, races(3, 0, many, 3))
    counts = torch.bincount(won, minlength=5) / many
    expected = torch.softmax(torch.tensor([2.0, 1.0, 1.6]), 0)
    assert counts[[3, 4]].tolist() == [0, 0]
    assert torch.allclose(counts[:3], expected, atol=0.015)  # four standard deviations


def test_a_row_draws_the_same_alone_and_in_a_batch() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    noise = torch.stack([races(seed, 9, 1, 10)[0] for seed in range(4)])
    together = draw(logits, Chance(0.8, 10), noise)
    alone = [draw(logits[i : i + 1], Chance(0.8, 10), races(i, 9, 1, 10)) for i in range(4)]
    assert together.tolist() == [int(each) for each in alone]
    assert not torch.equal(races(0, 9, 1, 10), races(0, 10, 1, 10))


def test_temperature_zero_is_the_likeliest() -> None:
    assert draw(torch.tensor([[0.1, 3.0, 2.0]]), Chance(0, 250), None).tolist() == [1]
