"""A rank that ends, hangs or never comes: a coded error within the bound, and a server that says so."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
import torch

from parallel.tiny_ranks import config, ranked, start
from realtime_omni.errors import BackendUnavailable, ErrorCode
from realtime_omni.manager import SessionManager
from realtime_omni.parallel import team
from realtime_omni.parallel.mesh import Mesh
from realtime_omni.parallel.team import Hello
from realtime_omni.testing.inline import InlineEngine


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_rank_that_is_lost_fails_the_sessions_with_a_code_and_is_seen(how: signal.Signals) -> None:
    model = start(2, 1, timeout_s=3.0)
    engine = InlineEngine(model, config(sp=2))
    engine.create("a", seed=5)
    engine.next("a")
    (process,) = ranked(model).processes
    assert engine.runner.fault is None

    def hit(at: str, sessions: Sequence[str]) -> None:
        if at == "forward:3":
            os.kill(process, how)

    engine.runner.faults = hit
    began_s = time.monotonic()
    with pytest.raises(BackendUnavailable, match="must be started again") as lost:
        engine.next("a")
    assert time.monotonic() - began_s < 30
    assert lost.value.code == ErrorCode.BACKEND_UNAVAILABLE
    assert engine.runner.fault is not None
    assert engine.view("a").state == "failed"
    assert engine.runner.pages()[0] == 0
    with pytest.raises(BackendUnavailable):
        engine.create("b", seed=1)
    engine.close("a")
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_rank_that_cannot_build_its_part_is_no_team() -> None:
    with pytest.raises(BackendUnavailable, match=r"over 2 ranks|has ended"):
        start(2, 1, arguments=b"nonsense")


def test_a_rank_that_still_builds_ends_with_rank_0(tmp_path: Path) -> None:
    """It waits for a meeting that will not come, as it would read weights, when rank 0 is killed."""
    ours, theirs = socket.socketpair()
    folder = tmp_path / "ranks"
    folder.mkdir()
    command = [sys.executable, "-m", "realtime_omni.parallel.worker", str(theirs.fileno()), str(folder)]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    try:
        theirs.close()
        pipe = Connection(ours.detach())
        place = str(folder / "rendezvous")
        hello = Hello(1, 2, 1, "cpu", place, 300.0, 1, "parallel.tiny_ranks:replica", b"")
        pipe.send_bytes(msgspec.msgpack.encode(hello))
        assert pipe.poll(60)
        pipe.recv_bytes()
        assert process.poll() is None
        pipe.close()
        assert process.wait(60) == 0
        assert not folder.exists(), "nobody else is left to remove it"
    finally:
        process.kill()
        process.wait()


def test_an_old_team_that_is_closed_again_leaves_the_new_one_alone() -> None:
    old = start(2, 1)
    ranked(old).close()
    model = start(2, 1)
    engine = InlineEngine(model, config(sp=2))
    engine.create("a", seed=5)
    ranked(old).close()
    engine.next("a")
    ranked(model).close()


def test_ranks_that_met_half_can_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Mesh, timeout: timedelta) -> None:
        raise RuntimeError("a rank is gone")

    with monkeypatch.context() as half:
        half.setattr(Mesh, "_join", fail)
        with pytest.raises(BackendUnavailable, match="did not meet"):
            start(2, 1)
    ranked(start(2, 1)).close()


def test_ranks_of_which_one_never_came_can_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as lame:
        lame.setattr(team, "device_of", lambda first, rank: torch.device("cuda", 77) if rank else torch.device(first))
        with pytest.raises(BackendUnavailable, match="did not meet"):
            start(2, 1, timeout_s=1.0)
    model = start(2, 1)
    engine = InlineEngine(model, config(sp=2))
    engine.create("a", seed=5)
    engine.next("a")
    ranked(model).close()


async def test_a_rank_that_ends_while_nothing_runs_makes_the_server_unhealthy_at_once() -> None:
    model = start(2, 1)
    (process,) = ranked(model).processes
    async with SessionManager(model, config(sp=2)) as manager:
        session = await manager.create_session(seed=1)
        await session.next_chunk()
        assert manager.health().ok
        os.kill(process, signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PID, process, os.WEXITED | os.WNOWAIT)
        health = manager.health()
        assert not health.ok
        assert health.reason == "rank 1 of 2 has ended; start the server again"
        with pytest.raises(BackendUnavailable):
            await session.next_chunk()
        await session.close()
