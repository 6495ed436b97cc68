"""Attention by torch's scaled_dot_product_attention: the reference, on any device, and the fast path on CPU.

Owns: contiguous copies of the rows' history, one per layer and tick. Must not know: sessions, and how pages are found.

History cannot change within a tick, so it is gathered once per layer, in front of room for the current tokens; every
pass then copies only its own tokens behind it::

    buffer [rows, heads, history | current, head_dim]       gathered once | overwritten by each pass

A layer whose window is smaller (``KVSpec.layer_windows``) gathers that much; of a window that is thin far away, nobody gathers
what no layer sees.

Gathering follows contiguous runs of slots, so a window whose pages lie together costs one copy, and goes by index where
they are many and short. The order is always frame order, never page order, so where pages happen to lie cannot change a bit of
the result.

What a group computes with its buffers is a kernel's: torch's own, or one in eight bits (:mod:`.fp8`), whose buffers are half
as large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from realtime_omni.kv.attention.plan import RowPlan
from realtime_omni.kv.storage import KVStorage, Run

# cuDNN's kernel is 1.6 times as fast as the default flash one on Hopper (551 against 340 TFLOP/s, head dim 128, bf16).
_CUDA_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_MANY_RUNS, _SHORT_RUN = 4, 256
"""More runs than that, shorter than so many tokens in the mean, are gathered by index, not by a copy for each: with pages of
one token a history can be all runs. Long ones are not, because a gather by index writes what it gathered twice."""


@dataclass(frozen=True, slots=True)
class _Row:
    history: tuple[Run, ...]
    history_tokens: int
    tokens: int
    seen_ahead: tuple[Run, ...]
    seen_ahead_tokens: int
    room_ahead: int

    @classmethod
    def of(cls, row: RowPlan, storage: KVStorage) -> _Row:
        seen = row.seen_ahead if row.ahead else ()  # a window of 3,000 frames costs a millisecond to walk
        return cls(
            storage.runs(row.seen),
            row.history_tokens,
            row.tokens,
            storage.runs(seen),
            sum(frame.tokens for frame in seen),
            row.room_ahead,
        )

    def seen(self, ahead: bool) -> tuple[tuple[Run, ...], int]:
        """The runs that a pass reads, and their tokens."""
        return (self.seen_ahead, self.seen_ahead_tokens) if ahead else (self.history, self.history_tokens)


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of one call: their numbers in the plan, their positions in the batch (None: all of it in order)."""

    rows: tuple[int, ...]
    positions: tuple[int, ...] | None
    history_tokens: int
    ahead: bool
    window: int | None


class Kernel(Protocol):
    """One call of attention over contiguous keys and values."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the buffers; None: the pools'."""
        ...

    def gather(self, x: Tensor, out: Tensor) -> None:
        """Copy keys or values of a row's history into its part of a buffer, both [tokens, heads, head_dim]."""
        ...

    def append(self, x: Tensor, out: Tensor) -> None:
        """The same with those of a pass."""
        ...

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """q [rows, heads, T, head_dim]; keys, values [rows, kv_heads, S, head_dim] in the buffers' dtype, or in that of q
        where there is no history; mask bool [T, S]. Returns the shape and dtype of q; bfloat16 where q is e4m3,
        which only a kernel in eight bits takes."""
        ...


