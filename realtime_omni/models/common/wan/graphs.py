"""Passes of a Wan network as CUDA graphs: a small network costs the device's time, not the interpreter's.

A pass of the 1.3B network launches a thousand kernels of some ten microseconds each, and the process that launches them one by
one is what a session waits for. Here a pass is recorded once its window is full, for as many rows as it has, and replayed from
then on: a pass that only denoises, one that only yields what becomes history, and one that does both. Everything else runs
plainly: windows that are filling, rows of different histories, float64, and a size whose recording failed.

Owns the graphs and their buffers: inputs, gathered history, what a clean pass yields. Nothing of a session: buffers are filled
for every tick. On the CPU the same buffers are filled and the same work runs without a graph, so tests see all but the
capture. Results are those of :class:`~realtime_omni.models.common.wan.network.LocalNetwork`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from realtime_omni.kv.attention.sdpa import SdpaPlan
from realtime_omni.models.common.conditioning import stacked
from realtime_omni.models.common.wan.network import Inputs, LocalNetwork
from realtime_omni.models.common.wan.transformer import KeysValues, WanTransformer

log = logging.getLogger(__name__)

MOST = 4
"""Sizes that are kept, each with its gathered history; beyond it the one that was used least recently goes."""


@dataclass(frozen=True, slots=True)
class _Size:
    """What a graph is for."""

    rows: int
    history_tokens: int
    tokens: int
    latents: torch.Size
    text: torch.Size
    camera: bool


class _Kind(Enum):
    """What a pass yields."""

    FLOW = auto()
    HISTORY = auto()
    BOTH = auto()


@dataclass(slots=True)
class _Recorded:
    """One kind of pass: ``run`` computes ``flow`` and fills ``written`` from the buffers of its size."""

    run: Callable[[], None]
    flow: Tensor | None
    """None in a pass that only writes."""
    written: list[tuple[Tensor, Tensor]]
    """Of every layer, keys and values [B, T, heads, head_dim]; empty in a pass that only denoises."""


@dataclass(slots=True)
class _Buffers:
    """Of one size. ``plan`` and ``rows``: whose history is in them, of the tick that runs."""

    latents: Tensor
    timestep: Tensor
    frames: Tensor
    texts: tuple[KeysValues, ...]
    camera: tuple[KeysValues, ...] | None
    history: tuple[KeysValues, ...]
    plan: SdpaPlan | None = None
    rows: tuple[int, ...] = ()
    sources: tuple[object, ...] = ()
    """What texts and camera were copied from; held, so that nothing else can have its identity."""
    passes: dict[_Kind, _Recorded] = field(default_factory=dict)


class GraphedNetwork(LocalNetwork):
    """See the module. For one thread."""

    def __init__(self, transformer: WanTransformer) -> None:
        super().__init__(transformer)
        self._sizes: dict[_Size, _Buffers] = {}
        self._refused: set[_Size] = set()

    @property
    def recorded(self) -> int:
        """Kinds of passes that are replayed."""
        return sum(len(buffers.passes) for buffers in self._sizes.values())

    def flow(self, inputs: Inputs, *, commit: bool) -> Tensor:
        """See ``Network.flow``."""
        recorded = self._replayed(inputs, _Kind.BOTH if commit else _Kind.FLOW)
        if recorded is None:
            return super().flow(inputs, commit=commit)
        assert recorded.flow is not None
        return recorded.flow.clone()

    def write(self, inputs: Inputs) -> None:
        """See ``Network.write``."""
        if self._replayed(inputs, _Kind.HISTORY) is None:
            super().write(inputs)

    def _replayed(self, inputs: Inputs, kind: _Kind) -> _Recorded | None:
        """The pass, done, its history written; None: it is not one that is replayed."""
        size = self._size(inputs)
        if size is None or size in self._refused:
            return None
        attention = inputs.attention
        assert isinstance(attention, SdpaPlan)
        buffers = self._filled(size, inputs, attention)
        recorded = buffers.passes.get(kind)
        if recorded is None:
            try:
                recorded = buffers.passes[kind] = self._record(buffers, kind)
            except RuntimeError:
                log.exception("a pass could not be recorded; passes of its size run plainly size=%s", size)
                self._refused.add(size)
                del self._sizes[size]
                return None
        recorded.run()
        for layer, (k, v) in enumerate(recorded.written):
            attention.write(layer, k, v, rows=inputs.rows)
        return recorded

    def _size(self, inputs: Inputs) -> _Size | None:
        """None: not a pass that is recorded."""
        attention, rows = inputs.attention, inputs.rows
        if not isinstance(attention, SdpaPlan):
            return None
        seen = attention.full_window(rows)
        if seen is None:
            return None
        text = inputs.texts[0][0][0].shape
        return _Size(len(rows), *seen, inputs.latents.shape, text, inputs.camera is not None)

    def _filled(self, size: _Size, inputs: Inputs, plan: SdpaPlan) -> _Buffers:
        """The size's buffers with everything that this pass reads."""
        latents, texts, camera, rows = inputs.latents, inputs.texts, inputs.camera, inputs.rows
        buffers = self._sizes.pop(size, None)
        if buffers is None:
            if len(self._sizes) == MOST:
                del self._sizes[next(iter(self._sizes))]
            buffers = _buffers(inputs, plan, size)
        self._sizes[size] = buffers  # the most recently used is last
        buffers.latents.copy_(latents)
        buffers.timestep.fill_(inputs.timestep)
        for row, first in enumerate(inputs.frames):
            torch.arange(first, first + latents.shape[1], out=buffers.frames[row])
        sources = (*texts, camera)
        if len(sources) != len(buffers.sources) or any(
            a is not b for a, b in zip(sources, buffers.sources, strict=True)
        ):
            _copy(buffers.texts, stacked(texts))
            if camera is not None:
                assert buffers.camera is not None
                _copy(buffers.camera, camera)
            buffers.sources = sources
        if buffers.plan is not plan or buffers.rows != rows:
            plan.gather_into(rows, buffers.history)
            buffers.plan, buffers.rows = plan, rows
        return buffers

    def _record(self, buffers: _Buffers, kind: _Kind) -> _Recorded:
        written: list[tuple[Tensor, Tensor]] = []

        def write(_: int, k: Tensor, v: Tensor) -> None:
            written.append((k, v))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            assert buffers.plan is not None
            if kind is not _Kind.FLOW:
                write(layer, k, v)
            return buffers.plan.attend(layer, q, k, v, rows=buffers.rows, commit=False)

        def work() -> Tensor | None:
            written.clear()
            given = (buffers.latents, buffers.timestep, buffers.frames, buffers.texts, attend)
            if kind is _Kind.HISTORY:
                self.transformer.commit(*given, write, camera=buffers.camera)
                return None
            flow: Tensor = self.transformer(*given, camera=buffers.camera)
            return flow

        # Once over the same tensors: a compiler makes other code for them than for a plain pass's views, and times its
        # kernels at their first run, which a capture forbids.
        work()
        run, flow = (_captured if buffers.latents.is_cuda else _repeated)(work)
        return _Recorded(run, flow, written)


