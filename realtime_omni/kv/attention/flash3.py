"""FlashAttention-3's forward kernels (package ``fa3-fwd``), where they are installed: Hopper, bfloat16 and e4m3.

On an H200 one layer of LingBot, 4,680 queries of 28,080 keys and 40 heads of 128, takes 3.90 ms in bfloat16 (cuDNN 4.64) and
2.83 ms in e4m3 (cuDNN 3.25 at best). Owns finding the package and how a call is cut; knows nothing of pages.

A kernel gives 128 queries of a head to each processor of the GPU, wave after wave, and the last wave lasts as long as a full
one. Those 4,680 queries are 37 * 40 tiles, 11.2 waves of 132: they cost 12. So queries that fill whole waves are one call, and
what is left is another that shares each tile's keys among processors; where that is faster, which is measured once for a shape.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor

from realtime_omni.errors import BackendUnavailable
from realtime_omni.float8 import E4M3
from realtime_omni.kv.attention.sdpa import TorchKernel

log = logging.getLogger(__name__)

Cut = tuple[int, int]
"""Queries of the first call, and among how many processors the second shares a tile's keys."""

_PACKAGE = "fa3_fwd_interface"
_HEAD_DIMS = (64, 128, 256)
_TILE = 128
_ROUNDS = 4


def find() -> Flash3 | None:
    """The kernels, where package and GPU are there; None, and a line in the log where the package does not load."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    if importlib.util.find_spec(_PACKAGE) is None:
        return None
    try:
        return load()
    except BackendUnavailable:
        log.exception("FlashAttention-3 is installed and does not load; attention is by cuDNN")
        return None


def load() -> Flash3:
    """The kernels. Raises BackendUnavailable."""
    try:
        importlib.import_module(_PACKAGE)  # registers the operator
        return Flash3(torch.ops.fa3_fwd.fwd)
    except (ImportError, OSError, AttributeError) as error:
        raise BackendUnavailable(f"attention by FlashAttention-3 needs fa3-fwd: {error}") from error


def cut_of(rows: int, tokens: int, heads: int, processors: int) -> Cut | None:
    """How a call may be cut; None: it fills its waves, or is too small or too large beyond them."""
    blocks, tiles_of_block = -(-tokens // _TILE), rows * heads
    whole = blocks * tiles_of_block // processors * processors // tiles_of_block
    if not 0 < whole < blocks:
        return None
    shares = processors // ((blocks - whole) * tiles_of_block)
    return (whole * _TILE, shares) if shares > 1 else None


class Flash3:
    """``attend(q, k, v)``: [rows, T, heads, head_dim] of bfloat16, or e4m3 numbers as they are; bfloat16 of q's shape."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self._cuts: dict[tuple[object, ...], Cut | None] = {}

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shape = (q.shape, keys.shape, q.dtype)
        if shape not in self._cuts and not torch.cuda.is_current_stream_capturing():
            self._cuts[shape] = self._faster(q, keys, values)
        return self._run(q, keys, values, self._cuts.get(shape))

    def _run(self, q: Tensor, keys: Tensor, values: Tensor, cut: Cut | None) -> Tensor:
        out = torch.empty_like(q, dtype=torch.bfloat16 if q.dtype == E4M3 else q.dtype)
        tokens = q.shape[1]
        for first, end, shares in ((0, tokens, 1),) if cut is None else ((0, cut[0], 1), (cut[0], tokens, cut[1])):
            self._operator(
                q[:, first:end],
                keys,
                values,
                out=out[:, first:end],
                softmax_scale=q.shape[-1] ** -0.5,
                num_splits=shares,
            )
        return out

    def _faster(self, q: Tensor, keys: Tensor, values: Tensor) -> Cut | None:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        cut = cut_of(q.shape[0], q.shape[1], q.shape[2], processors)
        if cut is None:
            return None
        try:
            faster = self._ms(q, keys, values, cut) < self._ms(q, keys, values, None)
        except RuntimeError:
            log.exception("attention cannot be cut and is one call shape=%s", tuple(q.shape))
            return None
        return cut if faster else None

    def _ms(self, q: Tensor, keys: Tensor, values: Tensor, cut: Cut | None) -> float:
        taken = []
        with torch.cuda.device(q.device):
            for _ in range(_ROUNDS):
                event: Any = torch.cuda.Event
                begin, end = event(enable_timing=True), event(enable_timing=True)
                begin.record()
                self._run(q, keys, values, cut)
                end.record()
                end.synchronize()
                taken.append(float(begin.elapsed_time(end)))
        return min(taken)


class Flash3Kernel(TorchKernel):
    """A :class:`~realtime_omni.kv.attention.sdpa.Kernel` in bfloat16; what it has no kernel for is torch's."""

    def __init__(self, attend: Flash3) -> None:
        self._attend = attend

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None or q.dtype != torch.bfloat16 or q.shape[-1] not in _HEAD_DIMS:
            return super().__call__(q, keys, values, mask)
        return self._attend(q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)).transpose(1, 2)
