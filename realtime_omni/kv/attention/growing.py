"""Attention of blocks that are written in pieces: each pass appends its tokens behind those that the tick has written so far.

For a language model whose tick reads some tokens and then writes others one by one, as many as it likes. A frame is still the
unit that is reserved, evicted and saved; it holds *at most* ``tokens_per_frame`` tokens. How many a committed frame holds is
the model's to know (its state says so); slots behind them are zero and are never read.

Owns: contiguous copies of each row's history, and how far each row has come. Must not know: sessions, positions, rotary
conventions. A row attends alone, so no row's result depends on another. Causal: a token sees its row's history, what the tick
wrote before it, and itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from realtime_omni.kv.attention.plan import RowPlan
from realtime_omni.kv.attention.sdpa import fast_kernels
from realtime_omni.kv.storage import KVStorage, Run

Turn = Callable[[int, Tensor], None]
"""(row, its history's keys [heads, tokens, head_dim]): edits this copy in place. Where frames between the oldest and the
newest are gone, keys must be turned to stand at their new distance."""


class GrowingPlan:
    """One tick's attention over rows that grow. Not to be used after ``close``."""

    def __init__(
        self, rows: Sequence[RowPlan], storage: KVStorage, *, turn: Turn, cache_history: bool | None = None
    ) -> None:
        """``rows``: the history's frames with the tokens that they hold, the block's with all that they can.
        ``cache_history``: see :class:`~realtime_omni.kv.attention.sdpa.SdpaBackend`."""
        self._storage = storage
        self._turn = turn
        self._cache = storage.device.type == "cpu" if cache_history is None else cache_history
        self._history = [storage.runs(row.history) for row in rows]
        self._slots: dict[int, Tensor] = {}
        self._tokens = [row.history_tokens for row in rows]
        self._reserved = [storage.runs(row.frames) for row in rows]
        self._room = [sum(frame.tokens for frame in row.frames) for row in rows]
        layers = storage.spec.num_layers
        self._written = [[0] * layers for _ in rows]
        self._buffers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._finished: set[int] = set()
        self._closed = False

    def history_tokens(self, row: int) -> int:
        """Committed tokens that the row sees."""
        return self._tokens[row]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, rows: Sequence[int]) -> Tensor:
        """Write ``k`` and ``v`` [B, T, kv_heads, head_dim] behind what the named rows have written, and attend from ``q``
        [B, T, heads, head_dim]; returns its shape. Raises ValueError when a row has no room for T tokens."""
        if self._closed:
            raise ValueError("this attention plan is closed")
        tokens = q.shape[1]
        for row in rows:
            if row in self._finished or self._written[row][layer] + tokens > self._room[row]:
                raise ValueError(
                    f"row {row} has {self._written[row][layer]} of {self._room[row]} tokens; no room for {tokens}"
                )
        out = torch.empty_like(q)
        for position, row in enumerate(rows):
            out[position] = self._attend_row(layer, row, q[position], k[position], v[position])
        return out

    def finish(self, rows: Sequence[int]) -> None:
        """The rows have written all that they will; what is left of their frames becomes zero."""
        for row in rows:
            for layer, written in enumerate(self._written[row]):
                left = self._room[row] - written
                if left:
                    like = self._storage.flat_k[layer]
                    zeros = like.new_zeros(left, *like.shape[1:])
                    self._storage.write(layer, _behind(self._reserved[row], written), zeros, zeros)
            self._finished.add(row)

    def complete(self, row: int) -> bool:
        """Whether the row is finished, and every layer has written as much."""
        return row in self._finished and len(set(self._written[row])) == 1

    def close(self) -> None:
        """Drop the gathered history. Harmless to repeat."""
        self._closed = True
        self._buffers.clear()
        self._slots.clear()

    def _attend_row(self, layer: int, row: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, d], k and v [T, kv_heads, d]."""
        tokens, written = len(q), self._written[row][layer]
        before = self._tokens[row] + written
        keys, values = self._gathered(layer, row)
        keys[before : before + tokens].copy_(k)
        values[before : before + tokens].copy_(v)
        self._storage.write(layer, _first(_behind(self._reserved[row], written), tokens), k, v)
        self._written[row][layer] = written + tokens
        mask = None
        if tokens > 1:
            mask = torch.ones(tokens, before + tokens, dtype=torch.bool, device=q.device).tril(before)
        with fast_kernels(q):
            out = scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                keys[: before + tokens].transpose(0, 1)[None],
                values[: before + tokens].transpose(0, 1)[None],
                attn_mask=mask,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return out[0].transpose(0, 1)

    def _gathered(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values [history + room, kv_heads, d] with all up to now filled."""
        known = self._buffers.get((layer, row))
        if known is not None:
            return known
        history, like = self._tokens[row], self._storage.flat_k[layer]
        shape = (history + self._room[row], *like.shape[1:])
        pair = (like.new_empty(shape), like.new_empty(shape))
        runs = _first(self._reserved[row], self._written[row][layer])
        for buffer, pool in zip(pair, (self._storage.flat_k[layer], self._storage.flat_v[layer]), strict=True):
            if history:
                torch.index_select(pool, 0, self._history_slots(row), out=buffer[:history])
            offset = history
            for start, length in runs:
                buffer[offset : offset + length].copy_(pool[start : start + length])
                offset += length
        self._turn(row, pair[0][:history].transpose(0, 1))
        if self._cache:
            self._buffers[layer, row] = pair
        return pair

    def _history_slots(self, row: int) -> Tensor:
        """Frames that are not full leave gaps, so a history is as many runs as it has frames: it is gathered by index."""
        slots = self._slots.get(row)
        if slots is None:
            each = [slot for start, length in self._history[row] for slot in range(start, start + length)]
            slots = self._slots[row] = torch.tensor(each, device=self._storage.device)
        return slots


def _first(runs: Sequence[Run], tokens: int) -> tuple[Run, ...]:
    """The runs of the first ``tokens`` slots."""
    kept: list[Run] = []
    for start, length in runs:
        if tokens > 0:
            kept.append((start, min(length, tokens)))
        tokens -= length
    return tuple(kept)


def _behind(runs: Sequence[Run], tokens: int) -> tuple[Run, ...]:
    """The runs without their first ``tokens`` slots."""
    kept: list[Run] = []
    for start, length in runs:
        skipped = min(length, tokens)
        if skipped < length:
            kept.append((start + skipped, length - skipped))
        tokens -= skipped
    return tuple(kept)
