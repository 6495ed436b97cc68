"""Candidates of a finished training: its stages, the moments of stage B, means of the last ones and blends."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from recipes.tiny_world.candidates import goodness  # noqa: E402
from recipes.tiny_world.choose import candidates  # noqa: E402


def test_means_are_of_the_last_moments_in_the_order_of_their_seconds(tmp_path: Path):
    moments = {"model_a": 100.0, "model_b_62s": 1.0, "model_b_120s": 2.0, "model_b_1000s": 4.0, "model_b": 8.0}
    for name, value in moments.items():
        save_file({"x": torch.full((2,), value).half()}, str(tmp_path / f"{name}.safetensors"))
    found = {name: weights["x"][0].item() for name, weights in candidates(tmp_path, torch.device("cpu")).items()}
    assert found.pop("mean_2") == 6
    assert found.pop("mean_3") == pytest.approx((2 + 4 + 8) / 3)
    assert found.pop("blend_0.5") == 54
    assert found.pop("blend_0.75") == 31
    assert found == moments


def test_of_a_training_that_was_cut_short_there_is_what_there_is(tmp_path: Path):
    save_file({"x": torch.ones(2)}, str(tmp_path / "model_b_120s.safetensors"))
    assert set(candidates(tmp_path, torch.device("cpu"))) == {"model_b_120s"}


def test_a_view_that_does_not_come_back_costs_what_it_lacks():
    scores = {"psnr_db": dict.fromkeys(("6", "12", "24"), 30.0), "sharpness_ratio": dict.fromkeys(("12", "48"), 1.0)}
    whole = goodness(scores | {"turn_full_psnr_db": 25.0})
    assert whole == goodness(scores)
    assert goodness(scores | {"turn_full_psnr_db": 17.0}) == pytest.approx(whole - 3)