def _captured(work: Callable[[], Tensor | None]) -> tuple[Callable[[], None], Tensor | None]:
    """What replays ``work``, and its result, which a replay fills."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        flow = work()
    return graph.replay, flow


def _repeated(work: Callable[[], Tensor | None]) -> tuple[Callable[[], None], Tensor | None]:
    """The same on the CPU."""
    flow = work()
    return lambda: _redo(work, flow), flow


def _redo(work: Callable[[], Tensor | None], flow: Tensor | None) -> None:
    """What a replay is on the CPU."""
    made = work()
    if flow is not None and made is not None:
        flow.copy_(made)


def _buffers(inputs: Inputs, plan: SdpaPlan, size: _Size) -> _Buffers:
    latents, camera = inputs.latents, inputs.camera
    return _Buffers(
        torch.empty_like(latents),
        torch.empty(size.rows, device=latents.device),
        torch.empty(size.rows, latents.shape[1], dtype=torch.int64, device=latents.device),
        tuple((k.clone(), v.clone()) for k, v in stacked(inputs.texts)),
        None if camera is None else tuple((scale.clone(), shift.clone()) for scale, shift in camera),
        plan.new_history(size.rows, size.history_tokens + size.tokens),
    )


def _copy(into: tuple[KeysValues, ...], source: tuple[KeysValues, ...]) -> None:
    torch._foreach_copy_([part for pair in into for part in pair], [part for pair in source for part in pair])
