"""The bench of several ranks at its smallest size: it measures what it says, and notices another network."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from realtime_omni.bench import lingbot_ranks, world

SMALL = ["--scale", "tiny", "--device", "cpu", "--dtype", "float32", "--blocks", "2", "--metered", "1", "--json"]


def test_ranks_measure_the_world_of_one_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = tmp_path / "first.npy"
    assert lingbot_ranks.main([*SMALL, "--parallel", "sp=1", "--keep", str(first)]) == 0
    capsys.readouterr()
    geometry = ["--model", "lingbot-geometry", "--parallel", "sp=2", "--sessions", "2"]
    assert world.main([*geometry, *SMALL, "--against", str(first), "--tolerance", "1e-4"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["valid"] is True
    assert result["ranks"] == 2
    assert result["exchange_ms"] > 0
    assert 0 < result["dit_ms"]["p50"] <= result["block_ms"]["p50"]
    assert result["resident_ms"]["p50"] > 0
    assert result["difference"] <= 1e-4


def test_another_first_block_makes_a_run_invalid(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = tmp_path / "other.npy"
    np.save(other, np.random.default_rng(0).standard_normal((3, 16, 8, 8)).astype(np.float32))
    assert lingbot_ranks.main([*SMALL, "--parallel", "sp=1", "--against", str(other)]) == 1
    assert "differs from that" in json.loads(capsys.readouterr().out)["wrong"][0]


@pytest.mark.parametrize("text", ["2", "sp=0", "sp=two", "ring=2"])
def test_a_sharing_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lingbot_ranks.main([*SMALL, "--parallel", text])
    assert "write it as" in capsys.readouterr().err
