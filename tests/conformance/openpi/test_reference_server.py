"""openpi's own server beside ours, the same policy behind both: the same bytes, but for the timings."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from conformance.openpi.robot import DROID, droid_observation
from realtime_omni.testing.null_policy import NullPolicy
from realtime_omni_protocols.openpi import ObservationReader, pack, unpack
from server.robot_server import served


class SamePolicy:
    """`NullPolicy`'s answers, as openpi's server asks for them."""

    def __init__(self) -> None:
        self.reader = ObservationReader(DROID)

    def infer(self, obs: dict[str, Any]) -> dict[str, Any]:
        state = self.reader.read(obs).state
        actions = state + np.arange(10, dtype=np.float32)[:, None]
        return {"actions": actions, "policy_timing": {"infer_ms": 0.0}}


@contextlib.asynccontextmanager
async def reference() -> AsyncIterator[str]:
    server_module = importlib.import_module("openpi_server.websocket_policy_server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = server_module.WebsocketPolicyServer(SamePolicy(), "127.0.0.1", port, dict(DROID.handshake))
    task = asyncio.create_task(server.run())
    try:
        yield f"ws://127.0.0.1:{port}"
    finally:
        task.cancel()
        await asyncio.wait([task])


async def connected(url: str) -> ClientConnection:
    async with asyncio.timeout(10):
        while True:
            try:
                return await connect(url, compression=None, max_size=None)
            except OSError:
                await asyncio.sleep(0.01)


def without_timing(frame: str | bytes) -> bytes:
    answer = unpack(frame)  # type: ignore[arg-type]
    assert isinstance(answer, dict)
    assert answer.keys() == {"actions", "policy_timing", "server_timing"}
    assert answer["policy_timing"].keys() == {"infer_ms"}
    return pack(answer["actions"])


async def test_both_servers_say_the_same() -> None:
    async with reference() as theirs, served(NullPolicy(DROID)) as ours:
        stock, mine = await connected(theirs), await connected(ours)
        assert await stock.recv() == await mine.recv()
        for number in range(5):
            frame = pack(droid_observation(number / 4))
            await stock.send(frame)
            await mine.send(frame)
            expected, found = await stock.recv(), await mine.recv()
            assert without_timing(expected) == without_timing(found)
            timing = {**unpack(expected)["server_timing"]}  # type: ignore[arg-type,index,call-overload]
            assert timing.keys() <= unpack(found)["server_timing"].keys()  # type: ignore[arg-type,index,call-overload]
        for robot in (stock, mine):
            await robot.send(pack({"prompt": "go"}))
            assert isinstance(await robot.recv(), str)
            with pytest.raises(ConnectionClosed):
                await robot.recv()
            assert robot.close_code == 1011
