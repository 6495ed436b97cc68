"""The in-process API over a real engine thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from realtime_omni.clock import ManualClock
from realtime_omni.config import Config
from realtime_omni.errors import (
    AbortedError,
    CapacityError,
    CleanupError,
    ConfigError,
    EngineError,
    EventConflictError,
    OmniError,
    SessionGoneError,
    StateError,
    TickError,
)
from realtime_omni.ids import CountingMint
from realtime_omni.manager import STUCK_AFTER_S, Session, SessionManager, SessionNotice
from realtime_omni.session.values import Chunk, EventId, SessionEvent
from realtime_omni.testing.faults import Gate, at, inject
from realtime_omni.testing.inline import small_config
from realtime_omni.testing.models import TinyKVWorld, move


@asynccontextmanager
async def running(model: TinyKVWorld | None = None, **how: Any) -> AsyncIterator[SessionManager]:
    parts = {k: how.pop(k) for k in ("clock", "mint") if k in how}
    world = model if model is not None else TinyKVWorld()
    async with SessionManager(world, small_config(**how), **parts) as manager:
        yield manager


def event(event_id: int, prompt: str = "blue") -> SessionEvent:
    return SessionEvent(EventId(event_id), prompt=prompt)


async def at_gate(manager: SessionManager, point: str, *calls: Any) -> list[Any]:
    """Run calls one after another while the engine stands at ``point``; then let it go and gather their outcomes."""
    gate = Gate()
    with at(manager, point, gate):
        first = asyncio.create_task(calls[0])
        await asyncio.to_thread(gate.reached.wait)
        rest = []
        for call in calls[1:]:
            rest.append(asyncio.create_task(call))
            await asyncio.sleep(0)
        gate.open()
        return await asyncio.gather(first, *rest, return_exceptions=True)


async def test_a_world_from_the_first_call_to_the_last() -> None:
    async with running(mint=CountingMint()) as manager:
        session = await manager.create_session(prompt="green", seed=7)
        assert (session.id, session.prompt, session.seed, session.state) == ("session-0", "green", 7, "active")
        receipt = await session.accept_event(SessionEvent(EventId(0), controls=(move(1),)))
        assert (receipt.status, receipt.pending_event_count, session.pending_event_count) == ("accepted", 1, 1)
        chunk = await session.next_chunk()
        assert (chunk.metadata.applied_event_ids, session.chunk_index, session.pending_event_count) == ((0,), 1, 0)
        assert (chunk.first_frame, chunk.frames, chunk.epoch, chunk.prompt) == (0, 2, 0, "green")
        assert (await session.next_chunk()).first_frame == 2
        await session.reset(prompt="blue", seed=8)
        assert (session.epoch, session.chunk_index, session.prompt, session.seed) == (1, 0, "blue", 8)
        await session.close()
        assert session.state == "closed"
        assert manager.sessions() == ()


async def test_the_null_model_and_a_recipe_by_name() -> None:
    async with SessionManager.from_recipe("null", ("kv.requested_sessions=2", "session.max_sessions=2")) as manager:
        assert manager.describe().name == "null"
        assert manager.max_sessions == 2
        session = await manager.create_session(prompt="at dusk")
        assert (await session.next_chunk()).artifacts["frames"].data.shape == (3, 3, 128, 128)
        with pytest.raises(KeyError):
            manager.start_image("nothing")


@pytest.mark.req("AC-04")
async def test_concurrent_calls_of_next_chunk_never_overlap_and_get_successive_chunks() -> None:
    busy: list[str] = []

    def trace(what: str, sessions: tuple[str, ...]) -> None:
        if what == "forward:1":
            busy.extend(sessions)

    async with running(TinyKVWorld(trace=trace)) as manager:
        session = await manager.create_session("a")
        chunks = await asyncio.gather(*(session.next_chunk() for _ in range(5)))
        assert [c.chunk_index for c in chunks] == [0, 1, 2, 3, 4]
        assert busy == ["a"] * 5


async def test_a_chunk_whose_data_are_late_is_handed_out_when_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is cancelled while it waits leaves the chunk for the next one."""
    async with running() as manager:
        session = await manager.create_session("a")
        plain, copied, asked = session.committed_chunk, threading.Event(), threading.Event()

        def ready() -> None:
            asked.set()
            assert copied.wait(10)

        async def late_chunk(outputs: Sequence[str] | None = None) -> Chunk:
            chunk = await plain(outputs)
            late = {name: replace(artifact, ready=ready) for name, artifact in chunk.artifacts.items()}
            return replace(chunk, artifacts=late)

        monkeypatch.setattr(session, "committed_chunk", late_chunk)
        given_up = asyncio.create_task(session.next_chunk())
        await asyncio.to_thread(asked.wait)
        assert not given_up.done()
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        copied.set()
        assert [(await session.next_chunk()).chunk_index for _ in range(2)] == [0, 1]


