"""Fork and rewind through the session manager: handles, callers that go away, chunks that were left behind."""

from __future__ import annotations

import asyncio

import pytest

from realtime_omni.errors import AbortedError, ArgumentError, CapacityError, SessionGoneError, StateError
from realtime_omni.manager import SessionManager, SessionNotice
from realtime_omni.session.values import Chunk, EventId, SessionEvent
from realtime_omni.testing.faults import Gate, at
from realtime_omni.testing.inline import small_config
from realtime_omni.testing.models import TinyKVWorld, move


def running(sessions: int = 3) -> SessionManager:
    return SessionManager(TinyKVWorld(), small_config(sessions=sessions, rewind_blocks=4))


def picture(chunk: Chunk) -> bytes:
    data: bytes = chunk.artifacts["frames"].data.tobytes()
    return data


def event(number: int, dx: int) -> SessionEvent:
    return SessionEvent(EventId(number), controls=(move(dx),))


async def test_a_fork_is_a_session_like_any_other_with_a_handle_of_its_own() -> None:
    async with running() as manager:
        parent = await manager.create_session("a", seed=1)
        await parent.accept_event(event(0, 3))
        await parent.next_chunk()
        fork = await parent.fork("b")
        minted = await fork.fork()
        assert manager.get_session("b") is fork
        assert len({parent.id, fork.id, minted.id}) == 3
        assert (fork.chunk_index, fork.epoch, fork.seed, fork.view.event_floor) == (1, 0, 1, 0)
        assert len({picture(await s.next_chunk()) for s in (parent, fork, minted)}) == 1
        assert manager.statistics().sessions_created == 3
        with pytest.raises(CapacityError):
            await parent.fork()
        await parent.close()
        await fork.accept_event(event(1, 5))
        await fork.next_chunk()
        with pytest.raises(SessionGoneError):
            await parent.fork()


async def test_a_rewind_answers_the_view_and_the_same_events_make_the_same_chunks() -> None:
    async with running() as manager:
        session = await manager.create_session("a", seed=1)
        seen = []
        for i in range(6):
            await session.accept_event(event(i, i))
            seen.append(picture(await session.next_chunk()))
        assert session.oldest_rewind == 2
        view = await session.rewind(3)
        assert (view.chunk_index, view.epoch, session.chunk_index) == (3, 1, 3)
        for i in range(3, 6):
            await session.accept_event(event(10 + i, i))
            assert picture(await session.next_chunk()) == seen[i]
        with pytest.raises(ArgumentError) as refused:
            await session.rewind(0)
        assert refused.value.code == "not_retained"


async def test_who_waits_for_a_chunk_is_told_of_the_rewind() -> None:
    async with running() as manager:
        session = await manager.create_session("a")
        await session.next_chunk()
        gate = Gate()
        with at(manager, "forward:2", gate):
            waiting = [asyncio.create_task(session.next_chunk()) for _ in range(2)]
            await asyncio.to_thread(gate.reached.wait, 20)
            rewound = asyncio.create_task(session.rewind(0))
            await asyncio.sleep(0)
            gate.open()
            assert (await rewound).chunk_index == 0
        for task in waiting:
            with pytest.raises(AbortedError):
                await task


async def test_a_fork_whose_caller_went_away_is_closed_again() -> None:
    async with running() as manager:
        session = await manager.create_session("a")
        gate = Gate()
        with at(manager, "forward:1", gate):
            chunk = asyncio.create_task(session.next_chunk())
            await asyncio.to_thread(gate.reached.wait, 20)
            forking = asyncio.create_task(session.fork("b"))
            await asyncio.sleep(0)
            forking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await forking
            gate.open()
            await chunk
        while [v.session_id for v in manager.sessions()] != ["a"]:
            await asyncio.sleep(0.001)


async def test_a_chunk_left_behind_is_dropped_by_a_rewind_and_only_undone_events_are_told_of() -> None:
    for target, told in ((0, [((0,), "reset")]), (2, [])):
        async with running() as manager:
            notices: list[SessionNotice] = []
            session = await manager.create_session("a")
            session.subscribe(notices.append)
            await session.accept_event(event(0, 1))
            session._undelivered.append(await session.next_chunk())
            if target:
                left, session._undelivered = session._undelivered.copy(), session._undelivered.__class__()
                await session.next_chunk()
                session._undelivered.extend(left)
            await session.rewind(target)
            assert [(n.event_ids, n.reason) for n in notices if n.kind == "events_discarded"] == told
            assert (await session.next_chunk()).chunk_index == target


async def test_a_log_is_played_again_through_the_handle() -> None:
    async with running() as manager:
        session = await manager.create_session("a", seed=1)
        seen = []
        for i in range(5):
            await session.accept_event(event(i, i))
            seen.append(picture(await session.next_chunk()))
        log = await session.log()
        other = await manager.create_session("b")
        for one in (session, other):
            assert [picture(chunk) async for chunk in one.replay(log)] == seen
        assert (session.epoch, session.view.event_floor, session.chunk_index) == (1, 9, 5)


async def test_who_takes_part_in_a_replay_ends_it() -> None:
    async with running() as manager:
        session = await manager.create_session("a")
        for i in range(3):
            await session.accept_event(event(i, i))
            await session.next_chunk()
        log = await session.log()
        chunks = session.replay(log)
        await anext(chunks)
        stolen = await session.next_chunk()
        with pytest.raises(StateError, match="something else"):
            await anext(chunks)
        session._undelivered.append(stolen)
        with pytest.raises(StateError, match="played alone"):
            await anext(session.replay(log))


async def test_a_replay_that_is_given_up_while_an_event_is_on_its_way_knows_the_events_id() -> None:
    async with running() as manager:
        session, other = await manager.create_session("a"), await manager.create_session("b")
        for i in range(2):
            await session.accept_event(event(i, i))
            await session.next_chunk()
        chunks = session.replay(await session.log())
        await anext(chunks)
        gate = Gate()
        with at(manager, "forward:1", gate, "b"):
            busy = asyncio.create_task(other.next_chunk())
            await asyncio.to_thread(gate.reached.wait)
            playing = asyncio.create_task(anext(chunks))
            await asyncio.sleep(0)  # its event waits at the engine now
            playing.cancel()
            await asyncio.sleep(0)
            assert not playing.done()
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await playing
            await busy
        assert session.view.event_floor == 3
