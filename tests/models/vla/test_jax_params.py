"""openpi's JAX parameters: a network's weights laid out as JAX has them come back as the same network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from models.vla import checkpoints
from realtime_omni.errors import BackendUnavailable, ConfigError
from realtime_omni.models.common.vla.openpi import Robot
from realtime_omni.models.common.vla.policy import LoadOptions
from realtime_omni.models.pi0 import convert as command
from realtime_omni.models.pi0.jax_params import convert
from realtime_omni.models.pi0.loader import load_lerobot, load_openpi

Array = NDArray[Any]
HEADS, HEAD_DIM, VISION_HEADS = 8, 8, 3


def jax_params(weights: dict[str, torch.Tensor], adaptive: bool) -> dict[str, Array]:
    """The inverse of the conversion, written from openpi's einsum strings: ``BTD,NDH->BTNH`` for q, ``BSD,2KDH->2BSKH`` for
    keys and values, ``BTNH,NHD->BTD`` for the output, ``x @ w`` for everything dense."""
    arrays = {name: value.numpy() for name, value in weights.items()}

    def stack(prefix: str, name: str) -> Array:
        count = sum(key.startswith(prefix) and key.endswith(f".{name}") for key in arrays)
        return np.stack([arrays[f"{prefix}{index}.{name}"] for index in range(count)])

    img, block = "PaliGemma/img/", "PaliGemma/img/Transformer/encoderblock/"
    heads = f"{block}MultiHeadDotProductAttention_0/"
    tree = {
        f"{img}embedding/kernel": np.einsum("oihw->hwio", arrays["vision.patch.weight"]),
        f"{img}embedding/bias": arrays["vision.patch.bias"],
        f"{img}pos_embedding": arrays["vision.position.weight"][None],
        f"{img}Transformer/encoder_norm/scale": arrays["vision.norm.weight"],
        f"{img}Transformer/encoder_norm/bias": arrays["vision.norm.bias"],
        f"{img}head/kernel": arrays["projector.weight"].T,
        f"{img}head/bias": arrays["projector.bias"],
        "PaliGemma/llm/embedder/input_embedding": arrays["words.weight"],
        "PaliGemma/llm/final_norm/scale": np.ones(32, np.float32),
    }
    for ours, theirs in (("attn_norm", "LayerNorm_0"), ("mlp_norm", "LayerNorm_1")):
        tree[f"{block}{theirs}/scale"] = stack("vision.layers.", f"{ours}.weight")
        tree[f"{block}{theirs}/bias"] = stack("vision.layers.", f"{ours}.bias")
    for ours, theirs in (("up", "Dense_0"), ("down", "Dense_1")):
        tree[f"{block}MlpBlock_0/{theirs}/kernel"] = np.einsum("loi->lio", stack("vision.layers.", f"{ours}.weight"))
        tree[f"{block}MlpBlock_0/{theirs}/bias"] = stack("vision.layers.", f"{ours}.bias")
    for ours, theirs in (("q", "query"), ("k", "key"), ("v", "value")):
        weight, bias = stack("vision.layers.", f"{ours}.weight"), stack("vision.layers.", f"{ours}.bias")
        split = weight.reshape(len(weight), VISION_HEADS, -1, weight.shape[2])
        tree[f"{heads}{theirs}/kernel"] = np.einsum("lhdi->lihd", split)
        tree[f"{heads}{theirs}/bias"] = bias.reshape(len(bias), VISION_HEADS, -1)
    out = stack("vision.layers.", "o.weight")
    tree[f"{heads}out/kernel"] = np.einsum("lohd->lhdo", out.reshape(len(out), out.shape[1], VISION_HEADS, -1))
    tree[f"{heads}out/bias"] = stack("vision.layers.", "o.bias")
    for tower, suffix in (("language", ""), ("expert", "_1")):
        tree.update(tower_params(stack, tower, suffix, adaptive and suffix == "_1"))
    tree.update(norm_params(lambda name: arrays[f"norm.{name}"], "PaliGemma/llm/final_norm_1", adaptive))
    for ours, theirs in (
        ("action_in", "action_in_proj"),
        ("action_out", "action_out_proj"),
        ("state_in", "state_proj"),
    ):
        if f"{ours}.weight" in arrays:
            tree[f"{theirs}/kernel"], tree[f"{theirs}/bias"] = arrays[f"{ours}.weight"].T, arrays[f"{ours}.bias"]
    for part in ("in", "out"):
        name = f"time_mlp_{part}" if adaptive else f"action_time_mlp_{part}"
        tree[f"{name}/kernel"], tree[f"{name}/bias"] = arrays[f"time_{part}.weight"].T, arrays[f"time_{part}.bias"]
    return tree


def tower_params(stack: Any, tower: str, suffix: str, adaptive: bool) -> dict[str, Array]:
    layers = "PaliGemma/llm/layers/"

    def heads(name: str) -> Array:
        weight: Array = stack(f"{tower}.", f"{name}.weight")
        return np.einsum("lhdi->lhid", weight.reshape(len(weight), -1, HEAD_DIM, weight.shape[2]))

    out: Array = stack(f"{tower}.", "o.weight")
    dense = {name: np.einsum("loi->lio", stack(f"{tower}.", f"{name}.weight")) for name in ("gate", "up", "down")}
    return {
        f"{layers}attn/q_einsum{suffix}/w": heads("q"),
        f"{layers}attn/kv_einsum{suffix}/w": np.stack((heads("k"), heads("v")), axis=1),
        f"{layers}attn/attn_vec_einsum{suffix}/w": np.einsum(
            "lohd->lhdo", out.reshape(len(out), out.shape[1], HEADS, HEAD_DIM)
        ),
        f"{layers}mlp{suffix}/gating_einsum": np.stack((dense["gate"], dense["up"]), axis=1),
        f"{layers}mlp{suffix}/linear": dense["down"],
        **norm_params(lambda n: stack(f"{tower}.", f"attn_norm.{n}"), f"{layers}pre_attention_norm{suffix}", adaptive),
        **norm_params(lambda n: stack(f"{tower}.", f"mlp_norm.{n}"), f"{layers}pre_ffw_norm{suffix}", adaptive),
    }


def norm_params(read: Any, theirs: str, adaptive: bool) -> dict[str, Array]:
    if not adaptive:
        return {f"{theirs}/scale": read("weight")}
    return {
        f"{theirs}/Dense_0/kernel": read("dense.weight").swapaxes(-1, -2),
        f"{theirs}/Dense_0/bias": read("dense.bias"),
    }


@pytest.fixture(params=["pi0", "pi05"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def weights(family: str) -> dict[str, torch.Tensor]:
    network = load_lerobot(checkpoints.GOLDEN / family, LoadOptions()).network
    return dict(network.state_dict())  # type: ignore[attr-defined]


def test_every_weight_comes_back_at_its_place(family: str, weights: dict[str, torch.Tensor]) -> None:
    back = convert(jax_params(weights, family == "pi05"))
    assert back.keys() == weights.keys()
    assert all(np.array_equal(back[name], weights[name].numpy()) for name in back)


def test_missing_and_unknown_names_are_listed(family: str, weights: dict[str, torch.Tensor]) -> None:
    params = jax_params(weights, family == "pi05")
    del params["PaliGemma/img/head/bias"]
    params["PaliGemma/llm/layers/attn/q_einsum/lora_a"] = np.zeros(1, np.float32)
    with pytest.raises(ConfigError) as refused:
        convert(params)
    assert "missing: PaliGemma/img/head/bias" in refused.value.message
    assert "unknown: PaliGemma/llm/layers/attn/q_einsum/lora_a" in refused.value.message


def test_a_converted_checkpoint_loads(tmp_path: Path, family: str, weights: dict[str, torch.Tensor]) -> None:
    source, target = checkpoints.openpi(family, tmp_path), tmp_path / "converted"
    command.write(jax_params(weights, family == "pi05"), source, target, horizon=6, dtype=torch.float32)
    for name in ("geometry.json", "tokenizer.json"):
        shutil.copy(source / name, target / name)
    policy = load_openpi(target, LoadOptions(), Robot(6, 5))
    assert policy.family == family
    assert json.loads((target / "config.json").read_text()) == {"action_dim": 8, "action_horizon": 6}
    loaded = dict(policy.network.named_parameters())  # type: ignore[attr-defined]
    assert all(torch.equal(loaded[name], weights[name]) for name in loaded)
    assert load_file(target / "model.safetensors").keys() == weights.keys()


def test_nested_maps_are_flattened() -> None:
    flat = command.flatten({"a": {"b": np.ones(2, np.int8)}, "c": 3})
    assert list(flat) == ["a/b", "c"]
    assert flat["a/b"].dtype == np.float32


def test_the_command_refuses_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path), str(tmp_path), "--horizon", "6"]) == 1
    assert "exists already" in capsys.readouterr().err


def test_without_orbax_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "orbax.checkpoint", None)
    with pytest.raises(BackendUnavailable, match="openpi-jax"):
        command.read_params(tmp_path)
