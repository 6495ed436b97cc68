"""Clients that labs have, unchanged, against our server."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from websockets.asyncio.client import connect

from conformance.openpi.robot import DROID, RoboarenaClient, blocking, droid_observation
from realtime_omni.testing.null_policy import NullPolicy
from realtime_omni_protocols.openpi import PATH, PolicyCode, pack, unpack
from server.robot_server import served

pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")
PACKAGES = {"openpi-client": "openpi_client.websocket_client_policy", "policy-websocket": "policy_websocket"}
BROKERS = {"openpi-client": "openpi_client.action_chunk_broker", "policy-websocket": "policy_websocket"}


def policy_class(package: str) -> Callable[..., Any]:
    made: Callable[..., Any] = importlib.import_module(PACKAGES[package]).WebsocketClientPolicy
    return made


def hang_up(client: Any) -> None:
    client._ws.close()


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("address", ["/", PATH + "?reply=openpi"])
async def test_a_stock_client_infers_again_and_again(package: str, address: str) -> None:
    async with served(NullPolicy(DROID)) as url:
        client = await blocking(policy_class(package), url + address)
        assert client.get_server_metadata() == DROID.handshake
        for state in (1.0, 2.0, 3.0):
            answer = await blocking(client.infer, droid_observation(state))
            assert answer["actions"].shape == (10, 8)
            assert answer["actions"].dtype == np.float32
            assert answer["actions"][0, 0] == state
            assert answer["policy_timing"]["infer_ms"] >= 0
        assert answer["server_timing"].keys() >= {"queue", "decode", "encode", "infer_ms", "prev_total_ms"}
        client.reset()
        await blocking(hang_up, client)


async def test_host_and_port_are_enough_where_the_port_is_openpis_own() -> None:
    async with served(NullPolicy(DROID)) as url:
        host, _, port = url.removeprefix("ws://").partition(":")
        client = await blocking(policy_class("openpi-client"), host, int(port))
        assert (await blocking(client.infer, droid_observation()))["actions"].shape == (10, 8)
        await blocking(hang_up, client)


async def test_the_api_key_of_a_stock_client_is_checked_on_the_upgrade() -> None:
    async with served(NullPolicy(DROID), api_key="secret") as url:
        client = await blocking(policy_class("openpi-client"), url, None, "secret")
        await blocking(hang_up, client)
        with pytest.raises(Exception, match="401"):
            await blocking(policy_class("openpi-client"), url, None, "wrong")


@pytest.mark.parametrize("package", BROKERS)
@pytest.mark.parametrize("address", ["/", PATH + "?reply=openpi", PATH + "?reply=roboarena"])
@pytest.mark.parametrize("fault", ["observation", "policy"])
async def test_a_chunk_broker_never_executes_an_error(package: str, address: str, fault: str) -> None:
    """The stock brokers hand whatever a binary frame holds to the robot, ten times in a row."""
    policy = NullPolicy(DROID)
    async with served(policy) as url:
        client = await blocking(policy_class(package), url + address)
        broker = importlib.import_module(BROKERS[package]).ActionChunkBroker(client, action_horizon=10)
        endpoint = {"endpoint": "infer"} if "roboarena" in address else {}
        for step in range(10):
            action = await blocking(broker.infer, droid_observation(1.0) | endpoint)
            assert action["actions"].shape == (8,)
            assert action["actions"][0] == 1.0 + step
        bad = droid_observation() | endpoint
        if fault == "observation":
            bad["observation/joint_position"] = np.full(7, np.nan, np.float32)
        else:
            policy.think = _fail
        with pytest.raises(RuntimeError, match=r"state_value|policy_failed"):
            await blocking(broker.infer, bad)
        with pytest.raises(Exception, match="1011"):
            await blocking(broker.infer, droid_observation())


async def _fail(_: str, __: object) -> None:
    raise ValueError("no actions today")


async def test_openpis_broker_takes_the_bare_array_too() -> None:
    async with served(NullPolicy(DROID)) as url:
        client = await blocking(policy_class("openpi-client"), url + PATH)
        broker = importlib.import_module(BROKERS["openpi-client"]).ActionChunkBroker(client, action_horizon=10)
        for step in range(12):
            action = await blocking(broker.infer, droid_observation(0.0))
            assert action[0] == step % 10
        await blocking(hang_up, client)


# ---- roboarena and DreamZero


@pytest.mark.parametrize(("address", "bare"), [(PATH + "?reply=roboarena", False), (PATH + "?reply=dreamzero", True)])
async def test_a_roboarena_client_plays_two_episodes(address: str, bare: bool) -> None:
    policy = NullPolicy(DROID)
    async with served(policy) as url:
        client = await blocking(RoboarenaClient, url + address)
        assert client.config.action_space == "joint_velocity"
        for episode in range(2):
            message = droid_observation(float(episode), "observation/exterior_image_0_left")
            message |= {"observation/cartesian_position": np.zeros(6), "session_id": f"episode-{episode}"}
            answer = await blocking(client.infer, message)
            actions = answer if bare else answer["actions"]
            assert actions.shape == (10, 8)
            assert actions[0, 0] == episode
            assert await blocking(client.reset) == "reset successful"
        assert policy.resets == 2
        with pytest.raises(RuntimeError, match="prompt_missing"):
            await blocking(client.infer, {k: v for k, v in message.items() if k != "prompt"})
        await blocking(client.close)


@pytest.mark.parametrize(("address", "bare"), [("/", False), (PATH, True)])
async def test_naming_an_endpoint_is_enough_to_be_answered_as_roboarena(address: str, bare: bool) -> None:
    async with served(NullPolicy(DROID)) as url, connect(url + address) as socket:
        await socket.recv()
        await socket.send(pack(droid_observation() | {"endpoint": "infer"}))
        answer = unpack(await socket.recv())  # type: ignore[arg-type]
        assert isinstance(answer, np.ndarray) if bare else answer.keys() == {"actions"}  # type: ignore[union-attr]
        await socket.send(pack({"endpoint": "reset"}))
        assert await socket.recv() == "reset successful"


# ---- other codecs


async def test_a_msgpack_numpy_peer_is_understood() -> None:
    """Its messages come in its own dialect; the reply is openpi's, which it reads as a map."""
    async with served(NullPolicy(DROID)) as url, connect(url + PATH) as socket:
        assert msgpack_numpy.unpackb(await socket.recv()) == DROID.handshake
        await socket.send(msgpack_numpy.packb(droid_observation(2.0)))
        reply = msgpack.unpackb(await socket.recv())
        actions = np.frombuffer(reply[b"data"], reply[b"dtype"]).reshape(reply[b"shape"])
        assert actions[0, 0] == 2.0


