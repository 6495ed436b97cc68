"""How connections and sessions end: exactly one last word each (check AC-43), and nothing left behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from realtime_omni.errors import TickError
from realtime_omni.server.hub import WorldHub
from server.fake_values import FakeNotice
from server.fakes import FakeManager
from server.wire import Client, eventually, make_hub, type_of


def last_words(client: Client) -> list[Any]:
    return [i for i in client.seen if not isinstance(i, tuple) and (type_of(i) == "session.closed" or _fatal(i))]


def _fatal(item: Any) -> bool:
    return bool(getattr(item, "fatal", False))


@pytest.mark.req("AC-14")
async def test_a_socket_closed_during_a_tick_without_grace_closes_the_session(manager: FakeManager) -> None:
    hub = make_hub(manager, grace_s=0.0)
    manager.hold()
    client = Client(hub)
    await client.start(session_id="s")
    await manager.tick_started.wait()
    session = manager.live["s"]
    await client.drop()
    assert session.state == "closed"
    assert session.close_reasons == ["detached_expired"]
    assert manager.sessions() == ()
    assert len(hub.sessions) == 0
    assert session.subscribers == 0
    hub.close()


@pytest.mark.req("AC-14")
async def test_a_socket_closed_during_a_tick_closes_the_session_when_the_grace_is_over(
    manager: FakeManager, hub: WorldHub
) -> None:
    manager.hold()
    client = Client(hub)
    await client.start(session_id="s")
    await manager.tick_started.wait()
    session = manager.live["s"]
    await client.drop()
    assert not session.ticking
    assert session.state == "active"
    manager.clock.advance(30.1)
    await eventually(lambda: session.state == "closed")
    assert session.close_reasons == ["detached_expired"]
    assert len(hub.sessions) == 0


@pytest.mark.req("AC-14")
async def test_a_release_that_fails_after_a_lost_socket_is_a_visible_tombstone(manager: FakeManager) -> None:
    hub = make_hub(manager, grace_s=0.0)
    manager.hold()
    manager.release_fails = True
    client = Client(hub)
    await client.start(session_id="s")
    await manager.tick_started.wait()
    await client.drop()
    assert [(view.session_id, view.state) for view in manager.sessions()] == [("s", "tombstone")]
    assert len(hub.sessions) == 0
    again = Client(hub)
    await again.until("hello")
    again.send("session.start", format="rgb24", session_id="s")
    assert (await again.until("error")).code == "session_exists"
    await again.drop()
    hub.close()


@pytest.mark.req("AC-43")
async def test_close_is_answered_by_exactly_one_terminal_message(manager: FakeManager, hub: WorldHub) -> None:
    manager.hold()
    client = Client(hub)
    await client.start()
    client.press(1)
    await client.until("event.accepted")
    client.send("session.close", id="bye")
    client.send("session.close", id="twice")
    client.press(2)
    assert await client.end() == (1000, "")
    assert [word.reason for word in last_words(client)] == ["client"]
    assert client.terminal.re == "bye"
    assert client.of("event.discarded")[0].reason == "closed"
    assert not manager.live


@pytest.mark.req("AC-43")
async def test_a_failed_session_ends_with_one_terminal_message(manager: FakeManager, hub: WorldHub) -> None:
    manager.failures.append(TickError("broken"))
    client = Client(hub)
    await client.start()
    await client.until("session.failed")
    client.send("session.close")
    assert (await client.end())[0] == 1000
    assert len(last_words(client)) == 1
    assert len(client.of("session.failed")) == 1


async def test_an_evicted_session_says_why_once(manager: FakeManager, hub: WorldHub) -> None:
    manager.hold()
    client = Client(hub)
    await client.start(session_id="s")
    await manager.tick_started.wait()
    await manager.live["s"].evict()
    assert (await client.end())[0] == 4410
    assert [(word.reason, word.code) for word in last_words(client)] == [("evicted", "capacity")]


async def test_an_operator_who_deletes_the_session_ends_it_once(manager: FakeManager, hub: WorldHub) -> None:
    client = Client(hub)
    await client.start(session_id="s")
    await client.block()
    await manager.close_session("s", "operator")
    assert (await client.end())[0] == 1000
    assert [word.reason for word in last_words(client)] == ["operator"]


@pytest.mark.req("AC-43")
async def test_a_lost_socket_has_no_last_word_and_the_next_connection_has_exactly_one(
    manager: FakeManager, hub: WorldHub
) -> None:
    client = Client(hub)
    await client.start(session_id="s")
    await client.block()
    await client.drop()
    assert last_words(client) == []
    again = Client(hub)
    await again.resume("s", client.token, 5)
    again.send("session.close")
    await again.end()
    assert [word.reason for word in last_words(again)] == ["client"]


async def test_shutdown_says_goodbye_to_sessions_and_to_those_who_only_greeted(manager: FakeManager) -> None:
    hub = make_hub(manager)
    manager.hold()
    with_session, greeted, detached = Client(hub), Client(hub), Client(hub)
    await with_session.start()
    await detached.start()
    await detached.drop()
    await greeted.until("hello")
    await hub.shutdown(5)
    assert (await with_session.end())[0] == 1001
    assert [word.reason for word in last_words(with_session)] == ["shutdown"]
    assert (await greeted.end())[0] == 1001
    assert greeted.terminal.code == "shutdown"
    assert not manager.live
    assert len(hub.sessions) == 0
    hub.close()


async def test_a_session_that_is_made_while_the_server_stops_does_not_stay(manager: FakeManager) -> None:
    hub = make_hub(manager)
    client = Client(hub)
    await client.until("hello")
    create = manager.create_session

    async def slow(*args: Any, **options: Any) -> Any:
        stopping.append(asyncio.create_task(hub.shutdown(5)))
        await eventually(lambda: hub.stopping)
        return await create(*args, **options)

    stopping: list[asyncio.Task[None]] = []
    manager.create_session = slow  # type: ignore[method-assign]
    client.send("session.start", format="rgb24")
    assert (await client.end())[0] == 1001
    assert client.terminal.code == "shutdown"
    await stopping[0]
    assert not manager.live
    hub.close()


@pytest.mark.parametrize("reason", ["operator", "evicted", "shutdown"])
async def test_a_tick_that_ends_as_gone_waits_for_the_reason(manager: FakeManager, hub: WorldHub, reason: str) -> None:
    """The engine answers a running tick first, and says why the session ended when its release is done."""
    manager.hold()
    manager.release_takes = 200
    client = Client(hub)
    await client.start(session_id="s")
    await manager.tick_started.wait()
    await manager.close_session("s", reason)
    await client.end()
    assert client.terminal.reason == reason


async def test_a_session_that_vanished_without_a_notice_ends_as_failed(manager: FakeManager, hub: WorldHub) -> None:
    client = Client(hub)
    await client.start(session_id="s")
    await client.block()
    manager.live.pop("s").state = "closed"
    client.ack()
    manager.clock.advance(1)
    await client.end()
    assert (client.terminal.reason, client.terminal.code) == ("failed", "session_gone")


async def test_a_tombstone_of_a_failed_session_ends_it_as_failed(manager: FakeManager, hub: WorldHub) -> None:
    client = Client(hub)
    await client.start(session_id="s", cadence="on_demand")
    manager.live["s"].notify(FakeNotice("cleanup_failed", reason="cleanup_failed", code="cleanup_failed"))
    assert (await client.end())[0] == 1000
    assert client.terminal.reason == "failed"
    await manager.live["s"].close()


async def test_a_client_that_shows_nothing_is_closed_as_stalled(manager: FakeManager, hub: WorldHub) -> None:
    client = Client(hub)
    await client.start()
    await client.block()
    manager.clock.advance(1)
    await client.block()
    manager.clock.advance(58)
    client.send("ping")
    await client.until("pong")  # pings are no progress
    manager.clock.advance(2)
    assert (await client.end())[0] == 4408
    assert (client.terminal.reason, client.terminal.code) == ("stalled", "stalled")
    assert not manager.live


@pytest.mark.req("AC-46")
@pytest.mark.parametrize("parked", ["paused", "on demand", "failed"])
async def test_a_parked_session_without_input_ends_with_an_error(manager: FakeManager, parked: str) -> None:
    hub = make_hub(manager, stalled_input_s=30.0)
    if parked == "failed":
        manager.failures.append(TickError("broken"))
    client = Client(hub)
    await client.start(cadence="on_demand" if parked == "on demand" else "paced")
    if parked == "paused":
        await client.block()
        client.send("session.pause")
        await client.until("session.paused")
    if parked == "failed":
        await client.until("session.failed")
    manager.clock.advance(20)
    client.ack()
    client.send("ping", id="p")
    await client.until("pong")
    await eventually(client.transport.inbound.empty)
    manager.clock.advance(29)
    client.send("ping")  # no input
    await client.until("pong")
    assert manager.live
    manager.clock.advance(2)
    assert (await client.end())[0] == 4408
    assert (client.terminal.reason, client.terminal.code) == ("stalled", "stalled")
    assert not manager.live
    hub.close()


@pytest.mark.req("AC-46")
async def test_the_input_limit_can_be_turned_off(manager: FakeManager) -> None:
    hub = make_hub(manager, stalled_input_s=0.0)
    client = Client(hub)
    await client.start(cadence="on_demand")
    manager.clock.advance(1e6)
    client.send("ping")
    await client.until("pong")
    assert manager.live
    await hub.shutdown(5)
    hub.close()


async def test_a_silent_connection_ends_at_the_handshake_deadline(manager: FakeManager, hub: WorldHub) -> None:
    client = Client(hub)
    await client.until("hello")
    await eventually(lambda: manager.clock.next_wake is not None)
    manager.clock.advance(10.1)
    assert (await client.end())[0] == 4408
    assert client.terminal.code == "handshake_timeout"


async def test_a_hundred_sessions_leave_no_task_record_lane_or_thread(manager: FakeManager) -> None:
    hub = make_hub(manager, encode_threads=1)
    tasks = asyncio.all_tasks()
    for index in range(100):
        client = Client(hub)
        await client.start(session_id=f"s{index}", format="h264" if index % 10 == 0 else "rgb24")
        if index % 3 == 0:
            await client.block()
        if index % 2:
            client.send("session.close")
            await client.end()
        else:
            await client.drop()
            again = Client(hub)
            await again.resume(f"s{index}", client.token, 1)
            again.send("session.close")
            await again.end()
    assert len(hub.sessions) == 0
    assert hub.connections == set()
    assert hub.pool.open_lanes == 0
    assert asyncio.all_tasks() == tasks
    hub.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("encode", "media-setup"))]


async def test_a_cancelled_endpoint_still_detaches_its_session(manager: FakeManager, hub: WorldHub) -> None:
    manager.hold()
    client = Client(hub)
    await client.start(session_id="s")
    await manager.tick_started.wait()
    client.task.cancel()
    await asyncio.wait([client.task])
    assert client.task.cancelled()
    session = manager.live["s"]
    assert not session.view.attached
    assert not session.ticking
    assert hub.pool.open_lanes == 0
