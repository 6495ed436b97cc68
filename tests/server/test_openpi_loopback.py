"""The robot endpoint on a real socket: access, sizes, rows by address, and life while another robot's policy computes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from realtime_omni.server.app import create_app
from realtime_omni.server.run import bind, running
from realtime_omni.server.settings import ServerSettings
from realtime_omni.testing.null_policy import NullPolicy
from realtime_omni_protocols.openpi import PATH, STREAM_PROTOCOL, StreamClientSide, pack, unpack
from realtime_omni_protocols.world import PATH as WORLD_PATH
from realtime_omni_protocols.world import PROTOCOL
from server.fakes import FakeManager
from server.robot_server import served
from server.robots import Gate, observation

KEY = "a robot's key"


async def ask(socket: Any, message: object) -> Any:
    await socket.send(pack(message))
    async with asyncio.timeout(10):
        reply = await socket.recv()
    return reply if isinstance(reply, str) else unpack(reply)


async def test_the_source_documents_example_gets_its_float32_array() -> None:
    """Path URI, first frame metadata, ``np.asarray(reply, float32)``, twice on one connection."""
    async with served(NullPolicy()) as url, connect(url + PATH, compression=None, max_size=None) as socket:
        metadata = unpack(await socket.recv())  # type: ignore[arg-type]
        assert isinstance(metadata, dict)
        for state in (1.0, 2.0):
            actions = np.asarray(await ask(socket, observation(state, session_id="episode-1")), dtype=np.float32)
            assert actions.shape == (metadata["action_horizon"], metadata["action_dim"])
            assert np.isfinite(actions).all()


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("/", dict),
        (PATH, np.ndarray),
        (PATH + "?reply=openpi", dict),
        ("/?reply=bare", np.ndarray),
        (PATH + "?reply=openpi&x=1", dict),
    ],
)
async def test_the_address_decides_the_reply(address: str, kind: type) -> None:
    async with served(NullPolicy()) as url, connect(url + address) as socket:
        await socket.recv()
        assert isinstance(await ask(socket, observation()), kind)


@pytest.mark.parametrize(
    ("address", "status"), [(PATH + "?reply=json", 400), (PATH + "?reply=", 400), ("/v1/other", 403)]
)
async def test_an_address_nobody_serves_is_an_http_answer(address: str, status: int) -> None:
    async with served(NullPolicy()) as url:
        with pytest.raises(InvalidStatus) as refused:
            await connect(url + address)
        assert refused.value.response.status_code == status


@pytest.mark.parametrize(
    ("header", "status"),
    [(f"Api-Key {KEY}", None), (f"Bearer {KEY}", None), ("Api-Key wrong", 401), (f"Basic {KEY}", 401), (None, 401)],
)
async def test_the_key_is_checked_before_the_upgrade(header: str | None, status: int | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    async with served(NullPolicy(), api_key=KEY) as url:
        for address in (url + PATH, url + "/"):
            if status is None:
                async with connect(address, additional_headers=headers) as socket:
                    await socket.recv()
            else:
                with pytest.raises(InvalidStatus) as refused:
                    await connect(address, additional_headers=headers)
                assert refused.value.response.status_code == status


async def test_health_is_openpis_and_needs_no_key() -> None:
    async with served(NullPolicy(), api_key=KEY) as url, httpx.AsyncClient() as http:
        answer = await http.get(url.replace("ws", "http") + "/healthz")
        assert (answer.status_code, answer.text) == (200, "OK\n")


async def test_three_raw_camera_pictures_pass_and_more_than_the_cap_is_1009() -> None:
    contract = NullPolicy().contract
    async with served(NullPolicy(contract)) as url:
        picture = np.zeros((480, 640, 3), np.uint8)
        names = ("observation.images.base_0_rgb", "observation.images.left_wrist_0_rgb")
        async with connect(url + PATH, max_size=None) as socket:
            await socket.recv()
            assert isinstance(await ask(socket, observation(**dict.fromkeys(names, picture))), np.ndarray)
            too_large = bytes(4 * 1024 * 1024 + 1)
            await socket.send(too_large)
            reply = unpack(await socket.recv())  # type: ignore[arg-type]
            assert isinstance(reply, dict)
            assert reply["code"] == "too_large"
            with pytest.raises(ConnectionClosed):
                await socket.recv()
            assert socket.close_code == 1009
        async with connect(url + "/", max_size=None) as socket:
            await socket.recv()
            with contextlib.suppress(ConnectionClosed):
                await socket.send(bytes(5 * 1024 * 1024))
                await socket.recv()
            assert socket.close_code == 1009


async def test_pings_and_handshakes_are_answered_while_another_policy_computes() -> None:
    """A loop that is blocked would never answer: the gate opens behind the answers."""
    gate = Gate()
    async with served(NullPolicy(think=gate)) as url, connect(url + PATH) as busy:
        await busy.recv()
        await busy.send(pack(observation()))
        await gate.arrived.wait()
        async with asyncio.timeout(20):
            await (await busy.ping())
            async with connect(url + PATH) as other:
                await other.recv()
        gate.open.set()
        assert isinstance(unpack(await busy.recv()), np.ndarray)  # type: ignore[arg-type]


async def test_the_subprotocol_is_chosen_by_offering_it() -> None:
    async with (
        served(NullPolicy()) as url,
        connect(url + PATH, subprotocols=[STREAM_PROTOCOL, "other"]) as socket,  # type: ignore[list-item]
    ):
        assert socket.subprotocol == STREAM_PROTOCOL
        side = StreamClientSide()
        side.receive(await socket.recv())  # type: ignore[arg-type]
        await socket.send(side.start())
        side.receive(await socket.recv())  # type: ignore[arg-type]
        await socket.send(side.observe(observation(3.0), 12))
        chunk = side.receive(await socket.recv())  # type: ignore[arg-type]
        assert chunk.start_tick == 12  # type: ignore[union-attr]


async def test_a_connection_beyond_the_limit_is_refused_with_503() -> None:
    async with served(NullPolicy(), max_connections=1) as url, connect(url + PATH):
        with pytest.raises(InvalidStatus) as refused:
            await connect(url + PATH)
        assert refused.value.response.status_code == 503


async def test_one_server_has_worlds_and_robots_and_ends_both() -> None:
    policy, settings = NullPolicy(), ServerSettings(port=0)
    app = create_app(FakeManager(), settings, robots=policy)
    with bind(settings) as listener:
        async with running(app, settings, listener) as url:
            url = url.replace("http", "ws")
            async with connect(url + PATH) as robot, connect(url + WORLD_PATH, subprotocols=[PROTOCOL]) as world:  # type: ignore[list-item]
                await robot.recv()
                assert isinstance(await ask(robot, observation()), np.ndarray)
                assert "hello" in str(await world.recv())
                assert policy.sessions == 1
                with pytest.raises(InvalidStatus):
                    await connect(url + "/")  # the page's path: robots that name no path have a port of their own
            async with connect(url + PATH) as robot:
                await robot.recv()
                await ask(robot, observation())
    assert policy.sessions == 0


async def test_a_plain_msgpack_peer_needs_no_library_of_ours() -> None:
    async with served(NullPolicy()) as url, connect(url + PATH) as socket:
        assert msgpack.unpackb(await socket.recv())["max_cameras"] == 3
        await socket.send(msgpack.packb({"prompt": "go"}))
        error = msgpack.unpackb(await socket.recv())
        assert (error["type"], error["code"]) == ("error", "camera_missing")
