"""The processes of a model's other ranks: started, spoken to, watched, ended.

Owns the processes and their pipes. Must not know what is said: messages are bytes (never pickles). Rank 0 is the engine's
process; it sends every message to all others in one order, so that their collectives meet. A team is whole or lost: an
operation that fails anywhere has left the ranks at different places, so the others are ended, too, and stay so until the
server starts again (:attr:`Team.lost` says why).

A thread sees the end of a rank's pipe. Whoever computes looks at ``lost`` where it waits for the device, and ends the team;
where it waits otherwise (a copy, a launch), the thread ends the groups and the ranks, by which that wait ends.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from realtime_omni.errors import BackendUnavailable
from realtime_omni.parallel.mesh import Grid, Mesh

log = logging.getLogger(__name__)

# NVLink multicast (NVLS) hung on shared hosts, and ranks are on one host, so nothing needs to listen elsewhere.
_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}

# A collective that fails or hangs must not take rank 0's process, which has sessions to answer, with it: torch's watchdog
# neither handles it, nor ends the process for an error of the device or because it hangs itself. Another rank may well end.
_OF_RANK_0 = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}

LOOK_S = 0.2
"""Between two looks at what no pipe tells."""
GRACE_S = 1.0
"""For whoever computes to see that a rank is gone, before the groups are ended under it."""
ENDED_WITHIN_S = 10.0
"""A killed process, which may hang in a driver."""


class Hello(msgspec.Struct, frozen=True):
    """What a rank is told first. ``replica``: ``module:function`` that is called with the mesh and ``arguments``."""

    rank: int
    sequence_size: int
    tensor_size: int
    device: str
    rendezvous: str
    timeout_s: float
    threads: int
    replica: str
    arguments: bytes


class Reply(msgspec.Struct, frozen=True):
    """What a rank says: an answer, or why it ends."""

    body: bytes = b""
    error: str | None = None


def device_of(first: str, rank: int) -> torch.device:
    """Of a rank, where rank 0's is ``first``: the following CUDA devices, or the CPU for all."""
    device = torch.device(first)
    return torch.device("cuda", (device.index or 0) + rank) if device.type == "cuda" else device


