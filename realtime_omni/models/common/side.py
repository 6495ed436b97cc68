"""Work beside a model's own: on a CUDA device a second stream and the copies to the host that it ends in.

Owns the stream. Work begins after everything that was queued before it, and what is queued afterwards does not wait for it:
decoding a block runs beside the next passes. Its results on the device are for later work of the same stream; whoever else
reads one must :meth:`Side.drain` first. Elsewhere there is no second stream, and work is done when it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OnHost:
    """An array that is filled once ``ready`` (None: it is) has returned."""

    data: np.ndarray
    ready: Callable[[], None] | None = None


class Side:
    """See the module. For one thread; ``OnHost.ready`` may be called from any."""

    def __init__(self, device: torch.device | str) -> None:
        cuda = torch.device(device).type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], T], *reads: Tensor) -> T:
        """Queue ``work``. ``reads``: tensors of the current stream that it reads, which may be freed before it is done. Of
        those on another device it must read copies (torch's copies between devices wait for both)."""
        if self._stream is None:
            return work()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for tensor in reads:
            if tensor.device == self._stream.device:
                tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            return work()

    def to_host(self, x: Tensor) -> OnHost:
        """Start to copy a result of :meth:`run` into page-locked memory."""
        if self._stream is None:
            return OnHost(x.numpy())
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            host.copy_(x, non_blocking=True)
            done.record()
        return OnHost(host.numpy(), done.synchronize)

    def drain(self) -> None:
        """Wait until all of it is done, copies included."""
        if self._stream is not None:
            self._stream.synchronize()


class Pace:
    """Keeps the host at most one piece of work ahead of a CUDA device: the device never waits for the next piece to be
    queued, and what is called off has at most two pieces to finish. Elsewhere nothing runs ahead."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last: torch.cuda.Event | None = None

    def queued(self) -> None:
        """A piece was queued: wait for the one before it."""
        if not self._cuda:
            return
        before, self._last = self._last, torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last.record()
        if before is not None:
            before.synchronize()
