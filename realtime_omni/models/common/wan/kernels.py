"""Triton kernels of a layer in eight bits: what lies between two matrix products, each read from memory once.

A program has one token: its whole row stays in registers from the first load to the rounded numbers. A compiler's code for the
same chain read it two to four times and took about three times as long. Owns the kernels and how they are launched; their
meaning is written out in :mod:`.fused`, which the tests hold them to. Triton comes with torch's CUDA builds and is imported
here only.

Rows are those of contiguous tensors ``[samples, tokens, width]``; ``sample = row // tokens``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from realtime_omni.float8 import E4M3

_SIZES = [triton.Config({}, num_warps=warps) for warps in (4, 8, 16)]
"""Of a program; which is fastest depends on the GPU and the row, and is found at a kernel's first launch of each kind."""


@triton.jit
def _store_rounded(y, rows, scales, row, at, inside, width):  # type: ignore[no-untyped-def]
    """A row as e4m3 and its scale: the largest magnitude over 448."""
    scale = tl.maximum(tl.max(tl.abs(y), axis=0), 1e-12) / 448.0
    tl.store(scales + row, scale)
    y = tl.minimum(tl.maximum(y / scale, -448.0), 448.0)
    tl.store(rows + row * width + at, y.to(tl.float8e4nv), mask=inside)


