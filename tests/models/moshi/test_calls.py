"""Tiny Moshis as calls: several at once, each its own, one interrupted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from call.test_call import Line
from models.moshi.tiny import checkpoint, recipe
from realtime_omni.call import Calls
from realtime_omni.duplex.outputs import DuplexOptions, Interrupted, Tick
from realtime_omni.manager import SessionManager
from realtime_omni.models import catalog
from realtime_omni.session.signals import ResponseEnded, ResponseStarted

FRAMES = 8


def _voice(call: int, frame: int) -> NDArray[np.float32]:
    return np.random.default_rng((call, frame)).normal(0, 0.1, 1920).astype(np.float32)


def _heard(line: Line) -> list[NDArray[np.float32]]:
    return [output.audio for output in line.outputs if isinstance(output, Tick)]


@pytest.mark.req("AC-41")
async def test_calls_of_one_batch_hear_and_say_what_they_would_alone(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = recipe(checkpoint(tmp_path / "tiny"))
    model = catalog.build(config)

    async def converse(seeds: list[int]) -> list[Line]:
        async with SessionManager(model, config) as manager, Calls(manager, clocked=False) as calls:
            options = DuplexOptions(pace="free", idle="hold")
            lines = [Line(calls, await calls.open(options, seed=seed)) for seed in seeds]
            for line, seed in zip(
                lines, seeds, strict=True
            ):  # at once: on a slow machine late sound would become silence
                line.call.append(np.concatenate([_voice(seed, frame) for frame in range(FRAMES)]))
            while min(len(_heard(line)) for line in lines) < FRAMES:
                calls.pulse(calls.now_s())
                await asyncio.sleep(0)
                for line in lines:
                    line.read()
            return lines

    together = await converse([1, 2])
    for line, seed in zip(together, (1, 2), strict=True):
        (alone,) = await converse([seed])
        for one, two in zip(_heard(line)[:FRAMES], _heard(alone)[:FRAMES], strict=True):
            assert np.abs(one - two).max() <= 1e-5
    assert not np.array_equal(_heard(together[0])[FRAMES - 1], _heard(together[1])[FRAMES - 1])


@pytest.mark.req("AC-42")
async def test_an_interrupted_call_goes_back_to_what_was_heard_and_on(tmp_path: Path) -> None:
    """The response ends as cancelled; the call goes on in the same session, silent for a pause, then speaks again."""
    torch.set_num_threads(1)
    config = recipe(checkpoint(tmp_path / "tiny"))
    async with SessionManager(catalog.build(config), config) as manager, Calls(manager, clocked=False) as calls:
        line = Line(calls, await calls.open(DuplexOptions(pace="free", idle="hold"), seed=4))
        for frame in range(6):
            await line.frame(audio=_voice(4, frame))
        assert line.text
        line.call.interrupt()
        await line.settle()
        line.read()
        (cut,) = [o for o in line.outputs if isinstance(o, Interrupted)]
        assert cut.ended == (cut.response,)
        told = len(line.outputs)
        again = await line.until(lambda s: isinstance(s, ResponseStarted), audio=_voice(4, 99))
        assert isinstance(again, ResponseStarted)
        assert again.response != cut.response
        quiet = [o for o in line.outputs[told:] if isinstance(o, Tick)][:-1]
        assert len(quiet) >= 8
        assert not any(o.audio.any() or any(isinstance(s, ResponseEnded) for s in o.signals) for o in quiet[:8])
