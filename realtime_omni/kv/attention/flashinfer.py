"""Attention by FlashInfer's paged prefill kernels, on CUDA: reads history where it lies, without gathering it.

Owns: kernel workspaces and the index tensors of a tick. Must not know: sessions, and how pages are found.

The kernel's page need not be the pool's. A kernel page of ``gcd(page_tokens, tokens_per_frame)`` tokens divides both,
so the same memory seen with that page size has only full pages in every frame: exactly the visible tokens are listed,
and no mask is needed (a mask would force the slower kernel family on Hopper, and a padded key of zero still gets
weight)::

    pool page of 16, 1,560 tokens a frame:   gcd 8   98 pool pages = 196 kernel pages, of which the first 195 are listed

A probe writes the block's keys and values into scratch pages, the clean pass into the reserved ones; extra tokens
always go to scratch. Index tensors are planned once per tick and kind of pass, and reused by every layer.

The package is imported on first use: it needs CUDA to construct anything, and takes seconds to import.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realtime_omni.errors import BackendUnavailable
from realtime_omni.kv.attention.plan import RowPlan
from realtime_omni.kv.storage import KVStorage
from realtime_omni.kv.window import FrameRef

# The size FlashInfer's own documentation recommends for its split-KV workspace.
_WORKSPACE_BYTES = 128 << 20
_MIN_CAPABILITY = (8, 0)
_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128, 256)
_CUDA_HOMES = ("/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc")


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can run here, and if not, what is missing."""

    available: bool
    reason: str


def probe() -> Availability:
    """Look, without importing FlashInfer, for the package, a CUDA device of capability 8.0 or more, and a kernel
    compiler.
    """
    if importlib.util.find_spec("flashinfer") is None:
        return Availability(False, "the package flashinfer-python is not installed")
    if not torch.cuda.is_available():
        return Availability(False, "torch sees no CUDA device")
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        return Availability(False, f"the CUDA device has capability {capability[0]}.{capability[1]}, 8.0 is needed")
    compiled = importlib.util.find_spec("flashinfer_jit_cache") is not None
    compiler = shutil.which("nvcc") or next((path for path in _CUDA_HOMES if Path(path).exists()), None)
    if not compiled and compiler is None:
        return Availability(False, "kernels are compiled on first use and nvcc is not found")
    return Availability(True, f"capability {capability[0]}.{capability[1]}")


class FlashInferBackend:
    """See the module. ``kernel``: ``auto``, ``fa2`` or ``fa3`` (Hopper)."""

    name = "flashinfer"

    def __init__(self, *, kernel: str = "auto", device: torch.device | str = "cuda") -> None:
        """Raises BackendUnavailable, naming what is missing, where it cannot run."""
        found = probe()
        if not found.available:
            raise BackendUnavailable(f"FlashInfer attention cannot run here: {found.reason}")
        try:
            prefill = importlib.import_module("flashinfer.prefill")
        except Exception as error:
            raise BackendUnavailable(f"FlashInfer is installed but does not import: {error}") from error
        if kernel == "auto":
            kernel = "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"
        self.kernel = kernel
        self._device = torch.device(device)
        self._wrapper_class: Any = prefill.BatchPrefillWithPagedKVCacheWrapper
        self._idle: list[Any] = []

    def plan(self, rows: Sequence[RowPlan], storage: KVStorage) -> FlashInferPlan:
        """Work out the kernel pages of every row; kernels are planned at the first pass of each kind.

        Raises BackendUnavailable on a dtype or head size that there are no kernels for.
        """
        if storage.dtype not in _DTYPES or storage.spec.head_dim not in _HEAD_DIMS:
            raise BackendUnavailable(
                f"FlashInfer has no kernel for {storage.dtype} with heads of {storage.spec.head_dim}: "
                "bfloat16 or float16 with 64, 128 or 256 are needed"
            )
        return FlashInferPlan(rows, storage, self)

    def take_wrapper(self) -> Any:
        """A kernel wrapper with its workspace; wrappers are reused by later ticks."""
        if self._idle:
            return self._idle.pop()
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        return self._wrapper_class(workspace, "NHD", backend=self.kernel)

    def give_wrapper(self, wrapper: Any) -> None:
        """Return a wrapper whose plan is no longer used."""
        self._idle.append(wrapper)


