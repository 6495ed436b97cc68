"""Matrices in eight bits: the error that e4m3 must have and no more, what saturates, and a network that is quantised."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from realtime_omni.float8 import LARGEST, to_e4m3
from realtime_omni.models.common.fp8 import Fp8Linear, quantise, quantised


def test_a_row_is_within_half_a_step_of_e4m3() -> None:
    """Three bits of fraction: a relative error of at most 1/16, whatever the row's size."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 64)[:, None]
    stored, scale = quantised(x)
    back = stored.float() * scale
    normal = x.abs() > scale * 2.0**-6  # below it e4m3 has fewer bits
    assert ((back - x).abs() <= x.abs() / 16 * 1.0001)[normal].all()
    assert torch.equal(stored.float().abs().amax(-1), torch.full((64,), LARGEST))


def test_zeros_stay_zeros_and_what_is_too_large_is_the_largest() -> None:
    stored, scale = quantised(torch.zeros(2, 16))
    assert not stored.float().any()
    assert scale.isfinite().all()
    assert to_e4m3(torch.tensor([1e9, -1e9, 448.0])).float().tolist() == [448.0, -448.0, 448.0]


def test_a_product_is_that_of_the_rounded_numbers_written_out() -> None:
    generator = torch.Generator().manual_seed(1)
    linear = nn.Linear(32, 48).requires_grad_(False)
    x = torch.randn(2, 5, 32, generator=generator)
    got = Fp8Linear(linear.weight, linear.bias)(x)
    for row in range(2):
        for token in range(5):
            a = x[row, token].double()
            a_scale = a.abs().max() / 448
            a_q = (a / a_scale).float().to(torch.float8_e4m3fn).double()
            for n in (0, 17, 47):
                w = linear.weight[n].double()
                w_scale = w.abs().max() / 448
                w_q = (w / w_scale).float().to(torch.float8_e4m3fn).double()
                want = float((a_q * w_q).sum() * a_scale * w_scale + linear.bias[n].double())
                assert float(got[row, token, n]) == pytest.approx(want, abs=1e-4)


def test_the_error_of_a_layer_is_a_few_percent() -> None:
    """Two rounded factors of relative error up to 1/16 each, uniform: about 3.6 percent in the root mean square."""
    generator = torch.Generator().manual_seed(2)
    linear = nn.Linear(1024, 256).requires_grad_(False)
    x = torch.randn(64, 1024, generator=generator)
    plain, eight = linear(x), Fp8Linear(linear.weight, linear.bias)(x)
    error = float((eight - plain).norm() / plain.norm())
    assert 0.01 < error < 0.05


def test_matrices_are_exchanged_by_name_and_others_are_left() -> None:
    network = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(16, 32)]), "b": nn.Linear(16, 16)})
    kept = network["b"].weight
    quantise(network, ["a.0"])
    assert isinstance(network["a"][0], Fp8Linear)
    assert network["a"][0].weight.dtype == torch.float8_e4m3fn
    assert network["b"].weight is kept


def test_sides_that_have_no_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        Fp8Linear(torch.zeros(24, 16), None)
