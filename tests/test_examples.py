"""The examples run, and show what they say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from models.lingbot.tiny import tiny_lingbot
from realtime_omni import SessionManager
from realtime_omni.testing.inline import small_config
from realtime_omni.testing.null_policy import NullPolicy
from server.robot_server import served

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
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


WALK = """
{"event_id": 0, "prompt": "a street in the rain", "frames": [["w"], ["w"], ["w", "l"]]}
{"event_id": 1, "frames": [["w"], [], []]}

{"event_id": 7, "prompt": "the sun comes out"}
"""


async def test_a_file_of_events_leaves_latents_and_metadata_of_every_chunk(tmp_path: Path) -> None:
    module = example("lingbot_events")
    (tmp_path / "walk.jsonl").write_text(WALK)
    events = module.read_events(tmp_path / "walk.jsonl", 3)
    (tmp_path / "out").mkdir()
    manager = SessionManager(tiny_lingbot(), small_config(dtype="float32"))
    summary = await module.run(manager, events, tmp_path / "out", seed=1)
    assert (summary["chunks"], summary["frames"], summary["finite"]) == (3, 33, True)
    assert json.loads((tmp_path / "out/summary.json").read_text()) == summary
    rows = [json.loads((tmp_path / f"out/chunk-{n:04}.json").read_text()) for n in range(3)]
    assert [row["applied_event_ids"] for row in rows] == [[0], [1], [7]]
    assert [row["prompt"] for row in rows] == ["a street in the rain"] * 2 + ["the sun comes out"]
    assert [row["chunk_index"] for row in rows] == [0, 1, 2]
    for n, row in enumerate(rows):
        latents = load_file(tmp_path / f"out/chunk-{n:04}.safetensors")["latents"]
        assert (list(latents.shape), str(latents.dtype)) == (row["shape"], row["dtype"])
    assert len(list((tmp_path / "out").iterdir())) == 7


BAD_EVENTS = {
    '{"event_id": 0}': "neither prompt nor frames",
    '{"event_id": -1, "prompt": "a"}': ">= 0",
    '{"event_id": 0, "prompt": "  "}': "regex",
    '{"event_id": 0, "frames": [["w"]]}': "3 lists of keys, not 1",
    '{"event_id": 0, "frames": [["w"], [], "s"]}': "got `str`",
    '{"event_id": 0, "prompt": "a", "camera": 1}': "camera",
    "not json": "JSON",
    '{"event_id": 0, "prompt": "a"}\n{"event_id": 0, "prompt": "b"}': ":2: event_id 0 does not rise",
    "\n": "no event in it",
}


@pytest.mark.parametrize("text", BAD_EVENTS)
def test_a_file_of_events_is_refused_by_its_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(SystemExit, match=BAD_EVENTS[text]):
        example("lingbot_events").read_events(tmp_path / "bad.jsonl", 3)


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("robot", ["--hz", "0"]),
        ("robot", ["--hz", "nan"]),
        ("robot", ["--steps", "-1"]),
        ("walk", ["--chunks", "0"]),
        ("walk", ["--seed", "-1"]),
        ("walk", ["--out", "walk.mov"]),
        ("what_if", ["--past", "0"]),
        ("what_if", ["--out", "no-such-folder/what-if.png"]),
        ("lingbot_events", ["no-such-file.jsonl"]),
        ("lingbot_events", ["no-such-file.jsonl", "--set", "model"]),
    ],
)
def test_what_an_example_cannot_do_is_refused_in_a_line(
    name: str, argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *argv])
    with pytest.raises(SystemExit) as ended:
        example(name).main()
    assert ended.value.code == 2
    assert f"{name}: error: " in capsys.readouterr().err
