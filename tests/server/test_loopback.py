"""The real server on a real socket: uvicorn and the ``websockets`` client, a fake manager behind them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from starlette.routing import Mount
from websockets.asyncio.client import ClientConnection, connect

from realtime_omni.server.app import create_app
from realtime_omni.server.clock import LoopClock
from realtime_omni.server.run import bind, running
from realtime_omni.server.settings import ServerSettings
from realtime_omni_protocols.world import PATH, PROTOCOL, parse_server, unpack_frame
from server.fake_values import FakeHealth
from server.fakes import FakeManager

KEY = "kölsch/+="


@contextlib.asynccontextmanager
async def served(manager: FakeManager, **fields: Any) -> AsyncIterator[str]:
    settings = ServerSettings(port=0, shutdown_timeout_s=5.0, **fields)
    with bind(settings) as listener:
        async with running(create_app(manager, settings, clock=LoopClock()), settings, listener) as url:
            yield url


@contextlib.asynccontextmanager
async def connected(url: str, *extra: str, **options: Any) -> AsyncIterator[ClientConnection]:
    target = url.replace("http", "ws") + PATH
    if (name := options.pop("rebound", None)) is not None:  # a foreign name that leads to this machine
        options |= {"host": "127.0.0.1", "port": int(url.rpartition(":")[2])}
        target = f"ws://{name}{PATH}"
    async with connect(target, subprotocols=[PROTOCOL, *extra], compression=None, **options) as socket_:
        yield socket_


async def until(client: ClientConnection, type_: str) -> Any:
    async with asyncio.timeout(10):
        while True:
            data = await client.recv()
            if isinstance(data, str) and json.loads(data)["type"] == type_:
                return parse_server(data)


async def close_code(client: ClientConnection) -> int:
    async with asyncio.timeout(10):
        with contextlib.suppress(websockets.ConnectionClosed):
            while True:
                await client.recv()
    assert client.close_code is not None
    return client.close_code


def start(**fields: Any) -> str:
    return json.dumps({"type": "session.start", "format": "jpeg", **fields})


async def test_a_session_over_a_real_socket_sees_frames_and_closes(manager: FakeManager) -> None:
    async with served(manager) as url, connected(url) as client:
        assert client.subprotocol == PROTOCOL
        assert "permessage-deflate" not in client.response.headers.get("Sec-WebSocket-Extensions", "")  # type: ignore[union-attr]
        await until(client, "hello")
        await client.send(start())
        await until(client, "session.started")
        chunk = await until(client, "chunk")
        for index in range(chunk.frames):
            header, payload = unpack_frame(await client.recv())  # type: ignore[arg-type]
            assert header.index == index
            assert bytes(payload[:2]) == b"\xff\xd8"
        await client.send(json.dumps({"type": "session.close"}))
        assert (await until(client, "session.closed")).reason == "client"
        assert await close_code(client) == 1000
    assert not manager.live


async def test_small_messages_leave_at_once(manager: FakeManager) -> None:
    """Nagle's algorithm would hold every block for a delayed acknowledgement, about 40 ms."""
    async with served(manager) as url, connected(url) as client:
        await until(client, "hello")
        [server_side] = [
            item
            for task in asyncio.all_tasks()
            if (coroutine := task.get_coro()) is not None and coroutine.__qualname__.endswith("run_asgi")
            for item in [coroutine.cr_frame.f_locals["self"].transport.get_extra_info("socket")]  # type: ignore[union-attr]
        ]
        assert server_side.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"rebound": "evil.example"}, 403),
        ({}, 401),
        ({"additional_headers": {"Authorization": "Bearer wrong"}}, 401),
    ],
)
async def test_strangers_are_refused_before_the_upgrade(
    manager: FakeManager, options: dict[str, Any], status: int
) -> None:
    async with served(manager, api_key=KEY) as url:
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with connected(url, **options):
                pass
        assert refused.value.response.status_code == status
        assert b"traceback" not in refused.value.response.body.lower()
        async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEY}".encode()}) as http:
            metrics = (await http.get("/metrics")).text
        code = "unauthorized" if status == 401 else "origin_refused"
        assert f'realtime_omni_refusals_total{{code="{code}"}} 1.0' in metrics
        assert KEY not in metrics


async def test_the_key_opens_as_header_and_as_subprotocol(manager: FakeManager) -> None:
    as_subprotocol = "realtime-omni.key." + base64.urlsafe_b64encode(KEY.encode()).decode().rstrip("=")
    async with served(manager, api_key=KEY) as url:
        async with connected(url, as_subprotocol) as client:
            assert client.subprotocol == PROTOCOL  # the key is not echoed
            await until(client, "hello")
        async with httpx.AsyncClient(base_url=url) as http:
            assert (await http.get("/v1/sessions")).status_code == 401
            allowed = await http.get("/v1/sessions", headers={"Authorization": f"Bearer {KEY}".encode()})
            assert allowed.status_code == 200


async def test_a_client_that_speaks_another_version_is_told(manager: FakeManager) -> None:
    async with served(manager) as url, connect(url.replace("http", "ws") + PATH) as client:
        error = await until(client, "error")
        assert (error.code, error.fatal) == ("unsupported_version", True)
        assert await close_code(client) == 4400


async def test_beyond_max_connections_the_upgrade_is_refused(manager: FakeManager) -> None:
    async with served(manager, max_connections=1) as url, connected(url) as client:
        await until(client, "hello")
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with connected(url):
                pass
        assert refused.value.response.status_code == 503