@pytest.mark.req("AC-03")
async def test_an_event_accepted_while_a_tick_runs_is_in_the_next_one() -> None:
    async with running() as manager:
        session = await manager.create_session("a")
        chunk, receipt = await at_gate(manager, "forward:2", session.next_chunk(), session.accept_event(event(0)))
        assert receipt.status == "accepted"
        assert chunk.metadata.applied_event_ids == ()
        assert (await session.next_chunk()).metadata.applied_event_ids == (0,)


async def test_posted_events_are_answered_in_order_and_before_the_chunk_that_applies_them() -> None:
    async with running() as manager:
        session = await manager.create_session()
        order: list[str] = []
        posted = [session.post_event(event(0)), session.post_event(event(0, "green")), session.post_event(event(1))]
        for number, answer in enumerate(posted):
            answer.add_done_callback(lambda _, number=number: order.append(f"answer {number}"))
        chunk = await session.next_chunk()
        order.append("chunk")
        assert order == ["answer 0", "answer 1", "answer 2", "chunk"]
        assert chunk.metadata.applied_event_ids == (0, 1)
        assert isinstance(posted[1].exception(), EventConflictError)


async def test_a_block_takes_the_event_before_it_along_and_an_event_alone_is_heard_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as manager:
        session = await manager.create_session()
        wakes: list[str] = []
        for name in ("put", "nudge"):
            called = getattr(manager._inbox, name)

            def noted(*args: Any, called: Any = called, name: str = name, **how: Any) -> None:
                wakes.append("quiet" if how.get("quiet") else name)
                called(*args, **how)

            monkeypatch.setattr(manager._inbox, name, noted)
        receipt = session.post_event(event(0))
        chunk = await session.next_chunk()
        assert chunk.metadata.applied_event_ids == (0,)
        assert receipt.done()
        assert wakes == ["quiet", "put"]
        assert (await session.post_event(event(1))).status == "accepted"


async def test_abort_rolls_the_running_chunk_back_and_names_it() -> None:
    async with running() as manager:
        session = await manager.create_session("a")
        assert await session.abort() is None
        await session.next_chunk()
        failed, index = await at_gate(manager, "forward:2", session.next_chunk(), session.abort())
        assert isinstance(failed, AbortedError)
        assert index == 1
        assert (session.state, session.chunk_index) == ("active", 1)
        assert (await session.next_chunk()).chunk_index == 1


@pytest.mark.req("AC-13")
async def test_a_failed_cleanup_is_told_blocks_the_id_and_a_later_close_ends_it() -> None:
    async with running() as manager:
        session, other = await manager.create_session("a"), await manager.create_session("b")
        notices: list[SessionNotice] = []
        session.subscribe(notices.append)
        with inject(manager, "release", "a"):
            with pytest.raises(CleanupError):
                await session.close()
            assert session.state == "cleanup_failed"
            assert manager.statistics().tombstones == 1
            for call in (session.next_chunk, session.reset, session.rollback):
                with pytest.raises(StateError):
                    await call()
            with pytest.raises(StateError):
                await manager.create_session("a")
            assert (await other.next_chunk()).chunk_index == 0
        assert manager.get_session("a") is session
        await session.close()
        assert [n.kind for n in notices] == ["cleanup_failed", "closed"]
        await manager.create_session("a")
        assert manager.statistics().cleanup_failures == 1


@pytest.mark.req("AC-15")
@pytest.mark.parametrize("fails", [False, True])
async def test_overlapping_closes_clean_up_once_and_agree_on_the_outcome(fails: bool) -> None:
    async with running() as manager:
        session = await manager.create_session("a")
        attempts: list[int] = []

        def release() -> None:
            attempts.append(1)
            if fails:
                raise OSError("busy")

        with at(manager, "release", release, times=None):
            calls = [session.close(), session.disconnect(), manager.close_session("a"), manager.disconnect("a")]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(o) for o in outcomes] == [CleanupError if fails else type(None)] * 4
        assert len(attempts) == 1
        await session.close()
        await session.close()  # and again, when there is nothing left to close


async def test_close_during_a_tick_does_not_wait_for_it() -> None:
    async with running() as manager:
        session = await manager.create_session("a")
        waiting = session.next_chunk()
        running_tick, closed, behind = await at_gate(
            manager, "forward:1", session.next_chunk(), session.close(), waiting
        )
        assert isinstance(running_tick, SessionGoneError)
        assert closed is None
        assert isinstance(behind, SessionGoneError)
        assert manager.statistics().pages_used == 0


