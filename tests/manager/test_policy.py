"""Observations through the session manager: a call that is given up leaves nothing for the next one."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace

import numpy as np
import pytest

from realtime_omni.config import Config
from realtime_omni.errors import ConfigError, SupersededError
from realtime_omni.manager import SessionManager
from realtime_omni.models import catalog
from realtime_omni.models.null.model import NullWorld
from realtime_omni.models.null.policy import NullPolicy
from realtime_omni.session.observation import Observation
from realtime_omni.session.values import Chunk
from realtime_omni.testing.faults import Gate, at

PICTURE = np.zeros((4, 4, 3), np.uint8)


def observation(first: float) -> Observation:
    return Observation(images={"base_0_rgb": PICTURE}, state=np.full(32, first, np.float32))


def first_action(chunk: Chunk) -> float:
    return float(chunk.artifacts["actions"].data[0, 0])


async def test_a_call_that_is_cancelled_between_denoise_steps_commits_nothing() -> None:
    async with SessionManager(NullPolicy()) as manager:
        session = await manager.create_session()
        gate = Gate()
        at(manager, "forward:2", gate)
        call = asyncio.create_task(session.act(observation(1.0)))
        assert await asyncio.to_thread(gate.reached.wait, 10)
        call.cancel()
        await asyncio.wait([call])
        gate.open()
        chunk = await session.act(observation(2.0))
        assert (chunk.chunk_index, first_action(chunk)) == (0, 2.0)
        assert manager.statistics().chunks_aborted == 1


async def test_a_chunk_that_was_committed_for_nobody_is_not_handed_to_the_next_call() -> None:
    """Cancelled at any moment, before, during and after the tick."""
    draw = random.Random(4)
    async with SessionManager(NullPolicy()) as manager:
        session = await manager.create_session()
        for number in range(100):
            call = asyncio.create_task(session.act(observation(-1.0)))
            await asyncio.sleep(draw.random() * 0.001)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            assert first_action(await session.act(observation(number))) == number


async def test_the_newest_of_two_calls_wins() -> None:
    async with SessionManager(NullPolicy()) as manager:
        session = await manager.create_session()
        gate = Gate()
        at(manager, "forward:1", gate)
        running = asyncio.create_task(session.act(observation(1.0)))
        assert await asyncio.to_thread(gate.reached.wait, 10)
        waiting = asyncio.create_task(session.act(observation(2.0)))
        newest = asyncio.create_task(session.act(observation(3.0)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gate.open()
        assert first_action(await running) == 1.0
        with pytest.raises(SupersededError):
            await waiting
        assert first_action(await newest) == 3.0


class Mute(NullWorld):
    """Says that it is a policy."""

    def __init__(self) -> None:
        super().__init__()

        self._spec = replace(self._spec, policy=NullPolicy().spec.policy)

    @classmethod
    def from_config(cls, config: Config) -> Mute:
        return cls()


def test_a_policy_without_its_check_is_refused_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "load_class", lambda name: Mute)
    with pytest.raises(ConfigError, match="lacks check_observation"):
        catalog.build(Config(model="mute:Mute"))
