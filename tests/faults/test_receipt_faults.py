"""Every accepted event gets its one receipt, also when the block that reflects it reaches nobody."""

from __future__ import annotations

import asyncio

from realtime_omni.engine.commands import Notice
from realtime_omni.manager import SessionManager
from realtime_omni.session.values import EventId, SessionEvent
from realtime_omni.testing.faults import Gate, at
from realtime_omni.testing.inline import small_config
from realtime_omni.testing.models import TinyKVWorld, move


async def test_events_of_a_chunk_that_nobody_took_before_the_reset_are_discarded() -> None:
    async with SessionManager(TinyKVWorld(), small_config()) as manager:
        session = await manager.create_session("a")
        notices: list[Notice] = []
        session.subscribe(notices.append)
        await session.accept_event(SessionEvent(EventId(0), controls=(move(1),)))
        gate = Gate()
        with at(manager, "commit", gate):  # too late for the cancellation: the chunk is committed and left behind
            task = asyncio.create_task(session.next_chunk())
            await asyncio.to_thread(gate.reached.wait)
            task.cancel()
            await asyncio.wait([task])
            gate.open()
            await session.accept_event(SessionEvent(EventId(1), controls=(move(2),)))
        await session.reset()
        discarded = [n for n in notices if n.kind == "events_discarded"]
        assert sorted(i for n in discarded for i in n.event_ids) == [0, 1]
        chunk = await session.next_chunk()
        assert (chunk.epoch, chunk.chunk_index, chunk.metadata.applied_event_ids) == (1, 0, ())
        await session.reset()
        assert len([n for n in notices if n.kind == "events_discarded"]) == len(discarded)
