"""Many calls come and go, in every way in which a call can go, and nothing stays. Ten thousand of them with ``--slow``."""

from __future__ import annotations

import asyncio
import gc
import random

import numpy as np
import pytest

from realtime_omni.call import Call, Calls
from realtime_omni.duplex.outputs import DuplexOptions
from realtime_omni.errors import CapacityError, OmniError
from realtime_omni.manager import SessionManager
from realtime_omni.models.puppet.model import Puppet, PuppetOptions
from realtime_omni.session.frame import Say
from realtime_omni.testing.inline import small_config

AT_ONCE = 40
LOUD = np.full(640, 0.3, np.float32)


async def one(calls: Calls, number: int, chance: random.Random) -> None:
    """A call, from its beginning to one of its ends: closed, detached and forgotten, or cut off with its task."""
    try:
        call = await calls.open(DuplexOptions(pace="free", overlap=chance.choice(["model", "barge_in_on_speech"])))
    except CapacityError:
        return
    call.direct(Say(f"r{number}", "one two three four"))
    for _ in range(chance.randrange(6)):
        call.append(LOUD if chance.random() < 0.3 else np.zeros(640, np.float32))
        calls.pulse(calls.now_s())
        if chance.random() < 0.2:
            call.interrupt()
        await asyncio.sleep(0)
    await _leave(call, chance)


async def _leave(call: Call, chance: random.Random) -> None:
    way = chance.randrange(3)
    if way == 0:
        await call.close()
    elif way == 1:
        await call.detach(0.0)
    else:
        asyncio.get_running_loop().create_task(call.close())
        raise asyncio.CancelledError


@pytest.mark.parametrize("sessions", [200, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_calls_come_and_go_and_nothing_stays(sessions: int) -> None:
    chance = random.Random(7)
    puppet = Puppet(PuppetOptions(input_rate_hz=8000, output_rate_hz=8000))
    config = small_config(sessions=AT_ONCE, max_batch=AT_ONCE, rewind_blocks=25)
    async with SessionManager(puppet, config) as manager, Calls(manager, clocked=False) as calls:
        for first in range(0, sessions, AT_ONCE):
            tasks = [asyncio.create_task(one(calls, n, chance)) for n in range(first, first + AT_ONCE)]
            for task in chance.sample(tasks, 4):
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert not [r for r in results if isinstance(r, Exception) and not isinstance(r, OmniError)]
            async with asyncio.timeout(30):
                while manager._futures or manager.statistics().sessions:
                    await asyncio.sleep(0)
        assert len(calls) == 0
        assert not any(calls._load)
        memory = manager.statistics().memory
        assert (memory.states, memory.kv_used) == (0, 0)
        assert manager.statistics().tombstones == 0
        gc.collect()
        assert sum(type(o) is Call for o in gc.get_objects()) <= AT_ONCE, "calls that have ended are still held"
