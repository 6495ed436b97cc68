"""The ranks of one model as a grid, and the collectives between them.

Owns process groups and the shapes of what is exchanged. Must not know models, sessions or who started the processes. Ranks
are numbered ``sequence * tensor_size + tensor``; each owns the tokens of its number, in order. A *tensor* group shares
matrices (its ranks hold some heads and some of the MLP each), a *sequence* group shares tokens of one set of matrices.

Every collective is bounded: on a CPU by the groups' timeout, on a CUDA device by whoever waits for it (:func:`finish`) or
ends it (:meth:`Mesh.leave`). Shape legend: B rows, T tokens of a block, t of one rank, S and P the
sizes of the sequence and the tensor group, H heads of a tensor rank, h = H / S.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed.distributed_c10d import _abort_process_group, _world

log = logging.getLogger(__name__)

ENDED_WITHIN_S = 10.0
"""After it, groups that do not end are given up."""

# Their names since torch 2.13, which warns about the older ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """Where one rank stands."""

    rank: int = 0
    sequence_size: int = 1
    tensor_size: int = 1

    @property
    def size(self) -> int:
        return self.sequence_size * self.tensor_size

    @property
    def sequence(self) -> int:
        return self.rank // self.tensor_size

    @property
    def tensor(self) -> int:
        return self.rank % self.tensor_size

    def own_tokens(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of all [.., T, ..]."""
        return x.chunk(self.size, dim)[self.rank]

    def group_tokens(self, x: Tensor, dim: int = 1) -> Tensor:
        """Those of this rank's tensor group, whose ranks gather each other's."""
        return x.chunk(self.sequence_size, dim)[self.sequence]


class Meter:
    """Time spent in collectives, on the device's clock; waiting for a rank that is late counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._host: list[tuple[str, float]] = []

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        if self._device.type != "cuda":
            began_s = time.perf_counter()
            yield
            self._host.append((kind, (time.perf_counter() - began_s) * 1000))
            return
        before, after = (_event(timed=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self._spans.append((kind, before, after))

    def take_each(self) -> list[tuple[str, float]]:
        """Kind (``broadcast``, ``exchange``, ``gather``, ``sum``) and milliseconds of each since the last call, in order. The
        device must be idle."""
        taken = self._host + [(kind, before.elapsed_time(after)) for kind, before, after in self._spans]
        self._spans, self._host = [], []
        return taken

    def take_ms(self) -> float:
        """All of them together."""
        return sum(ms for _, ms in self.take_each())


Watch = Callable[[], None]
"""Raises when a rank is gone."""


def _nobody() -> None:
    """Is watched."""


class _WatchedStore(Store):
    """Where ranks find each other; whoever waits there has an eye on those that are to come."""

    LOOK_S = 0.05

    def __init__(self, place: FileStore, watch: Watch) -> None:
        super().__init__()
        self._place = place
        self._watch = watch

    def set(self, key: str, value: str) -> None:
        self._place.set(key, value)

    def get(self, key: str) -> bytes:
        return self._place.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._place.check(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]
        """Raises TimeoutError, and what the watch raises."""
        deadline_s = time.monotonic() + timeout.total_seconds()
        while not self._place.check(keys):
            self._watch()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nobody has said {', '.join(keys)}")
            time.sleep(self.LOOK_S)


class Leash:
    """Keeps the host a few layers ahead of a CUDA device, and never more.

    The device's queue has about a thousand places. A launch that finds it full behind a collective whose partner is gone
    waits for ever, some launches with the interpreter's lock held: then no other thread can look, act or end the process."""

    EVERY, MARKS = 8, 4
    """Collectives from one mark to the next; marks that the device may still have to reach."""

    def __init__(self) -> None:
        self._count = 0
        self._marks: deque[torch.cuda.Event] = deque()

    def pull(self, watch: Watch, timeout_s: float) -> None:
        """Before each collective. Raises as :func:`finish` does."""
        self._count += 1
        if self._count % self.EVERY:
            return
        if len(self._marks) == self.MARKS:
            finish(self._marks.popleft(), watch, timeout_s)
        self._marks.append(marked())


