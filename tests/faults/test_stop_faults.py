"""Stopping at the worst moment."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from realtime_omni import build
from realtime_omni.manager import SessionManager
from realtime_omni.testing.faults import Gate
from realtime_omni.testing.inline import small_config
from realtime_omni.testing.models import TinyKVWorld
from server.fakes import FakeManager
from server.wire import Client, make_hub


async def test_a_start_that_is_given_up_does_not_wait_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, make = Gate(), build.build_engine

    def load(*args: object, **kwargs: object) -> object:
        gate()
        return make(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "build_engine", load)
    manager = SessionManager(TinyKVWorld(), small_config())
    starting = asyncio.create_task(manager.start())
    await asyncio.to_thread(gate.reached.wait)
    starting.cancel()
    async with asyncio.timeout(10):
        await asyncio.wait([starting])
    gate.open()
    async with asyncio.timeout(10):
        await manager.stop()  # and the thread ends by itself once the model is there
    assert not manager._thread._thread.is_alive()


@pytest.mark.parametrize("model", ["NeverLoaded", "AlwaysComputing"])
def test_one_signal_ends_a_server_that_is_still_loading(model: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "realtime_omni.cli", "serve", f"never_loaded:{model}", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in errors


async def test_a_shutdown_that_the_engine_does_not_follow_still_says_the_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = FakeManager()
    hub = make_hub(manager)
    client = Client(hub)
    await client.start(cadence="on_demand")

    async def hang(reason: str = "client") -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(manager.live[client.session_id], "close", hang)
    await hub.shutdown(0.02)
    assert await client.end() == (1001, "")
    assert client.terminal.reason == "shutdown"
    assert not hub.connections
    assert len(hub.sessions) == 0
    hub.close()
    assert hub.pool.open_lanes == 0
