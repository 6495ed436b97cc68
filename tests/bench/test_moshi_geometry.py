"""The buffers of the geometry benchmark compute what the reference does; the benchmark measures what it says."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from parity.rebuilt import moshi
from realtime_omni.bench import moshi_geometry
from realtime_omni.bench.moshi_static import Calls
from realtime_omni.models.moshi.config import mimi_config, read_config
from realtime_omni.models.moshi.mimi import Mimi
from realtime_omni.models.moshi.network import MoshiLM
from realtime_omni.models.moshi.sampling import Chance
from realtime_omni.models.moshi.weights import load_lm, load_mimi

GOLDEN = moshi()
GREEDY = Chance(0.0, 0)


def _golden(rows: int) -> Calls:
    torch.set_num_threads(1)
    config = read_config(GOLDEN / "lm-8")
    assert config is not None
    lm = MoshiLM(config)
    load_lm(lm, GOLDEN / "lm-8" / "model.safetensors", dtype=torch.float32, device="cpu")
    mimi = Mimi(mimi_config(json.loads((GOLDEN / "mimi" / "mimi_config.json").read_text())), 4)
    load_mimi(mimi, GOLDEN / "mimi" / "mimi.safetensors", device="cpu")
    return Calls(lm, mimi, rows, 4, GREEDY, GREEDY, masked=True)


def test_rows_that_run_when_they_like_say_the_references_tokens() -> None:
    """One batch of three rows with execution masks, past the window, against kyutai's: every token."""
    trace = load_file(GOLDEN / "lm-8" / "trace.safetensors")
    calls = _golden(3)
    for at in range(len(trace["user"])):
        calls.heard.copy_(trace["user"][at])
        calls.running.copy_(trace["running"][at])
        calls.temporal()
        calls.depth()
        for call in range(3):
            if calls.running[call]:
                expected = [-1 if token == -2 else token for token in trace["frames"][at, call].tolist()]
                assert calls.newest[call].tolist() == expected, f"step {at} of call {call}"


def test_the_codecs_rings_are_the_references_codes_and_sound() -> None:
    """Two rows, the second of which rests every third tick, past the window: codes exact, sound to 1e-5."""
    trace = load_file(GOLDEN / "mimi" / "trace.safetensors")
    calls = _golden(2)
    mimi, clips = calls.mimi, trace["codes"].shape[2]
    noise = np.random.default_rng(5).normal(0, 0.3, (2, clips * 1920)).astype(np.float32)
    sound = torch.from_numpy(noise).view(2, clips, 1920)
    done, spoken = [0, 0], ([], [])
    for tick in range(2 * clips):
        runs = torch.tensor([done[0] < clips, done[1] < clips and tick % 3 != 2])
        at = [min(n, clips - 1) for n in done]
        heard = torch.stack([sound[row, at[row]] for row in range(2)])
        said = torch.stack([trace["said"][row, :, at[row]].long() for row in range(2)])
        codes = calls.sides["ears"].step(mimi.encode, heard, runs, 2)
        out = calls.sides["mouth"].step(mimi.decode, said, runs, 2)
        for row in range(2):
            if runs[row]:
                assert codes[row].tolist() == trace["codes"][row, :, at[row]].tolist()
                spoken[row].append(out[row])
                done[row] += 1
    assert done == [clips, clips]
    for row in range(2):  # every seventh sample is kept
        assert float((torch.cat(spoken[row])[::7] - trace["sound"][row]).abs().max()) <= 1e-5


@pytest.mark.parametrize("depth", ["4", "8"])
def test_a_tiny_run_is_valid_and_tells_its_conditions(capsys: pytest.CaptureFixture[str], depth: str) -> None:
    small = ["--scale", "tiny", "--device", "cpu", "--dtype", "float32", "--calls", "3", "--ticks", "4"]
    assert moshi_geometry.main([*small, "--depth", depth]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["valid"] is True
    assert result["calls"] == 3
    assert result["conditions"]["workload"]["depth"] == int(depth)
    assert set(result["stages_ms"]) == {"listen", "temporal", "depth", "speak"}
    assert result["tick_ms"]["p99"] > 0


def test_numbers_that_are_none_make_a_run_invalid(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moshi_geometry, "WEIGHT_SCALE", float("inf"))
    small = ["--scale", "tiny", "--device", "cpu", "--dtype", "float32", "--calls", "2", "--ticks", "2", "--depth", "4"]
    assert moshi_geometry.main(small) == 1
    assert json.loads(capsys.readouterr().out)["wrong"]
