"""The tensors behind the pages: one K and one V pool per layer, and the cross-attention rows.

Owns: device memory and its byte count. Must not know: sessions, windows, reference counts, which page is whose.

K and V are separate allocations per layer, because a compiler that sees one shared allocation mutated clones all of it.
Slot ``s`` is token ``s % page_tokens`` of page ``s // page_tokens``; pools are written through flat ``[slots, heads,
head_dim]`` views. Page 0 is the null page and is never written.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from realtime_omni.kv.capacity import KVSpec
from realtime_omni.kv.cross import CrossEntry, CrossIndex, CrossKey
from realtime_omni.kv.window import FrameRef

Run = tuple[int, int]
"""A contiguous run of slots: (first slot, length)."""


class KVStorage:
    """The paged pools: ``k[layer]`` and ``v[layer]`` are ``[pages, page_tokens, heads, head_dim]``."""

    def __init__(self, spec: KVSpec, pages: int, *, device: torch.device | str = "cpu", dtype: torch.dtype) -> None:
        """Allocate ``pages`` pages (``CapacityPlan.total_pages``: null, managed and scratch).

        Raises ValueError when ``dtype`` is not of the size that the spec planned with.
        """
        if dtype.itemsize != spec.dtype_bytes:
            raise ValueError(f"the plan counts {spec.dtype_bytes} bytes an element, {dtype} has {dtype.itemsize}")
        self.spec = spec
        self.pages = pages
        self.page_tokens = spec.page_size_tokens
        self.device = torch.device(device)
        self.dtype = dtype
        shape = (pages, self.page_tokens, spec.num_kv_heads, spec.head_dim)
        # Zeros, not empty: a kernel that masks a partly filled page still multiplies what it loads, and 0 * NaN is NaN.
        self.k = tuple(torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(spec.num_layers))
        self.v = tuple(torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(spec.num_layers))
        self.flat_k = tuple(pool.view(-1, *shape[2:]) for pool in self.k)
        self.flat_v = tuple(pool.view(-1, *shape[2:]) for pool in self.v)

    @property
    def bytes(self) -> int:
        """Bytes of the pools, counted by storage: ``pages * page_bytes``."""
        return sum(pool.untyped_storage().nbytes() for pool in (*self.k, *self.v))

    def runs(self, frames: Sequence[FrameRef]) -> tuple[Run, ...]:
        """The slots of the frames' tokens in order, as the fewest contiguous runs."""
        size = self.page_tokens
        runs: list[Run] = []
        for frame in frames:
            left = frame.tokens
            for page in frame.pages:
                start, length = page * size, min(size, left)
                left -= length
                if runs and runs[-1][0] + runs[-1][1] == start:
                    runs[-1] = (runs[-1][0], runs[-1][1] + length)
                elif length:
                    runs.append((start, length))
        return tuple(runs)

    def slots(self, frames: Sequence[FrameRef]) -> Tensor:
        """The slots of the frames' tokens in order, int64 ``[tokens]`` on the pools' device."""
        parts = [torch.arange(start, start + length) for start, length in self.runs(frames)]
        return torch.cat(parts).to(self.device) if parts else torch.empty(0, dtype=torch.int64, device=self.device)

    def write(self, layer: int, runs: Sequence[Run], k: Tensor, v: Tensor) -> None:
        """Copy ``k`` and ``v`` ``[tokens, heads, head_dim]`` into the runs in order; surplus tokens are not
        written.
        """
        offset = 0
        for start, length in runs:
            self.flat_k[layer][start : start + length].copy_(k[offset : offset + length].detach())
            self.flat_v[layer][start : start + length].copy_(v[offset : offset + length].detach())
            offset += length

    def write_slots(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Scatter ``k`` and ``v``, both ``[tokens, heads, head_dim]``, to ``slots`` int64 ``[tokens]``."""
        self.flat_k[layer].index_copy_(0, slots, k.detach())
        self.flat_v[layer].index_copy_(0, slots, v.detach())

    def read(self, layer: int, frames: Sequence[FrameRef]) -> tuple[Tensor, Tensor]:
        """Copies of the frames' keys and values, each ``[tokens, heads, head_dim]``; for snapshots and oracles."""
        slots = self.slots(frames)
        return self.flat_k[layer][slots], self.flat_v[layer][slots]


class CrossStore:
    """Cross-attention keys and values: per cache and layer ``[rows, tokens, heads, head_dim]``, published when
    complete.

    Which row is whose, and whether it is complete, is the ``CrossIndex``'s business (``KVBook.cross``).
    """

    def __init__(self, spec: KVSpec, sessions: int, *, device: torch.device | str = "cpu", dtype: torch.dtype) -> None:
        if dtype.itemsize != spec.dtype_bytes:
            raise ValueError(f"the plan counts {spec.dtype_bytes} bytes an element, {dtype} has {dtype.itemsize}")
        rows = sessions * len(spec.branches)
        self.spec = spec
        self._pools: dict[str, tuple[tuple[Tensor, Tensor], ...]] = {}
        for cache in spec.cross_attention:
            shape = (rows, cache.num_tokens, spec.cross_heads(cache), spec.head_dim)
            self._pools[cache.name] = tuple(
                (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
                for _ in range(spec.num_layers)
            )

    @property
    def bytes(self) -> int:
        """Bytes of all rows, counted by storage: ``sessions * cross_bytes_per_session``."""
        return sum(t.untyped_storage().nbytes() for pool in self._pools.values() for pair in pool for t in pair)

    def populate(
        self, index: CrossIndex, key: CrossKey, layers: Iterable[tuple[Tensor, Tensor]], fingerprint: Hashable
    ) -> None:
        """Fill one entry from exactly ``num_layers`` pairs (K, V), each ``[tokens, heads, head_dim]`` or with a
        leading 1.

        All pairs are drawn from the iterator and checked before anything is written, so an iterator that raises, or
        yields too few, too many or misshapen pairs (ValueError), leaves the old entry as it was under its old
        fingerprint. The staging costs the memory of one entry for the moment. A fault while copying leaves none.
        """
        row = index.row(key)
        pool = self._pools[key.cache]
        staged: list[tuple[Tensor, Tensor]] = []
        for pair in layers:
            if len(staged) == len(pool):
                raise ValueError(f"{key.cache}: more than {len(pool)} layers")
            staged.append((self._shaped(key, pair[0], pool[0][0]), self._shaped(key, pair[1], pool[0][1])))
        if len(staged) != len(pool):
            raise ValueError(f"{key.cache}: {len(staged)} layers of {len(pool)}")
        index.invalidate(key)
        for (k_pool, v_pool), (k, v) in zip(pool, staged, strict=True):
            k_pool[row].copy_(k.detach())
            v_pool[row].copy_(v.detach())
        index.publish(key, fingerprint)

    def read(self, entry: CrossEntry, cache: str, layer: int) -> tuple[Tensor, Tensor]:
        """Views of a published entry's keys and values, each ``[tokens, heads, head_dim]``."""
        k, v = self._pools[cache][layer]
        return k[entry.row], v[entry.row]

    @staticmethod
    def _shaped(key: CrossKey, given: Tensor, pool: Tensor) -> Tensor:
        flat = given[0] if given.dim() == 4 and given.shape[0] == 1 else given
        if flat.shape != pool.shape[1:]:
            raise ValueError(f"{key.cache}: shape {tuple(given.shape)}, expected {tuple(pool.shape[1:])}")
        return flat
