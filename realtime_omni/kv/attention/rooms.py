"""Keys and values of several rows in memory that stays where it is, and passes over some tokens of each.

For a model that writes token by token and whose passes are captured as CUDA graphs: a row's history is copied into its room
once a tick, in order; then each pass puts its tokens behind it and attends over the whole room with a mask, so no shape
depends on how far a row has come. Of a full window that is what there is to read, and torch's kernel does it at 0.85 of an
H200's memory speed (``recipes/gpu/minicpm_speed.py --parts rooms``). Must not know: whose rows these are, where their
histories are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from realtime_omni.kv.attention.sdpa import fast_kernels
from realtime_omni.kv.capacity import KVSpec

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Rooms:
    """``keys`` and ``values`` [layers, rows + 1, tokens, kv_heads, head_dim]; the last row is nobody's, and is never read."""

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
        self._ends = [0] * rows
        """Of each room; all behind is zero, since what a mask hides is still multiplied, and 0 * NaN is NaN."""
        self._columns = torch.arange(tokens, device=device)
        self._places = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._places[0] = rows

    @classmethod
    def of(cls, spec: KVSpec, rows: int, *, dtype: torch.dtype, device: torch.device | str) -> Rooms:
        """For rows of this geometry, each with all that a session may see."""
        tokens = (spec.sink_frames + spec.window_frames + spec.frames_per_block) * spec.tokens_per_frame
        return cls(spec.num_layers, rows, tokens, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=device)

    def begin(self, row: int, tokens: int) -> None:
        """The room is to hold a history of so many tokens, which the caller copies there."""
        if self._ends[row] > tokens:
            for side in (self.keys, self.values):
                side[:, row, tokens : self._ends[row]] = 0
        self._ends[row] = tokens

    def place(self, rows: Sequence[int], columns: Sequence[int], tokens: int, padded: int) -> None:
        """The next pass is over the first ``padded`` rooms: the named ones get so many tokens, the first in the column given,
        each of which sees all before it; those of the others are nobody's."""
        at, first = [self.rows] * padded, [0] * padded
        for row, column in zip(rows, columns, strict=True):
            at[row], first[row] = row, column
            self._ends[row] = max(self._ends[row], column + tokens)
        self._places[:, :padded].copy_(torch.tensor([at, first]), non_blocking=True)

    def look(self, count: int, tokens: int) -> Attend:
        """Begin a pass over ``tokens`` tokens of the first ``count`` rooms, as placed. May be captured, with what it returns:
        (layer, q [B, T, heads, head_dim], k and v [B, T, kv_heads, head_dim], rotated) to q's shape."""
        at, first = self._places[:, :count]
        columns = first[:, None] + self._columns[:tokens]
        hidden = self._columns > columns[..., None]
        bias = torch.zeros(hidden.shape, dtype=self.keys.dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[at[:, None], columns], values[at[:, None], columns] = k, v
            with fast_kernels(q):
                return scaled_dot_product_attention(
                    q.transpose(1, 2),
                    keys[:count].transpose(1, 2),
                    values[:count].transpose(1, 2),
                    attn_mask=bias[:, None],
                    enable_gqa=q.shape[2] != k.shape[2],
                ).transpose(1, 2)

        return attend