@triton.autotune(configs=_SIZES, key=["width", "ADDED", "GATED", "CAMERA", "NORMED"])  # type: ignore[untyped-decorator]
@triton.jit  # type: ignore[untyped-decorator]
def _mix_kernel(  # type: ignore[no-untyped-def]
    x,
    part,
    gate,
    camera_scale,
    camera_shift,
    gain,
    offset,
    out,
    rows,
    scales,
    tokens,
    gate_stride,
    norm_stride,
    eps,
    width: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
    CAMERA: tl.constexpr,
    NORMED: tl.constexpr,
    ABOUT_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sample = row // tokens
    at = tl.arange(0, BLOCK)
    inside = at < width
    here = row * width + at
    y = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        more = tl.load(part + here, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            more = more * tl.load(gate + sample * gate_stride + at, mask=inside, other=0.0)
        y = y + more
        if CAMERA:
            y = y.to(out.dtype.element_ty).to(tl.float32)
            scale = tl.load(camera_scale + here, mask=inside, other=0.0).to(tl.float32)
            y = (1.0 + scale) * y + tl.load(camera_shift + here, mask=inside, other=0.0).to(tl.float32)
        stored = y.to(out.dtype.element_ty)
        tl.store(out + here, stored, mask=inside)
        y = stored.to(tl.float32)
    if NORMED:
        mean = tl.sum(y, axis=0) / width
        y = tl.where(inside, y - mean, 0.0)
        y = y * (1.0 / tl.sqrt(tl.sum(y * y, axis=0) / width + eps))
        factor = tl.load(gain + sample * norm_stride + at, mask=inside, other=0.0).to(tl.float32)
        if ABOUT_ONE:
            factor = 1.0 + factor
        y = y * factor + tl.load(offset + sample * norm_stride + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.where(inside, y, 0.0).to(x.dtype.element_ty).to(tl.float32)
        _store_rounded(y, rows, scales, row, at, inside, width)


@triton.autotune(configs=_SIZES, key=["width", "GELU", "SILU"])  # type: ignore[untyped-decorator]
@triton.jit  # type: ignore[untyped-decorator]
def _activate_kernel(  # type: ignore[no-untyped-def]
    x, rows, scales, width: tl.constexpr, GELU: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    y = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # tanh(u) = 2 sigmoid(2 u) - 1 makes the tanh form y * sigmoid(2 u).
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
        y = y.to(x.dtype.element_ty).to(tl.float32)
    if SILU:
        y = (y * tl.sigmoid(y)).to(x.dtype.element_ty).to(tl.float32)
    _store_rounded(y, rows, scales, row, at, inside, width)


@triton.autotune(configs=_SIZES, key=["width", "TURNED", "ROUNDED"])  # type: ignore[untyped-decorator]
@triton.jit  # type: ignore[untyped-decorator]
def _head_kernel(  # type: ignore[no-untyped-def]
    x,
    weights,
    cos,
    sin,
    rounded,
    out,
    total,
    x_stride,
    eps,
    width: tl.constexpr,
    half: tl.constexpr,
    TURNED: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    y = tl.load(x + row * x_stride + which * width + at, mask=inside, other=0.0).to(tl.float32)
    y = y * (1.0 / tl.sqrt(tl.sum(y * y, axis=0) / width + eps))
    y = y * tl.load(weights + which * width + at, mask=inside, other=0.0).to(tl.float32)
    if TURNED:
        first, second = tl.split(tl.reshape(y.to(x.dtype.element_ty).to(tl.float32), (BLOCK // 2, 2)))
        angle = row * half + tl.arange(0, BLOCK // 2) % half
        c = tl.load(cos + angle)
        s = tl.load(sin + angle)
        y = tl.interleave(first * c - second * s, first * s + second * c)
    if ROUNDED and which == 0:
        y = y.to(out.dtype.element_ty).to(tl.float32)
        y = tl.minimum(tl.maximum(y, -448.0), 448.0)
        tl.store(rounded + row * width + at, y.to(tl.float8e4nv), mask=inside)
    else:
        tl.store(out + which * total + row * width + at, y.to(out.dtype.element_ty), mask=inside)


def _block(width: int) -> int:
    return int(triton.next_power_of_2(width))


def _rounded_like(x: Tensor) -> tuple[Tensor, Tensor]:
    count = x.numel() // x.shape[-1]
    return (
        torch.empty(count, x.shape[-1], dtype=E4M3, device=x.device),
        torch.empty(count, 1, dtype=torch.float32, device=x.device),
    )


def mix(
    x: Tensor,
    part: Tensor | None,
    gate: Tensor | None,
    camera: tuple[Tensor, Tensor] | None,
    norm: tuple[Tensor, Tensor] | None,
    *,
    about_one: bool,
    eps: float,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """See ``fused.TorchOperations.mix``."""
    count, width = x.numel() // x.shape[-1], x.shape[-1]
    out = x if part is None else torch.empty_like(x)
    rounded = None if norm is None else _rounded_like(x)
    gain, offset = (x, x) if norm is None else norm
    if gain.stride() != offset.stride() or gain.stride(-1) != 1:
        raise ValueError("gain and offset must be laid out alike")
    rows, scales = (x, x) if rounded is None else rounded
    camera_scale, camera_shift = (x, x) if camera is None else camera
    _launch(
        _mix_kernel,
        (count,),
        x,
        x if part is None else part,
        x if gate is None else gate,
        camera_scale,
        camera_shift,
        gain,
        offset,
        out,
        rows,
        scales,
        x.shape[-2],
        0 if gate is None else gate.stride(0),
        gain.stride(0) if norm is not None and gain.dim() == 2 else 0,
        eps,
        width=width,
        ADDED=part is not None,
        GATED=gate is not None,
        CAMERA=camera is not None,
        NORMED=norm is not None,
        ABOUT_ONE=about_one,
        BLOCK=_block(width),
    )
    return out, rounded


def activate(x: Tensor, function: str = "") -> tuple[Tensor, Tensor]:
    """See ``fused.TorchOperations.activate``."""
    rows, scales = _rounded_like(x)
    width = x.shape[-1]
    chosen = {"GELU": function == "gelu", "SILU": function == "silu"}
    _launch(_activate_kernel, (len(rows),), x, rows, scales, width=width, **chosen, BLOCK=_block(width))
    return rows, scales


def heads(
    x: Tensor, weights: Tensor, angles: tuple[Tensor, Tensor] | None, *, half: int, eps: float, rounded: bool = False
) -> tuple[Tensor, ...]:
    """See ``fused.TorchOperations.heads``."""
    number, width = weights.shape
    count = x.numel() // x.shape[-1]
    out = torch.empty(number, *x.shape[:-1], width, dtype=x.dtype, device=x.device)
    first = torch.empty(*x.shape[:-1], width, dtype=E4M3, device=x.device) if rounded else out[0]
    cos, sin = (weights, weights) if angles is None else angles
    _launch(
        _head_kernel,
        (count, number),
        x,
        weights,
        cos,
        sin,
        first,
        out,
        count * width,
        x.shape[-1],
        eps,
        width=width,
        half=half,
        TURNED=angles is not None,
        ROUNDED=rounded,
        BLOCK=_block(width),
    )
    return first, *out[1:]


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    with torch.cuda.device(args[0].device):
        kernel[grid](*args, **kwargs)