class Mesh:
    """The groups of this process. One for a process: torch keeps the groups in a global."""

    def __init__(
        self, grid: Grid, device: torch.device, rendezvous: Path, timeout_s: float, watch: Watch = _nobody
    ) -> None:
        """Blocks until all ranks are here, at ``rendezvous``, a file in a private folder. Raises TimeoutError or RuntimeError
        when they do not come in time, and what ``watch`` raises."""
        self.grid = grid
        self.device = device
        self.meter: Meter | None = None
        self.watch = watch
        """Asked while this process waits, for the others or for the device; what it raises ends the wait."""
        self._timeout_s = timeout_s
        self._leash = Leash() if device.type == "cuda" else None
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_s)
        place = FileStore(str(rendezvous), grid.size)
        watched = _WatchedStore(place, watch)
        watched.set(f"here/{grid.rank}", "")
        watched.wait([f"here/{rank}" for rank in range(grid.size)], timeout)
        # NCCL's own threads read the store, too, and must not wait for the interpreter; it meets in its first collective.
        store = place if backend == "nccl" else watched
        try:
            dist.init_process_group(backend, store=store, rank=grid.rank, world_size=grid.size, timeout=timeout)
        except BaseException:
            _world.group_count = 0  # as when groups end: they are named by it, and this process may meet new ranks
            raise
        self._left = False
        self._leaving = threading.Lock()
        self._groups: list[Any] = [dist.group.WORLD]
        try:
            self._join(timeout)
        except BaseException:
            self.leave()
            raise

    def _join(self, timeout: timedelta) -> None:
        grid = self.grid
        rows = [[s * grid.tensor_size + t for t in range(grid.tensor_size)] for s in range(grid.sequence_size)]
        self._tensor = self._joined(rows, timeout)
        self._sequence = self._joined([list(column) for column in zip(*rows, strict=True)], timeout)
        for group in (None, self._tensor, self._sequence):  # communicators are made now, while all are known to be here
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def _joined(self, members: Sequence[Sequence[int]], timeout: timedelta) -> dist.ProcessGroup | None:
        """Every rank makes all groups, in one order; its own is returned. None: everybody, or (never used) itself alone."""
        if len(members) == 1 or len(members[0]) == 1:
            return None
        groups = [dist.new_group(list(ranks), timeout=timeout) for ranks in members]
        (own,) = (group for ranks, group in zip(members, groups, strict=True) if self.grid.rank in ranks)
        assert isinstance(own, dist.ProcessGroup)
        self._groups.append(own)
        return own

    def broadcast(self, x: Tensor) -> Tensor:
        """From rank 0 to all, into ``x``."""
        with self._span("broadcast"):
            dist.broadcast(x, 0)
        return x

    def exchange(self, sent: Tensor) -> Exchange:
        """Begin to give ``sent[s]`` to rank s of the sequence group; the device goes on with what is asked of it next."""
        if self.grid.sequence_size == 1:
            return Exchange(sent, None, self)
        self._pull()
        received = torch.empty_like(sent)
        return Exchange(
            received, dist.all_to_all_single(received, sent, group=self._sequence, async_op=True), self, sent
        )

    def to_heads(self, *sent: Exchange) -> tuple[Tensor, ...]:
        """Each of [S, B, t', h, d], to [B, T, h, d]: all tokens of some heads."""
        return tuple(x.wait().transpose(0, 1).flatten(1, 2) for x in sent)

    def to_tokens(self, x: Tensor) -> Tensor:
        """[B, T, h, d] to [S, B, t', h, d]: the heads of each rank for some tokens."""
        return self.exchange(_split(x, self.grid.sequence_size)).wait()

    def gathered(self, x: Tensor) -> Tensor:
        """[B, t, D] of each rank of the tensor group to [B, P t, D]."""
        return self._gathered(x, self.grid.tensor_size, self._tensor)

    def everybody(self, x: Tensor) -> Tensor:
        """[B, t, D] of every rank to [B, T, D]."""
        return self._gathered(x, self.grid.size, None)

    def _gathered(self, x: Tensor, count: int, group: dist.ProcessGroup | None) -> Tensor:
        out = x.new_empty((count * x.shape[0], *x.shape[1:]))
        with self._span("gather"):
            _all_gather(out, x.contiguous(), group=group)
        return out.view(count, *x.shape).transpose(0, 1).flatten(1, 2)

    def summed_share(self, x: Tensor) -> Tensor:
        """Partial sums [B, P t, D] of the tensor group to this rank's tokens of the sum, [B, t, D]."""
        parts = _split(x, self.grid.tensor_size)
        out = torch.empty_like(parts[0])
        with self._span("sum"):
            _reduce_scatter(out, parts.flatten(0, 1), group=self._tensor)
        return out

    def summed(self, x: Tensor) -> Tensor:
        """Over the tensor group, in place."""
        with self._span("sum"):
            dist.all_reduce(x, group=self._tensor)
        return x

    def leave(self) -> None:
        """End all groups at once; what waits in a collective anywhere is let go with an error, and kernels that wait for
        another rank end. From any thread; returns when that is so, or cannot be had in ``ENDED_WITHIN_S``. Harmless to repeat,
        also when the process has other groups since."""
        with self._leaving:
            if not self._left:
                self._left = True
                if _all_end(self._groups):
                    _abort_process_group()  # torch forgets them
                else:
                    log.error("a collective does not end on %s, which cannot be used any more", self.device)

    def _pull(self) -> None:
        if self._left:
            raise RuntimeError("the groups of the ranks have ended")
        if self._leash is not None:
            self._leash.pull(self.watch, self._timeout_s)

    def _span(self, kind: str) -> _Span:
        """Around a collective."""
        self._pull()
        return _Span(self.meter, kind)


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-to-all that is under way."""

    received: Tensor
    work: dist.Work | None
    mesh: Mesh
    sent: Tensor | None = None
    """Held until then: its memory must not be another's."""

    def wait(self) -> Tensor:
        """What came, in the order of the ranks; only the device waits (a CPU is the device)."""
        if self.work is not None:
            with _Span(self.mesh.meter, "exchange"):
                self.work.wait()
        return self.received


