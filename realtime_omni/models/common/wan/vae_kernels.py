"""A Triton kernel of Wan's autoencoder: its norm over channels and SiLU behind it, one read and one write.

As torch operations the two go over the pictures some ten times, in float32, and cost about as much as the convolutions. Owns
the kernel. Imported on CUDA only; the meaning is diffusers' ``WanRMS_norm`` and ``torch.nn.SiLU``, rounded at the same places.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096
"""Of one program."""


@triton.jit  # type: ignore[untyped-decorator]
def _norm_silu_kernel(  # type: ignore[no-untyped-def]
    x, gamma, out, rows, factor, width: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (at < width)
    y = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(y * y, axis=1)), 1e-12)[:, None]
    kind = out.dtype.element_ty
    y = ((y / length).to(kind).to(tl.float32) * factor).to(kind).to(tl.float32)
    y = (y * tl.load(gamma + at, mask=at < width, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    tl.store(out + row * width + at, (y * tl.sigmoid(y)).to(kind), mask=inside)


def norm_silu(x: Tensor, gamma: Tensor, factor: float) -> Tensor:
    """SiLU of ``factor * gamma * x / |x|`` over channels; x [1, C, T, H, W] laid out channels last, gamma [C]."""
    width = x.shape[1]
    out, rows = torch.empty_like(x), x.numel() // width
    block = int(triton.next_power_of_2(width))
    each = max(_ELEMENTS // block, 1)
    kernel: Any = _norm_silu_kernel
    with torch.cuda.device(x.device):
        kernel[(triton.cdiv(rows, each),)](x, gamma, out, rows, factor, width=width, ROWS=each, BLOCK=block)
    return out
