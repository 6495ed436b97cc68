"""What one socket still has to take: in order, bounded, closed behind everything."""

from __future__ import annotations

import asyncio

import pytest

from realtime_omni.server.outbox import ConnectionEnded
from realtime_omni.server.outgoing import MAX_WAITING_BYTES, ROOM_BYTES, Outgoing
from realtime_omni.server.transport import TransportLost
from server.voices import VoiceTransport


async def test_frames_keep_their_order_when_the_socket_stops_and_goes_on() -> None:
    transport = VoiceTransport()
    out = Outgoing(transport)
    writing = asyncio.create_task(out.run())
    out.put("1")
    assert transport.sent == ["1"], "written at once"
    transport.flowing.clear()
    out.put("2")
    await asyncio.sleep(0)
    transport.flowing.set()
    out.put("3")
    out.close(1000, "done")
    out.put("4")
    with pytest.raises(ConnectionEnded):
        await writing
    assert transport.sent == ["1", "2", "3"], "and nothing behind the close"
    assert transport.closed == (1000, "done")


async def test_sound_waits_for_room() -> None:
    transport = VoiceTransport()
    transport.flowing.clear()
    out = Outgoing(transport)
    writing = asyncio.create_task(out.run())
    await out.room()
    out.put(bytes(ROOM_BYTES + 1))
    waiting = asyncio.create_task(out.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    transport.flowing.set()
    await waiting
    writing.cancel()


async def test_a_client_that_takes_nothing_is_given_up_at_the_bound() -> None:
    transport = VoiceTransport()
    transport.flowing.clear()
    out = Outgoing(transport)
    writing = asyncio.create_task(out.run())
    for _ in range(MAX_WAITING_BYTES // 65_536 + 2):
        out.put(bytes(65_536))
    out.put("more")
    await asyncio.sleep(0)
    transport.flowing.set()
    with pytest.raises(TransportLost):
        await writing
