"""A client's end of an in-memory WebSocket: what a test sends, what the server said, and what a good client checks.

``FakeTransport`` has the shape of ``realtime_omni.server.transport.Transport``. ``Client`` decodes with the protocol
package and keeps the rules of every client: numbers without a gap, nothing after the terminal message.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from realtime_omni.server.hub import WorldHub
from realtime_omni.server.metrics import Metrics
from realtime_omni.server.settings import ServerSettings
from realtime_omni.server.transport import TransportLost
from realtime_omni_protocols.world import FrameHeader, parse_server, unpack_frame
from realtime_omni_protocols.world_messages import Chunk, SessionClosed
from server.fakes import FakeManager

LIVENESS_S = 10.0
"""A test that waits longer than this has found a hang."""
T = TypeVar("T")


class FakeTransport:
    """One WebSocket in memory. ``stuck`` makes sends block, as a full socket does."""

    def __init__(self) -> None:
        self.inbound: asyncio.Queue[str | bytes | None] = asyncio.Queue()
        self.outbound: asyncio.Queue[str | bytes | None] = asyncio.Queue()
        self.closed: tuple[int, str] | None = None
        self.lost = asyncio.Event()
        self.received_s = 0.0
        self.take: Callable[[str | bytes], bool] | None = None
        self.flowing = asyncio.Event()
        self.flowing.set()

    def listen(self, take: Callable[[str | bytes], bool]) -> None:
        self.take = take

    def arrive(self, data: str | bytes) -> None:
        """From the peer."""
        if self.take is None or not self.inbound.empty() or not self.take(data):
            self.inbound.put_nowait(data)

    async def receive(self) -> str | bytes:
        data = await self.inbound.get()
        if data is None or self.closed:
            raise TransportLost
        return data

    def put(self, messages: Sequence[str | bytes]) -> bool:
        if not self.flowing.is_set() or self.lost.is_set() or self.closed:
            return False
        for data in messages:
            self.outbound.put_nowait(data)
        return True

    async def send(self, *messages: str | bytes) -> None:
        for data in messages:
            await self._send(data)

    async def _send(self, data: str | bytes) -> None:
        await self.flowing.wait()
        if self.lost.is_set():
            raise TransportLost
        assert self.closed is None, "sent after close"
        self.outbound.put_nowait(data)

    async def close(self, code: int, reason: str) -> None:
        await self.flowing.wait()
        if self.closed is None:
            self.closed = (code, reason)
            self.outbound.put_nowait(None)
            self.inbound.put_nowait(None)

    def drop(self) -> None:
        """The TCP connection is gone."""
        self.lost.set()
        self.flowing.set()
        self.inbound.put_nowait(None)
        self.outbound.put_nowait(None)


class Client:
    """Speaks the protocol over a :class:`FakeTransport` that a hub serves."""

    def __init__(self, hub: WorldHub) -> None:
        self.hub = hub
        self.transport = FakeTransport()
        self.task = asyncio.create_task(hub.serve(self.transport))
        self.seen: list[Any] = []
        self.last_seq = 0
        self.displayed = 0
        self.epoch = 0
        self.token = ""
        self.session_id = ""
        self.terminal: Any = None

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, type_: str, **fields: Any) -> None:
        self.transport.arrive(json.dumps({"type": type_, **fields}))

    def send_raw(self, data: str | bytes) -> None:
        self.transport.arrive(data)

    def ack(self) -> None:
        self.send("session.ack", seq=self.last_seq, displayed=self.displayed, epoch=self.epoch)

    def press(self, event_id: int, **fields: Any) -> None:
        control = {"track": "camera", "schema": "realtime_omni.held_keys.v1", "data": {"keys": ["w"], "t_ms": event_id}}
        self.send("session.event", event_id=event_id, **({"controls": [control]} | fields))

    async def start(self, **fields: Any) -> Any:
        await self.until("hello")
        self.send("session.start", **({"format": "rgb24"} | fields))
        started = await self.until("session.started")
        self.session_id, self.token = started.session_id, started.resume_token
        return started

    async def resume(self, session_id: str, token: str, last_seq: int, **fields: Any) -> Any:
        await self.until("hello")
        return await self.resume_again(session_id, token, last_seq, **fields)

    async def resume_again(self, session_id: str, token: str, last_seq: int, **fields: Any) -> Any:
        """Resume on a connection that has greeted already."""
        self.send("session.resume", session_id=session_id, resume_token=token, last_seq=last_seq, **fields)
        resumed = await self.until("session.resumed")
        self.session_id, self.token, self.last_seq = session_id, resumed.resume_token, last_seq
        self.epoch = resumed.epoch
        return resumed

    # -- receiving -------------------------------------------------------------------------------------------------

    async def receive(self) -> Any:
        """The next message: a typed value, or (header, payload) of a frame. None when the connection is closed."""
        async with asyncio.timeout(LIVENESS_S):
            data = await self.transport.outbound.get()
        if data is None:
            return None
        assert self.terminal is None, f"{data!r} after the terminal message"
        item: Any
        if isinstance(data, str):
            item = parse_server(data)
            seq = getattr(item, "seq", None)
            if isinstance(item, SessionClosed) or getattr(item, "fatal", False):
                self.terminal = item
            if type(item).__name__ == "SessionResetDone":
                self.epoch, self.displayed = item.epoch, 0
            if type(item).__name__ == "SessionRewound":
                self.epoch, self.displayed = item.epoch, item.next_frame
        else:
            header, payload = unpack_frame(data)
            item, seq = (header, bytes(payload)), header.seq
            self.displayed = header.frame + 1
        if seq is not None:
            assert seq == self.last_seq + 1, f"seq {seq} after {self.last_seq}"
            self.last_seq = seq
        self.seen.append(item)
        return item

    async def until(self, type_: str, **fields: Any) -> Any:
        """Receive up to the next message of this type (and with these field values)."""
        while True:
            item = await self.receive()
            assert item is not None, f"closed while waiting for {type_}: {self.transport.closed}"
            if isinstance(item, tuple) or type_of(item) != type_:
                continue
            if all(getattr(item, name) == value for name, value in fields.items()):
                return item

    async def until_any(self, *types: str) -> Any:
        """Receive up to the next message of one of these types."""
        while True:
            item = await self.receive()
            assert item is not None
            if not isinstance(item, tuple) and type_of(item) in types:
                return item

    async def block(self) -> tuple[Chunk, list[tuple[FrameHeader, bytes]]]:
        """The next chunk with its frames."""
        chunk = await self.until("chunk")
        frames = [await self.receive() for _ in range(chunk.parts)]
        assert [header.index for header, _ in frames] == list(range(chunk.parts))
        assert frames[-1][0].last
        return chunk, frames

    async def end(self) -> tuple[int, str]:
        """Receive until the connection is closed; returns the close code and reason."""
        while await self.receive() is not None:
            pass
        await self.gone()
        assert self.transport.closed is not None
        return self.transport.closed

    async def drop(self) -> None:
        """Cut the connection and wait until the server has noticed."""
        self.transport.drop()
        await self.gone()

    async def gone(self) -> None:
        async with asyncio.timeout(LIVENESS_S):
            await asyncio.wait([self.task])
        self.task.result()

    def of(self, type_: str) -> list[Any]:
        return [item for item in self.seen if not isinstance(item, tuple) and type_of(item) == type_]


def type_of(message: Any) -> str:
    return str(message.__struct_config__.tag)


async def eventually(condition: Any) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(LIVENESS_S):
        while not condition():
            await asyncio.sleep(0)


def make_hub(manager: FakeManager, **settings: Any) -> WorldHub:
    return WorldHub(manager, ServerSettings(**settings), Metrics(), manager.clock)
