"""``serve`` as a process: refusals before anything listens, one line when ready, and a clean end on a signal."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.client import connect

from realtime_omni.config import Config, ServerSection
from realtime_omni.errors import ConfigError
from realtime_omni.manager import SessionManager
from realtime_omni.server.clock import LoopClock
from realtime_omni.server.hub import WorldHub
from realtime_omni.server.metrics import Metrics
from realtime_omni.server.run import YOUNG_OBJECTS, keep_for_good, serve
from realtime_omni.server.settings import ServerSettings
from realtime_omni_protocols.openpi import PATH as ROBOT_PATH
from realtime_omni_protocols.openpi import pack, unpack
from realtime_omni_protocols.world import PATH, PROTOCOL
from server.robots import observation
from server.wire import Client, eventually

READY_S = 60


def server_process(*overrides: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "realtime_omni.cli", "serve", "null", "--port", "0", *overrides]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    made = server_process()
    yield made
    if made.poll() is None:
        made.kill()
    made.communicate(timeout=10)


def ready_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    assert found, line
    return found[0]


def test_the_garbage_collector_passes_over_what_was_made_before_serving() -> None:
    thresholds = gc.get_threshold()
    try:
        keep_for_good()
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < gc.get_freeze_count() / 10
        assert gc.get_threshold() == (YOUNG_OBJECTS, *thresholds[1:]), "and seldom looks at what is not"
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_cleanly_after_the_last_word(process: subprocess.Popen[str], number: int) -> None:
    url = ready_url(process)
    with connect(url.replace("http", "ws") + PATH, subprotocols=[PROTOCOL]) as client:  # type: ignore[list-item]
        client.send(json.dumps({"type": "session.start", "format": "rgb24"}))
        while json.loads(client.recv(timeout=10))["type"] != "session.started":
            pass
        process.send_signal(number)
        words: list[Any] = []
        try:
            while True:
                data = client.recv(timeout=10)
                if isinstance(data, str):
                    words.append(json.loads(data))
        except Exception:
            assert client.protocol.close_code == 1001
        assert words[-1]["type"] == "session.closed"
        assert words[-1]["reason"] == "shutdown"
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_a_public_host_without_a_key_is_refused_with_one_line() -> None:
    process = server_process("--host", "0.0.0.0")
    out, errors = process.communicate(timeout=READY_S)
    assert process.returncode == 2
    assert out == ""
    assert "REALTIME_OMNI_API_KEY" in errors
    assert "Traceback" not in errors


def test_on_every_address_it_names_one_that_opens_here() -> None:
    process = server_process("--host", "0.0.0.0", REALTIME_OMNI_API_KEY="s3cret")
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == "loading null\n"
        line = process.stdout.readline()
        assert re.search(r" on http://127\.0\.0\.1:\d+ and this computer's other addresses ", line), line
    finally:
        process.terminate()
        process.communicate(timeout=20)


def test_an_address_in_use_is_refused_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*--port"):
            serve(Config(model="no-such-model", server=ServerSection(port=port)))


def _hub(manager: SessionManager, **settings: Any) -> WorldHub:
    return WorldHub(manager, ServerSettings(**settings), Metrics(), LoopClock())


@pytest.mark.req("AC-14")
@pytest.mark.parametrize("grace_s", [0.0, 0.2])
async def test_with_the_real_engine_a_socket_lost_during_a_tick_leaves_no_session_and_no_page(grace_s: float) -> None:
    async with SessionManager.from_recipe("null") as manager:
        hub = _hub(manager, grace_s=grace_s)
        client = Client(hub)
        await client.start(session_id="s")
        await client.until("chunk")
        await client.drop()
        async with asyncio.timeout(10):
            while manager.sessions():
                await asyncio.sleep(0.01)
        assert manager.statistics().pages_used == 0
        assert manager.health().ok
        assert len(hub.sessions) == 0
        hub.close()


async def test_with_the_real_engine_a_player_walks_resets_resumes_and_leaves() -> None:
    async with SessionManager.from_recipe("null") as manager:
        hub = _hub(manager)
        client = Client(hub)
        started = await client.start(session_id="s", format="h264", seed=3, fps=120)
        control = started.controls[0]
        for event_id in range(4):
            data = {"keys": ["w"], "t_ms": event_id}
            client.send(
                "session.event",
                event_id=event_id,
                controls=[{"track": control.track, "schema": control.schema, "data": data}],
            )
            assert (await client.until("event.accepted")).status == "accepted"
            await client.block()
            client.ack()
        client.send("session.reset", seed=4)
        assert (await client.until("session.reset_done")).seed == 4
        chunk, frames = await client.block()
        assert (chunk.epoch, chunk.chunk_index, frames[0][0].key) == (1, 0, True)
        await client.drop()
        again = Client(hub)
        await again.resume("s", client.token, client.last_seq)
        again.displayed = 3
        again.ack()
        chunk, frames = await again.block()
        assert frames[0][0].key
        again.send("session.close")
        assert (await again.end())[0] == 1000
        await eventually(lambda: not manager.sessions())
        hub.close()


def test_a_policy_is_served_on_both_ports_and_ends_cleanly() -> None:
    command = [sys.executable, "-m", "realtime_omni.cli", "serve", "null-policy", "--port", "0", "--openpi-port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            main, robots = re.findall(r"\S+://[^\s,]+", process.stdout.readline())
            for url in (main.replace("http", "ws") + ROBOT_PATH, robots):
                with connect(url, compression=None) as client:
                    metadata = unpack(client.recv(timeout=10))  # type: ignore[arg-type]
                    assert isinstance(metadata, dict)
                    assert metadata["action_horizon"] == 50
                    client.send(pack(observation(0.5)))
                    reply = unpack(client.recv(timeout=10))  # type: ignore[arg-type]
                    actions = reply["actions"] if isinstance(reply, dict) else reply
                    assert actions.shape == (50, 32)
            for port in (main, robots.replace("ws", "http")):
                with urllib.request.urlopen(port + "/healthz", timeout=10) as answer:
                    assert answer.status == 200
            with urllib.request.urlopen(main + "/metrics", timeout=10) as answer:
                assert b'realtime_omni_engine_ticks_total{model="policy"} 2.0' in answer.read()
            with urllib.request.urlopen(main + "/v1/models", timeout=10) as answer:
                (model,) = json.load(answer)["models"]
                assert model["formats"] == []
                assert model["policy"]["action_horizon"] == 50
            with connect(main.replace("http", "ws") + PATH, subprotocols=[PROTOCOL]) as world:  # type: ignore[list-item]
                world.recv(timeout=10)
                world.send(json.dumps({"type": "session.start", "format": "rgb24"}))
                assert json.loads(world.recv(timeout=10))["code"] == "unsupported"
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
            assert process.returncode == 0
            assert "Traceback" not in errors
        finally:
            process.kill()


def test_a_world_and_a_voice_are_served_together_and_end_cleanly() -> None:
    process = server_process("puppet", "--set", "puppet:session.max_sessions=3")
    try:
        url = ready_url(process)
        with urllib.request.urlopen(url + "/v1/models", timeout=10) as answer:
            assert [(m["name"], m["max_sessions"]) for m in json.load(answer)["models"]] == [
                ("null", 64),
                ("puppet", 3),
            ]
        with connect(url.replace("http", "ws") + "/v1/realtime?model=puppet") as call:
            assert json.loads(call.recv(timeout=10))["type"] == "session.created"
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
        assert process.returncode == 0
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_a_world_has_no_port_for_robots() -> None:
    process = server_process("--openpi-port", "0")
    _, errors = process.communicate(timeout=READY_S)
    assert process.returncode == 2
    assert "server.openpi_port: no policy is served" in errors
