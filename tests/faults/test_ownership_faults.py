"""Who owns a session while connections come, go and take over, at every moment the event loop offers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from realtime_omni.manager import SessionManager
from realtime_omni.server.clock import LoopClock
from realtime_omni.server.hub import WorldHub
from realtime_omni.server.metrics import Metrics
from realtime_omni.server.settings import ServerSettings
from realtime_omni.testing.inline import small_config
from realtime_omni.testing.models import TinyKVWorld
from realtime_omni_protocols.world_messages import ErrorMessage, SessionResumed
from server.fakes import FakeManager
from server.wire import Client, eventually, make_hub


@asynccontextmanager
async def serving(manager: Any, **settings: Any) -> AsyncIterator[WorldHub]:
    hub = WorldHub(manager, ServerSettings(**settings), Metrics(), LoopClock())
    yield hub
    await hub.shutdown(5)
    hub.close()
    assert not hub.connections
    assert len(hub.sessions) == 0
    assert hub.pool.open_lanes == 0


def turns(count: int) -> Iterator[int]:
    """How long the event loop runs between two things that race."""
    yield from range(count)


async def test_a_resume_that_races_with_the_loss_of_the_old_socket_owns_what_it_was_given() -> None:
    """The lease of the lost socket must never run under the connection that came back."""
    async with SessionManager.from_recipe("null") as manager, serving(manager) as hub:
        for wait in turns(12):
            old, new = Client(hub), Client(hub)
            await old.start(session_id=f"s{wait}", cadence="on_demand")
            await new.until("hello")
            new.send("session.resume", session_id=old.session_id, resume_token=old.token, last_seq=old.last_seq)
            for _ in range(wait):
                await asyncio.sleep(0)
            old.transport.drop()
            await old.gone()
            while not isinstance(answer := await new.receive(), SessionResumed | ErrorMessage):
                pass
            await manager.get_session(old.session_id).abort()  # answered after everything that was asked before
            (view,) = [view for view in manager.sessions() if view.session_id == old.session_id]
            if isinstance(answer, SessionResumed):
                assert view.attached, f"the grace runs after {wait} turns"
            await manager.close_session(old.session_id)
            await new.drop()


@pytest.fixture
def manager() -> FakeManager:
    return FakeManager()


async def test_a_takeover_that_is_lost_half_way_still_ends_the_old_connection(manager: FakeManager) -> None:
    hub = make_hub(manager)
    manager.hold()
    old = Client(hub)
    await old.start()
    await eventually(lambda: manager.ticks_started == 1)  # withdrawing this tick takes the takeover some turns
    new = Client(hub)
    await new.until("hello")
    new.send("session.resume", session_id=old.session_id, resume_token=old.token, last_seq=1, takeover=True)
    record = hub.sessions.get(old.session_id)
    assert record is not None
    await eventually(lambda: record.connection is None)
    new.task.cancel()
    await asyncio.wait([new.task])
    assert await old.end() == (4409, "")
    assert old.terminal.reason == "taken_over"
    manager.release()
    await hub.shutdown(5)
    hub.close()
    assert hub.pool.open_lanes == 0


async def test_a_reset_of_a_connection_that_was_taken_over_leaves_the_new_ones_reset_alone(
    manager: FakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both wait for a reset when the old connection ends: the new one's answer must still carry its ``re``."""
    hub = make_hub(manager)
    old = Client(hub)
    await old.start(cadence="on_demand")
    session = manager.live[old.session_id]
    goes_on, reset, waiting = asyncio.Event(), session.reset, []

    async def slow_reset(**how: Any) -> None:
        waiting.append(how)
        await goes_on.wait()
        await reset(**how)

    monkeypatch.setattr(session, "reset", slow_reset)
    old.send("session.reset", id="old", seed=1)
    await eventually(lambda: len(waiting) == 1)
    old.transport.flowing.clear()  # its last word takes a while
    new = Client(hub)
    await new.resume(old.session_id, old.token, old.last_seq, takeover=True)
    new.send("session.reset", id="new", seed=2)
    await eventually(lambda: len(waiting) == 2)
    old.transport.flowing.set()
    assert (await old.end())[0] == 4409  # its reader, and the reset that it waits for, are cancelled
    goes_on.set()
    done = await new.until("session.reset_done")
    assert (done.re, done.seed) == ("new", 2)
    await new.drop()
    await hub.shutdown(5)
    hub.close()


async def test_a_session_evicted_before_its_client_heard_of_it_ends_as_evicted() -> None:
    async with SessionManager(TinyKVWorld(), small_config(sessions=1, policy="lru")) as manager:
        async with serving(manager) as hub:
            clients = [Client(hub) for _ in range(4)]
            for client in clients:
                await client.until("hello")
            for client in clients:
                client.send("session.start", format="rgb24", cadence="on_demand")
            for client in clients:
                await client.until("session.started")
            last = hub.sessions.get(manager.sessions()[0].session_id)
            assert last is not None
            lost = [client for client in clients if client.of("session.started")[0].session_id != last.id]
            assert len(lost) == 3
            for client in lost:
                assert await client.end() == (4410, "")
                assert client.terminal.reason == "evicted"
