"""Rounding to e4m3 as a Triton kernel: one read, one write, for tokens of any number, wherever they lie.

Owns the kernel. Triton comes with torch's CUDA builds; this module is imported on such a device only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _round_kernel(x, out, x_stride, out_stride, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    y = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.minimum(tl.maximum(y, -448.0), 448.0)
    tl.store(out + row * out_stride + at, y.to(tl.float8e4nv), mask=inside)


def fits(x: Tensor) -> bool:
    """Whether a token of x [tokens, heads, head_dim] is one run of memory."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def round_into(x: Tensor, out: Tensor) -> None:
    """``out`` = x cut at 448 and rounded, both [tokens, heads, head_dim] and such that they :func:`fits`."""
    tokens, width = x.shape[0], x.shape[1] * x.shape[2]
    kernel: Any = _round_kernel
    if tokens:
        with torch.cuda.device(x.device):
            grid = (tokens, triton.cdiv(width, _BLOCK))
            kernel[grid](x, out, x.stride(0), out.stride(0), width, BLOCK=_BLOCK, num_warps=4)
