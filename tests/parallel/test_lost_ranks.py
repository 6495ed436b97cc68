"""A rank that ends, hangs or never comes: a coded error within the bound, and a server that says so."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
import torch
from torch._C._distributed_c10d import FileStore

from parallel.tiny_ranks import config, ranked, start
from realtime_omni.errors import BackendUnavailable, ErrorCode
from realtime_omni.manager import SessionManager
from realtime_omni.parallel import mesh, team
from realtime_omni.parallel.mesh import Grid, Leash, Mesh
from realtime_omni.parallel.team import Hello
from realtime_omni.testing.inline import InlineEngine


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_rank_that_is_lost_fails_the_sessions_with_a_code_and_is_seen(how: signal.Signals) -> None:
    model = start(2, 1, timeout_s=10.0)
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
    assert time.monotonic() - began_s < 100
    assert lost.value.code == ErrorCode.BACKEND_UNAVAILABLE
    assert engine.runner.fault is not None
    assert engine.view("a").state == "failed"
    assert engine.runner.pages()[0] == 0
    with pytest.raises(BackendUnavailable):
        engine.create("b", seed=1)
    engine.close("a")
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_wait_that_sees_nothing_ends_with_the_groups(how: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a copy from a device does, behind a collective whose partner is gone."""
    model = start(2, 1)
    engine = InlineEngine(model, config(sp=2))
    engine.create("a", seed=5)
    engine.next("a")
    network = ranked(model)
    ranks, ended = network.transformer.mesh, threading.Event()
    monkeypatch.setattr(network._team, "timeout_s", 0.5)
    leave = ranks.leave

    def left() -> None:
        leave()
        ended.set()

    def stuck(x: torch.Tensor) -> torch.Tensor:
        os.kill(network.processes[0], how)
        assert ended.wait(20), "nobody has ended the groups"
        return x

    monkeypatch.setattr(ranks, "leave", left)
    monkeypatch.setattr(ranks, "everybody", stuck)
    began_s = time.monotonic()
    with pytest.raises(BackendUnavailable, match=r"has ended|does not end"):
        engine.next("a")
    assert time.monotonic() - began_s < 60
    with pytest.raises(BackendUnavailable):
        engine.create("b", seed=1)
    engine.close("a")


def test_a_collective_that_waits_for_a_rank_that_hangs_is_ended_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    model = start(2, 1, timeout_s=120.0)
    engine = InlineEngine(model, config(sp=2))
    engine.create("a", seed=5)
    engine.next("a")
    network = ranked(model)
    monkeypatch.setattr(network._team, "timeout_s", 0.5)
    os.kill(network.processes[0], signal.SIGSTOP)
    began_s = time.monotonic()
    with pytest.raises(BackendUnavailable, match="does not end"):
        engine.next("a")
    assert time.monotonic() - began_s < 60
    engine.close("a")


class Far:
    """A mark that a device reaches when it is told."""

    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached


def test_the_host_is_a_bounded_number_of_collectives_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[Far] = []

    def marked() -> Far:
        marks.append(Far())
        return marks[-1]

    monkeypatch.setattr(mesh, "marked", marked)
    leash = Leash()
    most = Leash.EVERY * (Leash.MARKS + 1) - 1

    def gone() -> None:
        raise BackendUnavailable("rank 1 is gone")

    for _ in range(most):
        leash.pull(gone, 60.0)
    with pytest.raises(BackendUnavailable):
        leash.pull(gone, 60.0)
    leash = Leash()
    marks.clear()
    for _ in range(most):
        leash.pull(lambda: None, 0.01)
    with pytest.raises(TimeoutError):
        leash.pull(lambda: None, 0.01)
    leash = Leash()
    marks.clear()
    for number in range(10 * most):
        for mark in marks[:-2]:
            mark.reached = True
        leash.pull(gone, 60.0)
        assert len(marks) == (number + 1) // Leash.EVERY


class Group:
    def __init__(self, end: Callable[[], object]) -> None:
        self.abort = end


def test_groups_are_ended_side_by_side_and_those_that_do_not_end_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = threading.Barrier(2)
    assert mesh._all_end([Group(lambda: both.wait(20)), Group(lambda: both.wait(20))])
    monkeypatch.setattr(mesh, "ENDED_WITHIN_S", 0.05)
    never = threading.Event()
    assert not mesh._all_end([Group(lambda: never.wait(20))])
    never.set()


def test_a_rank_in_a_collective_ends_with_rank_0() -> None:
    """Rank 0 is killed when the other has been told to take part in something that it never does itself."""
    code = (
        "import time, msgspec\n"
        "from parallel.tiny_ranks import ranked, start\n"
        "from realtime_omni.models.common.wan.ranks import Input, Text\n"
        "network = ranked(start(2, 1))\n"
        "network._tell(Text([], 1, Input((4, 8), 'float32')))\n"
        "print(*network.processes, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as first:
        try:
            assert first.stdout is not None
            other = int(first.stdout.readline())
            time.sleep(0.2)  # it begins to wait
            os.kill(other, 0)
        finally:
            first.kill()
    deadline_s = time.monotonic() + 20
    while runs(other):
        assert time.monotonic() < deadline_s, "the rank outlives rank 0"
        time.sleep(0.05)


def runs(process: int) -> bool:
    """Is it there, and more than a name that nobody has asked after."""
    try:
        return ") Z" not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def test_a_rank_that_cannot_build_its_part_is_no_team() -> None:
    with pytest.raises(BackendUnavailable, match=r"over 2 ranks|has ended"):
        start(2, 1, arguments=b"nonsense")


@pytest.mark.timeout(600)
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
        pipe.recv_bytes()  # its interpreter has started: two seconds, and minutes where others compute
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


def test_ranks_of_which_one_ends_before_they_meet_can_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    began_s = time.monotonic()
    with monkeypatch.context() as lame:
        lame.setattr(team, "device_of", lambda first, rank: torch.device("cuda", 77) if rank else torch.device(first))
        with pytest.raises(BackendUnavailable, match="did not meet: rank 1 of 2 has ended"):
            start(2, 1, timeout_s=300.0)
    assert time.monotonic() - began_s < 120, "it waited for who has ended"
    model = start(2, 1)
    engine = InlineEngine(model, config(sp=2))
    engine.create("a", seed=5)
    engine.next("a")
    ranked(model).close()


def test_a_rank_that_is_killed_as_it_starts_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = team.Team._start

    def killed(self: team.Team) -> None:
        begin(self)
        self._processes[-1].kill()

    monkeypatch.setattr(team.Team, "_start", killed)
    with pytest.raises(BackendUnavailable, match=r"did not meet: (a rank|rank 1 of 2) has ended"):
        start(2, 1, timeout_s=300.0)


def test_a_rank_that_ends_while_the_groups_are_made_is_not_waited_for(tmp_path: Path) -> None:
    """It came, and says nothing more: torch waits for its address. New ranks can be met afterwards."""
    FileStore(str(tmp_path / "rendezvous"), 2).set("here/1", "")

    def gone() -> None:
        raise BackendUnavailable("rank 1 of 2 has ended")

    began_s = time.monotonic()
    with pytest.raises(BackendUnavailable, match="has ended"):
        Mesh(Grid(0, 2, 1), torch.device("cpu"), tmp_path / "rendezvous", 300.0, gone)
    assert time.monotonic() - began_s < 60
    ranked(start(2, 1)).close()


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
