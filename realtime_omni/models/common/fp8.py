"""Matrices in eight bits: products of e4m3 numbers, summed in float32.

A weight keeps one scale per output channel, found once when it is loaded. An activation gets one scale per token, found as
it comes: its largest magnitude over 448, the largest number of e4m3. Both scales leave the product again::

    y[t, n] = (sum over k of xq[t, k] * wq[n, k]) * x_scale[t] * w_scale[n] + bias[n]

On CUDA this is one ``torch._scaled_mm`` (capability 8.9 or more); elsewhere the same numbers are multiplied in float32, so
that what quantising does to a model can be tested anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from realtime_omni.float8 import LARGEST, to_e4m3

_SMALLEST = 1e-12
"""Below it a row counts as zeros; its scale must not."""


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [..., K] and float32 scales [..., 1] of rows [..., K], so that ``x`` is about their product."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(_SMALLEST) / LARGEST
    return to_e4m3(x.float() / scale), scale


class Fp8Linear(nn.Module):
    """What :class:`torch.nn.Linear` does, see the module. ``weight`` e4m3 [out, in], ``scale`` float32 [1, out]."""

    bias: nn.Parameter | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Quantises ``weight`` [out, in], whose sides must be multiples of 16."""
        super().__init__()
        if weight.shape[0] % 16 or weight.shape[1] % 16:
            raise ValueError(
                f"a matrix of {tuple(weight.shape)} has no 8-bit kernel: its sides must be multiples of 16"
            )
        stored, scale = quantised(weight.detach())
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.scale = nn.Parameter(scale.t().contiguous(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out] of the same dtype."""
        return self.product(*quantised(x.reshape(-1, x.shape[-1])), x.dtype).view(*x.shape[:-1], -1)

    def product(self, rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """[rows, out] of ``dtype`` from what :func:`quantised` yields: e4m3 [rows, in], float32 [rows, 1]."""
        if rows.is_cuda:
            return torch._scaled_mm(
                rows,
                self.weight.t(),
                scale_a=scale,
                scale_b=self.scale,
                bias=self.bias,
                out_dtype=dtype,
                use_fast_accum=True,
            )
        product = (rows.float() @ self.weight.float().t()) * scale * self.scale
        return (product if self.bias is None else product + self.bias.float()).to(dtype)


def quantise(module: nn.Module, names: Iterable[str]) -> None:
    """Exchange the linear maps of these dotted names, one by one, so that no two copies of all weights exist at once."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        owner: Any = module.get_submodule(parent)
        linear = getattr(owner, leaf)
        setattr(owner, leaf, Fp8Linear(linear.weight, linear.bias))
