"""Peers that hurt below the protocol: requests without an end, floods of frames that are no messages, sockets left open."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import struct
from collections.abc import AsyncIterator

import pytest

from realtime_omni.server import guard
from realtime_omni.server.app import create_app
from realtime_omni.server.clock import LoopClock
from realtime_omni.server.hub import WorldHub
from realtime_omni.server.run import bind, running
from realtime_omni.server.settings import ServerSettings
from realtime_omni_protocols.world import PATH, PROTOCOL
from server.fakes import FakeManager

TEXT, PING, PONG, CONTINUATION, CLOSE = 1, 9, 10, 0, 8
LIVENESS_S = 10.0


@contextlib.asynccontextmanager
async def served(**fields: int) -> AsyncIterator[tuple[int, WorldHub]]:
    settings = ServerSettings(port=0, **fields)  # type: ignore[arg-type]
    app = create_app(FakeManager(), settings, clock=LoopClock())
    with bind(settings) as listener:
        async with running(app, settings, listener):
            yield listener.getsockname()[1], app.state.hub


def frame(opcode: int, payload: bytes = b"", *, last: bool = True) -> bytes:
    assert len(payload) < 126
    return bytes([last << 7 | opcode, 0x80 | len(payload)]) + b"\0\0\0\0" + payload


@contextlib.asynccontextmanager
async def socket_to(port: int, *first: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.writelines(first)
        yield reader, writer
    finally:
        writer.close()


def upgrade(port: int) -> bytes:
    key = base64.b64encode(bytes(16)).decode()
    head = [f"GET {PATH} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Upgrade: websocket", "Connection: Upgrade"]
    head += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Protocol: {PROTOCOL}"]
    return "\r\n".join([*head, "", ""]).encode()


async def greeted(reader: asyncio.StreamReader) -> None:
    await reader.readuntil(b"\r\n\r\n")
    assert (await next_frame(reader))[0] == TEXT  # hello


async def next_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    first, size = await reader.readexactly(2)
    if size == 126:
        (size,) = struct.unpack("!H", await reader.readexactly(2))
    return first & 15, await reader.readexactly(size)


async def ended(reader: asyncio.StreamReader) -> None:
    """The server has let go of the socket, one way or the other."""
    async with asyncio.timeout(LIVENESS_S):
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass


async def nobody_left(hub: WorldHub) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while hub.connections:
            await asyncio.sleep(0.001)


BEGINNINGS = {
    "silence": b"",
    "half a line": b"GET / HT",
    "headers without an end": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: y\r\n",
    "a body that never comes": b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\na",
}


@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
async def test_a_request_that_does_not_end_is_cut(monkeypatch: pytest.MonkeyPatch, beginning: bytes) -> None:
    monkeypatch.setattr(guard, "REQUEST_TIMEOUT_S", 0.05)
    async with served() as (port, _), socket_to(port, beginning) as (reader, _):
        await ended(reader)


async def test_a_websocket_outlives_the_time_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for requests: an upgraded connection that says nothing for longer stays open."""
    monkeypatch.setattr(guard, "REQUEST_TIMEOUT_S", 0.1)
    async with served() as (port, _), socket_to(port, upgrade(port)) as (reader, writer):
        await greeted(reader)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.4):
                await reader.read(1)
        writer.write(frame(PING, b"still"))
        assert await next_frame(reader) == (PONG, b"still")


async def test_headers_beyond_any_use_are_refused() -> None:
    async with served() as (port, _):
        async with socket_to(port, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 200_000) as (reader, _):
            assert (await reader.readline()).startswith(b"HTTP/1.1 400")


FLOODS = {
    "pings": frame(PING, b"x") * 1000,
    "pongs": frame(PONG) * 1000,
    "empty fragments": frame(TEXT, last=False) + frame(CONTINUATION, last=False) * 1000,
    "tiny fragments": frame(TEXT, b"a", last=False) + frame(CONTINUATION, b"b", last=False) * 1000,
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
async def test_a_flood_of_frames_that_are_no_messages_ends_with_4429(flood: bytes) -> None:
    async with served() as (port, hub):
        async with socket_to(port, upgrade(port)) as (reader, writer):
            await greeted(reader)
            writer.write(flood)
            async with asyncio.timeout(LIVENESS_S):
                while (found := await next_frame(reader))[0] != CLOSE:
                    assert found[0] == PONG
            assert struct.unpack("!H", found[1][:2]) == (4429,)
            await ended(reader)
            await nobody_left(hub)


async def test_a_few_fragments_and_pings_harm_nothing() -> None:
    async with served() as (port, _), socket_to(port, upgrade(port)) as (reader, writer):
        await greeted(reader)
        parts = [b'{"type":', b"", b'"ping"', b"}"]
        writer.write(frame(TEXT, parts[0], last=False) + frame(PING, b"hi"))
        for number, part in enumerate(parts[1:], 2):
            writer.write(frame(CONTINUATION, part, last=number == len(parts)))
        assert await next_frame(reader) == (PONG, b"hi")
        assert b'"pong"' in (await next_frame(reader))[1]


async def test_a_peer_that_goes_on_talking_after_the_close_is_cut() -> None:
    async with served(max_message_bytes=1024) as (port, hub), socket_to(port, upgrade(port)) as (reader, writer):
        await greeted(reader)
        writer.write(frame(TEXT, b"garbage"))
        while (await next_frame(reader))[0] != CLOSE:
            pass
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                writer.write(frame(TEXT, b" " * 100))
            await writer.drain()
        await ended(reader)  # long before the ten seconds that a closing handshake may take
        await nobody_left(hub)