class _Span:
    """A meter's span, or nothing: entered a thousand times a block."""

    __slots__ = ("_inner",)

    def __init__(self, meter: Meter | None, kind: str) -> None:
        self._inner = None if meter is None else meter.span(kind)

    def __enter__(self) -> None:
        if self._inner is not None:
            self._inner.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._inner is not None:
            self._inner.__exit__(None, None, None)


def by_rank(x: Tensor, ranks: int) -> Tensor:
    """[B, t, H, d] to [S, B, t, h, d]: heads sorted by the rank that they go to."""
    B, t, H, d = x.shape
    return x.reshape(B, t, ranks, H // ranks, d).permute(2, 0, 1, 3, 4).contiguous()


def by_token(x: Tensor) -> Tensor:
    """What :meth:`Mesh.to_tokens` returns, [S, B, t, h, d], as [B, t, H d]."""
    return x.permute(1, 2, 0, 3, 4).flatten(2)


def _split(x: Tensor, ranks: int) -> Tensor:
    """[B, T, ..] to [ranks, B, T / ranks, ..]."""
    B, T, *rest = x.shape
    return x.reshape(B, ranks, T // ranks, *rest).transpose(0, 1).contiguous()


def _all_end(groups: Sequence[Any]) -> bool:
    """Abort them side by side: the end of one waits for the device, and so for the kernels of the others."""

    def end(group: dist.ProcessGroup) -> None:
        try:
            group.abort()
        except RuntimeError:
            log.exception("a group of ranks did not end well")

    threads = [threading.Thread(target=end, args=(group,), name="ranks-end", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + ENDED_WITHIN_S
    for thread in threads:
        thread.join(max(deadline_s - time.monotonic(), 0.0))
    return not any(thread.is_alive() for thread in threads)


def _event(*, timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def marked() -> torch.cuda.Event:
    """Where the device's work stands when it comes to what has been asked of it so far."""
    event = _event()
    event.record()
    return event


def finish(event: torch.cuda.Event, watch: Watch, timeout_s: float) -> None:
    """Wait until the device has come to ``event``, as long as all ranks live. Raises TimeoutError, or what ``watch`` does.

    A collective whose partner is gone does not end by itself, so nothing here waits for the device without an eye on them."""
    began_s = time.monotonic()
    while not event.query():  # type: ignore[no-untyped-call]
        watch()
        if time.monotonic() - began_s > timeout_s:
            raise TimeoutError("the device did not finish a pass in time")
        time.sleep(0.0005)
