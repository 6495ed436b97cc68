"""What need not wait does not: messages acted upon where they come in, blocks written where they are made, in order."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from realtime_omni.media import EncodePool
from realtime_omni.server.hub import WorldHub
from realtime_omni.server.metrics import Metrics
from realtime_omni.server.outbox import Batch, Sender
from realtime_omni.server.transport import TransportLost
from realtime_omni_protocols.world import WireState, WorldServerSide
from realtime_omni_protocols.world_entries import FrameEntry
from realtime_omni_protocols.world_messages import Pong
from server.fakes import FakeManager
from server.wire import Client, FakeTransport, type_of


class Pieces(FakeTransport):
    """Remembers what was written in one piece, and what by the sender's task."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[list[str | bytes]] = []
        self.sent: list[str | bytes] = []

    def put(self, messages: Any) -> bool:
        took = super().put(messages)
        if took:
            self.pieces.append(list(messages))
        return took

    async def send(self, *messages: str | bytes) -> None:
        await super().send(*messages)
        self.sent += messages


class Side:
    """A wire machine that allows everything: messages are their sequence of numbers."""

    state = WireState.PLAYING

    def send(self, message: Any) -> str:
        return str(message.t)

    def send_frame(self, header: Any, payload: bytes) -> bytes:
        return b"frame %d" % header.seq


def block(seq: int, size: int = 8) -> Batch:
    frame = FrameEntry(
        seq=seq,
        epoch=0,
        chunk_index=0,
        index=0,
        last=True,
        frame=0,
        applied_event_id=None,
        pts_ms=0,
        media=np.zeros((size, size, 3), np.uint8),
        after=cast(Any, None),
    )
    return Batch((frame,), sent=lambda: None)


def pong(number: int) -> Pong:
    return Pong(t=float(number), server_ms=0.0)


@pytest.fixture
async def sending() -> Any:
    transport, pool = Pieces(), EncodePool(1)
    sender = Sender(transport, cast(WorldServerSide, Side()), Metrics())
    sender.use(await pool.lane("rgb24", 8, 8, 12.0), "rgb24")
    task = asyncio.create_task(sender.run())
    await asyncio.sleep(0)
    yield sender, transport, task
    task.cancel()
    sender.close()
    pool.close()


async def rounds(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_block_leaves_when_it_is_queued_with_what_waits_before_it(sending: Any) -> None:
    sender, transport, _ = sending
    sender.put(pong(1))
    assert transport.pieces == [], "a block may follow in the same round"
    sender.put(block(2))
    assert transport.pieces == [["1.0", b"frame 2"]]
    sender.put(pong(3))
    await rounds(1)
    assert transport.pieces[1:] == [["3.0"]]
    await rounds()
    assert (len(transport.pieces), transport.sent) == (2, []), "and once"


async def test_a_full_socket_gets_the_rest_from_the_task_in_order(sending: Any) -> None:
    sender, transport, task = sending
    transport.flowing.clear()
    sender.put(block(1))
    sender.put(pong(2))
    await rounds()
    sender.put(block(3))
    await rounds()
    assert transport.pieces == transport.sent == []
    transport.flowing.set()
    sender.put(block(4))  # the task is in the middle of the first: nothing may pass it
    await rounds()
    got = [transport.outbound.get_nowait() for _ in range(4)]
    assert got == [b"frame 1", "2.0", b"frame 3", b"frame 4"]
    transport.flowing.clear()
    transport.drop()
    sender.put(block(5))
    with pytest.raises(TransportLost):
        await task


async def test_a_large_block_is_encoded_in_a_thread_and_what_follows_waits_for_it(sending: Any) -> None:
    sender, transport, _ = sending
    sender.put(block(1, size=400))
    sender.put(block(2))
    assert transport.pieces == []
    async with asyncio.timeout(10):
        got = [await transport.outbound.get() for _ in range(2)]
    assert got == [b"frame 1", b"frame 2"]


async def test_an_event_and_a_next_act_before_the_readers_turn(manager: FakeManager, hub: WorldHub) -> None:
    client = Client(hub)
    await client.start(session_id="s", cadence="on_demand")
    await rounds()
    heard: list[Any] = []
    session = manager.live["s"]
    post = session.post_event
    session.post_event = lambda event: (heard.append(event), post(event))[1]  # type: ignore[method-assign]
    client.press(1)
    assert [event.event_id for event in heard] == [1]
    client.send("session.pause")  # the reader's, and what follows it waits for its turn
    client.press(2)
    assert len(heard) == 1
    client.send("session.resume_play")
    await client.until("session.playing")
    client.send("session.next")
    await client.block()
    assert [event.event_id for event in heard] == [1, 2]
    order = [type_of(item) for item in client.seen if not isinstance(item, tuple)]
    wanted = ["event.accepted", "session.paused", "event.accepted", "session.playing"]
    assert [name for name in order if name in wanted] == wanted


async def test_a_bug_in_what_acts_at_once_ends_the_connection_and_not_the_server(
    manager: FakeManager, hub: WorldHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(hub)
    await client.start(session_id="s", cadence="on_demand")
    await rounds()

    def broken(*_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(next(iter(hub.connections)).side, "receive_text", broken)
    client.press(1)
    assert (await client.end())[0] == 4500
    assert "s" in manager.live, "it can be resumed"
