"""Forks and rewinds among everything else, from several tasks, with cancellations and faults at random.

Not a replay: the engine's thread and the event loop run as they please. Whatever came of it, each session's log must tell the
truth: played in an engine that nobody disturbs, it leads to the very same next chunk. And nothing may be left behind.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from faults.test_interleavings import LIVENESS_S, bits, troubles
from realtime_omni.errors import OmniError
from realtime_omni.manager import Session, SessionManager
from realtime_omni.session.journal import EventLog
from realtime_omni.session.values import EventId, SessionEvent
from realtime_omni.testing.inline import InlineEngine, small_config
from realtime_omni.testing.models import PROMPTS, TinyKVWorld, move

REWIND_BLOCKS = 3
CALLS = {"next": 9, "event": 6, "fork": 3, "rewind": 3, "abort": 1, "reset": 1, "rollback": 3, "close": 1, "replay": 1}


async def step(manager: SessionManager, rng: random.Random) -> None:
    session = manager.get_session(rng.choice(manager.sessions()).session_id)
    match rng.choices(list(CALLS), list(CALLS.values()))[0]:
        case "next":
            await session.next_chunk()
        case "event":
            event_id = EventId(session.view.event_floor + 1)
            await session.accept_event(SessionEvent(event_id, rng.choice(PROMPTS), (move(rng.randrange(5)),)))
        case "fork":
            await session.fork()
        case "rewind":
            await session.rewind(session.chunk_index - rng.randrange(REWIND_BLOCKS + 1))
        case "abort":
            await session.abort()
        case "reset":
            await session.reset(seed=rng.randrange(3))
        case "rollback":
            await session.rollback()
        case "close":
            if len(manager.sessions()) > 1:
                await session.close()
        case "replay":
            async for _ in session.replay(await session.log()):
                pass


async def play(manager: SessionManager, rng: random.Random, steps: int) -> None:
    for _ in range(steps):
        with suppress(OmniError, IndexError):  # refused, aborted, failed; or nobody is there
            async with asyncio.timeout(LIVENESS_S):
                await step(manager, rng)


async def told_truly(session: Session) -> None:
    """The next chunk of a session is that of its log."""
    with suppress(OmniError):
        await session.rollback()
    if session.state == "failed":
        return  # a reset failed, or a tick with its worker state: only reset and close are left
    while session._undelivered:
        await session.next_chunk()
    await session.rewind(session.chunk_index)  # nothing waits any more
    log = EventLog.from_json((await session.log()).to_json())
    twin = InlineEngine(TinyKVWorld())
    twin.create("twin")
    twin.replay("twin", log)
    assert bits(await session.next_chunk()) == bits(twin.next("twin"))


@pytest.mark.parametrize("seed", range(8))
async def test_every_branch_is_what_its_log_says_and_nothing_is_left(seed: int) -> None:
    rng = random.Random(seed)
    policy = "lru" if seed % 2 else "refuse"
    config = small_config(sessions=6, policy=policy, max_pending_events=4, rewind_blocks=REWIND_BLOCKS)
    async with SessionManager(TinyKVWorld(), config) as manager:
        for number in range(2):
            await manager.create_session(seed=number)
        trouble = asyncio.create_task(troubles(manager, rng))
        tasks = [asyncio.create_task(play(manager, rng, 15)) for _ in range(5)]
        for _ in range(10):
            await asyncio.sleep(rng.random() * 0.004)
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
        await asyncio.wait(tasks)
        trouble.cancel()
        await asyncio.wait([trouble])
        for task in tasks:
            if not task.cancelled():
                task.result()
        async with asyncio.timeout(LIVENESS_S):
            for view in manager.sessions():
                session = manager.get_session(view.session_id)
                if session.state in ("active", "failed"):
                    await told_truly(session)
                await session.close()
            while manager.sessions():  # forks of callers that went away are closed by themselves
                await asyncio.sleep(0)
        assert manager._futures == {}
        assert manager.statistics().pages_used == 0
        manager._engine.check()
