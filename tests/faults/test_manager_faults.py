"""SessionManager under attack: whatever happens to an engine, a model or a caller, nobody waits for ever and nothing stays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from realtime_omni.errors import AbortedError, CapacityError, EngineError, ErrorCode, SessionGoneError, TickError
from realtime_omni.manager import Session, SessionManager
from realtime_omni.models.base import Step, StepBatch
from realtime_omni.testing.faults import Gate, at, inject
from realtime_omni.testing.inline import small_config
from realtime_omni.testing.models import TinyKVWorld


async def test_a_session_evicted_before_its_creator_wakes_leaves_no_handle() -> None:
    """Five creates at once on a server with one place: each evicts the one before in the same breath of the engine."""
    async with SessionManager(TinyKVWorld(), small_config(sessions=1, policy="lru")) as manager:
        made = await asyncio.gather(*(manager.create_session(f"s{i}") for i in range(5)))
        assert [view.session_id for view in manager.sessions()] == ["s4"]
        assert [session.state for session in made] == ["closed"] * 4 + ["active"]
        with pytest.raises(SessionGoneError):
            manager.get_session("s0")


@pytest.mark.parametrize(
    "error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit()], ids=lambda e: type(e).__name__
)
async def test_whoever_waits_is_told_when_a_model_raises_what_is_no_exception(error: BaseException) -> None:
    async with SessionManager(TinyKVWorld(), small_config()) as manager:
        session = await manager.create_session("a")
        with inject(manager, "forward:1", error=error), pytest.raises(EngineError):
            async with asyncio.timeout(10):
                await session.next_chunk()
        assert not manager.health().ok
        with pytest.raises(CapacityError) as refused:
            await session.close()
        assert refused.value.code == ErrorCode.SHUTDOWN


async def test_after_a_stop_that_could_not_end_a_stuck_model_nobody_waits() -> None:
    manager = SessionManager(TinyKVWorld(), small_config())
    await manager.start()
    session = await manager.create_session("a")
    gate = Gate()
    with at(manager, "forward:1", gate):
        running = asyncio.create_task(session.next_chunk())
        await asyncio.to_thread(gate.reached.wait)
        await manager.stop(timeout_s=0.05)
        async with asyncio.timeout(10):
            with pytest.raises(EngineError):
                await running
            for call in (session.next_chunk, session.close, session.abort, manager.create_session):
                with pytest.raises(CapacityError) as refused:
                    await call()
                assert refused.value.code == ErrorCode.SHUTDOWN
        gate.open()


class UntidyWorld(TinyKVWorld):
    """A model whose step raises when it is stopped half way."""

    def step(self, batch: StepBatch) -> Step:
        finished = False
        try:
            rows = yield from super().step(batch)
            finished = True
            return rows
        finally:
            if not finished:
                raise RuntimeError("the model's own clean-up failed")


@pytest.mark.parametrize(
    ("stop", "error"),
    [(Session.abort, AbortedError), (Session.reset, AbortedError), (Session.close, SessionGoneError)],
    ids=["abort", "reset", "close"],
)
async def test_a_step_that_cannot_be_stopped_tidily_is_withdrawn_all_the_same(
    stop: Callable[[Session], Awaitable[object]], error: type[Exception]
) -> None:
    async with SessionManager(UntidyWorld(), small_config()) as manager:
        session = await manager.create_session("a")
        gate = Gate()
        with at(manager, "forward:2", gate):
            running = asyncio.create_task(session.next_chunk())
            await asyncio.to_thread(gate.reached.wait)
            stopping = asyncio.ensure_future(stop(session))
            await asyncio.sleep(0)
            gate.open()
            async with asyncio.timeout(10):
                with pytest.raises(error):
                    await running
                await stopping
        if stop is not Session.close:
            assert (await session.next_chunk()).chunk_index == 0
            await session.close()
        manager._engine.check()
        assert manager.statistics().pages_used == 0


async def test_a_cancelled_caller_of_a_step_that_cannot_be_stopped_tidily_blocks_nobody() -> None:
    async with SessionManager(UntidyWorld(), small_config()) as manager:
        session = await manager.create_session("a")
        gate = Gate()
        with at(manager, "forward:2", gate):
            running = asyncio.create_task(session.next_chunk())
            await asyncio.to_thread(gate.reached.wait)
            running.cancel()
            await asyncio.wait([running])
            gate.open()
            async with asyncio.timeout(10):
                assert (await session.next_chunk()).chunk_index == 0


async def test_the_tombstone_of_a_create_that_failed_is_seen_and_can_be_closed() -> None:
    async with SessionManager(TinyKVWorld(prefill=True), small_config()) as manager:
        with inject(manager, "release"), inject(manager, "prefill:1"):
            with pytest.raises(TickError):
                await manager.create_session("a")
            async with asyncio.timeout(10):
                while not manager.sessions():  # the answer comes before the clean-up that fails
                    await asyncio.sleep(0)
        assert [(view.session_id, view.state) for view in manager.sessions()] == [("a", "cleanup_failed")]
        assert manager.statistics().tombstones == 1
        await manager.close_session("a")
        assert manager.sessions() == ()
        await manager.create_session("a")
