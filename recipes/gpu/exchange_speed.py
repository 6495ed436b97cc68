"""What an exchange of one layer's queries costs between GPUs of one host: NCCL as it is, tuned, and peers' memory. JSON lines.

    PYTHONPATH=.:protocols:clients/python python recipes/gpu/exchange_speed.py [--ranks 2] [--limit-s 150]

One line per setting, each in processes of its own: microseconds of an all-to-all of [ranks, 1, 4680 / ranks, 40 / ranks, 128]
in bfloat16 alone, and of a matrix product of the size that runs beside it alone, after it and at the same time. ``peers``: the
ranks write into each other's memory (torch's symmetric memory) instead. ``--device cpu`` rehearses it, smaller, with gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from realtime_omni.parallel.mesh import Grid, Mesh, finish, marked
from realtime_omni.parallel.team import Team

SETTINGS: dict[str, dict[str, str]] = {
    "nccl": {},
    "peers": {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"},
    "nccl 16 channels": {"NCCL_MIN_P2P_NCHANNELS": "16"},
    "nccl 32 channels": {"NCCL_MIN_P2P_NCHANNELS": "32"},
    "nccl copy engine": {"NCCL_P2P_USE_CUDA_MEMCPY": "1"},
}
TOKENS, HEADS, SIZE = 4680, 40, 128
ROUNDS = 60


class Exchanger:
    """One rank; every rank does the same."""

    def __init__(self, mesh: Mesh, setting: str) -> None:
        self.mesh = mesh
        ranks = mesh.grid.size
        cuda = mesh.device.type == "cuda"
        dtype, size = (torch.bfloat16, SIZE) if cuda else (torch.float32, 4)
        shape = (ranks, 1, TOKENS // ranks, HEADS // ranks, size)
        self.sent = torch.randn(shape, device=mesh.device).to(dtype)
        self.a = torch.randn(TOKENS // ranks, HEADS * size, device=mesh.device).to(dtype)
        self.b = torch.randn(HEADS * size, HEADS * size, device=mesh.device).to(dtype)
        self.exchange: Callable[[], Callable[[], Tensor]] = self._nccl
        if setting == "peers":
            self._meet(shape, dtype)
            self.exchange = self._peers
        self.aside = torch.cuda.Stream() if cuda else None

    def _nccl(self) -> Callable[[], Tensor]:
        return self.mesh.exchange(self.sent).wait

    def _meet(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.received = symmetric.empty(shape, dtype=dtype, device=self.mesh.device)
        self.memory = symmetric.rendezvous(self.received, group=dist.group.WORLD)
        self.theirs = [self.memory.get_buffer(rank, shape, dtype) for rank in range(self.mesh.grid.size)]

    def _peers(self) -> Callable[[], Tensor]:
        """On a stream of its own: nobody reads what came last any more, each writes, everybody has written."""
        self.aside.wait_stream(torch.cuda.current_stream())
        own = self.mesh.grid.rank
        with torch.cuda.stream(self.aside):
            self.memory.barrier(channel=0)
            for step in range(self.mesh.grid.size):
                to = (own + step) % self.mesh.grid.size
                self.theirs[to][own].copy_(self.sent[to])
            self.memory.barrier(channel=1)

        def wait() -> Tensor:
            torch.cuda.current_stream().wait_stream(self.aside)
            return self.received

        return wait

    def work(self) -> None:
        torch.mm(self.a, self.b)

    def both(self) -> None:
        wait = self.exchange()
        self.work()
        wait()

    def after(self) -> None:
        self.exchange()()
        self.work()

    def handle(self, message: bytes) -> bytes:
        """Check it, then time each."""
        first = self.exchange()().float().sum().item()
        assert first == first
        parts = {"alone": lambda: self.exchange()(), "matrix": self.work, "after": self.after, "both": self.both}
        return json.dumps({name: self._us(part) for name, part in parts.items()}).encode()

    def _us(self, part: Callable[[], object]) -> float:
        taken = []
        for _ in range(ROUNDS):
            self.mesh.broadcast(self.a[:1, :8].contiguous())  # all ranks begin together
            began = self._now()
            part()
            taken.append(self._since(began))
        return round(statistics.median(taken[10:]), 1)

    def _now(self) -> torch.cuda.Event | float:
        if self.aside is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, began: torch.cuda.Event | float) -> float:
        if isinstance(began, float):
            return (time.perf_counter() - began) * 1e6
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        finish(marked(), lambda: None, 20.0)
        return began.elapsed_time(event) * 1000


def replica(mesh: Mesh, arguments: bytes) -> Exchanger:
    return Exchanger(mesh, arguments.decode())


def one(args: argparse.Namespace) -> None:
    """This process is rank 0 of one setting."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    team = Team(
        Grid(0, args.ranks, 1),
        device=args.device,
        replica="exchange_speed:replica",
        arguments=args.setting.encode(),
        timeout_s=30.0,
    )
    exchanger = Exchanger(team.mesh, args.setting)
    team.wait_ready()
    with team.together():
        team.tell(b"go")
        print(exchanger.handle(b"go").decode(), flush=True)
    team.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit-s", type=float, default=150.0)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.setting:
        one(args)
        return 0
    ends_s = time.monotonic() + args.limit_s
    for setting, environment in SETTINGS.items():
        command = [sys.executable, __file__, "--ranks", str(args.ranks), "--device", args.device, "--setting", setting]
        try:
            done = subprocess.run(
                command,
                env=os.environ | environment,
                capture_output=True,
                text=True,
                timeout=max(min(60.0, ends_s - time.monotonic()), 1.0),
            )
        except subprocess.TimeoutExpired:
            print(json.dumps({"setting": setting, "error": "not done in time"}), flush=True)
            continue
        try:
            found = {"microseconds": json.loads(done.stdout)}
        except ValueError:
            found = {"error": done.stderr[-1500:]}
        print(json.dumps({"setting": setting, **found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
