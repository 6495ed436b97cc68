"""The examples run, and show what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from realtime_omni.testing.null_policy import NullPolicy
from server.robot_server import served

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_a_walk_is_as_many_pictures_as_chunks() -> None:
    walk = example("walk")
    frames = await walk.walk("a snowy valley", 2, seed=7)
    assert frames.shape == (2, 128, 128, 3)
    assert walk.contact_sheet(frames, columns=2).size == (256, 128)


async def test_what_if_branches_share_their_past_and_not_their_future() -> None:
    what_if = example("what_if")
    frames = await what_if.what_if(past=1, future=1, seed=7)
    assert frames.shape == (len(what_if.BRANCHES), 2, 128, 128, 3)
    assert all(np.array_equal(row, frames[0, 0]) for row in frames[:, 0])
    futures = frames[:, 1].astype(int)
    assert all(np.abs(futures[a] - futures[b]).mean() > 10 for a, b in ((0, 1), (0, 2), (1, 2)))
    sheet = np.array(what_if.contact_sheet(frames, past=1))
    row, left = what_if.CAPTION + 128 + what_if.GAP, 128 + what_if.GAP + what_if.FORK
    for number, future in enumerate(frames[:, 1]):
        top = number * row + what_if.CAPTION
        assert np.array_equal(sheet[top : top + 128, left : left + 128], future)
    assert np.array_equal(sheet[row + what_if.CAPTION :][:128, :128], frames[0, 0]), "the past once, in the middle"


async def test_a_robot_executes_what_its_policy_plans() -> None:
    async with served(NullPolicy()) as url:
        executed, held = await example("robot").drive(url, hz=50, steps=40)
    assert executed + held == 40
    assert executed >= 1


async def test_a_voice_that_is_interrupted_remembers_what_was_heard() -> None:
    module = example("interrupt")
    heard_ms, said = await module.interrupt()
    assert 0 < heard_ms < module.BARGE_IN_MS + 2000
    assert said
    assert module.LINE.startswith(said)
    assert said != module.LINE
