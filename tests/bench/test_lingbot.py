"""The geometry benchmark at its smallest size: it measures what it says, and says when what it measured is worthless."""

from __future__ import annotations

import json

import pytest
import torch

from realtime_omni.bench import lingbot

SMALL = ["--scale", "tiny", "--device", "cpu", "--dtype", "float32", "--blocks", "2", "--json"]


def test_a_run_is_valid_and_tells_its_conditions(capsys: pytest.CaptureFixture[str]) -> None:
    assert lingbot.main([*SMALL, "--eager-blocks", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["valid"] is True
    assert result["conditions"]["workload"] == "32 x 48, 5 passes, 9 + 9 frames"
    assert 0 < result["of_floor"] < 1
    assert result["difference_to_eager"] == 0.0


def test_the_arithmetic_of_the_full_size_is_the_published_one() -> None:
    scale = lingbot.SCALES["full"]
    work = lingbot.flops(scale.network, scale.settings)
    assert {name: round(value / 1e12) for name, value in work.items()} == {
        "linear": 112,
        "attention": 110,
        "camera": 39,
    }


def test_activations_that_explode_make_a_run_invalid(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lingbot, "CAMERA", 40.0)
    assert lingbot.main(SMALL) == 1
    assert "activations" in json.loads(capsys.readouterr().out)["wrong"][0]


def test_a_network_that_changed_after_the_first_block_makes_a_run_invalid(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_layers(network: lingbot.WanTransformer) -> None:
        with torch.no_grad():
            network.head.weight.mul_(2)

    monkeypatch.setattr(lingbot.WanTransformer, "compile_layers", compile_layers)
    assert lingbot.main([*SMALL, "--compile"]) == 1
    assert "differs from the eager one" in json.loads(capsys.readouterr().out)["wrong"][0]
