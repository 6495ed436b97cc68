"""The checkpoint's layout: names, dimensions and statistics, and what is refused before a weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.dreamzero.tiny import CONFIG, MeanColours, PatchVAE, seen, tiny_network
from models.lingbot.tiny import HashedText, tiny_vae
from models.wan.native import native
from realtime_omni.config import Config
from realtime_omni.errors import ConfigError
from realtime_omni.models.dreamzero import loader
from realtime_omni.testing.inline import InlineEngine, small_config

OWN = {
    "image_norm_in": "img_emb.proj.0",
    "image_in": "img_emb.proj.1",
    "image_out": "img_emb.proj.3",
    "image_norm_out": "img_emb.proj.4",
    "state_encoder.first": "state_encoder.layer1",
    "state_encoder.second": "state_encoder.layer2",
    "action_decoder.first": "action_decoder.layer1",
    "action_decoder.second": "action_decoder.layer2",
    "action_encoder.first": "action_encoder.W1",
    "action_encoder.second": "action_encoder.W2",
    "action_encoder.third": "action_encoder.W3",
}
STATISTICS = {
    "state": {
        "joint_position": {"q01": [-1.0, -2.0, 0.0], "q99": [1.0, 2.0, 4.0]},
        "gripper_position": {"q01": [0.0], "q99": [1.0]},
    },
    "action": {
        "joint_position": {"q01": [-0.5, -0.5, -0.5], "q99": [0.5, 0.25, 0.5]},
        "gripper_position": {"q01": [0.0], "q99": [1.0]},
    },
}
OPTIONS: dict[str, Any] = {
    "embodiment": "oxe_droid",
    "cameras": ["wrist", "left", "right"],
    "state_keys": ["joint_position", "gripper_position"],
    "action_keys": ["joint_position", "gripper_position"],
    "relative_keys": ["joint_position"],
    "actions": 5,
    "frames_per_block": 2,
    "window_blocks": 4,
    "height": 32,
    "width": 64,
    "steps": 2,
    "head_dim": CONFIG.trunk.head_dim,
}


def stored() -> dict[str, torch.Tensor]:
    """The tiny network under the names of the root checkpoint, written out by hand."""
    out, rest = {}, torch.nn.Module()
    for name, tensor in tiny_network().state_dict().items():
        stem, _, kind = name.rpartition(".")
        if stem in OWN:
            table = not stem.startswith("image")
            out[f"{OWN[stem]}.{ {'weight': 'W', 'bias': 'b'}[kind] if table else kind }"] = tensor
        elif ".image_" in name:
            _, number, _, _ = name.split(".")
            where = f"blocks.{number}.cross_attn"
            if ".image_k_norm." in name:
                out[f"{where}.norm_k_img.weight"] = tensor
            else:
                out[f"{where}.k_img.{kind}"], out[f"{where}.v_img.{kind}"] = (t.clone() for t in tensor.chunk(2))
        else:
            rest.register_buffer(name.replace(".", "|"), tensor)
    plain = {name.replace("|", "."): tensor for name, tensor in rest.state_dict().items()}
    out |= native(_Holding(plain))
    return {f"action_head.model.{name}": tensor.contiguous() for name, tensor in out.items()}


class _Holding(torch.nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def state_dict(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        return self._tensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    root = tmp_path / "dreamzero"
    (root / "experiment_cfg").mkdir(parents=True)
    (root / loader.METADATA).write_text(json.dumps({"oxe_droid": {"statistics": STATISTICS}}))
    tensors = stored() | {
        "action_head.vae.model.conv1.weight": torch.zeros(2),
        "action_head.text_encoder.x": torch.zeros(1),
    }
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[::2]}, root / "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in names[1::2]}, root / "model-00002-of-00002.safetensors")
    return root


@pytest.fixture
def encoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An autoencoder as diffusers writes it; text and picture encoders need a package that the tests do without."""
    root = tmp_path / "wan"
    for name in ("tokenizer", "text_encoder", "image_encoder"):
        (root / name).mkdir(parents=True)
    tiny_vae()._vae.save_pretrained(root / "vae")
    monkeypatch.setattr(loader, "UMT5", lambda *_, **__: HashedText(CONFIG.trunk.text_width))
    monkeypatch.setattr(loader, "CLIPVision", lambda *_, **__: MeanColours())
    return root


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Wan's autoencoder, which takes a second to be made."""
    monkeypatch.setattr(loader.WanVAE, "load", lambda *_, **__: PatchVAE())


def configured(root: Path, wan: Path, **options: Any) -> Config:
    given = OPTIONS | {"checkpoint": str(root), "encoders": str(wan)} | options
    return Config(model="dreamzero", options=given)


def test_dimensions_are_read_off_the_tensors(checkpoint: Path) -> None:
    assert loader.dimensions(checkpoint, CONFIG.trunk.head_dim) == CONFIG