class FlashInferPlan:
    """One tick's attention; see ``AttentionPlan``."""

    def __init__(self, rows: Sequence[RowPlan], storage: KVStorage, backend: FlashInferBackend) -> None:
        self._rows = tuple(rows)
        self._storage = storage
        self._backend = backend
        spec = storage.spec
        self._kernel_page = math.gcd(storage.page_tokens, spec.tokens_per_frame)
        shape = (-1, self._kernel_page, spec.num_kv_heads, spec.head_dim)
        self._k = tuple(pool.view(shape) for pool in storage.k)
        self._v = tuple(pool.view(shape) for pool in storage.v)
        self._passes: dict[tuple[tuple[int, ...], bool, bool, bool, int | None], tuple[Any, Tensor]] = {}
        self._written = [0] * len(self._rows)
        self._closed = False

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
        if ahead and (commit or not all(self._written[row] & 1 << layer for row in rows)):
            raise ValueError("a pass ahead follows the clean pass and commits nothing")
        wrapper, slots = self._pass(tuple(rows), commit, causal, ahead, self._storage.spec.window_of_layers[layer], q)
        self._storage.write_slots(layer, slots, k.flatten(0, 1), v.flatten(0, 1))
        out: Tensor = wrapper.run(q.flatten(0, 1), (self._k[layer], self._v[layer]))
        if commit:
            for row in rows:
                self._written[row] |= 1 << layer
        return out.view(q.shape)

    def write(self, layer: int, k: Tensor, v: Tensor, *, rows: Sequence[int]) -> None:
        """See ``AttentionPlan.write``."""
        slots = [self._storage.slots(self._targets(self._rows[row], True))[: k.shape[1]] for row in rows]
        self._storage.write_slots(layer, torch.cat(slots), k.flatten(0, 1), v.flatten(0, 1))
        for row in rows:
            self._written[row] |= 1 << layer

    def complete(self, row: int) -> bool:
        """See ``AttentionPlan.complete``."""
        return self._written[row] == (1 << self._storage.spec.num_layers) - 1

    def close(self) -> None:
        """Return the kernel wrappers to the backend."""
        self._closed = True
        for wrapper, _ in self._passes.values():
            self._backend.give_wrapper(wrapper)
        self._passes.clear()

    def _pass(
        self, rows: tuple[int, ...], commit: bool, causal: bool, ahead: bool, window: int | None, q: Tensor
    ) -> tuple[Any, Tensor]:
        """The planned kernel, and the slots to write, int64 ``[B * T]``; made once per set of rows, kind of pass, window."""
        known = self._passes.get((rows, commit, causal, ahead, window))
        if known is not None:
            return known
        spec = self._storage.spec
        page = self._kernel_page
        tokens = q.shape[1]
        indptr, last, pages, slots = [0], [], list[int](), list[Tensor]()
        for number in rows:
            row = self._rows[number].within(window, spec.sink_frames)
            current = row.ahead if ahead else self._targets(row, commit)
            seen = row.seen_ahead if ahead else row.seen
            listed = self._kernel_pages((*seen, *current))
            total = sum(frame.tokens for frame in seen) + tokens
            pages.extend(listed[: -(-total // page)])
            indptr.append(len(pages))
            last.append((total - 1) % page + 1)
            slots.append(self._storage.slots(current)[:tokens])
        wrapper = self._backend.take_wrapper()
        wrapper.plan(
            torch.arange(0, (len(rows) + 1) * tokens, tokens, dtype=torch.int32),
            torch.tensor(indptr, dtype=torch.int32),
            torch.tensor(pages, dtype=torch.int32, device=self._storage.device),
            torch.tensor(last, dtype=torch.int32),
            q.shape[2],
            spec.num_kv_heads,
            spec.head_dim,
            page,
            causal=causal,  # the triangle ends at the last key
            q_data_type=q.dtype,
            kv_data_type=self._storage.dtype,
        )
        planned = (wrapper, torch.cat(slots))
        self._passes[rows, commit, causal, ahead, window] = planned
        return planned

    def _targets(self, row: RowPlan, commit: bool) -> tuple[FrameRef, ...]:
        """Where this pass puts the current tokens: reserved or scratch pages, then the extra tokens' pages."""
        if commit:
            return (*row.frames, *row.extra)
        if len(row.scratch) < len(row.frames):
            raise ValueError(f"{len(row.frames)} frames cannot be probed with scratch for {len(row.scratch)}")
        return (*row.scratch, *row.extra)

    def _kernel_pages(self, frames: Sequence[FrameRef]) -> list[int]:
        """The kernel pages that hold these frames' tokens, in order; only the last may be partly filled."""
        page, per_pool_page = self._kernel_page, self._storage.page_tokens // self._kernel_page
        listed: list[int] = []
        for frame in frames:
            whole = [number * per_pool_page + i for number in frame.pages for i in range(per_pool_page)]
            listed.extend(whole[: -(-frame.tokens // page)])
        return listed

    def _check(self, q: Tensor, k: Tensor, v: Tensor, rows: Sequence[int], ahead: bool) -> None:
        if self._closed:
            raise ValueError("this attention plan is closed")
        if not rows or len(set(rows)) != len(rows):
            raise ValueError(f"rows must be named once each, got {tuple(rows)}")
        for row in rows:
            if ahead and k.shape[1] > self._rows[row].room_ahead:
                raise ValueError(f"row {row} has room for {self._rows[row].room_ahead} tokens ahead, got {k.shape[1]}")
            if not ahead and k.shape[1] != self._rows[row].tokens:
                raise ValueError(f"row {row} was planned with {self._rows[row].tokens} tokens, got {k.shape[1]}")
        spec = self._storage.spec
        expected = (len(rows), k.shape[1], spec.num_kv_heads, spec.head_dim)
        if k.shape != expected or v.shape != expected or q.shape[:2] != expected[:2] or q.shape[3] != expected[3]:
            raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected {expected}")
