"""A thousand sessions come and go in every way; nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import deque
from typing import Any

import pytest

from realtime_omni.errors import CapacityError, CleanupError, OmniError, TickError
from realtime_omni.manager import Session, SessionManager
from realtime_omni.session.registry import MAX_GRAVES
from realtime_omni.session.values import EventId, SessionEvent
from realtime_omni.testing.faults import inject
from realtime_omni.testing.inline import InlineEngine, small_config
from realtime_omni.testing.models import TinyKVWorld

SESSIONS = 1000
PLACES = 4


@pytest.mark.req("AC-12")
async def test_a_thousand_sessions_leave_no_page_handle_future_or_task() -> None:
    """250 times the capacity, ended in seven ways; every tenth one fails to clean up at first."""
    tasks = len(asyncio.all_tasks())
    handles: list[weakref.ref[Session]] = []
    async with SessionManager(TinyKVWorld(), small_config(sessions=PLACES, policy="lru")) as manager:
        living: deque[Session] = deque()
        for number in range(SESSIONS):
            session = await manager.create_session(seed=number)
            handles.append(weakref.ref(session))
            await session.accept_event(SessionEvent(EventId(0), prompt="blue"))
            assert (await session.next_chunk()).chunk_index == 0
            living.append(session)
            if len(living) == PLACES:
                await _end(manager, living.popleft(), number)
        while living:
            await living.popleft().close()
        del session
        statistics = manager.statistics()
        assert (statistics.sessions, statistics.tombstones) == (0, 0)
        assert (statistics.pages_used, statistics.memory.states) == (0, 0)
        assert statistics.sessions_created == SESSIONS
        assert manager.health().ok
        engine = manager._engine
        engine.check()
        assert len(engine.registry) == 0
        assert engine.consumer.book.free_pages == statistics.pages_total  # type: ignore[attr-defined]
        assert manager._futures == {}
        assert manager._handles == {}
        assert len(manager._graves) <= MAX_GRAVES
        assert engine.next_deadline_s() is None
        assert len(asyncio.all_tasks()) == tasks
        gc.collect()
        assert sum(ref() is not None for ref in handles) == 0
    assert len(asyncio.all_tasks()) == tasks


async def _end(manager: SessionManager, session: Session, number: int) -> None:
    """Seven ways to end."""
    way = number % 7
    if way == 0:
        await session.disconnect()
    elif way == 1:
        await session.detach(0)
    elif way == 2:
        await asyncio.gather(*(session.close() for _ in range(3)))
    elif way == 3:
        task = asyncio.create_task(session.next_chunk())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await session.close()
    elif way == 4:
        with inject(manager, "forward:2"), pytest.raises(TickError):
            await session.next_chunk()
        await session.close()
    elif way == 5:
        with inject(manager, "release", session.id), pytest.raises(CleanupError):
            await session.close()
        await session.close()
    else:
        return  # nobody closes it: it is evicted when its place is needed


async def test_a_full_server_under_many_clients_at_once_refuses_some_and_leaks_nothing() -> None:
    async with SessionManager(TinyKVWorld(), small_config(sessions=PLACES)) as manager:
        refused: list[OmniError] = []

        async def client(number: int) -> int:
            try:
                session = await manager.create_session(f"client-{number}", seed=number)
            except CapacityError as full:
                refused.append(full)
                return 0
            try:
                return sum([(await session.next_chunk()).frames for _ in range(3)])
            finally:
                await session.close()

        frames = await asyncio.gather(*(client(n) for n in range(40)))
        assert sum(frames) == (40 - len(refused)) * 6
        assert len(refused) < 40
        assert manager.statistics().pages_used == 0
        assert manager.sessions() == ()


@pytest.mark.parametrize("branches", [("main",), ("cond", "free")])
def test_a_long_rollout_holds_a_window_of_pages_and_no_more(branches: tuple[str, ...]) -> None:
    """Pruning after the commit: sink 2 and window 4 frames of one page each, on every branch, for 40 chunks."""
    engine = InlineEngine(TinyKVWorld(branches=branches))
    engine.create("a")
    used: list[int] = []
    for _ in range(40):
        engine.next("a")
        used.append(engine.view("a").pages_used)
    assert used[:4] == [2 * len(branches), 4 * len(branches), 6 * len(branches), 6 * len(branches)]
    assert set(used[3:]) == {6 * len(branches)}
    assert engine.runner.book.completed_frames("a") == 80


def test_ten_times_the_capacity_one_after_another_in_one_engine() -> None:
    engine: Any = InlineEngine(TinyKVWorld(prefill=True), sessions=PLACES)
    free = engine.free_pages
    for number in range(10 * PLACES):
        engine.create(f"s{number}")
        engine.next(f"s{number}")
        engine.close(f"s{number}")
        assert engine.free_pages == free
