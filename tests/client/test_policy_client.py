"""`PolicyClient` and `PolicyStream` against the real server on a real socket, and against servers that are not ours."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from realtime_omni.server.policy import PolicyRequest
from realtime_omni.testing.null_policy import SOURCE_CONTRACT, NullPolicy
from realtime_omni_client import PolicyClient, PolicyServerError, PolicyStream, PolicyTimeoutError
from realtime_omni_client.errors import ConnectError, ConnectionLostError, SessionClosedError
from realtime_omni_client.policy import policy_url
from realtime_omni_client.transport import WebSocketTransport, websocket_connector
from realtime_omni_protocols.openpi import STREAM_PROTOCOL, pack, unpack
from realtime_omni_protocols.openpi.stream_messages import ActionChunk
from server.robot_server import served
from server.robots import Gate, observation

T = TypeVar("T")


async def call(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """A blocking call beside the server's loop."""
    async with asyncio.timeout(20):
        return await asyncio.to_thread(function, *args, **kwargs)


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [
        ("127.0.0.1", 8000, "ws://127.0.0.1:8000/v1/realtime/robot/openpi"),
        ("ws://robot:9", None, "ws://robot:9/v1/realtime/robot/openpi"),
        ("wss://robot", 443, "wss://robot:443/v1/realtime/robot/openpi"),
        ("http://robot:9/", None, "ws://robot:9/v1/realtime/robot/openpi"),
        ("ws://robot:9/other/path", None, "ws://robot:9/other/path"),
        ("https://robot/p?reply=openpi", None, "wss://robot/p?reply=openpi"),
        ("gopher://robot", None, "gopher://robot/v1/realtime/robot/openpi"),
    ],
)
def test_an_address_is_what_a_user_types(host: str, port: int | None, url: str) -> None:
    assert policy_url(host, port) == url


async def test_infer_reset_and_metadata_as_openpis_policies_have_them() -> None:
    policy = NullPolicy()
    async with served(policy) as url:
        client = await call(PolicyClient, url)
        assert client.get_server_metadata() == SOURCE_CONTRACT.handshake
        for state in (1.0, 2.0):
            answer = await call(client.infer, observation(state))
            assert answer.keys() == {"actions", "policy_timing", "server_timing"}
            assert answer["actions"].shape == (50, 32)
            assert answer["actions"][0, 0] == state
            answer["actions"][0, 0] = 7  # a robot may scale in place
        await call(client.reset)
        assert policy.resets == 1
        await call(client.close)
        await call(client.close)
        assert policy.sessions == 0


async def test_a_refusal_is_raised_and_the_next_call_succeeds() -> None:
    async with served(NullPolicy()) as url:
        client = await call(PolicyClient, url)
        with pytest.raises(PolicyServerError, match="prompt is empty") as refused:
            await call(client.infer, observation(prompt=""))
        assert refused.value.code == "prompt_invalid"
        assert (await call(client.infer, observation()))["actions"].shape == (50, 32)
        await call(client.close)


async def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    gate = Gate()
    async with served(NullPolicy(think=gate)) as url:
        client = await call(PolicyClient, url)
        client._timeout_s = 0.3  # of the answer; connecting may take a busy machine longer
        with pytest.raises(PolicyTimeoutError):
            await call(client.infer, observation(1.0))
        gate.open.set()
        client._timeout_s = 10.0
        assert (await call(client.infer, observation(2.0)))["actions"][0, 0] == 2.0
        await call(client.close)


async def test_another_label_is_a_reset_and_seed_and_steps_arrive() -> None:
    seen: list[PolicyRequest] = []

    async def look(_: str, request: PolicyRequest) -> None:
        seen.append(request)

    policy = NullPolicy(think=look)
    async with served(policy) as url:
        client = await call(PolicyClient, url)
        for label in ("a", "a", "b"):
            message = observation(session_id=label, seed=4, sampling_params={"num_inference_steps": 3})
            await call(client.infer, message, tick=30)
        assert policy.resets == 1
        assert (seen[0].seed, seen[0].steps, seen[0].tick) == (4, 3, 30)
        await call(client.close)


async def test_a_dead_connection_is_resumed_without_a_word() -> None:
    policy = NullPolicy()
    async with served(policy) as url:
        client = await call(PolicyClient, url)
        await call(client.infer, observation())
        assert client._ws is not None
        client._ws.socket.shutdown(2)
        assert (await call(client.infer, observation(3.0)))["actions"][0, 0] == 3.0
        assert policy.sessions == 1, "the same session goes on"
        await call(client.close)


