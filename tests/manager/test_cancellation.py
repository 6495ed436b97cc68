"""Cancelling a call at any of its awaits loses nothing: no chunk, no page, no place, no future."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from realtime_omni.errors import SessionGoneError
from realtime_omni.manager import Session, SessionManager
from realtime_omni.session.values import Chunk, EventId, SessionEvent
from realtime_omni.testing.faults import Gate, at
from realtime_omni.testing.inline import InlineEngine, small_config
from realtime_omni.testing.models import TinyKVWorld, move

TICK_POINTS = ("forward:1", "forward:2", "forward:3", "decode", "sync", "commit")


@asynccontextmanager
async def running(**model: Any) -> AsyncIterator[SessionManager]:
    async with SessionManager(TinyKVWorld(**model), small_config()) as manager:
        yield manager


def bits(chunk: Chunk) -> tuple[int, bytes]:
    return chunk.chunk_index, chunk.artifacts["frames"].data.tobytes()


def expected(chunks: int, *, seed: int = 3) -> list[tuple[int, bytes]]:
    """What an undisturbed session yields."""
    engine = InlineEngine(TinyKVWorld())
    engine.create("a", seed=seed)
    return [bits(engine.next("a")) for _ in range(chunks)]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop and the engine's thread run until something is true."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def nothing_left(manager: SessionManager) -> None:
    await until(lambda: manager._futures == {} and not manager.sessions() and manager.statistics().pages_used == 0)
    assert manager._engine.consumer.book.sessions == ()  # type: ignore[attr-defined]
    manager._engine.check()


@pytest.mark.parametrize("point", TICK_POINTS)
async def test_a_next_chunk_cancelled_at_any_engine_checkpoint_loses_and_repeats_nothing(point: str) -> None:
    async with running() as manager:
        session = await manager.create_session("a", seed=3)
        seen = [bits(await session.next_chunk())]
        pages = manager.statistics().pages_used
        gate = Gate()
        with at(manager, point, gate):
            task = asyncio.create_task(session.next_chunk())
            await asyncio.to_thread(gate.reached.wait)
            await cancelled(task)
            gate.open()
            seen.append(bits(await session.next_chunk()))
            statistics = manager.statistics()
            assert statistics.chunks_committed == 2  # one before, one now: none for nobody
            assert statistics.chunks_aborted == (point != "commit")  # rolled back, unless it had begun to settle
            seen += [bits(await session.next_chunk()) for _ in range(2)]
        assert seen == expected(4)
        assert session.state == "active"
        assert session._orphans == set()
        assert manager.statistics().pages_used >= pages
        await session.close()
        await nothing_left(manager)


async def test_a_next_chunk_cancelled_before_the_engine_looks_loses_nothing() -> None:
    async with running() as manager:
        session = await manager.create_session("a", seed=3)
        other = await manager.create_session("b", seed=4)
        gate = Gate()
        with at(manager, "forward:1", gate, "b"):
            busy = asyncio.create_task(other.next_chunk())
            await asyncio.to_thread(gate.reached.wait)
            task = asyncio.create_task(session.next_chunk())
            await asyncio.sleep(0)
            await cancelled(task)  # both commands wait in the inbox now
            gate.open()
            await busy
        assert [bits(await session.next_chunk()) for _ in range(3)] == expected(3)


@pytest.mark.parametrize("when", ["in the outbox", "future done"])
async def test_a_chunk_that_was_committed_before_the_cancel_goes_to_the_next_call(when: str) -> None:
    async with running() as manager:
        session = await manager.create_session("a", seed=3)
        arrived = threading.Event()
        manager._outbox.bind(arrived.set)
        task = asyncio.create_task(session.next_chunk())
        await asyncio.to_thread(arrived.wait)
        if when == "future done":
            manager._deliver()
        await cancelled(task)
        manager._outbox.bind(manager._wake)
        manager._deliver()
        assert [bits(await session.next_chunk()) for _ in range(3)] == expected(3)


@pytest.mark.parametrize("when", ["in the outbox", "future done"])
async def test_a_chunk_left_behind_comes_before_the_chunk_of_a_call_that_waited_behind_it(when: str) -> None:
    async with running() as manager:
        session = await manager.create_session("a", seed=3)
        arrived = threading.Event()
        manager._outbox.bind(arrived.set)
        first = asyncio.create_task(session.next_chunk())
        await asyncio.sleep(0)
        second = asyncio.create_task(session.next_chunk())
        await asyncio.sleep(0)
        await asyncio.to_thread(arrived.wait)
        await until(lambda: manager._outbox.statistics().depth == 2)
        if when == "future done":
            manager._deliver()
        first.cancel()
        manager._outbox.bind(manager._wake)
        manager._deliver()
        got = [bits(await second), bits(await session.next_chunk()), bits(await session.next_chunk())]
        assert got == expected(3)
        assert first.cancelled()


async def test_a_chunk_left_behind_by_an_earlier_epoch_is_not_the_first_of_the_next() -> None:
    async with running() as manager:
        session = await manager.create_session("a", seed=3)
        await session.next_chunk()
        arrived = threading.Event()
        manager._outbox.bind(arrived.set)
        task = asyncio.create_task(session.next_chunk())
        await asyncio.to_thread(arrived.wait)
        await cancelled(task)
        manager._outbox.bind(manager._wake)
        manager._deliver()
        await session.reset()
        assert [bits(await session.next_chunk()) for _ in range(2)] == expected(2)


async def test_events_of_a_cancelled_tick_are_applied_by_the_chunk_that_is_delivered() -> None:
    async with running() as manager:
        session = await manager.create_session("a", seed=3)
        await session.accept_event(SessionEvent(EventId(0), prompt="blue", controls=(move(2),)))
        gate = Gate()
        with at(manager, "forward:2", gate):
            task = asyncio.create_task(session.next_chunk())
            await asyncio.to_thread(gate.reached.wait)
            await cancelled(task)
            gate.open()
        chunk = await session.next_chunk()
        assert (chunk.chunk_index, chunk.metadata.applied_event_ids) == (0, (0,))


@pytest.mark.parametrize("point", ["prefill:1", "sync", "commit"])
async def test_a_cancelled_create_leaves_no_session(point: str) -> None:
    async with running(prefill=True) as manager:
        gate = Gate()
        with at(manager, point, gate):
            task = asyncio.create_task(manager.create_session("a"))
            await asyncio.to_thread(gate.reached.wait)
            await cancelled(task)
            gate.open()
        await nothing_left(manager)
        with pytest.raises(SessionGoneError):
            manager.get_session("a")
        session = await manager.create_session("a")
        assert (await session.next_chunk()).chunk_index == 0


@pytest.mark.parametrize("when", ["at once", "in the outbox", "future done"])
async def test_a_create_cancelled_before_or_after_the_engine_made_it_leaves_no_session(when: str) -> None:
    async with running() as manager:
        arrived = threading.Event()
        if when != "at once":
            manager._outbox.bind(arrived.set)
        task = asyncio.create_task(manager.create_session("a"))
        await asyncio.sleep(0)
        if when != "at once":
            await asyncio.to_thread(arrived.wait)
        if when == "future done":
            manager._deliver()
        await cancelled(task)
        manager._outbox.bind(manager._wake)
        manager._deliver()
        await nothing_left(manager)


async def test_a_cancelled_create_that_meets_a_stop_is_no_error_of_the_loop() -> None:
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    async with running(prefill=True) as manager:
        gate = Gate()
        with at(manager, "prefill:1", gate):
            task = asyncio.create_task(manager.create_session("a"))
            await asyncio.to_thread(gate.reached.wait)
            await cancelled(task)
            gate.open()
            await manager.stop()
    assert problems == []


async def test_a_cancelled_close_closes_all_the_same() -> None:
    async with running() as manager:
        session = await manager.create_session("a")
        await session.next_chunk()
        gate = Gate()
        with at(manager, "release", gate):
            task = asyncio.create_task(session.close())
            await asyncio.to_thread(gate.reached.wait)
            await cancelled(task)
            gate.open()
        await session.close()
        await nothing_left(manager)


@pytest.mark.parametrize("call", ["reset", "abort", "rollback", "attach"])
async def test_a_cancelled_control_call_leaves_a_session_that_works(call: str) -> None:
    async with running() as manager:
        session: Session = await manager.create_session("a", seed=3)
        await session.next_chunk()
        task = asyncio.create_task(getattr(session, call)())
        await asyncio.sleep(0)
        await cancelled(task)
        await until(lambda: manager._futures == {})
        chunk = await session.next_chunk()
        assert bits(chunk) == expected(2)[chunk.chunk_index]
