"""Keys and values of several rows in memory that stays where it is, and passes over one token of some of them.

For a model that writes token by token and whose passes are captured as CUDA graphs: a row's history is copied into its room
once a tick, in order; then each pass puts its tokens behind it and attends over what its rows hold, so no shape depends on
how far a row has come. Must not know: whose rows these are, where their histories are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from realtime_omni.kv.attention.decode import attention
from realtime_omni.kv.storage import KVStorage


class Rooms:
    """``keys`` and ``values`` [layers, rows + 1, tokens, kv_heads, head_dim]; the last row is nobody's."""

    def __init__(
        self,
        layers: int,
        rows: int,
        tokens: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (layers, rows + 1, tokens, kv_heads, head_dim)
        self.rows = rows
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self._slots = torch.arange((rows + 1) * tokens, dtype=torch.int32, device=device).view(rows + 1, tokens)
        self._places = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._places[0] = rows
        self._lengths = torch.ones(rows, dtype=torch.int32, device=device)
        self._tables = self._slots[-1:].repeat(rows, 1)

    @classmethod
    def of(cls, storage: KVStorage, rows: int) -> Rooms:
        """For rows of these pools, each with all that a session may see."""
        spec = storage.spec
        tokens = (spec.sink_frames + spec.window_frames + spec.frames_per_block) * spec.tokens_per_frame
        heads = (spec.num_kv_heads, spec.head_dim)
        return cls(spec.num_layers, rows, tokens, *heads, dtype=storage.dtype, device=storage.device)

    def place(self, rows: Sequence[int], columns: Sequence[int], padded: int) -> None:
        """The next pass is over ``padded`` rows: the named ones first, each of whose tokens stands in its column and sees all
        before it, then nobody's."""
        spare = padded - len(rows)
        placed = torch.tensor([[*rows, *[self.rows] * spare], [*columns, *[0] * spare]])
        self._places[:, :padded].copy_(placed)

    def look(self, count: int) -> None:
        """Begin a pass over the first ``count`` rows that were placed. May be captured, as :meth:`attend`."""
        at, columns = self._places[:, :count]
        torch.index_select(self._slots, 0, at, out=self._tables[:count])
        self._lengths[:count].copy_(columns + 1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, 1, heads, head_dim], k and v [B, 1, kv_heads, head_dim] of the rows that were placed, rotated; returns q's
        shape."""
        count = len(q)
        at, columns = self._places[:, :count]
        keys, values = self.keys[layer], self.values[layer]
        keys[at, columns], values[at, columns] = k[:, 0], v[:, 0]
        tables, lengths = self._tables[:count], self._lengths[:count]
        return attention(q[:, 0].contiguous(), keys.flatten(0, 1), values.flatten(0, 1), tables, lengths)[:, None]
