"""One query per row over pages where they lie: two Triton kernels, for CUDA. Imported on demand, since Triton comes with it.

``_partial`` goes over a part of a row's places for one head, token by token through the row's table, with a running softmax
(Milakov and Gimelshein 2018); ``_merge`` joins the parts, whose number fills the device when there are few rows (Dao et al.
2023, "Flash-Decoding"). Everything between a load and the store is float32. Nothing depends on other rows. Triton reads
the kernels' annotations, so they have none but its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 32
"""Tokens that a program loads at once."""
WARPS = 2
"""Of a program: 64 threads. With tiles of 32 the fastest of seven sizes on an H200 for 64 calls' full windows, at 0.85 of the
memory's speed (four warps: 0.53); ``recipes/gpu/moshi_speed.py --parts "paged 64"`` compares them."""
PROGRAMS = 4096
"""Enough for several waves over a device of 132 processors."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _partial(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    table,
    lengths,
    sums,
    tops,
    scale,
    places,
    part,
    heads: tl.constexpr,
    dim: tl.constexpr,
    tile: tl.constexpr,
):
    head, number, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channel = tl.arange(0, dim)
    query = tl.load(q + (row * heads + head) * dim + channel).to(tl.float32) * scale
    length = tl.load(lengths + row)
    first = number * part
    last = tl.minimum(first + part, length)
    top = tl.full([1], -1e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([dim], tl.float32)
    place = first + tl.arange(0, tile)
    slot = tl.load(table + row * places + place, mask=place < last, other=0)
    for _ in range(first, last, tile):
        there = place < last
        at = (slot.to(tl.int64)[:, None] * heads + head) * dim + channel[None, :]
        keys = tl.load(k + at, mask=there[:, None], other=0.0)
        values = tl.load(v + at, mask=there[:, None], other=0.0)
        place += tile  # the next slots are on their way while this tile is computed
        slot = tl.load(table + row * places + place, mask=place < last, other=0)
        scores = tl.where(there, tl.sum(keys.to(tl.float32) * query[None, :], 1), -1e30)
        higher = tl.maximum(top, tl.max(scores, 0))
        weights = tl.where(there, tl.exp(scores - higher), 0.0)
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, 0)
        mixed = mixed * shrink + tl.sum(weights[:, None] * values.to(tl.float32), 0)
        top = higher
    out = (row * heads + head) * tl.num_programs(1) + number
    tl.store(sums + out * dim + channel, mixed)
    one = tl.arange(0, 1)
    tl.store(tops + out * 2 + one, top)
    tl.store(tops + out * 2 + 1 + one, total)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _merge(sums, tops, out, parts: tl.constexpr, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    head = tl.program_id(0)
    channel, number = tl.arange(0, dim), tl.arange(0, parts)
    top = tl.load(tops + (head * parts + number) * 2)
    total = tl.load(tops + (head * parts + number) * 2 + 1)
    mixed = tl.load(sums + (head * parts + number)[:, None] * dim + channel[None, :])
    weights = tl.exp(top - tl.max(top, 0))
    whole = tl.sum(mixed * weights[:, None], 0) / tl.sum(total * weights, 0)
    tl.store(out + head * dim + channel, whole.to(out.dtype.element_ty))


def parts_of(rows: int, heads: int, places: int) -> int:
    """How many parts a row's places are cut into: a power of two."""
    parts = 1
    while parts < 64 and rows * heads * parts < PROGRAMS and places > parts * TILE:
        parts *= 2
    return parts


def decode(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """See :func:`realtime_omni.kv.attention.decode.attention`, whose shapes these are; all contiguous, head_dim a power of
    two. May be captured in a CUDA graph."""
    rows, heads, dim = q.shape
    places = table.shape[1]
    parts = parts_of(rows, heads, places)
    sums = q.new_empty((rows, heads, parts, dim), dtype=torch.float32)
    tops = q.new_empty((rows, heads, parts, 2), dtype=torch.float32)
    out = torch.empty_like(q)
    part = -(-places // parts)
    _partial[heads, parts, rows](
        q, k, v, table, lengths, sums, tops, dim**-0.5, places, part, heads, dim, TILE, num_warps=WARPS
    )
    _merge[(rows * heads,)](sums, tops, out, parts, dim, num_warps=4)
    return out