async def test_a_session_that_is_over_is_followed_by_a_new_one() -> None:
    policy = NullPolicy()
    async with served(policy) as url:
        client = await call(PolicyClient, url)
        await call(client.infer, observation())
        policy.evict(next(iter(policy._sessions)))
        with pytest.raises(ConnectionLostError, match="evicted"):
            await call(client.infer, observation())
        assert (await call(client.infer, observation(5.0)))["actions"][0, 0] == 5.0
        await call(client.close)


async def test_a_wrong_key_and_no_server_are_connect_errors() -> None:
    async with served(NullPolicy(), api_key="right") as url:
        with pytest.raises(ConnectError) as refused:
            await call(PolicyClient, url, None, "wrong")
        assert refused.value.status == 401
        assert "api_key=" in str(refused.value)
        client = await call(PolicyClient, url, None, "right")
        await call(client.close)
    with pytest.raises(ConnectError):
        await call(PolicyClient, url)


async def test_a_full_pool_is_said_when_connecting() -> None:
    async with served(NullPolicy(capacity=1)) as url:
        client = await call(PolicyClient, url)
        with pytest.raises(PolicyServerError, match="capacity"):
            await call(PolicyClient, url)
        await call(client.close)


async def test_threads_that_share_a_client_each_get_their_own_answer() -> None:
    async with served(NullPolicy()) as url:
        client = await call(PolicyClient, url)
        answers = await asyncio.gather(*(call(client.infer, observation(float(n))) for n in range(12)))
        assert [answer["actions"][0, 0] for answer in answers] == list(range(12))
        await call(client.close)


# ---- other servers


