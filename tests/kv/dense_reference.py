"""An independent oracle for paged attention: one global cache per row, an explicit choice of indices, plain softmax.

It knows nothing of pages, windows, plans or torch's attention functions: keys and values of every token ever committed are
kept in one growing tensor, and a block sees the tokens whose frame number is among the first ``sink`` or the last ``window``
of all frames including its own, and of the latter, where they are older than the last ``dense``, ends a block. Computed in
float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DenseCache:
    """The whole past of one row in one layer."""

    def __init__(
        self, sink_frames: int, window_frames: int, tokens_per_frame: int, dense_frames: int | None = None
    ) -> None:
        self.sink = sink_frames
        self.window = window_frames
        self.tokens = tokens_per_frame
        self.dense = dense_frames
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, d] over the selected past and the block's own k, v [T, kv_heads, d]; float64 [T, heads, d]."""
        block_frames = k.shape[0] // self.tokens
        past = 0 if self.k is None else self.k.shape[0] // self.tokens
        total = past + block_frames
        dense = self.window if self.dense is None else self.dense
        chosen = [
            f
            for f in range(past)
            if f < self.sink
            or (f >= total - self.window and (f >= total - dense or f % block_frames == block_frames - 1))
        ]
        at = torch.tensor([f * self.tokens + t for f in chosen for t in range(self.tokens)], dtype=torch.int64)
        keys, values = k.double(), v.double()
        if self.k is not None and self.v is not None:
            keys, values = torch.cat([self.k[at], keys]), torch.cat([self.v[at], values])
        repeat = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(repeat, dim=1), values.repeat_interleave(repeat, dim=1)
        scores = torch.einsum("thd,shd->hts", q.double(), keys) / q.shape[2] ** 0.5
        weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return torch.einsum("hts,shd->thd", weights, values)

    def commit(self, k: Tensor, v: Tensor) -> None:
        """Append the block's clean keys and values."""
        self.k = k.double() if self.k is None else torch.cat([self.k, k.double()])
        self.v = v.double() if self.v is None else torch.cat([self.v, v.double()])
