"""The short way to the socket: messages in one piece and in order, and never past a full or closing socket."""

from __future__ import annotations

import asyncio
import gc
import sys
import tracemalloc
from typing import Any

import pytest
import uvicorn
from starlette.websockets import WebSocketState
from uvicorn.server import ServerState
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from realtime_omni.server.peer import PeerProtocol
from realtime_omni.server.run import _loop_factory
from realtime_omni.server.transport import PEER_KEY, StarletteTransport, TransportLost


class FakeSocket(asyncio.Transport):
    """Keeps what is written, one item per write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closing = self.aborted = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.aborted = self.closing = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Accepts, and leaves the rest to the test."""
    await receive()
    await send({"type": "websocket.accept"})
    await receive()


class Connected:
    """A protocol with an open WebSocket, and the client's end of it."""

    def __init__(self) -> None:
        config = uvicorn.Config(app, ws=PeerProtocol, lifespan="off", ws_ping_interval=None)
        config.load()
        self.peer = PeerProtocol(config, ServerState(), {})
        self.socket = FakeSocket()
        self.client = ClientProtocol(parse_uri("ws://127.0.0.1/"))

    async def open(self) -> Connected:
        self.peer.connection_made(self.socket)
        self.client.send_request(self.client.connect())
        self.peer.data_received(b"".join(self.client.data_to_send()))
        while not self.peer.handshake_complete:
            await asyncio.sleep(0)
        self.client.receive_data(self.socket.writes.pop())
        self.client.events_received()
        return self

    def received(self) -> list[tuple[Opcode, bytes]]:
        self.client.receive_data(b"".join(self.socket.writes))
        return [(f.opcode, bytes(f.data)) for f in self.client.events_received() if isinstance(f, Frame)]


@pytest.fixture
async def connected() -> Any:
    connection = await Connected().open()
    yield connection
    connection.peer.connection_lost(None)
    while connection.peer.tasks:
        await asyncio.sleep(0)


async def test_messages_leave_in_one_write_and_in_order(connected: Connected) -> None:
    assert connected.peer.put(["one", b"\x02\x02", "three"])
    assert connected.peer.put([b"\x04"])
    assert len(connected.socket.writes) == 2
    expected = [(Opcode.TEXT, b"one"), (Opcode.BINARY, b"\x02\x02"), (Opcode.TEXT, b"three"), (Opcode.BINARY, b"\x04")]
    assert connected.received() == expected


async def test_both_ways_to_the_socket_keep_one_order(connected: Connected) -> None:
    connected.peer.put(["one"])
    await connected.peer.send({"type": "websocket.send", "text": "two"})
    connected.peer.put(["three"])
    assert [data for _, data in connected.received()] == [b"one", b"two", b"three"]


async def test_a_full_socket_takes_nothing_until_it_has_room(connected: Connected) -> None:
    connected.peer.pause_writing()
    assert not connected.peer.put(["early"])
    assert connected.socket.writes == []
    connected.peer.resume_writing()
    assert connected.peer.put(["late"])
    assert [data for _, data in connected.received()] == [b"late"]


async def test_a_closing_connection_takes_nothing_and_its_close_frame_comes_last(connected: Connected) -> None:
    connected.peer.put(["last word"])
    await connected.peer.send({"type": "websocket.close", "code": 1000})
    assert not connected.peer.put(["too late"])
    frames = connected.received()
    assert [opcode for opcode, _ in frames] == [Opcode.TEXT, Opcode.CLOSE]
    assert frames[0][1] == b"last word"


async def test_a_peer_that_said_goodbye_takes_nothing(connected: Connected) -> None:
    connected.client.send_close(1000)
    connected.peer.data_received(b"".join(connected.client.data_to_send()))
    before = len(connected.socket.writes)
    assert not connected.peer.put(["too late"])
    assert len(connected.socket.writes) == before


async def test_abort_cuts_at_once(connected: Connected) -> None:
    connected.peer.put(["written before"])
    connected.peer.abort()
    assert connected.socket.aborted
    assert not connected.peer.put(["written after"])