async def test_an_oversized_message_is_refused_with_a_code_and_the_session_resumes(manager: FakeManager) -> None:
    async with served(manager, max_message_bytes=100_000) as url:
        async with connected(url) as client:
            await client.send(start(session_id="s"))
            token = (await until(client, "session.started")).resume_token
            await client.send("x" * 200_000)
            assert await close_code(client) == 1009
        async with connected(url) as client:
            resume = {"type": "session.resume", "session_id": "s", "resume_token": token, "last_seq": 1}
            await client.send(json.dumps(resume))
            await until(client, "session.resumed")


async def test_stopping_the_server_says_goodbye_and_closes_1001(manager: FakeManager) -> None:
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(manager))
        client = await connect(url.replace("http", "ws") + PATH, subprotocols=[PROTOCOL])
        await client.send(start())
        await until(client, "session.started")
        stopping = asyncio.create_task(stack.aclose())
        assert (await until(client, "session.closed")).reason == "shutdown"
        assert await close_code(client) == 1001
        await stopping
    assert not manager.live


async def test_a_server_that_stops_is_not_healthy(manager: FakeManager) -> None:
    app = create_app(manager, ServerSettings(), clock=LoopClock())
    await app.state.hub.shutdown(1.0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        answer = await http.get("/healthz")
    app.state.hub.close()
    assert (answer.status_code, answer.json()["reason"]) == (503, "the server is stopping")


async def test_health_models_sessions_metrics_and_the_page(manager: FakeManager) -> None:
    async with served(manager) as url, connected(url) as client, httpx.AsyncClient(base_url=url) as http:
        await client.send(start(session_id="s"))
        await until(client, "session.started")
        assert (await http.get("/healthz")).json() == {"status": "ok", "reason": "ok"}
        manager.health_report = FakeHealth(ok=False, reason="no progress for 61 s")
        unhealthy = await http.get("/healthz")
        assert (unhealthy.status_code, unhealthy.json()["reason"]) == (503, "no progress for 61 s")
        [model] = (await http.get("/v1/models")).json()["models"]
        assert (model["name"], model["formats"]) == ("fake", ["h264", "jpeg", "rgb24", "latent"])
        assert (await http.get("/v1/models/fake/starts/door.png")).headers["content-type"] == "image/png"
        assert (await http.get("/v1/models/fake/starts/..%2f..%2fetc.png")).status_code == 404
        [session] = (await http.get("/v1/sessions")).json()["sessions"]
        assert (session["session_id"], session["attached"]) == ("s", True)
        metrics = await http.get("/metrics")
        assert "realtime_omni_open_connections 1.0" in metrics.text
        page = await http.get("/")
        assert page.status_code in (200, 404)
        assert "default-src 'self'" in page.headers.get("content-security-policy", "default-src 'self'")


@pytest.mark.parametrize("path", ["/", "/v1/realtime/wrld"])
async def test_a_websocket_where_there_is_none_is_told_where_they_are(
    manager: FakeManager, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with served(manager) as url:
        with pytest.raises(websockets.InvalidStatus) as refused:
            await connect(url.replace("http", "ws") + path)
    assert refused.value.response.status_code == 404
    error = json.loads(refused.value.response.body)["error"]
    assert error["code"] == "invalid_argument"
    assert PATH in error["message"]
    assert PATH in caplog.text, "the operator reads it, too"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_deleting_a_session_ends_it_and_an_unknown_one_is_404(manager: FakeManager) -> None:
    async with served(manager) as url, connected(url) as client, httpx.AsyncClient(base_url=url) as http:
        await client.send(start(session_id="s"))
        await until(client, "session.started")
        assert (await http.delete("/v1/sessions/s")).status_code == 204
        assert (await until(client, "session.closed")).reason == "operator"
        missing = await http.delete("/v1/sessions/s")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "session_not_found")
        foreign = await http.delete("/v1/sessions/s", headers={"Origin": "https://evil.example"})
        assert foreign.status_code == 403


async def test_a_bug_in_a_route_shows_an_id_and_nothing_else(
    manager: FakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> FakeHealth:
        raise RuntimeError("/opt/secret")

    manager.health = broken  # type: ignore[method-assign]
    async with served(manager) as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.get("/healthz")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["message"].split()[-1] in caplog.text


async def test_a_peer_that_never_reads_is_cut_and_its_session_detached(manager: FakeManager) -> None:
    """A full socket: the kernel's buffers and uvicorn's fill, the send makes no progress, the connection is cut."""
    big = FakeManager()
    object.__setattr__(big.info, "height", 1024)
    object.__setattr__(big.info, "width", 1024)
    async with served(big, send_timeout_s=0.5) as url:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"), limit=1024)
        key = base64.b64encode(b"0123456789abcdef").decode()
        host = url.removeprefix("http://")
        writer.write(
            f"GET {PATH} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: {PROTOCOL}\r\n\r\n".encode()
        )
        await reader.readuntil(b"\r\n\r\n")
        body = start(format="rgb24", session_id="s", lead_frames=12).encode()
        mask = b"\0\0\0\0"
        writer.write(b"\x81" + bytes([0x80 | len(body)]) + mask + body)
        async with asyncio.timeout(20):
            while "s" not in big.live or big.live["s"].view.attached:
                await asyncio.sleep(0.02)
        writer.transport.abort()


def test_the_route_table_is_the_applications(manager: FakeManager) -> None:
    page = (Path(__file__).resolve().parents[2] / "protocols" / "http.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| (\w+) \| `([^`]+)`", page, re.MULTILINE))
    app = create_app(manager, ServerSettings())
    actual = set()
    for route in app.routes:
        methods = getattr(route, "methods", None) or ({"GET"} if isinstance(route, Mount) else {"WS"})
        actual |= {(method, route.path or "/") for method in methods if method != "HEAD"}  # type: ignore[attr-defined]
    app.state.hub.close()
    assert actual == documented
