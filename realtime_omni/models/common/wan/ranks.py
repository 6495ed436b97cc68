"""A Wan network on several ranks: what rank 0 tells the others, and what they make of it.

Owns the command lane's vocabulary and both ends of it. Rank 0 is the engine's process: it alone knows sessions, decides at
checkpoints and keeps the book of pages. The others hold shares of weights and pages and values by number (texts, the
camera of a block, the plan of a tick); they act in the order they are told, and forget what rank 0 has forgotten. One
message starts each operation, a broadcast carries its input, and then all ranks compute. Between two passes nothing is
under way, so a tick that is aborted, closed or reset just has no further pass.

Messages are msgpack of the structs below.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from realtime_omni.kv.attention import open_backend
from realtime_omni.kv.attention.plan import AttentionBackend, AttentionPlan, RowPlan
from realtime_omni.kv.capacity import CapacityPlan, KVSpec
from realtime_omni.kv.storage import KVStorage
from realtime_omni.models.common.wan.network import Inputs, flow, text_of_row, write
from realtime_omni.models.common.wan.sharded import ShardedTransformer
from realtime_omni.models.common.wan.transformer import KeysValues
from realtime_omni.parallel.mesh import Meter, finish, marked
from realtime_omni.parallel.team import Team


class _Order(msgspec.Struct, frozen=True, tag=True):
    forget: list[int]
    """Numbers of texts, cameras and plans that rank 0 holds no more."""


class Pools(_Order, frozen=True, tag=True):
    """Allocate pages for this geometry, whose heads are those of one rank."""

    spec: KVSpec
    pages: int
    keep_gathered: bool | None
    fp8: bool


class Report(_Order, frozen=True, tag=True):
    """Answer with :class:`RankReport`."""


class Input(msgspec.Struct, frozen=True):
    """A tensor that follows as a broadcast."""

    shape: tuple[int, ...]
    dtype: str


class Text(_Order, frozen=True, tag=True):
    number: int
    features: Input


class Filmed(_Order, frozen=True, tag=True):
    number: int
    pictures: Input


class Planned(_Order, frozen=True, tag=True):
    number: int
    rows: list[RowPlan]


class Pass(_Order, frozen=True, tag=True):
    latents: Input
    timestep: float
    frames: list[int]
    texts: list[int]
    camera: int | None
    plan: int
    rows: tuple[int, ...]
    commit: bool
    flow: bool
    """False: the pass is for its history alone."""


Order = Pools | Report | Text | Filmed | Planned | Pass


class RankReport(msgspec.Struct, frozen=True):
    """What a rank holds."""

    texts: int
    cameras: int
    plans: int
    pages: int
    """Allocated."""
    kv_heads: int
    free_bytes: int
    peak_bytes: int
    """Of CUDA memory; 0 on a CPU."""


class RankedNetwork:
    """Rank 0's side: a :class:`~realtime_omni.models.common.wan.network.Network`, and the engine's ``Ranks``."""

    def __init__(self, transformer: ShardedTransformer, team: Team, *, compile_layers: bool = False) -> None:
        """Waits for the other ranks to have built theirs."""
        self.transformer = transformer
        self._team = team
        self._mesh = transformer.mesh
        self._numbers = itertools.count(1)
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Numbers of texts and cameras, by the first tensor of each: the others hold theirs as long as it lives."""
        self._forgotten: list[int] = []
        self._before: torch.cuda.Event | None = None
        if compile_layers:
            transformer.compile_layers()
        team.wait_ready()

    @property
    def kv_heads(self) -> int:
        return self.transformer.config.own_heads // self._mesh.grid.sequence_size

    def text(self, features: Tensor) -> tuple[KeysValues, ...]:
        number = next(self._numbers)
        with self._team.together():
            self._tell(Text(self._take_forgotten(), number, _input(features)))
            self._mesh.broadcast(features.contiguous())
            made = text_of_row(self.transformer, features)
            self._keep_pace(last=True)
            return self._remembered(number, made)

    def camera(self, pictures: Tensor) -> tuple[KeysValues, ...]:
        number = next(self._numbers)
        with self._team.together():
            self._tell(Filmed(self._take_forgotten(), number, _input(pictures)))
            self._mesh.broadcast(pictures.contiguous())
            return self._remembered(number, self.transformer.camera_cache(pictures))

    def flow(self, inputs: Inputs, *, commit: bool) -> Tensor:
        with self._team.together():
            made = flow(self.transformer, self._told(inputs, commit=commit, flow=True), commit=commit)
            self._keep_pace(last=commit)
            return made

    def write(self, inputs: Inputs) -> None:
        with self._team.together():
            write(self.transformer, self._told(inputs, commit=True, flow=False))
            self._keep_pace(last=True)

    def _told(self, inputs: Inputs, *, commit: bool, flow: bool) -> Inputs:
        """The pass as rank 0 computes it, once the others have begun theirs."""
        attention = inputs.attention
        assert isinstance(attention, RankedPlan)
        order = Pass(
            self._take_forgotten(),
            _input(inputs.latents),
            inputs.timestep,
            list(inputs.frames),
            [self._number_of(text) for text in inputs.texts],
            None if inputs.camera is None else self._number_of(inputs.camera),
            attention.number,
            inputs.rows,
            commit,
            flow,
        )
        self._tell(order)
        self._mesh.broadcast(inputs.latents)
        return replace(inputs, attention=attention.own)

    def _keep_pace(self, *, last: bool) -> None:
        """The host is at most one pass ahead of the device, and not at all after a block's last: so a checkpoint is a place
        in time, and whatever waits for the device next does not wait for a rank that is gone."""
        if self._mesh.device.type != "cuda":
            return
        event = marked()
        awaited = event if last else self._before
        if awaited is not None:
            finish(awaited, self._team.watch, self._team.timeout_s)
        self._before = None if last else event

    # What the engine asks (models.base.Ranks).

    @property
    def count(self) -> int:
        return self._team.size

    def available_bytes(self) -> int | None:
        """Bytes; None on a CPU."""
        free = [report.free_bytes for report in self.reports()]
        if self._mesh.device.type != "cuda":
            return None
        return min(torch.cuda.mem_get_info(self._mesh.device)[0], *free)

    def allocate(
        self, plan: CapacityPlan, backend: AttentionBackend, *, keep_gathered: bool | None, fp8: bool
    ) -> AttentionBackend:
        with self._team.together():
            self._tell(Pools(self._take_forgotten(), plan.spec, plan.total_pages, keep_gathered, fp8))
        self.reports()  # memory that is lacking on a rank is noticed now
        return RankedBackend(backend, self)

    @property
    def fault(self) -> str | None:
        return self._team.lost

    def close(self) -> None:
        self._team.close()

    def reports(self) -> list[RankReport]:
        """Of the other ranks."""
        message = msgspec.msgpack.encode(Report(self._take_forgotten()))
        return [msgspec.msgpack.decode(body, type=RankReport) for body in self._team.ask(message)]

    def tell_plan(self, rows: Sequence[RowPlan]) -> int:
        number = next(self._numbers)
        with self._team.together():
            self._tell(Planned(self._take_forgotten(), number, list(rows)))
        return number

    def forget(self, number: int) -> None:
        self._forgotten.append(number)

    @property
    def processes(self) -> tuple[int, ...]:
        """Their ids, by rank."""
        return self._team.processes

    def measure(self) -> Meter:
        """From now on, time spent in rank 0's collectives."""
        self._mesh.meter = Meter(self._mesh.device)
        return self._mesh.meter

    def stop_measuring(self) -> None:
        self._mesh.meter = None

    def _remembered(self, number: int, layers: tuple[KeysValues, ...]) -> tuple[KeysValues, ...]:
        first = layers[0][0]
        self._known[first] = number
        weakref.finalize(first, self._forgotten.append, number)
        return layers

    def _number_of(self, layers: tuple[KeysValues, ...]) -> int:
        number: int = self._known[layers[0][0]]
        return number

    def _take_forgotten(self) -> list[int]:
        taken = []
        while self._forgotten:  # values may be dropped meanwhile
            taken.append(self._forgotten.pop())
        return taken

    def _tell(self, order: Order) -> None:
        self._team.tell(msgspec.msgpack.encode(order))


