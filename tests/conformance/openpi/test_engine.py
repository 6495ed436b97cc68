"""A stock client on the whole server: openpi's own, a real network, the session engine."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from conformance.openpi.robot import blocking
from models.vla import checkpoints
from realtime_omni.config import Config
from realtime_omni.manager import SessionManager
from realtime_omni.server.run import robot_backend
from server.robot_server import served

pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")


def observation(state: float) -> dict[str, Any]:
    cameras = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    pictures = {name: np.full((30, 40, 3), 90, np.uint8) for name in cameras}
    return pictures | {"state": np.full(6, state, np.float32), "prompt": "pick up", "seed": 4}


async def test_openpis_client_and_its_broker_execute_pi0s_chunks() -> None:
    config = Config(model="pi0", options={"checkpoint": str(checkpoints.GOLDEN / "pi0")})
    async with SessionManager(config=config) as manager:
        backend = robot_backend(manager)
        assert backend is not None
        async with served(backend) as url:
            make = importlib.import_module("openpi_client.websocket_client_policy").WebsocketClientPolicy
            client = await blocking(make, url + "/")
            assert client.get_server_metadata()["action_horizon"] == 6
            chunk = (await blocking(client.infer, observation(0.1)))["actions"]
            assert (chunk.shape, chunk.dtype) == ((6, 5), np.float32)
            broker = importlib.import_module("openpi_client.action_chunk_broker").ActionChunkBroker(client, 6)
            executed = [(await blocking(broker.infer, observation(0.1)))["actions"] for _ in range(7)]
            np.testing.assert_array_equal(np.stack(executed[:6]), chunk)
            np.testing.assert_array_equal(executed[6], chunk[0])
            assert manager.statistics().chunks_committed == 3
            await blocking(client._ws.close)
        assert manager.statistics().sessions == 0
