"""Noise levels against the published numbers, and a step against its formula."""

from __future__ import annotations

import pytest
import torch

from realtime_omni.models.common.wan.sampler import clean, levels, renoised

LABELS = (1000, 750, 500, 250)


@pytest.mark.parametrize(
    ("shift", "sigmas"), [(5.0, (1, 0.9375, 0.833333, 0.625)), (10.0, (1, 0.967742, 0.909091, 0.769231))]
)
def test_levels_of_the_real_form(shift: float, sigmas: tuple[float, ...]) -> None:
    found = levels(LABELS, shift)
    assert [level.sigma for level in found] == pytest.approx(sigmas, abs=1e-6)
    assert [level.timestep for level in found] == pytest.approx([1000 * s for s in sigmas], abs=1e-3)
    assert all(level.renoise == level.sigma for level in found)


def test_levels_of_the_table() -> None:
    found = levels(LABELS, 5.0, table=True)
    assert [level.timestep for level in found] == [999, 937, 833, 624]
    assert [level.sigma for level in found] == pytest.approx((0.9998, 0.93789, 0.83361, 0.624687), abs=1e-5)
    assert found[1].renoise == pytest.approx(0.937578, abs=1e-6)
    assert all(level.renoise <= level.sigma for level in found)


@pytest.mark.parametrize("labels", [(), (250, 500), (1000, 1000), (1001,), (500, 0), (500, -1)])
def test_labels_that_do_not_fall_are_refused(labels: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="labels"):
        levels(labels, 5.0)


def test_a_step_recovers_what_was_noised() -> None:
    x0, noise = torch.randn(2, 3), torch.randn(2, 3)
    x = renoised(x0, noise, 0.8)
    assert torch.allclose(clean(x, noise - x0, 0.8), x0, atol=1e-6)


def test_a_network_that_knows_the_answer_needs_one_step_however_many_are_taken() -> None:
    torch.manual_seed(0)
    x0, x = torch.randn(4), torch.randn(4)
    for level, following in zip(levels(LABELS, 5.0), (*levels(LABELS, 5.0)[1:], None), strict=True):
        found = clean(x, (x - x0) / level.sigma, level.sigma)
        assert torch.allclose(found, x0, atol=1e-5)
        if following is not None:
            x = renoised(found, torch.randn(4), following.renoise)