class RankedBackend:
    """The attention of rank 0's pages, whose plans the other ranks make, too."""

    def __init__(self, own: AttentionBackend, network: RankedNetwork) -> None:
        self._own = own
        self._network = network

    @property
    def name(self) -> str:
        return self._own.name

    def plan(self, rows: Sequence[RowPlan], storage: KVStorage) -> RankedPlan:
        return RankedPlan(self._network.tell_plan(rows), self._own.plan(rows, storage), self._network)


class RankedPlan:
    """One tick's plan on all ranks; attended to by passes, never from outside of one."""

    def __init__(self, number: int, own: AttentionPlan, network: RankedNetwork) -> None:
        self.number = number
        self.own = own
        self._network: RankedNetwork | None = network

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
        return self.own.attend(layer, q, k, v, rows=rows, commit=commit, causal=causal, ahead=ahead)

    def write(self, layer: int, k: Tensor, v: Tensor, *, rows: Sequence[int]) -> None:
        self.own.write(layer, k, v, rows=rows)

    def complete(self, row: int) -> bool:
        """Of all ranks: they write the same layers."""
        return self.own.complete(row)

    def close(self) -> None:
        self.own.close()
        if self._network is not None:
            self._network.forget(self.number)
            self._network = None


class WanReplica:
    """Another rank's side; see ``parallel.worker``."""

    def __init__(self, transformer: ShardedTransformer, *, compile_layers: bool = False) -> None:
        self._transformer = transformer.eval().requires_grad_(False)
        self._mesh = transformer.mesh
        self._texts: dict[int, tuple[KeysValues, ...]] = {}
        self._cameras: dict[int, tuple[KeysValues, ...]] = {}
        self._plans: dict[int, AttentionPlan] = {}
        self._backend: AttentionBackend | None = None
        self._storage: KVStorage | None = None
        if compile_layers:
            transformer.compile_layers()

    @torch.no_grad()
    def handle(self, message: bytes) -> bytes | None:
        order = msgspec.msgpack.decode(message, type=Order)
        self._forget(order.forget)
        match order:
            case Pass():
                self._pass(order)
            case Planned(number=number, rows=rows):
                assert self._backend is not None
                assert self._storage is not None
                self._plans[number] = self._backend.plan(rows, self._storage)
            case Text(number=number, features=features):
                self._texts[number] = text_of_row(self._transformer, self._received(features))
            case Filmed(number=number, pictures=pictures):
                self._cameras[number] = self._transformer.camera_cache(self._received(pictures))
            case Pools():
                dtype = self._transformer.patches.weight.dtype
                device = self._mesh.device
                self._storage = KVStorage(order.spec, order.pages, device=device, dtype=dtype)
                self._backend = open_backend(device=str(device), keep_gathered=order.keep_gathered, fp8=order.fp8)
            case Report():
                return msgspec.msgpack.encode(self._report())
        return None

    def _pass(self, order: Pass) -> None:
        inputs = Inputs(
            self._received(order.latents),
            order.timestep,
            order.frames,
            [self._texts[number] for number in order.texts],
            None if order.camera is None else self._cameras[order.camera],
            self._plans[order.plan],
            order.rows,
        )
        if order.flow:
            flow(self._transformer, inputs, commit=order.commit)
        else:
            write(self._transformer, inputs)

    def _received(self, given: Input) -> Tensor:
        return self._mesh.broadcast(
            torch.empty(given.shape, dtype=getattr(torch, given.dtype), device=self._mesh.device)
        )

    def _forget(self, numbers: Sequence[int]) -> None:
        held: list[dict[int, Any]] = [self._texts, self._cameras, self._plans]
        for number in numbers:
            for values in held:
                values.pop(number, None)

    def _report(self) -> RankReport:
        device = self._mesh.device
        cuda = device.type == "cuda"
        return RankReport(
            texts=len(self._texts),
            cameras=len(self._cameras),
            plans=len(self._plans),
            pages=0 if self._storage is None else self._storage.pages,
            kv_heads=self._transformer.config.own_heads // self._mesh.grid.sequence_size,
            free_bytes=torch.cuda.mem_get_info(device)[0] if cuda else 0,
            peak_bytes=torch.cuda.max_memory_allocated(device) if cuda else 0,
        )


def _input(x: Tensor) -> Input:
    return Input(tuple(x.shape), str(x.dtype).removeprefix("torch."))