async def test_an_evicted_owner_is_told_with_the_reason_and_then_gone() -> None:
    async with running(sessions=1, policy="lru") as manager:
        first = await manager.create_session("a")
        notices: list[SessionNotice] = []
        first.subscribe(notices.append)
        await manager.create_session("b")
        assert [(n.kind, n.reason) for n in notices] == [("evicted", "evicted")]
        assert first.state == "closed"
        with pytest.raises(SessionGoneError):
            await first.next_chunk()
        with pytest.raises(SessionGoneError) as gone:
            manager.get_session("a")
        assert gone.value.code == "session_gone"
        assert manager.statistics().sessions_evicted == 1


async def test_a_handle_of_an_earlier_life_never_touches_the_later_one() -> None:
    async with running() as manager:
        old = await manager.create_session("a")
        await old.close()
        new = await manager.create_session("a")
        assert manager.get_session("a") is new
        for call in (old.next_chunk, old.reset, old.abort, old.attach, lambda: old.accept_event(event(0))):
            with pytest.raises(SessionGoneError):
                await call()
        await old.close()
        assert (await new.next_chunk()).chunk_index == 0
        assert old.view.generation < new.view.generation


async def test_an_unknown_id_is_not_found_and_never_created() -> None:
    async with running() as manager:
        with pytest.raises(SessionGoneError) as unknown:
            await manager.close_session("a")
        assert unknown.value.code == "session_not_found"
        assert manager.statistics().sessions_created == 0


async def test_rollback_after_a_kept_failure_runs_the_same_chunk() -> None:
    async with running() as manager:
        session = await manager.create_session("a")
        notices: list[SessionNotice] = []
        unsubscribe = session.subscribe(notices.append)
        session.subscribe(lambda notice: 1 / 0)  # a bad subscriber disturbs nobody
        with inject(manager, "decode"), pytest.raises(TickError):
            await session.next_chunk()
        assert (session.state, session.view.can_rollback) == ("failed", True)
        await session.rollback()
        unsubscribe()
        unsubscribe()
        assert (await session.next_chunk()).chunk_index == 0
        assert [(n.kind, n.code) for n in notices] == [("failed", "tick_failed")]


async def test_leases_by_the_managers_clock() -> None:
    clock = ManualClock()
    async with running(clock=clock) as manager:
        session, other = await manager.create_session("a"), await manager.create_session("b")
        await session.detach(10)
        assert not session.view.attached
        clock.advance(9)
        await session.attach()
        assert session.view.attached
        await session.detach(10)
        clock.advance(10)
        await other.next_chunk()
        with pytest.raises(SessionGoneError):
            await session.attach()
        await other.detach(0)
        assert manager.sessions() == ()


async def test_stop_answers_everybody_and_ends_the_thread() -> None:
    manager = SessionManager(TinyKVWorld(), small_config())
    await manager.start()
    session = await manager.create_session("a")
    gate = Gate()
    with at(manager, "forward:1", gate):
        chunks = [asyncio.create_task(session.next_chunk()) for _ in range(3)]
        await asyncio.to_thread(gate.reached.wait)
        stopping = asyncio.create_task(manager.stop())
        await asyncio.to_thread(manager._thread._stopping.wait)
        gate.open()
        await stopping
        outcomes = await asyncio.gather(*chunks, return_exceptions=True)
    assert all(isinstance(o, OmniError) or o.chunk_index == 0 for o in outcomes)
    assert isinstance(outcomes[-1], OmniError)
    assert session.state == "closed"
    assert not manager._thread._thread.is_alive()
    assert manager._futures == {}
    with pytest.raises(OmniError) as refused:
        await session.next_chunk()
    assert refused.value.code == "shutdown"
    assert not manager.health().ok


async def test_stop_is_orderly_although_a_session_can_never_be_cleaned_up() -> None:
    closed: list[Any] = []

    class Model(TinyKVWorld):
        def close(self, state: Any) -> None:
            closed.append(state)

    async with SessionManager(Model(), small_config()) as manager:
        for name in "abc":
            await manager.create_session(name)
        inject(manager, "release", "a", times=None)
    assert len(closed) == 2  # b and c; and no exception has escaped from the engine's thread
    assert manager._thread.pulse().fatal is None


async def test_a_model_that_cannot_be_built_raises_at_start() -> None:
    with pytest.raises(ConfigError):
        await SessionManager("realtime_omni.errors:Missing").start()
    with pytest.raises(EngineError):
        SessionManager(TinyKVWorld()).statistics()
    with pytest.raises(EngineError):
        await SessionManager(TinyKVWorld()).create_session()


