"""``bench sessions`` measures what it says, and refuses to call wrong results valid."""

from __future__ import annotations

import json

import pytest

from realtime_omni.bench import sessions
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.models.null.model import NullWorld


def measured(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, object]]:
    status = sessions.main(["--model", "null", "--rounds", "3", "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


def test_every_time_and_size_is_there_with_its_conditions(capsys: pytest.CaptureFixture[str]) -> None:
    status, got = measured(capsys, "--set", "kv.rewind_blocks=2")
    assert (status, got["valid"], got["wrong"]) == (0, True, [])
    for name in sessions.TIMES:
        times = got[name]
        assert isinstance(times, dict)
        assert 0 < times["p50"] <= times["p99"]
    sizes = got["bytes"]
    assert isinstance(sizes, dict)
    page, frames = 2 * 4, 6 + 3  # one layer of one float32 key and value; the window, and one block more of rewind
    assert (sizes["session_kv"], sizes["fork_kv"]) == (page * frames, 0)
    assert sizes["snapshot"] > sizes["session_kv"]
    conditions = got["conditions"]
    assert isinstance(conditions, dict)
    assert {"commit", "hardware", "software", "config", "workload"} <= conditions.keys()


def test_a_policy_is_measured_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert sessions.main(["--model", "null-policy", "--rounds", "2", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["valid"], got["bytes"]["fork_kv"]) == (True, 0)


def test_a_model_that_is_not_repeatable_is_not_valid(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = NullWorld._output, iter(range(1000))

    def restless(self: NullWorld, row: object) -> object:
        output = honest(self, row)  # type: ignore[arg-type]
        output.artifacts[0].data[...] = next(calls) % 251
        return output

    monkeypatch.setattr(NullWorld, "_output", restless)
    status, got = measured(capsys)
    assert (status, got["valid"]) == (1, False)
    assert len(got["wrong"]) == 3  # type: ignore[arg-type]


def test_a_window_is_full_after_all_of_its_blocks_however_few_of_their_frames_stay() -> None:
    thin = KVSpec(1, 1, 1, 1, 3, 75, dense_frames=9, rewind_blocks=2)
    assert sessions._blocks(thin) == 75 // 3 + 1 + 1
