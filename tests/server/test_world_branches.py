"""Fork and rewind over the wire: a branch is opened by an ordinary resume, an old epoch never comes after `session.rewound`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from realtime_omni.errors import TickError
from realtime_omni.server.hub import WorldHub
from server.fakes import FakeManager
from server.wire import Client, eventually, make_hub, type_of


@pytest.fixture
async def player(hub: WorldHub) -> Client:
    """A session with its first block."""
    client = Client(hub)
    started = await client.start(session_id="s", seed=5)
    assert (started.can_fork, started.oldest_rewind) == (True, 0)
    await client.block()
    return client


async def next_block(client: Client, manager: FakeManager) -> Any:
    """Everything so far was shown, and it is time for the next block."""
    client.ack()
    manager.clock.advance(1)
    return (await client.block())[0]


async def fork(client: Client, **fields: Any) -> Any:
    client.send("session.fork", id="f", **fields)
    return await client.until("session.forked", re="f")


async def open_branch(hub: WorldHub, forked: Any) -> Client:
    branch = Client(hub)
    resumed = await branch.resume(forked.session_id, forked.resume_token, 1)
    assert (resumed.replayed_from, resumed.state) == (2, "playing")
    assert (resumed.epoch, resumed.next_frame) == (forked.epoch, forked.next_frame)
    return branch


# ---- fork ----------------------------------------------------------------------------------------------------------


async def test_parent_and_branch_go_on_from_the_same_chunk(hub: WorldHub, manager: FakeManager, player: Client) -> None:
    player.press(0)
    await player.until("event.accepted")
    forked = await fork(player, session_id="what-if")
    assert (forked.session_id, forked.epoch, forked.chunk_index, forked.next_frame) == ("what-if", 0, 1, 3)
    assert (forked.seed, forked.next_event_id) == (5, 1)
    branch = await open_branch(hub, forked)
    chunk, frames = await branch.block()
    assert (chunk.seq, chunk.chunk_index, chunk.first_frame, chunk.applied_event_ids) == (2, 1, 3, ())
    assert frames[0][0].key
    parents = await next_block(player, manager)
    assert (parents.chunk_index, parents.applied_event_ids) == (1, (0,))
    branch.press(1)
    assert (await branch.until("event.accepted")).event_id == 1
    branch.send("session.close")
    assert (await branch.end())[0] == 1000
    assert (await next_block(player, manager)).chunk_index == 2


async def test_the_wrong_token_opens_no_branch_and_the_right_one_opens_it_once(hub: WorldHub, player: Client) -> None:
    forked = await fork(player)
    stranger = Client(hub)
    await stranger.until("hello")
    stranger.send("session.resume", session_id=forked.session_id, resume_token=player.token, last_seq=1)
    assert (await stranger.until("error")).code == "session_not_found"
    await open_branch(hub, forked)
    stranger.send("session.resume", session_id=forked.session_id, resume_token=forked.resume_token, last_seq=1)
    assert (await stranger.until("error")).code == "session_not_found"


async def test_a_branch_that_nobody_opens_ends_after_its_grace(
    hub: WorldHub, manager: FakeManager, player: Client
) -> None:
    forked = await fork(player)
    assert forked.grace_s == 30
    manager.clock.advance(29)
    await eventually(lambda: len(hub.sessions) == 2)
    manager.clock.advance(2)
    await eventually(lambda: len(hub.sessions) == 1)
    late = Client(hub)
    await late.until("hello")
    late.send("session.resume", session_id=forked.session_id, resume_token=forked.resume_token, last_seq=1)
    assert (await late.until("error")).code == "session_gone"


async def test_even_without_grace_there_is_time_to_open_a_branch(manager: FakeManager) -> None:
    hub = make_hub(manager, grace_s=0)
    client = Client(hub)
    await client.start()
    forked = await fork(client)
    assert forked.grace_s == 10
    await open_branch(hub, forked)
    await hub.shutdown(5)
    hub.close()


@pytest.mark.parametrize("lost", ["after", "during"])
async def test_a_client_that_lost_its_connection_learns_of_its_branch(
    hub: WorldHub, manager: FakeManager, player: Client, lost: str
) -> None:
    known = player.last_seq
    manager.answer_takes = 50 if lost == "during" else 3
    player.send("session.fork", id="f")
    if lost == "after":
        await player.until("session.forked")
    else:
        await eventually(lambda: len(manager.live) == 2)
    player.task.cancel()
    await asyncio.wait([player.task])
    back = Client(hub)
    await back.resume("s", player.token, known)
    back.send("ping", id="p")
    await back.until("pong", re="p")
    forks = back.of("session.forked")
    assert len(hub.sessions) == len(manager.live) == 1 + len(forks), "a branch that nobody knows of"
    assert len(forks) == (lost == "after")
    if forks:
        await open_branch(hub, forks[0])


async def test_a_branch_whose_parent_ends_before_it_could_tell_of_it_ends_too(
    hub: WorldHub, manager: FakeManager, player: Client
) -> None:
    manager.answer_takes = 30
    player.transport.flowing.clear()  # a slow reader: the connection does not end with its session
    player.send("session.fork", id="f")
    await eventually(lambda: len(manager.live) == 2)
    await manager.live["s"].evict()
    await eventually(lambda: not manager.live)
    assert not len(hub.sessions)
    player.transport.flowing.set()
    await player.end()
    assert not player.of("session.forked")


@pytest.mark.parametrize(
    ("what", "code"),
    [("taken", "session_exists"), ("full", "capacity"), ("cannot", "unsupported"), ("odd", "bad_message")],
)
async def test_a_refused_fork_changes_nothing(
    hub: WorldHub, manager: FakeManager, player: Client, what: str, code: str
) -> None:
    manager.max_sessions = 1 if what == "full" else 8
    manager.branches = what != "cannot"
    player.send("session.fork", id="f", session_id={"taken": "s", "odd": "a/b"}.get(what))
    error = await player.until("error")
    assert (error.code, error.fatal) == (code, False)
    assert len(hub.sessions) == len(manager.live) == 1
    assert (await next_block(player, manager)).chunk_index == 1


async def test_a_server_that_stops_ends_branches_too(hub: WorldHub, manager: FakeManager, player: Client) -> None:
    await fork(player)
    await hub.shutdown(5)
    assert not manager.live


# ---- rewind ----------------------------------------------------------------------------------------------------------


async def test_a_rewind_goes_on_at_the_earlier_chunk_in_a_new_epoch(
    hub: WorldHub, manager: FakeManager, player: Client
) -> None:
    player.press(0, prompt="desert")
    for _ in range(3):
        last = await next_block(player, manager)
    assert (last.chunk_index, last.prompt, last.oldest_rewind) == (3, "desert", 0)
    player.press(1)
    await player.until("event.accepted")
    player.send("session.rewind", id="r", chunk_index=1)
    rewound = await player.until("session.rewound", re="r")
    assert (rewound.epoch, rewound.chunk_index, rewound.next_frame) == (1, 1, 3)
    assert rewound.prompt != "desert"
    assert player.of("event.discarded")[-1].reason == "rewind"
    chunk, frames = await player.block()  # nothing is outstanding: the next block comes at once
    assert (chunk.epoch, chunk.chunk_index, chunk.first_frame, chunk.prompt) == (1, 1, 3, rewound.prompt)
    assert (frames[0][0].frame, frames[0][0].key) == (3, True)


async def test_no_chunk_of_the_old_epoch_comes_after_a_rewind(
    hub: WorldHub, manager: FakeManager, player: Client
) -> None:
    await next_block(player, manager)
    manager.hold()
    player.ack()
    manager.clock.advance(1)
    await manager.tick_started.wait()
    player.send("session.rewind", id="r", chunk_index=1)
    await player.until("session.rewound", re="r")
    manager.release()
    chunk, _ = await player.block()
    assert (chunk.epoch, chunk.chunk_index) == (1, 1)
    epochs = [item.epoch for item in player.of("chunk")]
    assert epochs == sorted(epochs)


@pytest.mark.parametrize(
    ("index", "branches", "code"), [(0, True, "not_retained"), (9, True, "invalid_argument"), (3, False, "unsupported")]
)
async def test_a_refused_rewind_changes_nothing(
    hub: WorldHub, manager: FakeManager, player: Client, index: int, branches: bool, code: str
) -> None:
    for _ in range(6):
        await next_block(player, manager)
    manager.branches = branches
    player.send("session.rewind", id="r", chunk_index=index)
    error = await player.until("error", re="r")
    assert (error.code, error.fatal) == (code, False)
    chunk = await next_block(player, manager)
    assert (chunk.epoch, chunk.chunk_index) == (0, 7)


async def test_a_failed_session_goes_back_and_plays(hub: WorldHub, manager: FakeManager, player: Client) -> None:
    await next_block(player, manager)
    manager.failures.append(TickError("broken"))
    player.ack()
    manager.clock.advance(1)
    await player.until("session.failed")
    player.send("session.rewind", chunk_index=1)
    await player.until("session.rewound")
    assert (await player.block())[0].chunk_index == 1


async def test_a_paused_session_stays_paused(hub: WorldHub, manager: FakeManager, player: Client) -> None:
    await next_block(player, manager)
    player.send("session.pause")
    player.send("session.rewind", chunk_index=1)
    await player.until("session.rewound")
    manager.clock.advance(5)
    player.send("session.resume_play")
    await player.until("session.playing")
    assert not [item for item in player.of("chunk") if item.epoch == 1]
    assert (await player.block())[0].chunk_index == 1


async def test_a_rewind_whose_connection_was_lost_is_told_with_the_next_chunk(
    hub: WorldHub, manager: FakeManager, player: Client
) -> None:
    for _ in range(2):
        await next_block(player, manager)
    player.ack()
    known = player.last_seq
    manager.answer_takes = 50
    player.send("session.rewind", chunk_index=1)
    await eventually(lambda: manager.live["s"].epoch == 1)
    player.task.cancel()  # in the middle of the command, before its answer is known
    await asyncio.wait([player.task])
    back = Client(hub)
    assert (await back.resume("s", player.token, known)).epoch == 0
    back.displayed = player.displayed
    back.ack()
    manager.clock.advance(1)
    chunk = await back.until("chunk", epoch=1)
    rewound = back.of("session.rewound")
    assert [type_of(item) for item in rewound] == ["session.rewound"]
    assert (rewound[0].chunk_index, chunk.epoch, chunk.chunk_index) == (1, 1, 1)


async def test_what_was_shown_of_the_old_epoch_is_no_credit_for_the_new_one(
    hub: WorldHub, manager: FakeManager, player: Client
) -> None:
    for _ in range(3):
        await next_block(player, manager)
    player.send("session.rewind", chunk_index=1)
    await player.until("session.rewound")
    await player.block()
    player.send("session.ack", seq=player.last_seq, displayed=99, epoch=1)
    assert (await player.until("error")).code == "invalid_argument"
    player.send("session.ack", seq=player.last_seq, displayed=12, epoch=0)  # true of the old one: only its seq counts
    player.send("ping", id="p")
    await player.until("pong", re="p")
    assert next(iter(hub.sessions)).stream.displayed == 3


async def test_a_block_that_was_committed_before_a_rewind_is_told_before_it(
    hub: WorldHub, manager: FakeManager, player: Client
) -> None:
    manager.chunk_takes = 40
    player.press(0)
    await player.until("event.accepted")
    player.ack()
    manager.clock.advance(1)
    await eventually(lambda: manager.live["s"].chunk_index == 2)
    player.send("session.rewind", chunk_index=2)
    assert (await player.until_any("chunk", "session.rewound")).chunk_index == 1
    assert player.of("event.applied")[-1].event_ids == (0,)
    assert (await player.until("session.rewound")).chunk_index == 2
    assert (await player.block())[0].chunk_index == 2


async def test_an_h264_stream_begins_anew_with_a_key_frame_after_a_rewind(hub: WorldHub, manager: FakeManager) -> None:
    client = Client(hub)
    await client.start(format="h264")
    await client.block()
    await next_block(client, manager)
    client.send("session.rewind", chunk_index=1)
    await client.until("session.rewound")
    _, frames = await client.block()
    assert [header.key for header, _ in frames] == [True, False, False]
