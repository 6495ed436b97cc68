"""Checkpoint layouts of the language model: what fits is loaded, what does not is listed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parity.rebuilt import moshi
from realtime_omni.errors import ConfigError
from realtime_omni.models.moshi.config import MOSHI_7B, LMConfig, lm_config, mimi_config, read_config
from realtime_omni.models.moshi.mimi import Mimi
from realtime_omni.models.moshi.network import MoshiLM
from realtime_omni.models.moshi.weights import depth_steps_in, load_lm, load_mimi

GOLDEN = moshi()


def _config(name: str) -> LMConfig:
    config = read_config(GOLDEN / name)
    assert config is not None
    return config


def _load(config: LMConfig, file: Path) -> dict[str, Tensor]:
    with torch.device("meta"):
        network = MoshiLM(config)
    load_lm(network, file, dtype=torch.float32, device="cpu")
    return dict(network.state_dict())


def _joined(stored: dict[str, Tensor], steps: int) -> dict[str, Tensor]:
    """The layout of kyutai's older files: all depth steps of a projection in one tensor."""
    out = {name: tensor for name, tensor in stored.items() if "_projs." not in name}
    for name in stored:
        if "_projs.0." not in name:
            continue
        parts = [stored[name.replace("_projs.0.", f"_projs.{s}.")] for s in range(steps if "depf" in name else 1)]
        joined = name.replace("in_projs.0.weight", "in_proj_weight").replace("out_projs.0.weight", "out_proj.weight")
        out[joined] = torch.cat(parts)
    return out


def test_both_layouts_of_the_projections_are_the_same_network(tmp_path: Path) -> None:
    config, file = _config("lm-8"), GOLDEN / "lm-8" / "model.safetensors"
    joined = tmp_path / "model.safetensors"
    save_file(_joined(load_file(file), config.dep_q), joined)
    one, two = _load(config, file), _load(config, joined)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_attention_weights_of_half_the_depth_steps_serve_for_both_halves(tmp_path: Path) -> None:
    config, file = _config("lm-16"), tmp_path / "model.safetensors"
    joined = _joined(load_file(GOLDEN / "lm-16" / "model.safetensors"), config.dep_q)
    for name in joined:
        if name.startswith("depformer.") and "_proj" in name:
            joined[name] = joined[name][: len(joined[name]) // 2].clone()
    save_file(joined, file)
    for name, tensor in _load(config, file).items():
        if name.startswith("depth.layers") and name.endswith((".qkv", ".out")):
            assert torch.equal(tensor[:8], tensor[8:])


def test_a_file_that_does_not_fit_is_refused_with_every_name(tmp_path: Path) -> None:
    stored, file = load_file(GOLDEN / "lm-8" / "model.safetensors"), tmp_path / "model.safetensors"
    stored["linears.2.weight_scb"] = stored.pop("linears.2.weight")
    stored["out_norm.alpha"] = torch.ones(1, 1, 5)
    save_file(stored, file)
    with torch.device("meta"):
        network = MoshiLM(_config("lm-8"))
    with pytest.raises(ConfigError) as refusal:
        load_lm(network, file, dtype=torch.float32, device="cpu")
    message = str(refusal.value)
    assert "missing: linears.2.weight;" in message
    assert "unexpected: linears.2.weight_scb;" in message
    assert "out_norm.alpha is [1, 1, 5], [1, 1, 32] is needed" in message
    assert all(parameter.is_meta for parameter in network.parameters())


@pytest.mark.parametrize("name", ["text_emb.weight", "depformer.layers.0.self_attn.in_projs.3.weight"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool])
def test_numbers_that_are_no_weights_are_refused_by_name(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    stored, file = load_file(GOLDEN / "lm-8" / "model.safetensors"), tmp_path / "model.safetensors"
    stored[name] = stored[name].to(dtype)
    save_file(stored, file)
    with torch.device("meta"):
        network = MoshiLM(_config("lm-8"))
    with pytest.raises(ConfigError, match=f"{name} is .*quantised weights are not read"):
        load_lm(network, file, dtype=torch.float32, device="cpu")
    assert all(parameter.is_meta for parameter in network.parameters())


def test_a_codec_of_integers_is_refused_by_name(tmp_path: Path) -> None:
    stored, file = load_file(GOLDEN / "mimi" / "mimi.safetensors"), tmp_path / "mimi.safetensors"
    name = next(name for name in stored if name.endswith("embedding_sum"))
    stored[name] = stored[name].to(torch.int8)
    save_file(stored, file)
    mimi = Mimi(mimi_config(json.loads((GOLDEN / "mimi" / "mimi_config.json").read_text())), 4)
    with pytest.raises(ConfigError, match=f"{name} is I8"):
        load_mimi(mimi, file, device="cpu")


def test_a_configuration_of_another_network_is_refused() -> None:
    raw = json.loads((GOLDEN / "lm-8" / "config.json").read_text())
    with pytest.raises(ConfigError, match="gating='gelu', quantize=True"):
        lm_config({**raw, "gating": "gelu", "quantize": True})
    with pytest.raises(ConfigError, match="delays has 3 numbers"):
        lm_config({**raw, "delays": [0, 0, 1]})


def test_sizes_of_the_published_model() -> None:
    """7.69 billion parameters, the published model's; gated layers 11,264 and 2,816 wide (moshi/models/loaders.py)."""
    with torch.device("meta"):
        network = MoshiLM(MOSHI_7B)
    assert (MOSHI_7B.hidden, MOSHI_7B.depth_hidden) == (11_264, 2_816)
    assert 7.6e9 < sum(p.numel() for p in network.parameters()) < 7.75e9
    assert depth_steps_in(GOLDEN / "lm-16" / "model.safetensors") == 16