@pytest.mark.parametrize("image_format", ["raw", "png", "jpeg"])
async def test_an_observation_in_vla_evals_codec_is_understood(image_format: str) -> None:
    codec = importlib.import_module("vla_eval.protocol.numpy_codec")
    codec.set_image_format(image_format)
    async with served(NullPolicy(DROID)) as url, connect(url + PATH) as socket:
        await socket.recv()
        await socket.send(msgpack.packb(droid_observation(2.0), default=codec.encode_ndarray))
        actions = unpack(await socket.recv())  # type: ignore[arg-type]
        assert isinstance(actions, np.ndarray), actions
        assert actions[0, 0] == 2.0


# ---- harnesses


async def test_inspect_robots_franka_drives_its_arm() -> None:
    franka = importlib.import_module("inspect_robots_franka.policy")
    types, scene = importlib.import_module("inspect_robots.types"), importlib.import_module("inspect_robots.scene")
    async with served(NullPolicy(DROID)) as url:
        host, _, port = url.removeprefix("ws://").partition(":")
        policy = franka.OpenpiPolicy(host=host, port=int(port), action_horizon=10)
        policy.reset(scene.Scene(id="1", instruction="pick up the cube"))
        camera = np.zeros((480, 640, 3), np.uint8)
        seen = types.Observation(
            images={"exterior_cam": camera, "wrist_cam": camera}, state={"joint_pos": np.linspace(0.1, 0.8, 8)}
        )
        for _ in range(2):
            chunk = await blocking(policy.act, seen)
            assert len(chunk.actions) == 10
            assert np.isfinite([action.data for action in chunk.actions]).all()
        assert policy.num_inferences == 2


async def test_many_stock_clients_at_once_each_get_their_own_answers() -> None:
    async with served(NullPolicy(DROID)) as url:

        async def robot(number: int) -> None:
            client = await blocking(policy_class("openpi-client"), url)
            for step in range(5):
                answer = await blocking(client.infer, droid_observation(number + step / 8))
                assert answer["actions"][0, 0] == number + step / 8
            await blocking(hang_up, client)

        async with asyncio.TaskGroup() as robots:
            for number in range(6):
                robots.create_task(robot(number))


def test_the_codes_of_the_spec_are_the_codes_of_the_package() -> None:
    spec = (Path(__file__).resolve().parents[3] / "protocols" / "openpi.md").read_text(encoding="utf-8")
    section = spec.split("## 7. Codes")[1].split("## 8.")[0]
    assert all(f"`{code.value}`" in section for code in PolicyCode)