async def test_an_internal_error_stops_the_engine_and_tells_everybody_who_waits() -> None:
    async with running() as manager:
        session, other = await manager.create_session("a"), await manager.create_session("b")
        assert manager.health().ok
        gate = Gate()
        with at(manager, "forward:1", gate):
            tasks = [asyncio.create_task(s.next_chunk()) for s in (session, other, session)]
            await asyncio.to_thread(gate.reached.wait)

            def broken() -> tuple[int, int]:
                raise AssertionError("a bug of ours")

            manager._engine.consumer.pages = broken  # type: ignore[method-assign]
            gate.open()
            async with asyncio.timeout(10):
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(o) for o in outcomes] == [EngineError] * 3
        health = manager.health()
        assert not health.ok
        assert "bug of ours" not in health.reason
        with pytest.raises(CapacityError) as refused:
            await session.next_chunk()
        assert refused.value.code == "shutdown"


async def test_health_is_progress() -> None:
    clock = ManualClock()
    async with running(clock=clock) as manager:
        session = await manager.create_session("a")
        gate = Gate()
        with at(manager, "forward:2", gate):
            task = asyncio.create_task(session.next_chunk())
            await asyncio.to_thread(gate.reached.wait)
            clock.advance(STUCK_AFTER_S + 1)
            health = manager.health()
            gate.open()
            await task
        assert not health.ok
        assert "no progress" in health.reason


async def test_health_notices_pages_that_belong_to_nobody() -> None:
    async with running() as manager:
        session = await manager.create_session("a")
        await session.next_chunk()
        book = manager._engine.consumer.book  # type: ignore[attr-defined]
        leaked = book.pool.reserve(1)
        assert manager.health().ok  # somebody may own it
        await session.close()
        assert not manager.health().ok
        book.pool.rollback(leaked)
        assert manager.health().ok


async def test_statistics_count_what_happened() -> None:
    async with running() as manager:
        session = await manager.create_session("a")
        await session.next_chunk()
        with inject(manager, "sync"), pytest.raises(TickError):
            await session.next_chunk()
        await session.rollback()
        await at_gate(manager, "forward:1", session.next_chunk(), session.abort())
        s = manager.statistics()
        assert (s.chunks_committed, s.chunks_failed, s.chunks_aborted) == (1, 1, 1)
        assert (s.sessions, s.sessions_created, s.tombstones, s.inbox_depth, s.outbox_depth) == (1, 1, 0, 0, 0)
        total = 4 * (2 + 4) + 4 * 2 + 1  # sessions (sink + window), blocks in flight, one of slack
        page_bytes = 2 * 2 * 2 * 4 * 8  # keys and values, layers, tokens, width, float64
        assert (s.pages_used, s.pages_total, s.mean_batch) == (2, total, 1.0)
        assert (s.memory.kv_used, s.memory.kv_pool) == (2 * page_bytes, (total + 1) * page_bytes)


async def test_statistics_and_health_walk_no_table_that_the_engine_changes_meanwhile() -> None:
    async with running() as manager:
        await (await manager.create_session("a")).next_chunk()

        def walk() -> None:
            raise RuntimeError("dictionary changed size during iteration")

        manager._engine.consumer.book.pool.statistics = walk  # type: ignore[attr-defined]
        assert manager.statistics().pages_used == 2
        assert manager.health().ok


async def test_sessions_share_batches() -> None:
    async with running() as manager:
        sessions: list[Session] = [await manager.create_session(n, seed=i) for i, n in enumerate("abc")]
        gate = Gate()
        with at(manager, "forward:1", gate):
            first = asyncio.create_task(sessions[0].next_chunk())
            await asyncio.to_thread(gate.reached.wait)
            rest = [asyncio.create_task(s.next_chunk()) for s in sessions]
            await asyncio.sleep(0)
            gate.open()
            await first
            chunks = await asyncio.gather(*rest)
        assert [c.timings.batch_size for c in chunks] == [3, 3, 3]


async def test_a_full_inbox_refuses_instead_of_waiting() -> None:
    import msgspec

    config: Config = small_config()
    config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, inbox=2))
    async with SessionManager(TinyKVWorld(), config) as manager:
        session = await manager.create_session("a")
        outcomes = await at_gate(manager, "forward:1", *(session.next_chunk() for _ in range(4)))
        assert isinstance(outcomes[-1], CapacityError)
        assert [c.chunk_index for c in outcomes[:3]] == [0, 1, 2]
        assert manager.statistics().inbox_refused == 1