@contextlib.asynccontextmanager
async def foreign(answer: Callable[[Any], str | bytes]) -> AsyncIterator[str]:
    """A server with openpi's wire and nothing else."""

    async def handle(socket: ServerConnection) -> None:
        await socket.send(pack({"name": "stock"}))
        async for frame in socket:
            reply = answer(unpack(frame))  # type: ignore[arg-type]
            await socket.send(reply)
            if isinstance(reply, str):
                await socket.close(1011)

    async with serve(handle, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_stock_openpi_server_is_spoken_to_in_openpis_wire() -> None:
    async with foreign(lambda obs: pack({"actions": obs["state"][None], "server_timing": {"infer_ms": 1.0}})) as url:
        client = await call(PolicyClient, url)
        assert client.get_server_metadata() == {"name": "stock"}
        answer = await call(client.infer, {"state": np.ones(3, np.float32)})
        assert answer["actions"].tolist() == [[1, 1, 1]]
        assert answer["actions"].flags.writeable
        await call(client.reset)
        await call(client.close)


async def test_a_stock_servers_traceback_is_raised_and_the_next_call_connects_again() -> None:
    replies = iter(["Traceback (most recent call last): boom", pack({"actions": np.zeros((1, 1))})])
    async with foreign(lambda _: next(replies)) as url:
        client = await call(PolicyClient, url)
        with pytest.raises(PolicyServerError, match="boom"):
            await call(client.infer, {})
        assert (await call(client.infer, {}))["actions"].shape == (1, 1)
        await call(client.close)


async def test_a_binary_error_map_is_raised_and_never_returned() -> None:
    async with foreign(lambda _: pack({"type": "error", "message": "Invalid request payload"})) as url:
        client = await call(PolicyClient, url)
        with pytest.raises(PolicyServerError, match="Invalid request payload"):
            await call(client.infer, {})
        await call(client.close)


async def test_a_server_that_greets_with_an_error_is_raised_and_the_connection_is_closed() -> None:
    over = asyncio.Event()

    async def handle(socket: ServerConnection) -> None:
        await socket.send("Traceback (most recent call last): no weights")
        await socket.wait_closed()
        over.set()

    async with serve(handle, "127.0.0.1", 0) as server:
        with pytest.raises(PolicyServerError, match="no weights"):
            await call(PolicyClient, f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with asyncio.timeout(20):
            await over.wait()


# ---- streaming


async def test_a_stream_keeps_the_plan_filled() -> None:
    policy = NullPolicy()
    async with served(policy) as url:
        async with PolicyStream.connect(url, control_hz=15) as robot:
            assert robot.metadata == SOURCE_CONTRACT.handshake
            for tick in range(0, 30, 10):
                assert await robot.observe(observation(float(tick)), tick)
                chunk = await robot.next_chunk()
                assert chunk.start_tick == tick
                action = robot.actions.pop(tick)
                assert action is not None
                assert action[0] == tick
                assert robot.actions.dry_in(tick + 1) == 49
        assert policy.sessions == 0


async def until(poll: Callable[[], ActionChunk | None]) -> ActionChunk:
    while (chunk := poll()) is None:
        await asyncio.sleep(0)
    return chunk


async def test_a_loop_that_does_not_wait_takes_what_has_come_and_says_how_chunks_are_joined() -> None:
    asked: list[str | None] = []

    async def think(_: str, request: PolicyRequest) -> None:
        asked.append(request.rtc)

    async with served(NullPolicy(think=think)) as url, PolicyStream.connect(url) as robot:
        assert robot.poll_chunk() is None
        for number, rtc in enumerate(("none", None)):
            await robot.observe(observation(1.0), number, rtc=rtc)
            assert (await until(robot.poll_chunk)).start_tick == number
        assert robot.poll_chunk() is None
        await robot.observe({"prompt": "go"}, 2)
        with pytest.raises(PolicyServerError, match="camera"):
            await until(robot.poll_chunk)
    assert asked == ["none", None]


async def test_a_refused_observation_is_raised_where_chunks_are_awaited() -> None:
    async with served(NullPolicy()) as url, PolicyStream.connect(url) as robot:
        await robot.observe({"prompt": "go"}, 0)
        with pytest.raises(PolicyServerError) as refused:
            await robot.next_chunk()
        assert refused.value.code == "camera_missing"


async def test_a_reset_empties_the_plan_at_once_and_drops_what_is_late() -> None:
    gate = Gate()
    policy = NullPolicy(think=gate)
    async with served(policy) as url, PolicyStream.connect(url) as robot:
        gate.open.set()
        await robot.observe(observation(1.0), 0)
        await robot.next_chunk()
        gate.open.clear()
        gate.arrived.clear()
        await robot.observe(observation(2.0), 1)
        await gate.arrived.wait()
        resetting = asyncio.create_task(robot.reset())
        await asyncio.sleep(0)
        assert len(robot.actions) == 0
        await resetting
        assert (policy.resets, gate.cancelled) == (1, 1)
        gate.open.set()
        await robot.observe(observation(3.0), 2)
        chunk = await robot.next_chunk()
        assert (chunk.epoch, chunk.start_tick) == (1, 2)


async def test_a_stream_resumes_its_session_in_the_background() -> None:
    policy = NullPolicy()
    async with served(policy) as url, PolicyStream.connect(url) as robot:
        await robot.observe(observation(), 0)
        await robot.next_chunk()
        assert robot._transport is not None
        await robot._transport.close()
        async with asyncio.timeout(10):
            while not await robot.observe(observation(4.0), 4):
                await asyncio.sleep(0.01)
        assert (await robot.next_chunk()).start_tick == 4
        assert policy.sessions == 1


async def test_a_stream_that_was_left_has_closed_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leaves may end the event loop next, and then nobody closes a socket any more."""
    close, closed = WebSocketTransport.close, []

    async def slowly(transport: WebSocketTransport) -> None:
        await asyncio.sleep(0.05)  # a server that takes its time for its half of the handshake
        await close(transport)
        closed.append(transport)

    monkeypatch.setattr(WebSocketTransport, "close", slowly)
    async with served(NullPolicy()) as url:
        async with PolicyStream.connect(url):
            pass
        assert len(closed) == 1


async def test_who_is_cancelled_while_closing_leaves_no_open_socket() -> None:
    """The server here is frozen, and never says its half of the closing handshake."""
    thaw = asyncio.Event()

    async def handle(socket: ServerConnection) -> None:
        socket.transport.pause_reading()
        await thaw.wait()
        socket.transport.abort()

    async with serve(handle, "127.0.0.1", 0, subprotocols=[Subprotocol(STREAM_PROTOCOL)]) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        transport = await websocket_connector(url, api_key=None, open_timeout_s=20, protocol=STREAM_PROTOCOL)()
        assert isinstance(transport, WebSocketTransport)
        socket = transport._ws.transport.get_extra_info("socket")
        closing = asyncio.create_task(transport.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()
        assert socket.fileno() == -1
        thaw.set()


async def test_a_stream_that_cannot_begin_says_why() -> None:
    async with served(NullPolicy(capacity=1)) as url, PolicyStream.connect(url):
        with pytest.raises(PolicyServerError, match="capacity"):
            async with PolicyStream.connect(url):
                pass
    with pytest.raises(ConnectError):
        async with PolicyStream.connect(url):
            pass


async def test_a_stream_tells_that_the_server_stopped() -> None:
    stack = contextlib.AsyncExitStack()
    async with stack:
        url = await stack.enter_async_context(served(NullPolicy()))
        robot = PolicyStream.connect(url)
        await robot.__aenter__()
        await stack.aclose()
        with pytest.raises(SessionClosedError) as closed:
            await robot.next_chunk()
        assert closed.value.reason == "shutdown"
        await robot.close()


def test_the_client_needs_neither_torch_nor_a_server() -> None:
    probe = (
        "import sys, realtime_omni_client\n"
        "print([m for m in ('torch', 'fastapi', 'uvicorn', 'msgpack', 'PIL') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