class TorchKernel:
    """torch's own, in the dtype of the pools."""

    dtype: torch.dtype | None = None

    def gather(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def append(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        with fast_kernels(q):
            return scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=q.shape[1] != keys.shape[1])


class SdpaBackend:
    """See the module. ``kernel``: torch's own where None. ``cache_history``: keep one gathered copy per layer for the tick.

    None means on CPU only: on a GPU the copies of all layers would double the resident window, so one is reused there.
    """

    name = "sdpa"

    def __init__(self, *, cache_history: bool | None = None, kernel: Kernel | None = None) -> None:
        self.cache_history = cache_history
        self._kernel = TorchKernel() if kernel is None else kernel

    def plan(self, rows: Sequence[RowPlan], storage: KVStorage) -> SdpaPlan:
        """Work out the runs of every row; tensors are touched at the first ``attend``."""
        cache = storage.device.type == "cpu" if self.cache_history is None else self.cache_history
        return SdpaPlan(rows, storage, self._kernel, cache_history=cache)


class SdpaPlan:
    """One tick's attention; see ``AttentionPlan``."""

    def __init__(self, rows: Sequence[RowPlan], storage: KVStorage, kernel: Kernel, *, cache_history: bool) -> None:
        self._storage = storage
        self._kernel = kernel
        self._cache_history = cache_history
        self._plans = rows
        self._reserved = tuple(storage.runs(row.frames) for row in rows)
        self._groups: dict[tuple[tuple[int, ...], bool, bool, int | None], tuple[_Group, ...]] = {}
        self._buffers: dict[tuple[int, tuple[int, ...], bool, int | None], tuple[Tensor, Tensor]] = {}
        self._borrowed: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] = {}
        self._slots: dict[tuple[int, bool, int | None], Tensor] = {}
        self._written = [0] * len(rows)
        self._closed = False

    @cached_property
    def _windows(self) -> dict[int | None, tuple[_Row, ...]]:
        """What each row sees, by the layers' windows. A tick that only writes need not walk it."""
        spec = self._storage.spec
        return {
            window: tuple(_Row.of(row.within(window, spec.sink_frames), self._storage) for row in self._plans)
            for window in {None, *spec.window_of_layers}
        }

    @cached_property
    def _rows(self) -> tuple[_Row, ...]:
        return self._windows[None]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rows: Sequence[int],
        commit: bool,
        causal: bool = False,
        ahead: bool = False,
    ) -> Tensor:
        """See ``AttentionPlan.attend``."""
        self._check(q, k, v, rows, ahead)
        if ahead:
            self._check_ahead(layer, rows, commit)
        window = self._storage.spec.window_of_layers[layer]
        groups = self._grouped(tuple(rows), alone=q.dtype == torch.float64, ahead=ahead, window=window)
        if len(groups) == 1 and groups[0].positions is None:
            out = self._attend_group(layer, groups[0], q, k, v, causal)
        else:
            out = torch.empty_like(q, dtype=k.dtype)
            for group in groups:
                assert group.positions is not None
                at = list(group.positions)
                out[at] = self._attend_group(layer, group, q[at], k[at], v[at], causal)
        if commit:
            self.write(layer, k, v, rows=rows)
        return out

    def write(self, layer: int, k: Tensor, v: Tensor, *, rows: Sequence[int]) -> None:
        """See ``AttentionPlan.write``."""
        for position, row in enumerate(rows):
            self._storage.write(layer, self._reserved[row], k[position], v[position])
            self._written[row] |= 1 << layer

    def full_window(self, rows: Sequence[int]) -> tuple[int, int] | None:
        """Tokens of history and of a pass, where these rows have the same of both and see as much as their window ever shows.
        Memory of such a shape can be used again and again: :meth:`new_history`, :meth:`gather_into`.

        None otherwise, and in float64, whose rows are computed one by one, and where layers have windows of their own."""
        spec = self._storage.spec
        most = spec.window.seen_frames * spec.tokens_per_frame
        shapes = {(self._rows[row].history_tokens, self._rows[row].tokens) for row in rows}
        if len(shapes) != 1 or self._storage.dtype == torch.float64 or len(self._windows) > 1:
            return None
        (shape,) = shapes
        return shape if shape[0] == most > 0 else None

    def new_history(self, rows: int, length: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """Of every layer, memory for keys and values of so many rows and tokens, history and a pass together."""
        pools = self._storage.flat_k
        return tuple((self._buffer(like, rows, length), self._buffer(like, rows, length)) for like in pools)

    def gather_into(self, rows: Sequence[int], history: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy what the rows see into memory of :meth:`new_history`, which ``attend`` of these rows uses from now on."""
        (group,) = self._grouped(tuple(rows), alone=False, ahead=False, window=None)
        for layer, buffers in enumerate(history):
            self._fill(layer, group, buffers)
            self._borrowed[layer, group.rows] = buffers

    def complete(self, row: int) -> bool:
        """See ``AttentionPlan.complete``."""
        return self._written[row] == (1 << self._storage.spec.num_layers) - 1

    def close(self) -> None:
        """Drop the gathered history."""
        self._closed = True
        self._buffers.clear()
        self._borrowed.clear()
        self._slots.clear()

    def _attend_group(self, layer: int, group: _Group, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        if group.history_tokens == 0:
            keys, values = k.transpose(1, 2), v.transpose(1, 2)
        else:
            keys, values = self._history(layer, group, k.shape[1])
            for buffer, current in ((keys, k.detach()), (values, v.detach())):
                room = buffer[:, :, group.history_tokens :].transpose(1, 2)
                for row in range(len(group.rows)):
                    self._kernel.append(current[row], room[row])
        mask = None
        if causal and q.shape[1] > 1:  # torch's own flag would align the triangle with the first key, not with the last
            mask = torch.ones(q.shape[1], keys.shape[2], dtype=torch.bool, device=q.device).tril(group.history_tokens)
        return self._kernel(q.transpose(1, 2), keys, values, mask).transpose(1, 2)

    def _history(self, layer: int, group: _Group, tokens: int) -> tuple[Tensor, Tensor]:
        """Buffers ``[rows, kv_heads, history + tokens, head_dim]`` with the history part filled."""
        if not group.ahead and (borrowed := self._borrowed.get((layer, group.rows))) is not None:
            return borrowed
        key = (layer if self._cache_history else -1, group.rows, group.ahead, group.window)
        buffers = self._buffers.get(key)
        if buffers is not None and self._cache_history:
            return buffers
        if buffers is None:
            like, number, length = self._storage.flat_k[layer], len(group.rows), group.history_tokens + tokens
            buffers = self._buffers[key] = (self._buffer(like, number, length), self._buffer(like, number, length))
        self._fill(layer, group, buffers)
        return buffers

    def _fill(self, layer: int, group: _Group, buffers: tuple[Tensor, Tensor]) -> None:
        for buffer, pool in zip(buffers, (self._storage.flat_k[layer], self._storage.flat_v[layer]), strict=True):
            for position, row in enumerate(group.rows):
                self._gather(row, group, pool, buffer[position, :, : group.history_tokens])

    def _buffer(self, like: Tensor, rows: int, length: int) -> Tensor:
        """[rows, kv_heads, length, head_dim]; on a GPU in the pools' order of tokens and heads, so that copies are plain."""
        heads, size = self._storage.spec.num_kv_heads, self._storage.spec.head_dim
        if like.is_cuda:
            return like.new_empty((rows, length, heads, size), dtype=self._kernel.dtype).transpose(1, 2)
        return like.new_empty((rows, heads, length, size), dtype=self._kernel.dtype)

    def _gather(self, number: int, group: _Group, pool: Tensor, out: Tensor) -> None:
        """Copy what a row sees into ``out`` [heads, tokens, head_dim]: run by run, or many short ones by index."""
        runs, tokens = self._windows[group.window][number].seen(group.ahead)
        if len(runs) > _MANY_RUNS and tokens < _SHORT_RUN * len(runs):
            key = number, group.ahead, group.window
            slots = self._slots.get(key)
            if slots is None:
                each = [slot for start, length in runs for slot in range(start, start + length)]
                slots = self._slots[key] = torch.tensor(each, device=pool.device)
            self._kernel.gather(pool.index_select(0, slots), out.transpose(0, 1))
            return
        offset = 0
        for start, length in runs:
            self._kernel.gather(pool[start : start + length], out[:, offset : offset + length].transpose(0, 1))
            offset += length

    def _grouped(self, rows: tuple[int, ...], *, alone: bool, ahead: bool, window: int | None) -> tuple[_Group, ...]:
        """Rows of equal history length share a call; in float64 every row has its own, so that no bit can differ."""
        groups = self._groups.get((rows, alone, ahead, window))
        if groups is not None:
            return groups
        together: dict[tuple[int, int], list[int]] = {}
        for position, row in enumerate(rows):
            _, tokens = self._windows[window][row].seen(ahead)
            together.setdefault((tokens, position if alone else -1), []).append(position)
        groups = tuple(
            _Group(
                tuple(rows[p] for p in positions),
                None if len(positions) == len(rows) else tuple(positions),
                length,
                ahead,
                window,
            )
            for (length, _), positions in together.items()
        )
        self._groups[rows, alone, ahead, window] = groups
        return groups

    def _check_ahead(self, layer: int, rows: Sequence[int], commit: bool) -> None:
        unwritten = [row for row in rows if not self._written[row] & 1 << layer]
        if commit or unwritten:
            raise ValueError(
                f"a pass ahead follows the clean pass and commits nothing; rows {unwritten} are not written"
            )

    def _check(self, q: Tensor, k: Tensor, v: Tensor, rows: Sequence[int], ahead: bool) -> None:
        if self._closed:
            raise ValueError("this attention plan is closed")
        if len(set(rows)) != len(rows):
            raise ValueError(f"a row is named twice: {tuple(rows)}")
        for row in rows:
            if ahead and k.shape[1] > self._rows[row].room_ahead:
                raise ValueError(f"row {row} has room for {self._rows[row].room_ahead} tokens ahead, got {k.shape[1]}")
            if not ahead and k.shape[1] != self._rows[row].tokens:
                raise ValueError(f"row {row} was planned with {self._rows[row].tokens} tokens, got {k.shape[1]}")
        spec = self._storage.spec
        expected = (len(rows), k.shape[1], spec.num_kv_heads, spec.head_dim)
        if k.shape != expected or v.shape != expected or q.shape[:2] != expected[:2] or q.shape[3] != expected[3]:
            raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected {expected}")


@contextmanager
def fast_kernels(q: Tensor) -> Iterator[None]:
    """Prefer the fastest kernel on CUDA; elsewhere torch's own choice stands."""
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        with sdpa_kernel(_CUDA_ORDER, set_priority=True):
            yield
    else:
        yield


@contextmanager
def kernels_of_any_length(q: Tensor) -> Iterator[None]:
    """Leave cuDNN out on CUDA, torch's first choice on Hopper: it makes a plan for every new shape, some 60 ms each on an H200,
    which a conversation that grows meets all the time."""
    if q.is_cuda:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield
    else:
        yield