def test_the_weights_arrive_and_the_model_acts(checkpoint: Path, encoders: Path) -> None:
    config = configured(checkpoint, encoders)
    model = loader.load(config)
    for name, tensor in tiny_network().state_dict().items():
        assert torch.equal(model.network.state_dict()[name], tensor), name
    assert model.robot.relative == (0, 1, 2, None)
    assert model.spec.policy is not None
    assert model.spec.policy.statistics == dict.fromkeys(
        ("state", "actions"), "experiment_cfg/metadata.json: oxe_droid"
    )
    engine = InlineEngine(model, small_config(dtype="float32"))
    engine.create("a", seed=1)
    engine.observe = seen
    chunk = engine.next("a", outputs=("actions", "frames"))
    assert chunk.artifacts["actions"].data.shape == (5, 4)
    assert chunk.artifacts["frames"].data.shape == (8, 3, 32, 64)


@pytest.mark.usefixtures("light")
def test_relative_channels_follow_the_states_own_order(checkpoint: Path, encoders: Path) -> None:
    model = loader.load(configured(checkpoint, encoders, state_keys=["gripper_position", "joint_position"]))
    assert model.robot.relative == (1, 2, 3, None)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    metadata = json.loads(path.read_text())
    change(metadata)
    path.write_text(json.dumps(metadata))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"embodiment": "gr1"}, "options.embodiment|no embodiment 'gr1'; known: oxe_droid"),
        ({"category": 2}, "options.category"),
        ({"cameras": ["wrist"]}, "droid has 3 cameras"),
        ({"state_keys": ["torque"]}, "statistics.state.torque"),
        ({"action_keys": ["joint_position", "joint_position"]}, "do not belong together"),
        ({"relative_keys": ["torque"]}, "options.relative_keys"),
        ({"prompt_template": "a robot"}, "prompt_template"),
        ({"encoders": "/nowhere"}, "options.encoders"),
        ({"checkpoint": "/nowhere"}, "options.checkpoint"),
        ({"window_blocks": 1}, "window_blocks"),
        ({"height": 40}, "height"),
        ({"layout": "agibot"}, "layout"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_by_name(
    checkpoint: Path, encoders: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        loader.load(configured(checkpoint, encoders, **options))


def test_a_window_of_the_recipes_kv_section_is_refused(checkpoint: Path, encoders: Path) -> None:
    config = configured(checkpoint, encoders)
    config = msgspec.structs.replace(config, kv=msgspec.structs.replace(config.kv, window_frames=9))
    with pytest.raises(ConfigError, match=r"options\.window_blocks"):
        loader.load(config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["oxe_droid"]["statistics"]["state"]["joint_position"].pop("q99"), "state.joint_position"),
        (lambda m: m["oxe_droid"]["statistics"]["action"]["gripper_position"].update(q01=[0, 0]), "gripper_position"),
        (lambda m: m["oxe_droid"]["statistics"]["action"]["gripper_position"].update(q01=[float("nan")]), "gripper"),
        (lambda m: m["oxe_droid"]["statistics"]["action"]["gripper_position"].update(q01=[2]), "gripper"),
        (lambda m: m["oxe_droid"].update(statistics=[]), "q01 and q99 are lists"),
        (lambda m: m.update(oxe_droid=3), "no embodiment"),
        (
            lambda m: m["oxe_droid"]["statistics"]["state"].update(
                gripper_position={"q01": [0.0] * 9, "q99": [1.0] * 9}
            ),
            "12 channels, the network has 10",
        ),
    ],
)
def test_statistics_that_are_none_are_refused(
    checkpoint: Path, encoders: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    edit(checkpoint / loader.METADATA, change)
    with pytest.raises(ConfigError, match=words):
        loader.load(configured(checkpoint, encoders))


def test_a_checkpoint_without_statistics_is_refused(checkpoint: Path, encoders: Path) -> None:
    (checkpoint / loader.METADATA).unlink()
    with pytest.raises(ConfigError, match="without statistics there are no actions"):
        loader.load(configured(checkpoint, encoders))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("action_head.model.action_encoder.W2.W"), r"missing: action_encoder\.second\.weight"),
        (lambda t: t.update({"action_head.model.motion_module.weight": torch.zeros(2)}), "unexpected: .*motion_module"),
        (lambda t: t.update({"action_head.model.head.head.bias": torch.zeros(3)}), "other shapes: .*head.head.bias"),
        (lambda t: t.update({"action_head.model.head.head.bias": torch.zeros(16, dtype=torch.int8)}), "is I8"),
        (lambda t: t.pop("action_head.model.patch_embedding.weight"), r"missing: patch_embedding\.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    checkpoint: Path, encoders: Path, change: Callable[[dict[str, torch.Tensor]], Any], words: str
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(ConfigError, match=words):
        loader.load(configured(checkpoint, encoders))


@pytest.mark.usefixtures("light")
def test_the_same_checkpoint_has_the_same_fingerprint_and_other_statistics_another(
    checkpoint: Path, encoders: Path
) -> None:
    one, same = (loader.load(configured(checkpoint, encoders)).fingerprint() for _ in range(2))
    edit(
        checkpoint / loader.METADATA,
        lambda m: m["oxe_droid"]["statistics"]["state"]["gripper_position"].update(q99=[2]),
    )
    assert one == same != loader.load(configured(checkpoint, encoders)).fingerprint()
