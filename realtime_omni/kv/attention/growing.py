"""Attention of blocks that are written in pieces: each pass appends its tokens behind those that the tick has written so far.

For a language model whose tick reads some tokens and then writes others one by one, as many as it likes. A frame is still the
unit that is reserved, evicted and saved; it holds *at most* ``tokens_per_frame`` tokens. How many a committed frame holds is
the model's to know (its state says so); slots behind them are zero and are never read.

Owns: contiguous copies of each row's history, and how far each row has come. Must not know: sessions, positions, rotary
conventions. Causal: a token sees its row's history, what the tick wrote before it, and itself. On a GPU the rows of a pass
share one kernel, padded to the longest and masked; elsewhere, and in float64, each row attends alone, so that no bit of its
result depends on another.

With :class:`~realtime_omni.kv.attention.rooms.Rooms` the copies are in memory that stays where it is: passes run through the
rooms then and may be captured, and what a tick wrote goes to the pages when the rows finish.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from realtime_omni.kv.attention.plan import RowPlan
from realtime_omni.kv.attention.rooms import Rooms
from realtime_omni.kv.attention.sdpa import fast_kernels
from realtime_omni.kv.storage import KVStorage, Run

Turn = Callable[[int, Tensor], None]
"""(row, its history's keys [..., heads, tokens, head_dim], of some layers): edits this copy in place. Where frames between the
oldest and the newest are gone, keys must be turned to stand at their new distance."""


_ALL = -1
_STEP = 256
"""Tokens by which the length of a shared pass grows: cuDNN makes a plan for each new shape, some 60 ms on an H200, and a
conversation has a new length in every pass."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the tokens of one pass go: ``rows`` [B] and ``columns`` [B, T] of the buffers, ``slots`` [B * T] of the pools; what
    each sees, ``mask`` [all rows, 1, T, length]."""

    rows: Tensor
    columns: Tensor
    slots: Tensor
    mask: Tensor
    all_rows: bool


class GrowingPlan:
    """One tick's attention over rows that grow. Not to be used after ``close``."""

    def __init__(
        self,
        rows: Sequence[RowPlan],
        storage: KVStorage,
        *,
        turn: Turn,
        cache_history: bool | None = None,
        together: bool | None = None,
    ) -> None:
        """``rows``: the history's frames with the tokens that they hold, the block's with all that they can.
        ``cache_history``: see :class:`~realtime_omni.kv.attention.sdpa.SdpaBackend`. ``together``: rows share a kernel;
        None: on a GPU."""
        self._storage = storage
        self._turn = turn
        self._cache = storage.device.type == "cpu" if cache_history is None else cache_history
        shared = storage.device.type == "cuda" if together is None else together
        self._together = shared and storage.dtype != torch.float64
        self._history = [storage.runs(row.history) for row in rows]
        self._slots: dict[int, Tensor] = {}
        self._tokens = [row.history_tokens for row in rows]
        self._reserved = [storage.runs(row.frames) for row in rows]
        self._room = [sum(frame.tokens for frame in row.frames) for row in rows]
        layers = storage.spec.num_layers
        self._written = [[0] * layers for _ in rows]
        self._buffers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._places: tuple[tuple[tuple[int, ...], tuple[int, ...], int], _Places] | None = None
        self._finished: set[int] = set()
        self._closed = False
        self._rooms: Rooms | None = None

    def use(self, rooms: Rooms) -> None:
        """Copy row n's history into room n, before the first pass; all passes then run through the rooms. Raises ValueError
        where that is too late, or they do not fit."""
        if self._buffers or any(map(any, self._written)) or not self._fits(rooms):
            raise ValueError(f"no rooms for {len(self._tokens)} rows, or too late")
        self._rooms = rooms
        for row, tokens in enumerate(self._tokens):
            rooms.begin(row, tokens)
            if tokens:
                slots = self._history_slots(row)
                for layer in range(self._storage.spec.num_layers):
                    pools = self._storage.flat_k[layer], self._storage.flat_v[layer]
                    for pool, side in zip(pools, (rooms.keys, rooms.values), strict=True):
                        torch.index_select(pool, 0, slots, out=side[layer, row, :tokens])
            self._turn(row, rooms.keys[:, row, :tokens].transpose(1, 2))  # all layers at once: it is a dozen kernels

    def columns(self, rows: Sequence[int]) -> list[int]:
        """Where each row's next token stands in its room."""
        return [self._tokens[row] + self._written[row][0] for row in rows]

    def wrote(self, rows: Sequence[int], tokens: int) -> None:
        """Each row's next tokens are in its room, in every layer. Raises ValueError for a row that had no place for them."""
        for row in rows:
            self._check(row, 0, tokens)
            self._written[row] = [written + tokens for written in self._written[row]]

    def history_tokens(self, row: int) -> int:
        """Committed tokens that the row sees."""
        return self._tokens[row]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, rows: Sequence[int]) -> Tensor:
        """Write ``k`` and ``v`` [B, T, kv_heads, head_dim] behind what the named rows have written, and attend from ``q``
        [B, T, heads, head_dim]; returns its shape. Raises ValueError when a row has no room for T tokens."""
        if self._closed or self._rooms is not None:
            raise ValueError("this attention plan is closed, or its rows are in rooms")
        tokens = q.shape[1]
        for row in rows:
            self._check(row, layer, tokens)
        if self._together:
            return self._attend_together(layer, q, k, v, tuple(rows))
        out = torch.empty_like(q)
        for position, row in enumerate(rows):
            out[position] = self._attend_row(layer, row, q[position], k[position], v[position])
        return out

    def finish(self, rows: Sequence[int]) -> None:
        """The rows have written all that they will; what is left of their frames becomes zero."""
        if self._rooms is not None:
            self._save(rows, self._rooms)
            self._finished.update(rows)
            return
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
        self._places = None

    def _fits(self, rooms: Rooms) -> bool:
        """Whether these are rooms for all rows."""
        spec, storage = self._storage.spec, self._storage
        longest = max(history + room for history, room in zip(self._tokens, self._room, strict=True))
        layers, _, tokens, *heads = rooms.keys.shape
        return (
            rooms.rows >= len(self._tokens)
            and tokens >= longest
            and (layers, *heads) == (spec.num_layers, spec.num_kv_heads, spec.head_dim)
            and (rooms.keys.dtype, rooms.keys.device) == (storage.dtype, storage.flat_k[0].device)
        )

    def _check(self, row: int, layer: int, tokens: int) -> None:
        written, room = self._written[row][layer], self._room[row]
        if row in self._finished or written + tokens > room:
            raise ValueError(f"row {row} has {written} of {room} tokens; no room for {tokens}")

    def _attend_together(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: tuple[int, ...]) -> Tensor:
        """q [B, T, heads, d], k and v [B, T, kv_heads, d]."""
        written = tuple(self._written[row][layer] for row in rows)
        key = (rows, written, q.shape[1])
        if self._places is None or self._places[0] != key:  # the layers of a pass share them
            self._places = (key, self._placed(*key))
        at = self._places[1]
        keys, values = self._stacked(layer)
        keys[at.rows[:, None], at.columns] = k
        values[at.rows[:, None], at.columns] = v
        self._storage.write_slots(layer, at.slots, k.flatten(0, 1), v.flatten(0, 1))
        for row, before in zip(rows, written, strict=True):
            self._written[row][layer] = before + q.shape[1]
        whole = q if at.all_rows else q.new_zeros(len(self._tokens), *q.shape[1:]).index_copy_(0, at.rows, q)
        length = at.mask.shape[-1]
        with fast_kernels(q):
            out = scaled_dot_product_attention(
                whole.transpose(1, 2),
                keys[:, :length].transpose(1, 2),
                values[:, :length].transpose(1, 2),
                attn_mask=at.mask,
                enable_gqa=q.shape[2] != k.shape[2],
            ).transpose(1, 2)
        return out if at.all_rows else out[at.rows]

    def _placed(self, rows: tuple[int, ...], written: tuple[int, ...], tokens: int) -> _Places:
        device = self._storage.device
        before = [self._tokens[row] + w for row, w in zip(rows, written, strict=True)]
        index = torch.tensor(rows, device=device)
        columns = torch.tensor(before, device=device)[:, None] + torch.arange(tokens, device=device)
        runs = [_first(_behind(self._reserved[row], w), tokens) for row, w in zip(rows, written, strict=True)]
        slots = [slot for row in runs for start, length in row for slot in range(start, start + length)]
        length = _whole_steps(max(before) + tokens)
        mask = torch.ones(len(self._tokens), tokens, length, dtype=torch.bool, device=device)
        mask[index] = torch.arange(length, device=device) <= columns[..., None]
        every = rows == tuple(range(len(self._tokens)))
        return _Places(index, columns, torch.tensor(slots, device=device), mask[:, None], every)

    def _stacked(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, whole steps, kv_heads, d] of all rows, zero where nothing is."""
        known = self._buffers.get((layer, _ALL))
        if known is not None:
            return known
        count = len(self._tokens)
        like = self._storage.flat_k[layer]
        longest = max(history + room for history, room in zip(self._tokens, self._room, strict=True))
        shape = (count, _whole_steps(longest), *like.shape[1:])
        pair = (like.new_zeros(shape), like.new_zeros(shape))
        for row in range(count):
            self._fill(layer, row, (pair[0][row], pair[1][row]))
        if self._cache:
            self._buffers[layer, _ALL] = pair
        return pair

    def _save(self, rows: Sequence[int], rooms: Rooms) -> None:
        """The rows' whole frames, from their rooms to the pages of all rows at once."""
        places = [
            (row, self._tokens[row] + offset, slot, offset < self._written[row][0])
            for row in rows
            for offset, slot in enumerate(s for start, n in self._reserved[row] for s in range(start, start + n))
        ]
        if not places:
            return
        device = self._storage.device
        numbers, columns, slots, written = (torch.tensor(each, device=device) for each in zip(*places, strict=True))
        for layer in range(self._storage.spec.num_layers):
            sides = ((self._storage.flat_k, rooms.keys), (self._storage.flat_v, rooms.values))
            for pools, room in sides:
                made = room[layer][numbers, columns]
                pools[layer].index_copy_(0, slots, made.masked_fill_(~written[:, None, None], 0))

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
        like = self._storage.flat_k[layer]
        shape = (self._tokens[row] + self._room[row], *like.shape[1:])
        pair = (like.new_empty(shape), like.new_empty(shape))
        self._fill(layer, row, pair)
        if self._cache:
            self._buffers[layer, row] = pair
        return pair

    def _fill(self, layer: int, row: int, pair: tuple[Tensor, Tensor]) -> None:
        """A row's history and what the tick has written of it, from the beginning of ``pair``."""
        history = self._tokens[row]
        runs = _first(self._reserved[row], self._written[row][layer])
        for buffer, pool in zip(pair, (self._storage.flat_k[layer], self._storage.flat_v[layer]), strict=True):
            if history:
                torch.index_select(pool, 0, self._history_slots(row), out=buffer[:history])
            offset = history
            for start, length in runs:
                buffer[offset : offset + length].copy_(pool[start : start + length])
                offset += length
        self._turn(row, pair[0][:history].transpose(0, 1))

    def _history_slots(self, row: int) -> Tensor:
        """Frames that are not full leave gaps, so a history is as many runs as it has frames: it is gathered by index."""
        slots = self._slots.get(row)
        if slots is None:
            each = [slot for start, length in self._history[row] for slot in range(start, start + length)]
            slots = self._slots[row] = torch.tensor(each, device=self._storage.device)
        return slots


def _whole_steps(tokens: int) -> int:
    return -(-tokens // _STEP) * _STEP


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