async def test_messages_say_when_they_came(connected: Connected) -> None:
    connected.client.send_text(b"hello")
    connected.peer.data_received(b"".join(connected.client.data_to_send()))
    message: Any = await connected.peer.receive()
    assert message["text"] == "hello"
    assert message["realtime_omni.received_s"] > 0


async def test_a_listener_has_every_message_at_once_and_what_it_refuses_waits_in_order(connected: Connected) -> None:
    heard: list[str | bytes] = []
    willing = True

    def take(message: str | bytes) -> bool:
        if willing:
            heard.append(message)
        return willing

    def say(*messages: bytes) -> None:
        for message in messages:
            connected.client.send_text(message)
        connected.peer.data_received(b"".join(connected.client.data_to_send()))

    connected.peer.listen(take)
    connected.client.send_binary(b"\x00")
    say(b"one", b"two")
    assert heard == [b"\x00", "one", "two"]
    willing = False
    say(b"three")
    willing = True
    say(b"four")  # behind the one that waits
    texts = [(await connected.peer.receive())["text"] for _ in range(2)]  # type: ignore[typeddict-item]
    assert texts == ["three", "four"]
    say(b"five")
    assert heard[3:] == ["five"]


async def test_a_listener_is_not_told_what_is_no_text(connected: Connected) -> None:
    connected.peer.listen(lambda message: True)
    connected.client.send_text(b"\xff")
    connected.peer.data_received(b"".join(connected.client.data_to_send()))
    assert connected.peer.close_sent


@pytest.mark.parametrize(
    "begun",
    [
        pytest.param(b"\x82\xff" + (1 << 20).to_bytes(8, "big") + bytes(4), id="a long one"),
        pytest.param(b"\x81\xff" + (1 << 20).to_bytes(8, "big") + bytes(4), id="a text"),
        pytest.param(b"\x02\xff" + (1 << 17).to_bytes(8, "big") + bytes(4 + (1 << 17)), id="fragments"),
    ],
)
async def test_a_peer_that_goes_in_the_middle_of_a_message_leaves_none_of_it(begun: bytes) -> None:
    """Without a garbage collection: a hundred of them would hold a hundred messages until one comes."""
    connection = await Connected().open()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        connection.peer.data_received(begun)
        for _ in range(8):
            connection.peer.data_received(b"\x00\xfe\xff\xff" + bytes(4 + 65_535) if begun[0] == 2 else bytes(65_536))
        held, _ = tracemalloc.get_traced_memory()
        connection.peer.connection_lost(None)
        while connection.peer.tasks:
            await asyncio.sleep(0)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert held - before > 400_000
    assert after - before < 50_000


class SlowPeer:
    """Has no room; ``abort`` is what a test waits for."""

    def __init__(self) -> None:
        self.aborted = False

    def put(self, messages: Any) -> bool:
        return False

    def abort(self) -> None:
        self.aborted = True


class StuckSocket:
    """A Starlette WebSocket whose sends block while ``open`` is unset."""

    application_state = WebSocketState.CONNECTED

    def __init__(self, peer: object | None) -> None:
        self.scope = {"state": {} if peer is None else {PEER_KEY: peer}}
        self.sent: list[str | bytes] = []
        self.open = asyncio.Event()

    async def send_text(self, data: str) -> None:
        await self.open.wait()
        self.sent.append(data)

    async def send_bytes(self, data: bytes) -> None:
        await self.open.wait()
        self.sent.append(data)


async def test_without_room_messages_wait_in_order() -> None:
    socket = StuckSocket(SlowPeer())
    transport = StarletteTransport(socket, 10.0)  # type: ignore[arg-type]
    sending = asyncio.create_task(transport.send("one", b"two", "three"))
    await asyncio.sleep(0)
    assert socket.sent == []
    socket.open.set()
    await sending
    assert socket.sent == ["one", b"two", "three"]


@pytest.mark.parametrize("peer", [SlowPeer(), None])
async def test_no_progress_within_the_limit_cuts_the_connection(peer: SlowPeer | None) -> None:
    transport = StarletteTransport(StuckSocket(peer), 0.001)  # type: ignore[arg-type]
    with pytest.raises(TransportLost):
        await transport.send("one")
    assert peer is None or peer.aborted


def test_without_uvloop_the_servers_loop_is_asyncios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert _loop_factory() is None
