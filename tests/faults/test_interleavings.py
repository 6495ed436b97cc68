"""Random interleavings of every call from several tasks on one session, with cancellations and faults at random.

Not a replay: the engine's thread and the event loop run as they please. What is checked holds in every order: chunk indices
contiguous per epoch and none twice, an event applied at most once and never also discarded, every future resolved, no page,
handle or reservation left. And what was not disturbed by a reset repeats bit for bit (the model is exact).
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from contextlib import suppress

import pytest

from realtime_omni.engine.commands import Notice
from realtime_omni.errors import OmniError
from realtime_omni.manager import Session, SessionManager
from realtime_omni.session.values import Chunk, EventId, SessionEvent
from realtime_omni.testing.faults import inject
from realtime_omni.testing.inline import InlineEngine, small_config
from realtime_omni.testing.models import TinyKVWorld, move

POINTS = ("forward:1", "forward:3", "decode", "sync", "commit", "release", "reducer.prepare", "reducer.commit")
LIVENESS_S = 20.0
SEED = 7


class Player:
    """What one session was asked and what it said."""

    def __init__(self, session: Session, rng: random.Random) -> None:
        self.session = session
        self.rng = rng
        self.chunks: dict[int, list[Chunk]] = defaultdict(list)
        self.discarded: list[int] = []
        self.moves: dict[int, int] = {}
        session.subscribe(self.noticed)

    def noticed(self, notice: Notice) -> None:
        if notice.kind == "events_discarded":
            self.discarded.extend(notice.event_ids)

    async def play(self, steps: int) -> None:
        for _ in range(steps):
            with suppress(OmniError):
                async with asyncio.timeout(LIVENESS_S):
                    await self.step()

    async def step(self) -> None:
        session, rng = self.session, self.rng
        match rng.choices(("next", "event", "abort", "reset", "rollback", "detach", "pause"), (9, 6, 2, 1, 3, 1, 2))[0]:
            case "next":
                chunk = await session.next_chunk()
                self.chunks[chunk.epoch].append(chunk)
            case "event":
                event_id = len(self.moves)
                self.moves[event_id] = rng.randrange(5)
                await session.accept_event(SessionEvent(EventId(event_id), controls=(move(self.moves[event_id]),)))
            case "abort":
                await session.abort()
            case "reset":
                await session.reset()
            case "rollback":
                await session.rollback()
            case "detach":
                await session.detach(60)
                await session.attach()
            case _:
                await asyncio.sleep(rng.random() * 0.002)

    def check(self) -> None:
        applied: list[int] = []
        for epoch, chunks in self.chunks.items():
            chunks.sort(key=lambda chunk: chunk.chunk_index)
            assert [chunk.chunk_index for chunk in chunks] == list(range(len(chunks)))
            applied += [event_id for chunk in chunks for event_id in chunk.metadata.applied_event_ids]
            assert [bits(chunk) for chunk in chunks] == self.undisturbed(epoch)
        assert len(applied) == len(set(applied))
        assert not set(applied) & set(self.discarded)
        assert len(self.discarded) == len(set(self.discarded))

    def undisturbed(self, epoch: int) -> list[bytes]:
        """The same events at the same chunks, in an engine that nobody disturbs."""
        engine = InlineEngine(TinyKVWorld())
        engine.create("twin", seed=SEED)
        out = []
        for chunk in self.chunks[epoch]:
            for event_id in chunk.metadata.applied_event_ids:
                engine.accept("twin", event_id, controls=(move(self.moves[event_id]),))
            out.append(bits(engine.next("twin")))
        return out


def bits(chunk: Chunk) -> bytes:
    data: bytes = chunk.artifacts["frames"].data.tobytes()
    return data


async def troubles(manager: SessionManager, rng: random.Random) -> None:
    while True:
        with inject(manager, rng.choice(POINTS), times=rng.choice((1, 2))):
            await asyncio.sleep(rng.random() * 0.004)
        await asyncio.sleep(rng.random() * 0.004)


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_order_the_calls_take_nothing_is_lost_repeated_or_left(seed: int) -> None:
    rng = random.Random(seed)
    policy = "release" if seed % 3 == 0 else "keep"
    async with SessionManager(TinyKVWorld(), small_config(on_failure=policy, max_pending_events=4)) as manager:
        players = [Player(await manager.create_session(seed=SEED), rng) for _ in range(2)]
        trouble = asyncio.create_task(troubles(manager, rng))
        tasks = [asyncio.create_task(player.play(12)) for player in players for _ in range(3)]
        for _ in range(10):
            await asyncio.sleep(rng.random() * 0.004)
            if rng.random() < 0.4:
                rng.choice(tasks).cancel()
        await asyncio.wait(tasks)
        trouble.cancel()
        await asyncio.wait([trouble])
        for task in tasks:
            if not task.cancelled():
                task.result()
        for player in players:
            while True:  # what cancelled calls left behind belongs to the record
                with suppress(OmniError):
                    async with asyncio.timeout(LIVENESS_S):
                        await player.session.rollback()
                try:
                    async with asyncio.timeout(LIVENESS_S):
                        chunk = await player.session.next_chunk()
                except OmniError:
                    break
                player.chunks[chunk.epoch].append(chunk)
                if not player.session._undelivered:
                    break
            player.check()
            async with asyncio.timeout(LIVENESS_S):
                await player.session.close()
        assert manager.sessions() == ()
        assert manager._futures == {}
        assert manager.statistics().pages_used == 0
        manager._engine.check()
        assert manager.health().ok
