"""The geometry benchmark at its smallest size: it measures what it says, and says when what it measured is worthless."""

from __future__ import annotations

import json

import pytest
import torch

from realtime_omni.bench import lingbot, lingbot_geometry

SMALL = ["--scale", "tiny", "--device", "cpu", "--dtype", "float32", "--blocks", "2", "--json"]


def test_a_run_is_valid_and_tells_its_conditions(capsys: pytest.CaptureFixture[str]) -> None:
    assert lingbot.main([*SMALL, "--eager-blocks", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["valid"] is True
    assert result["conditions"]["workload"] == "32 x 48, 5 passes, 9 + 9 frames"
    assert 0 < result["of_floor"] < 1
    assert result["difference_to_eager"] == 0.0


def test_the_arithmetic_of_the_full_size_is_the_published_one() -> None:
    scale = lingbot_geometry.SCALES["full"]
    work = lingbot_geometry.flops(scale.network, scale.settings)
    assert {name: round(value / 1e12) for name, value in work.items()} == {
        "linear": 112,
        "attention": 110,
        "camera": 39,
    }


def test_activations_that_explode_make_a_run_invalid(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lingbot_geometry, "CAMERA", 40.0)
    assert lingbot.main(SMALL) == 1
    assert "activations" in json.loads(capsys.readouterr().out)["wrong"][0]


def test_a_network_that_changed_after_the_first_block_makes_a_run_invalid(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_layers(network: lingbot.WanTransformer, *, fp8_attention: bool) -> None:
        with torch.no_grad():
            network.head.weight.mul_(2)

    monkeypatch.setattr(lingbot.WanTransformer, "compile_layers", compile_layers)
    assert lingbot.main([*SMALL, "--compile"]) == 1
    assert "differs from the eager one" in json.loads(capsys.readouterr().out)["wrong"][0]


def test_eight_bits_tell_their_error_and_too_much_of_it_makes_a_run_invalid(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lingbot.main([*SMALL, "--fp8", "linear_attention"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert 0.001 < result["error"] < 0.2
    assert lingbot.main([*SMALL, "--fp8", "linear", "--fp8-tolerance", "0.001"]) == 1
    assert "in the mean square" in json.loads(capsys.readouterr().out)["wrong"][0]


def test_two_worlds_with_pictures_share_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert lingbot.main([*SMALL, "--pixels", "tiny", "--sessions", "2", "--no-clean-pass"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["conditions"]["population"] >= 2 * 2
    assert min(result["block_ms"]["p50"], result["solo_ms"], result["latency_ms"]) > 0


def test_a_session_is_warm_when_its_start_is_not_encoded_any_more() -> None:
    pytest.importorskip("diffusers")
    scale = lingbot_geometry.SCALES["tiny"]
    network = lingbot_geometry.random_network(scale.network, dtype=torch.float32, device="cpu")
    model = lingbot_geometry.random_model(network, scale.settings, device="cpu", pixels="wan", dtype=torch.float32)
    engine = lingbot.InlineEngine(model, lingbot_geometry.config_for("cpu", "float32", 1, keep_gathered=True))
    lingbot.start(engine, "a")
    assert lingbot.warm_up(engine, "a", scale.settings) == 11 > lingbot.warm_up_blocks(scale.settings)
