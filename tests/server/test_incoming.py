"""Messages of a voice's socket: acted upon where they come in, in order, and no faster than they may."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from realtime_omni.server.incoming import Incoming
from realtime_omni.server.reading import ReadingPace
from realtime_omni.server.transport import TransportLost
from server.manual_clock import ManualClock
from server.voices import VoiceTransport


class Reading:
    """A connection whose messages are noted; the message ``fault`` is more than it can stand."""

    def __init__(self, messages_per_s: float) -> None:
        self.clock = ManualClock()
        self.transport = VoiceTransport()
        self.seen: list[str | bytes] = []
        incoming = Incoming(self.transport, ReadingPace(self.clock, messages_per_s), self.act)
        self.task = asyncio.create_task(incoming.run())

    def act(self, frame: str | bytes) -> None:
        if frame == "fault":
            raise ValueError("fault")
        self.seen.append(frame)

    async def begun(self) -> Reading:
        await settle()
        return self


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_message_is_acted_upon_where_it_comes_in() -> None:
    reading = await Reading(10).begun()
    reading.transport.arrive("one")
    assert reading.seen == ["one"]
    reading.transport.drop()
    with pytest.raises(TransportLost):
        await reading.task


async def test_messages_that_come_too_fast_wait_and_none_overtakes_them() -> None:
    reading = await Reading(2).begun()
    for name in "abcd":
        reading.transport.arrive(name)
    await settle()
    assert reading.seen == ["a", "b"]
    reading.clock.advance(0.5)
    await settle()
    assert reading.seen == ["a", "b", "c"]
    reading.clock.advance(5.0)
    reading.transport.arrive("e")
    await settle()
    assert reading.seen == [*"abcde"]
    reading.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading.task
    reading.transport.arrive("late")
    assert reading.seen == [*"abcde"]


async def test_what_goes_wrong_where_a_message_comes_in_is_raised_by_the_task() -> None:
    reading = await Reading(10).begun()
    reading.transport.arrive("fault")
    reading.transport.arrive("after it")
    with pytest.raises(ValueError, match="fault"):
        await reading.task
    assert reading.seen == []
