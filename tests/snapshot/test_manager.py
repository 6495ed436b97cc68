"""Snapshot and restore through the in-process API, over a real engine thread."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from realtime_omni.errors import ErrorCode, SessionGoneError, SnapshotError, StateError
from realtime_omni.manager import SessionManager
from realtime_omni.session.values import EventId, SessionEvent
from realtime_omni.snapshot.snapshot import Snapshot
from realtime_omni.testing.faults import Gate, at
from realtime_omni.testing.inline import small_config
from realtime_omni.testing.models import TinyKVWorld


def server(**how: object) -> SessionManager:
    return SessionManager(TinyKVWorld(), small_config(**how))  # type: ignore[arg-type]


async def test_save_load_and_go_on(tmp_path: Path) -> None:
    async with server() as manager:
        session = await manager.create_session("walk", seed=4, prompt="green")
        await session.next_chunk()
        await session.accept_event(SessionEvent(EventId(0), prompt="red"))
        snapshot = await session.snapshot()
        await asyncio.to_thread(snapshot.save, tmp_path / "walk.safetensors")
        expected = [(await session.next_chunk()).artifacts["frames"].data.tobytes() for _ in range(4)]
    async with server() as manager:
        loaded = await asyncio.to_thread(Snapshot.load, tmp_path / "walk.safetensors")
        session = await manager.restore(loaded)
        assert (session.id, session.chunk_index, session.pending_event_count) == ("walk", 1, 1)
        assert [(await session.next_chunk()).artifacts["frames"].data.tobytes() for _ in range(4)] == expected
        assert manager.get_session("walk") is session
        with pytest.raises(StateError) as taken:
            await manager.restore(loaded)
        assert taken.value.code == ErrorCode.SESSION_EXISTS


async def test_a_snapshot_while_a_tick_runs() -> None:
    async with server() as manager:
        session = await manager.create_session(seed=4)
        gate = Gate()
        with at(manager, "forward:2", gate):
            chunk = asyncio.create_task(session.next_chunk())
            await asyncio.to_thread(gate.reached.wait)
            saving = asyncio.create_task(session.snapshot())
            await asyncio.sleep(0)
            gate.open()
            snapshot = await saving
        assert snapshot.chunk_index == 0
        first = await chunk
        twin = await manager.restore(snapshot, "twin")
        again = await twin.next_chunk()
        assert first.artifacts["frames"].data.tobytes() == again.artifacts["frames"].data.tobytes()


async def test_a_caller_of_restore_who_goes_away_leaves_no_session() -> None:
    async with server() as manager:
        session = await manager.create_session("one")
        snapshot = await session.snapshot()
        task = asyncio.create_task(manager.restore(snapshot, "two"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(1000):
            if [v.session_id for v in manager.sessions()] == ["one"]:
                break
            await session.attach()
        assert [v.session_id for v in manager.sessions()] == ["one"]


async def test_a_closed_session_and_a_foreign_model_are_refused() -> None:
    async with server() as manager:
        session = await manager.create_session()
        snapshot = await session.snapshot()
        await session.close()
        with pytest.raises(SessionGoneError):
            await session.snapshot()
    async with SessionManager("null") as manager:
        with pytest.raises(SnapshotError) as foreign:
            await manager.restore(snapshot)
        assert foreign.value.code == ErrorCode.SNAPSHOT_FOREIGN
        assert manager.sessions() == ()
