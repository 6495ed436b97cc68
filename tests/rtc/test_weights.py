"""Prefix weights and guidance weights against the paper's formulas, written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from realtime_omni.rtc.weights import Schedule, guidance_weight, prefix_weights


def test_linear_weights_by_hand() -> None:
    """H = 8, d = 2, end = 5: c_i = (5 - i) / 4 for i = 2, 3, 4."""
    assert prefix_weights(2, 5, 8, Schedule.LINEAR).tolist() == [1, 1, 0.75, 0.5, 0.25, 0, 0, 0]


def test_exponential_weights_by_hand() -> None:
    expected = [c * (math.exp(c) - 1) / (math.e - 1) for c in (0.75, 0.5, 0.25)]
    assert prefix_weights(2, 5, 8, Schedule.EXP).tolist() == pytest.approx([1, 1, *expected, 0, 0, 0], abs=1e-7)


@pytest.mark.parametrize(("schedule", "expected"), [(Schedule.ONES, 5), (Schedule.ZEROS, 2)])
def test_hard_masks(schedule: Schedule, expected: int) -> None:
    assert prefix_weights(2, 5, 8, schedule).tolist() == [1.0] * expected + [0.0] * (8 - expected)


def test_a_delay_beyond_the_end_is_cut_to_it() -> None:
    assert prefix_weights(7, 3, 8).tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_nothing_left_means_no_weight() -> None:
    assert not prefix_weights(2, 0, 8).any()


def test_an_end_beyond_the_horizon_is_refused() -> None:
    with pytest.raises(ValueError, match="horizon of 8"):
        prefix_weights(2, 9, 8)


def test_guidance_weight_is_the_papers_formula_and_clipped_at_both_ends() -> None:
    """At tau = 0.5: r^2 = 1/2, so 0.5 / (0.5 * 0.5) = 2; at tau = 0.2: r^2 = 0.64 / 0.68, 0.8 / (0.2 r^2) = 4.25."""
    weights = guidance_weight(torch.tensor([1.0, 0.8, 0.5, 0.01, 0.0]), 5.0)
    assert weights.tolist() == pytest.approx([5.0, 4.25, 2.0, 5.0, 5.0], abs=1e-5)
