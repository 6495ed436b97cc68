"""A rank other than 0: ``python -m realtime_omni.parallel.worker FD FOLDER``.

Owns the loop: a message comes, the replica acts, an answer goes when there is one. Must not know what messages mean. It ends
when rank 0 closes its pipe, whatever it does then (so it never outlives rank 0), or at the first error, which it tells. The
folder where they met is rank 0's to remove; a rank that sees its end does it, too, because rank 0 may have been killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import sys
import threading
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn, Protocol

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported

import msgspec
import torch

from realtime_omni.parallel.mesh import Grid, Mesh
from realtime_omni.parallel.team import Hello, Reply

log = logging.getLogger(__name__)


class Replica(Protocol):
    """One rank's part of a model."""

    def handle(self, message: bytes) -> bytes | None:
        """Do what rank 0 does; the answer, when the message asks for one."""
        ...


def build(hello: Hello) -> Replica:
    """Meet the other ranks, then build this one's part."""
    torch.set_num_threads(hello.threads)
    device = torch.device(hello.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    grid = Grid(hello.rank, hello.sequence_size, hello.tensor_size)
    mesh = Mesh(grid, device, Path(hello.rendezvous), hello.timeout_s)
    module, _, name = hello.replica.partition(":")
    replica: Replica = getattr(import_module(module), name)(mesh, hello.arguments)
    return replica


def serve(pipe: Connection) -> NoReturn:
    """Say that it is here, and then that it is built; then act on messages. EOFError when rank 0 is gone."""
    pipe.send_bytes(msgspec.msgpack.encode(Reply()))
    replica = build(msgspec.msgpack.decode(pipe.recv_bytes(), type=Hello))
    pipe.send_bytes(msgspec.msgpack.encode(Reply()))
    while True:
        answer = replica.handle(pipe.recv_bytes())
        if answer is not None:
            pipe.send_bytes(msgspec.msgpack.encode(Reply(answer)))


def end_with(pipe: Connection, folder: str) -> None:
    """End this process when the other end of the pipe is closed: reading weights takes minutes, and a collective that waits
    for rank 0 may never end."""
    hangup = select.poll()
    hangup.register(pipe.fileno(), 0)  # of nothing but its end
    hangup.poll()
    leave(folder)


def leave(folder: str) -> NoReturn:
    """Rank 0 is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="rank: %(levelname)s %(message)s")
    pipe, folder = Connection(int(sys.argv[1])), sys.argv[2]
    threading.Thread(target=end_with, args=(pipe, folder), daemon=True).start()
    try:
        serve(pipe)
    except (EOFError, ConnectionError):
        leave(folder)
    except Exception as error:
        log.exception("this rank ends")
        with contextlib.suppress(OSError):
            pipe.send_bytes(msgspec.msgpack.encode(Reply(error=f"{type(error).__name__}: {error}")))
        return 1


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # a collective that never ends must not keep the process alive
