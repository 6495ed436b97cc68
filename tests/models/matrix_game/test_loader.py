"""A checkpoint in the layout of the published conversions: dimensions off the tensors, refusals that name them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parity.rebuilt import worlds
from realtime_omni.config import load
from realtime_omni.errors import ConfigError
from realtime_omni.models.common.wan.weights import load_transformer
from realtime_omni.models.matrix_game.loader import NAMES, dimensions
from realtime_omni.models.matrix_game.loader import load as load_model
from realtime_omni.models.matrix_game.network import MatrixGameConfig, MatrixGameTransformer

FILE = "transformer/model.safetensors"
HEADS = "options.head_dim=12"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shutil.copytree(worlds() / "matrix-game", tmp_path / "transformer")
    return tmp_path


def load_network(folder: Path) -> None:
    with torch.device("meta"):
        network = MatrixGameTransformer(dimensions(folder, head_dim=12))
    load_transformer(network, folder, dtype=torch.float32, device="cpu", names=NAMES)


def test_dimensions_are_read_off_the_tensors(checkpoint: Path) -> None:
    (checkpoint / "transformer/config.json").write_text(json.dumps({"attention_head_dim": 12}))
    assert dimensions(checkpoint / "transformer") == MatrixGameConfig(
        layers=2,
        heads=2,
        head_dim=12,
        mlp_width=40,
        in_channels=12,
        out_channels=4,
        frequencies=32,
        context_width=20,
        action_layers=1,
        action_heads=2,
        action_head_dim=64,
        key_width=8,
    )


def test_the_published_dimensions_are_a_network_of_1_8_billion_parameters() -> None:
    with torch.device("meta"):
        network = MatrixGameTransformer(MatrixGameConfig(action_layers=30))
    foundation = sum(parameter.numel() for parameter in network.parameters())
    assert 1.75e9 < foundation < 1.95e9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"blocks.0.action_model.t_qkv.weight": None}, r"missing: layers\.0\.action\.mouse_qkv\.weight"),
        ({"blocks.1.attn2.add_k_proj.weight": (24, 24)}, r"unexpected: blocks\.1\.attn2\.add_k_proj\.weight"),
        ({"blocks.0.action_model.proj_keyboard.weight": (24, 64)}, r"proj_keyboard\.weight is \[24, 64\]"),
        ({"blocks.0.action_model.keyboard_embed.0.weight": (8, 7)}, "for 7 keys; only the universal"),
        ({"blocks.0.action_model.keyboard_embed.0.weight": None}, "missing: .*keyboard_embed"),
        ({"blocks.0.action_model.mouse_mlp.0.weight": (128, 24)}, r"mouse_mlp\.0\.weight is \[128, 24\]"),
        (
            {"condition_embedder.image_embedder.ff.net.0.proj.weight": None},
            "missing: condition_embedder.image_embedder",
        ),
    ],
    ids=["missing", "unexpected", "shape", "other keyboard", "no keyboard", "mouse", "no picture"],
)
def test_what_does_not_fit_is_named(checkpoint: Path, changes: dict[str, tuple[int, ...] | None], words: str) -> None:
    tensors = load_file(checkpoint / FILE)
    for name, shape in changes.items():
        if shape is None:
            del tensors[name]
        else:
            tensors[name] = torch.zeros(shape)
    save_file(tensors, checkpoint / FILE)
    with pytest.raises(ConfigError, match=words):
        load_network(checkpoint / "transformer")


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        (["options.checkpoint=/no/such/folder"], "options.checkpoint"),
        (["options.window_frames=2"], "options.window_frames"),
        (["options.head_dim=16"], "options.head_dim"),
        ([HEADS], "options.vae"),
        ([HEADS, "options.pixels=false"], "options.image_encoder"),
        (["options.height=100"], "options.height"),
        (["options.labels=[]"], "options.labels"),
        (["options.sink_frames=1"], "options.sink_frames"),
    ],
)
def test_options_and_folders_that_do_not_fit_are_named(checkpoint: Path, changes: list[str], path: str) -> None:
    given = [f"options.checkpoint={checkpoint}", "device=cpu", "dtype=float32", *changes]
    with pytest.raises(ConfigError) as caught:
        load_model(load("matrix-game", {}, given))
    assert caught.value.path == path