class Team:
    """Rank 0's side. Use from one thread; ``lost`` may be read from any."""

    def __init__(
        self,
        grid: Grid,
        *,
        device: str,
        replica: str,
        arguments: bytes,
        timeout_s: float,
        threads: int = 1,
    ) -> None:
        """Starts the other ranks, which begin to build their part at once, and meets them.

        Raises BackendUnavailable when one does not come, or when this process is rank 0 of another team."""
        if dist.is_initialized():
            raise BackendUnavailable("this process computes with other ranks already; one model of a server can")
        self.size = grid.size
        self.timeout_s = timeout_s
        self._lost: str | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="realtime-omni-ranks-"))
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._due_s: float | None = None
        """When what is under way must have ended."""
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._look, name="ranks", daemon=True)
        for name, value in (_ENVIRONMENT | _OF_RANK_0).items():
            os.environ.setdefault(name, value)
        rendezvous = self._folder / "rendezvous"
        try:
            for rank in range(1, grid.size):
                self._start()
                hello = Hello(
                    rank=rank,
                    sequence_size=grid.sequence_size,
                    tensor_size=grid.tensor_size,
                    device=str(device_of(device, rank)),
                    rendezvous=str(rendezvous),
                    timeout_s=timeout_s,
                    threads=threads,
                    replica=replica,
                    arguments=arguments,
                )
                self._pipes[-1].send_bytes(msgspec.msgpack.encode(hello))
            for pipe in self._pipes:
                self._answer(pipe, bounded=False)  # its interpreter has started, which can take long
            own = device_of(device, 0)
            if own.type == "cuda":
                torch.cuda.set_device(own)
            self.mesh = Mesh(grid, own, rendezvous, timeout_s, self.watch)
            self._watcher.start()
        except Exception as error:
            cut = isinstance(error, EOFError | ConnectionError)  # its pipe ends before its process has
            reason = self.lost or ("a rank has ended" if cut else type(error).__name__)
            self._end("the ranks did not meet")
            raise BackendUnavailable(f"the ranks of the model did not meet: {reason}") from error

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "realtime_omni.parallel.worker", str(theirs.fileno()), str(self._folder)]
        environment = {name: value for name, value in os.environ.items() if name not in _OF_RANK_0}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        self._processes.append(
            subprocess.Popen(  # noqa: S603 - this interpreter, and a number
                command,
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt at the terminal is rank 0's to act on
            )
        )
        theirs.close()
        self._pipes.append(Connection(ours.detach()))

    @property
    def lost(self) -> str | None:
        """Why the team cannot compute any more, or None. Sees a process that has ended without a message to it."""
        if self._lost is None:
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    self._lost = f"rank {rank} of {self.size} has ended"
                    break
        return self._lost

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of the other ranks' processes."""
        return tuple(process.pid for process in self._processes)

    def watch(self) -> None:
        """Raises BackendUnavailable when a rank is gone."""
        if (reason := self.lost) is not None:
            raise BackendUnavailable(f"{reason}; the server must be started again")

    def _look(self) -> None:
        """Until a rank has ended or is overdue, or the team was ended."""
        hangup = select.poll()
        ranks = {pipe.fileno(): rank for rank, pipe in enumerate(self._pipes, 1)}
        for number in ranks:
            hangup.register(number, 0)  # of nothing but its end
        while self.lost is None:
            for number, _ in hangup.poll(LOOK_S * 1000):
                self._lost = self._lost or f"rank {ranks[number]} of {self.size} has ended"
            due_s = self._due_s
            if due_s is not None and time.monotonic() > due_s:
                self._lost = self._lost or f"a pass over {self.size} ranks does not end"
        if not self._ended.wait(GRACE_S):
            self.mesh.leave()
            self._kill()  # gloo waits on for a rank that hangs

    @contextmanager
    def together(self, *, bounded: bool = True) -> Iterator[None]:
        """An operation of all ranks: it succeeds, or the team is lost and BackendUnavailable is raised. ``bounded``: by twice
        the timeout, for this process may compile first, and then wait for another that does."""
        self.watch()
        self._due_s = time.monotonic() + 2 * self.timeout_s if bounded else None
        done = False
        try:
            yield
            done = True
        except Exception as error:
            reason = self.lost or f"a pass over {self.size} ranks failed"
            log.exception("the ranks are lost")
            raise BackendUnavailable(f"{reason}; the server must be started again") from error
        finally:
            self._due_s = None
            if not done:
                self._end(self.lost or f"a pass over {self.size} ranks failed")

    def tell(self, message: bytes) -> None:
        """To every other rank, in order. Only within :meth:`together`."""
        for pipe in self._pipes:
            pipe.send_bytes(message)

    def ask(self, message: bytes) -> list[bytes]:
        """Their answers, by rank."""
        with self.together():
            self.tell(message)
            return [self._answer(pipe) for pipe in self._pipes]

    def wait_ready(self) -> None:
        """Until every rank has built its part, as long as that takes. Raises BackendUnavailable when one cannot."""
        with self.together(bounded=False):
            for pipe in self._pipes:
                self._answer(pipe, bounded=False)

    def _answer(self, pipe: Connection, *, bounded: bool = True) -> bytes:
        deadline_s = time.monotonic() + self.timeout_s
        while not pipe.poll(0.05):
            self.watch()
            if bounded and time.monotonic() > deadline_s:
                raise TimeoutError("a rank does not answer")
        reply = msgspec.msgpack.decode(pipe.recv_bytes(), type=Reply)
        if reply.error is not None:
            raise RuntimeError(reply.error)
        return reply.body

    def close(self) -> None:
        """End every rank; harmless to repeat."""
        self._end("the ranks were closed")

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()  # it holds nothing that is worth a farewell, and may hang in a collective

    def _end(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._ended.set()
        if hasattr(self, "mesh"):
            self.mesh.leave()
        self._kill()
        deadline_s = time.monotonic() + ENDED_WITHIN_S
        for process in self._processes:
            try:
                process.wait(max(deadline_s - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                log.error("rank process %d was killed and does not end", process.pid)
        if self._watcher.ident is not None:
            self._watcher.join()  # it looks at the pipes
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)
