"""Losing and resuming a connection: nothing twice, nothing missing, nobody else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from realtime_omni.server.hub import WorldHub
from realtime_omni_protocols.world import FrameHeader
from server.fakes import FakeManager
from server.wire import Client, eventually, make_hub, type_of


def essence(item: Any) -> Any:
    """What must be equal however often it is sent; encode times and the replay flag may differ."""
    if isinstance(item, tuple):
        header, payload = item
        assert isinstance(header, FrameHeader)
        return (header.seq, header.epoch, header.chunk_index, header.frame, header.last, payload)
    fields = {name: getattr(item, name) for name in item.__struct_fields__ if name not in ("timings_ms", "re")}
    return (type_of(item), repr(fields))


async def story(client: Client, manager: FakeManager) -> None:
    """An event, two blocks, a pause, a reset with a waiting event, one more block; nothing is acknowledged."""
    await client.block()
    client.press(1)
    await client.until("event.accepted")
    manager.clock.advance(1)
    await client.block()
    client.send("session.pause")
    await client.until("session.paused")
    client.press(2)
    await client.until("event.accepted")
    client.send("session.reset")
    await client.until("session.reset_done")
    client.send("session.resume_play")
    await client.until("session.playing")
    await client.block()


async def _numbered(manager: FakeManager) -> dict[int, Any]:
    hub = make_hub(manager)
    client = Client(hub)
    await client.start(session_id="s", seed=1)
    await story(client, manager)
    await client.drop()
    await hub.shutdown(5)
    hub.close()
    numbered = {}
    for item in client.seen:
        seq = item[0].seq if isinstance(item, tuple) else getattr(item, "seq", None)
        if seq is not None:
            numbered[seq] = essence(item)
    return numbered


LAST = 21
"""started, chunk+3, accepted, applied, chunk+3, paused, accepted, discarded, reset_done, playing, chunk+3."""


async def test_the_story_has_the_length_the_other_tests_assume() -> None:
    assert sorted(await _numbered(FakeManager())) == list(range(1, LAST))


@pytest.mark.parametrize("boundary", range(1, LAST))
async def test_resume_at_every_message_boundary_gives_exactly_the_rest(boundary: int) -> None:
    """The client acknowledges nothing by seq, drops, and says it has everything up to the boundary."""
    expected = await _numbered(FakeManager())
    manager = FakeManager()
    hub = make_hub(manager)
    first = Client(hub)
    await first.start(session_id="s", seed=1)
    token = first.token
    await story(first, manager)
    await first.drop()
    second = Client(hub)
    resumed = await second.resume("s", token, boundary)
    assert resumed.replayed_from == boundary + 1
    for seq in range(boundary + 1, LAST):
        item = await second.receive()
        assert essence(item) == expected[seq], seq
        if isinstance(item, tuple):
            assert item[0].replay
    second.displayed = 3
    second.ack()
    manager.clock.advance(1)
    chunk, frames = await second.block()
    assert (chunk.seq, chunk.epoch, chunk.chunk_index) == (LAST, 1, 1)
    assert not frames[0][0].replay
    await hub.shutdown(5)
    hub.close()


@pytest.fixture
async def dropped(hub: WorldHub) -> Client:
    """A session whose client has one block and is gone."""
    client = Client(hub)
    await client.start(session_id="s", format="h264")
    await client.block()
    await client.drop()
    return client


async def test_a_resumed_h264_stream_begins_with_a_key_frame(hub: WorldHub, dropped: Client) -> None:
    client = Client(hub)
    resumed = await client.resume("s", dropped.token, 3)  # inside the chunk: frames 4 and 5 follow
    assert resumed.codec.startswith("avc1.42")
    header, payload = await client.receive()
    assert (header.seq, header.key, header.replay) == (4, True, True)
    assert payload[4] & 0x1F == 7  # a sequence parameter set comes first
    header, _ = await client.receive()
    assert (header.key, header.last) == (False, True)


async def test_the_format_may_change_on_resume_but_not_to_latents(hub: WorldHub, dropped: Client) -> None:
    client = Client(hub)
    await client.until("hello")
    client.send("session.resume", session_id="s", resume_token=dropped.token, last_seq=2, format="latent")
    assert (await client.until("error")).code == "unsupported_format"
    resumed = await client.resume_again("s", dropped.token, 2, format="rgb24")
    assert (resumed.format, resumed.codec) == ("rgb24", None)
    _, payload = await client.receive()
    assert len(payload) == 16 * 16 * 3


async def test_a_token_works_once(hub: WorldHub, dropped: Client) -> None:
    second = Client(hub)
    await second.resume("s", dropped.token, 2)
    assert second.token != dropped.token
    await second.drop()
    third = Client(hub)
    await third.until("hello")
    third.send("session.resume", session_id="s", resume_token=dropped.token, last_seq=2)
    assert (await third.until("error")).code == "session_not_found"
    await third.resume_again("s", second.token, 2)


@pytest.mark.parametrize("token", ["x", "A" * 43])
async def test_a_wrong_token_looks_like_an_unknown_session(hub: WorldHub, dropped: Client, token: str) -> None:
    client = Client(hub)
    await client.until("hello")
    client.send("session.resume", session_id="s", resume_token=token, last_seq=1)
    wrong = await client.until("error")
    client.send("session.resume", session_id="unknown", resume_token=token, last_seq=1)
    unknown = await client.until("error")
    assert (wrong.code, wrong.message) == (unknown.code, unknown.message)
    assert wrong.code == "session_not_found"


async def test_tokens_are_kept_as_digests_only(hub: WorldHub, dropped: Client) -> None:
    record = next(iter(hub.sessions))
    # `session.started` itself holds the first token until it is acknowledged: that is the replay buffer, not the check.
    assert record.stream._token is not None
    assert dropped.token.encode() not in record.stream._token
    assert len(record.stream._token) == 32


async def test_a_second_connection_is_busy_unless_it_takes_over(manager: FakeManager, hub: WorldHub) -> None:
    old, new = Client(hub), Client(hub)
    await old.start(session_id="s")
    await old.block()
    await new.until("hello")
    new.send("session.resume", session_id="s", resume_token=old.token, last_seq=2)
    assert (await new.until("error")).code == "session_busy"
    await new.resume_again("s", old.token, 2, takeover=True)
    await new.receive()
    code, _ = await old.end()
    assert code == 4409
    assert old.terminal.reason == "taken_over"
    assert old.terminal.seq is None
    assert [type_of(i) for i in old.seen if not isinstance(i, tuple)].count("session.closed") == 1
    new.press(1)
    assert (await new.until("event.accepted")).status == "accepted"


async def test_a_takeover_during_a_tick_never_runs_two_ticks_of_the_session(
    manager: FakeManager, hub: WorldHub
) -> None:
    manager.hold()
    old, new = Client(hub), Client(hub)
    await old.start(session_id="s")
    await manager.tick_started.wait()
    await new.resume("s", old.token, 1, takeover=True)
    manager.release()
    chunk, _ = await new.block()  # the fake asserts that no two ticks overlap
    assert chunk.chunk_index == 0
    assert (await old.end())[0] == 4409


async def test_a_connection_that_lost_its_session_can_do_nothing_to_it(manager: FakeManager, hub: WorldHub) -> None:
    manager.hold()
    old, new = Client(hub), Client(hub)
    await old.start(session_id="s")
    old.transport.flowing.clear()  # the old socket takes nothing: its terminal message waits
    await new.resume("s", old.token, 1, takeover=True)
    old.press(1)
    old.send("session.close")
    old.transport.flowing.set()
    await old.end()
    new.press(1)
    assert (await new.until("event.accepted")).status == "accepted"


async def test_after_the_grace_the_session_is_gone(manager: FakeManager, hub: WorldHub, dropped: Client) -> None:
    manager.clock.advance(29.9)
    await eventually(lambda: "s" in manager.live)
    manager.clock.advance(0.2)
    await eventually(lambda: "s" not in manager.live)
    assert manager.gone["s"] == "closed"
    assert len(hub.sessions) == 0
    client = Client(hub)
    await client.until("hello")
    client.send("session.resume", session_id="s", resume_token=dropped.token, last_seq=2)
    assert (await client.until("error")).code == "session_gone"
    client.press(5)
    assert (await client.until("error")).code == "bad_message"
    assert not manager.live  # a late event never creates a session


async def test_a_resumed_session_outlives_the_grace_it_was_resumed_in(
    manager: FakeManager, hub: WorldHub, dropped: Client
) -> None:
    client = Client(hub)
    await client.resume("s", dropped.token, 2)
    client.send("session.pause")
    await client.until("session.paused")
    manager.clock.advance(31)
    client.send("ping")
    await client.until("pong")
    assert "s" in manager.live


async def test_a_block_of_an_ended_epoch_is_dropped_and_its_events_are_receipted(
    manager: FakeManager, hub: WorldHub
) -> None:
    """The block was committed while the socket was lost; before it could be sent the player reset."""
    manager.hold()
    client = Client(hub)
    await client.start(session_id="s")
    await manager.tick_started.wait()
    client.press(1)
    await client.until("event.accepted")
    manager.release(1)
    await client.block()
    client.send("session.pause")  # holds the driver; block 1 (with event 1) is asked for by hand below
    await client.until("session.paused")
    session = manager.live["s"]
    chunk = session._commit(tuple(session.pending), ("frames",))
    session.undelivered.append(chunk)
    client.send("session.reset")
    await client.until("session.reset_done")
    manager.release()
    client.send("session.resume_play")
    discarded = await client.until("event.discarded")
    assert (discarded.event_ids, discarded.reason) == ((1,), "reset")
    following, _ = await client.block()
    assert (following.epoch, following.chunk_index) == (1, 0)
    next(iter(hub.sessions)).stream.check()


async def test_a_resume_from_what_was_forgotten_is_refused_and_the_grace_goes_on(
    manager: FakeManager, hub: WorldHub
) -> None:
    client = Client(hub)
    await client.start(session_id="s")
    await client.block()
    client.ack()
    await eventually(client.transport.inbound.empty)
    await client.drop()
    again = Client(hub)
    await again.until("hello")
    again.send("session.resume", session_id="s", resume_token=client.token, last_seq=1)
    assert (await again.until("error")).code == "resume_refused"
    again.send("session.resume", session_id="s", resume_token=client.token, last_seq=99)
    assert (await again.until("error")).code == "resume_refused"
    await again.drop()
    manager.clock.advance(31)
    await eventually(lambda: not manager.live)


async def test_generation_holds_while_nobody_is_attached(manager: FakeManager, hub: WorldHub, dropped: Client) -> None:
    ticks = manager.ticks_started
    manager.clock.advance(20)
    client = Client(hub)
    await client.until("hello")
    assert manager.ticks_started == ticks


async def test_events_accepted_while_the_socket_was_dying_are_receipted_after_the_resume(
    manager: FakeManager, hub: WorldHub
) -> None:
    manager.hold()
    client = Client(hub)
    await client.start(session_id="s")
    await manager.tick_started.wait()
    client.transport.flowing.clear()
    client.press(1)
    await eventually(lambda: manager.live["s"].pending_event_count == 1)
    await client.drop()
    manager.release()
    again = Client(hub)
    resumed = await again.resume("s", client.token, 1)
    assert resumed.next_event_id == 2
    assert (await again.until("event.accepted")).event_id == 1
    assert (await again.until("event.applied")).event_ids == (1,)


async def test_an_event_whose_first_receipt_was_lost_is_accepted_when_it_comes_again(
    hub: WorldHub, manager: FakeManager
) -> None:
    client = Client(hub)
    await client.start(session_id="s")
    await client.block()
    manager.answer_takes = 50
    client.press(0)
    await eventually(lambda: manager.live["s"].pending)
    client.task.cancel()  # the session has the event, the stream does not know of it yet
    await asyncio.wait([client.task])
    manager.hold()
    back = Client(hub)
    await back.resume("s", client.token, client.last_seq)
    back.press(0)
    back.press(1)
    for event_id in (0, 1):
        assert (await back.until("event.accepted", event_id=event_id)).status == "accepted"
    manager.release()
    back.send("session.abort")  # the block that began before the second event
    chunk, _ = await back.block()
    assert chunk.applied_event_ids == (0, 1)


async def test_an_answer_that_another_connection_reads_carries_no_id_of_the_first(
    hub: WorldHub, manager: FakeManager
) -> None:
    first = Client(hub)
    await first.start(session_id="s", cadence="on_demand")
    manager.held = asyncio.Event()
    first.transport.flowing.clear()  # it hangs, so it cannot even be told that it is over
    first.send("session.fork", id="7")
    await eventually(lambda: len(manager.live) == 2)
    second = Client(hub)
    await second.resume("s", first.token, first.last_seq, takeover=True)
    manager.held.set()
    assert (await second.until("session.forked")).re is None
    first.transport.flowing.set()
    await first.end()
