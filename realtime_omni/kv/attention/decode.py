"""Attention of rows that bring one token each over pages where they lie, in memory that stays where it is.

For a model whose passes are captured as CUDA graphs: nothing is gathered, no shape depends on a call's history, and what a tick
reads of a window is a copy of its table. Owns :class:`DecodeRows`, the fixed memory of a pass; and :class:`DecodePlan`, one
tick's rows, which fill it. Must not know sessions.

One frame is one token here, in the first slot of its page. A row's table holds the slots of all frames that it sees, by
``WindowGeometry.ring_place``: in no order, which attention does not need, since keys are rotated when they are written. Places
in use come first. Rows of a pass that no session has read and write a scratch page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from realtime_omni.kv.capacity import KVSpec
from realtime_omni.kv.manager import BranchBlock
from realtime_omni.kv.storage import KVStorage


class DecodeRows:
    """``rows`` rows. A pass may use the first of them only, and calls :meth:`attend` once a layer."""

    def __init__(self, storage: KVStorage, rows: int) -> None:
        spec = storage.spec
        if not decodable(spec):
            raise ValueError("only where a tick writes one token, and every layer sees the whole window")
        self.storage = storage
        places, device = spec.sink_frames + spec.window_frames, storage.device
        self.spare = (storage.pages - 1) * storage.page_tokens
        """Of the last page, which is scratch."""
        self.tables = torch.full((rows, places), self.spare, dtype=torch.int32, device=device)
        self.lengths = torch.ones(rows, dtype=torch.int32, device=device)
        self.slots = torch.full((rows,), self.spare, dtype=torch.int64, device=device)

    def clear(self) -> None:
        """All rows are nobody's."""
        self.tables.fill_(self.spare)
        self.lengths.fill_(1)
        self.slots.fill_(self.spare)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [B, 1, heads, head_dim] of the first B rows, rotated: writes keys and values to the rows' own slots, then
        attends over all that the rows see, the new token included. Returns q's shape."""
        rows = len(q)
        self.storage.write_slots(layer, self.slots[:rows], k[:, 0], v[:, 0])
        keys, values = self.storage.flat_k[layer], self.storage.flat_v[layer]
        return attention(q[:, 0], keys, values, self.tables[:rows], self.lengths[:rows])[:, None]


def decodable(spec: KVSpec) -> bool:
    """Whether :class:`DecodeRows` can serve this geometry."""
    one = spec.tokens_per_frame == spec.frames_per_block == len(spec.branches) == 1
    return one and not spec.reset_at_boundary and not spec.layer_windows and not spec.scratch_tokens_per_branch


class DecodePlan:
    """One tick's rows. Their keys and values become history when the tick is committed, as those of any other pass."""

    def __init__(self, blocks: Sequence[BranchBlock], storage: KVStorage) -> None:
        self._blocks = blocks
        self._storage = storage
        self._written: set[int] = set()

    def rows(self, most: int) -> DecodeRows:
        """Memory for passes over these pools, of up to ``most`` rows."""
        return DecodeRows(self._storage, most)

    def fits(self, memory: DecodeRows, most: int) -> bool:
        """Whether this memory serves so many rows of these pools."""
        return memory.storage is self._storage and most <= len(memory.slots)

    def fill(self, into: DecodeRows, rows: Sequence[int], padded: int) -> None:
        """Make the named rows the first ones of a pass over ``padded`` rows."""
        blocks = [self._blocks[row] for row in rows]
        size = self._storage.page_tokens  # of a page, a frame fills the first
        tables = np.full((padded, into.tables.shape[1]), into.spare, np.int32)
        lengths, slots = np.ones(padded, np.int32), np.full(padded, into.spare, np.int64)
        for position, block in enumerate(blocks):
            (frame,) = block.frames
            np.multiply(block.table.ring(), size, out=tables[position])
            lengths[position] = min(frame.index + 1, tables.shape[1])
            slots[position] = frame.pages[0] * size
        for buffer, filled in ((into.tables, tables), (into.lengths, lengths), (into.slots, slots)):
            buffer[:padded].copy_(torch.from_numpy(filled))

    def wrote(self, rows: Sequence[int]) -> None:
        """The pass over these rows has run, through every layer."""
        self._written.update(rows)

    def complete(self, row: int) -> bool:
        """As ``AttentionPlan.complete``."""
        return row in self._written

    def close(self) -> None:
        """Nothing is held."""


def attention(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """One query per head and row, q [B, H, d], over the slots ``table[b, :lengths[b]]`` (int32) of ``keys`` and ``values``
    [slots, H, d]. Scores, weights and sums are float32; returns q's shape and dtype."""
    return _kernel()(q, keys, values, table, lengths) if q.is_cuda else gathered(q, keys, values, table, lengths)


def gathered(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """The same on any device, over a copy of what is seen."""
    wide = torch.promote_types(q.dtype, torch.float32)
    there = torch.arange(table.shape[1], device=q.device) < lengths[:, None]
    slots = table.long().masked_fill(~there, 0)
    k, v = (pool[slots].to(wide) for pool in (keys, values))  # [B, T, H, d]
    scores = torch.einsum("bhd,bthd->bht", q.to(wide), k) * q.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill(~there[:, None], -torch.inf), dim=-1)
    return torch.einsum("bht,bthd->bhd", weights, v).to(q.dtype)


def _kernel() -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    from realtime_omni.kv.attention.decode_kernel import decode  # Triton comes with torch for CUDA only

    return decode
