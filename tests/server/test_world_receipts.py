"""A connection reads on while the engine has its events: what follows an event is done after it and answered after it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from realtime_omni.server.hub import WorldHub
from realtime_omni.server.world_commands import MAX_RECEIPTS
from realtime_omni_protocols.world_messages import EventAccepted
from server.fakes import FakeManager
from server.wire import Client, eventually, make_hub, type_of


def said(client: Client, *types: str) -> list[Any]:
    return [item for item in client.seen if not isinstance(item, tuple) and type_of(item) in types]


async def on_demand(hub: WorldHub) -> Client:
    client = Client(hub)
    await client.start(session_id="s", cadence="on_demand")
    return client


async def test_an_event_and_the_next_block_are_one_trip(manager: FakeManager, hub: WorldHub) -> None:
    client = await on_demand(hub)
    manager.answer_takes = 50
    client.press(1)
    client.send("session.next")
    await eventually(lambda: manager.live["s"].ticking)
    assert not client.of("event.accepted")  # asked for before the event was answered
    chunk, _ = await client.block()
    assert chunk.applied_event_ids == (1,)
    order = [type_of(item) for item in said(client, "event.accepted", "event.applied", "chunk")]
    assert order == ["event.accepted", "event.applied", "chunk"]


async def test_a_refused_event_does_not_hold_up_the_block_behind_it(manager: FakeManager, hub: WorldHub) -> None:
    client = await on_demand(hub)
    client.press(1, prompt="nonsense", id="x")
    client.send("session.next")
    chunk, _ = await client.block()
    assert chunk.applied_event_ids == ()
    (error,) = client.of("error")
    assert (error.code, error.event_id, error.re) == ("prompt_unknown", 1, "x")
    assert [type_of(item) for item in said(client, "error", "chunk")] == ["error", "chunk"]
    assert hub.metrics.value("events_total", status="refused") == 1


@pytest.mark.parametrize("prompt", ["a blue room", "nonsense"])
async def test_a_reset_at_once_behind_an_event_is_answered_behind_it(
    manager: FakeManager, hub: WorldHub, prompt: str
) -> None:
    client = await on_demand(hub)
    manager.answer_takes = 50
    client.press(1, prompt=prompt)
    client.send("session.reset", id="r")
    done = await client.until("session.reset_done")
    assert done.re == "r"
    told = [type_of(item) for item in said(client, "event.accepted", "error", "event.discarded")]
    assert told == (["error"] if prompt == "nonsense" else ["event.accepted", "event.discarded"])


async def test_receipts_that_are_under_way_when_the_socket_is_lost_reach_whoever_resumes(
    manager: FakeManager, hub: WorldHub
) -> None:
    client = await on_demand(hub)
    manager.held = asyncio.Event()
    client.press(1, id="a")
    client.press(2, prompt="nonsense", id="b")
    client.press(3, id="c")
    await eventually(lambda: manager.live["s"].pending_event_count == 2)
    await client.drop()
    back = Client(hub)
    await back.resume("s", client.token, client.last_seq)
    manager.held.set()
    for event_id in (1, 3):
        receipt = await back.until("event.accepted", event_id=event_id)
        assert (receipt.status, receipt.re) == ("accepted", None)  # ``re`` names a message of the connection before
    assert not back.of("error")
    back.press(1)
    assert (await back.until("event.accepted", event_id=1)).status == "duplicate"


async def test_a_takeover_gets_the_receipts_that_were_under_way(manager: FakeManager, hub: WorldHub) -> None:
    old = await on_demand(hub)
    manager.held = asyncio.Event()
    old.press(1)
    old.send("session.next")
    old.press(2, prompt="nonsense")
    await eventually(lambda: manager.live["s"].pending_event_count == 1)
    new = Client(hub)
    await new.resume("s", old.token, old.last_seq, takeover=True)
    assert (await old.end())[0] == 4409
    assert not said(old, "event.accepted", "error")
    manager.held.set()
    assert (await new.until("event.accepted")).event_id == 1
    new.send("session.next")
    chunk, _ = await new.block()
    assert chunk.applied_event_ids == (1,)
    assert len(new.of("event.accepted")) == 1


async def test_the_end_of_a_session_while_receipts_are_under_way_is_the_last_word(
    manager: FakeManager, hub: WorldHub
) -> None:
    client = await on_demand(hub)
    manager.answer_takes = 50
    client.press(1)
    session = manager.live["s"]
    await eventually(lambda: session.pending_event_count == 1)
    manager.release_takes = 0
    await session.evict()
    await client.end()
    assert client.terminal.reason == "evicted"
    await eventually(lambda: session.answer is not None and session.answer.done())


async def test_a_client_has_a_bounded_number_of_events_in_the_engines_inbox(manager: FakeManager) -> None:
    hub = make_hub(manager, max_events_per_s=1000, max_messages_per_s=1000)
    client = await on_demand(hub)
    posted = 0
    accept = manager.live["s"].post_event

    def counted(event: Any) -> asyncio.Future[Any]:
        nonlocal posted
        posted += 1
        return accept(event)

    manager.live["s"].post_event = counted  # type: ignore[method-assign]
    manager.answer_takes = 200
    for event_id in range(100):
        client.press(event_id)
    for _ in range(100):
        await asyncio.sleep(0)
        assert posted <= MAX_RECEIPTS
    for event_id in range(100):
        answer = await client.until_any("event.accepted", "error")
        assert answer.event_id == event_id  # answered in the order of the events
        assert isinstance(answer, EventAccepted) == (event_id < manager.config.engine.max_pending_events)
    await hub.shutdown(5)
    hub.close()
