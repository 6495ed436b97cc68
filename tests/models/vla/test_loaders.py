"""Checkpoints in the layouts people have: what loads, and what is refused with which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.vla import checkpoints
from realtime_omni.errors import ConfigError
from realtime_omni.models.common.vla.network import encode, sample
from realtime_omni.models.common.vla.normalize import Mode
from realtime_omni.models.common.vla.openpi import Robot
from realtime_omni.models.common.vla.policy import LoadOptions, Policy
from realtime_omni.models.pi0 import loader as pi0
from realtime_omni.models.smolvla import loader as smolvla

OPTIONS = LoadOptions()
FAMILIES = ("pi0", "pi05", "smolvla")
PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"
STATE = np.linspace(-1, 1, 6, dtype=np.float32)
ROBOT = Robot(state_channels=6, action_channels=5)


def load(folder: Path, options: LoadOptions = OPTIONS) -> Policy:
    return (smolvla if folder.name == "smolvla" else pi0).load_lerobot(folder, options)


def chunk(policy: Policy) -> torch.Tensor:
    pictures = {name: np.full((20, 30, 3), 90, np.uint8) for name in policy.processing.cameras[:2]}
    noise = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(1))
    return sample(policy.network, encode(policy.network, policy.processing.inputs(pictures, STATE, "pick up")), noise)


def rename(*pairs: tuple[str, str]) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(stored: dict[str, torch.Tensor]) -> None:
        for old, new in pairs:
            for name in [name for name in stored if old in name]:
                stored[name.replace(old, new)] = stored.pop(name)

    return change


HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
WORDS = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("pi0", rename(("model.paligemma_with_expert", "paligemma_with_expert"))),
        ("pi0", rename(("action_time_mlp_", "time_mlp_"))),
        ("pi0", rename(("vision_tower.vision_model.", "vision_tower."))),
        ("pi0", lambda stored: stored.pop(f"model.{WORDS}")),
        ("pi0", lambda stored: stored.pop(f"model.{HEAD}")),
        ("pi05", rename(("time_mlp_", "action_time_mlp_"))),
        ("pi05", lambda stored: stored.update({"model.state_proj.weight": torch.zeros(24, 8)})),
        ("smolvla", lambda stored: stored.pop("model.vlm_with_expert.vlm.model.text_model.embed_tokens.weight")),
    ],
)
def test_known_variations_of_stored_names_give_the_same_policy(
    tmp_path: Path, family: str, change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    folder = checkpoints.copy(family, tmp_path)
    stored = load_file(folder / "model.safetensors")
    head = next(name for name in stored if name.endswith("lm_head.weight") and "gemma_expert" not in name)
    words = next(name for name in stored if name.endswith("embed_tokens.weight"))
    checkpoints.edit_weights(folder, lambda s: s.update({head: s[words].clone()}))  # tied, as in a real file
    expected = chunk(load(folder))
    checkpoints.edit_weights(folder, change)
    assert torch.equal(chunk(load(folder)), expected)


def test_names_and_shapes_that_do_not_match_are_refused_with_a_list(tmp_path: Path) -> None:
    folder = checkpoints.copy("pi0", tmp_path)

    def change(stored: dict[str, torch.Tensor]) -> None:
        stored.pop("model.action_in_proj.bias")
        stored["model.lora_a.weight"] = torch.zeros(2)
        stored["model.state_proj.weight"] = torch.zeros(24, 9)

    checkpoints.edit_weights(folder, change)
    with pytest.raises(ConfigError) as refused:
        load(folder)
    assert "missing: action_in.bias" in refused.value.message
    assert "unexpected: model.lora_a.weight" in refused.value.message
    assert "model.state_proj.weight is [24, 9], [24, 8] is needed" in refused.value.message


def test_a_long_list_is_cut_and_counted(tmp_path: Path) -> None:
    folder = checkpoints.copy("pi0", tmp_path)
    checkpoints.edit_weights(folder, rename(("model.paligemma_with_expert", "model.other")))
    with pytest.raises(ConfigError, match=r"and \d+ more"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all"])
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = checkpoints.copy("pi0", tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(folder)


def test_an_unknown_size_is_refused_and_says_what_describes_it(tmp_path: Path) -> None:
    for family, field in (("pi0", "paligemma_variant"), ("smolvla", "vlm_model_name")):
        folder = checkpoints.copy(family, tmp_path)
        (folder / "geometry.json").unlink()
        checkpoints.edit_json(folder / "config.json", lambda config, field=field: config.update({field: "huge"}))
        with pytest.raises(ConfigError, match=r"geometry\.json"):
            load(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_mode", "self_attn"),
        ("add_image_special_tokens", True),
        ("adapt_to_pi_aloha", True),
        ("num_expert_layers", 1),
        ("num_vlm_layers", 9),
        ("resize_imgs_with_padding", [32, 64]),
        ("resize_imgs_with_padding", None),
        ("type", "pi0"),
    ],
)
def test_settings_without_a_counterpart_are_refused(tmp_path: Path, field: str, value: object) -> None:
    folder = checkpoints.copy("smolvla", tmp_path)
    checkpoints.edit_json(folder / "config.json", lambda config: config.update({field: value}))
    with pytest.raises(ConfigError, match=field):
        load(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_statistics_are_refused_unless_identity_is_allowed(tmp_path: Path, family: str) -> None:
    folder = checkpoints.copy(family, tmp_path)
    (folder / PRE).unlink()
    (folder / POST).unlink()
    with pytest.raises(ConfigError, match="allow-identity-normalization"):
        load(folder)
    policy = load(folder, LoadOptions(allow_identity_normalization=True))
    assert policy.processing.state.mode is Mode.IDENTITY
    assert set(policy.statistics.values()) == {"identity (statistics missing, allowed)"}


def test_statistics_of_another_dataset_are_refused_and_named(tmp_path: Path) -> None:
    """lerobot/smolvla_base: keys such as so100.buffer.action.mean; a lookup misses, lerobot then skips in silence."""
    folder = checkpoints.copy("smolvla", tmp_path)
    file = folder / checkpoints.step_of(folder, POST, "unnormalizer_processor")["state_file"]
    save_file({f"so100.buffer.{name}": value for name, value in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match=r"it has statistics of so100\.buffer\.action"):
        load(folder)


def test_statistics_of_another_width_are_refused(tmp_path: Path) -> None:
    folder = checkpoints.copy("pi0", tmp_path)
    file = folder / checkpoints.step_of(folder, PRE, "normalizer_processor")["state_file"]
    save_file({name: value[:4].clone() for name, value in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match="statistics of 4 channels"):
        load(folder)


def test_the_state_file_is_the_one_the_step_names(tmp_path: Path) -> None:
    folder = checkpoints.copy("pi0", tmp_path)
    before = load(folder).processing.state.digest()
    file = checkpoints.step_of(folder, PRE, "normalizer_processor")["state_file"]
    (folder / file).rename(folder / "elsewhere.safetensors")

    def change(content: Any) -> None:
        for step in content["steps"]:
            if step["registry_name"] == "normalizer_processor":
                step["state_file"] = "elsewhere.safetensors"

    checkpoints.edit_json(folder / PRE, change)
    assert load(folder).processing.state.digest() == before


@pytest.mark.parametrize("name", ["../secrets.safetensors", "/etc/passwd", "absent.safetensors"])
def test_a_state_file_is_a_file_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = checkpoints.copy("pi0", tmp_path)
    checkpoints.edit_json(folder / POST, lambda content: content["steps"][0].update(state_file=name))
    with pytest.raises(ConfigError):
        load(folder)


def test_an_unknown_processor_step_is_refused_by_name(tmp_path: Path) -> None:
    folder = checkpoints.copy("pi0", tmp_path)
    checkpoints.edit_json(folder / PRE, lambda content: content["steps"].append({"registry_name": "gripper_flip"}))
    with pytest.raises(ConfigError, match="gripper_flip"):
        load(folder)


@pytest.mark.parametrize("file", ["config.json", PRE, "geometry.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"steps": 3, "type": 1, "vision": {"patch": "x"}}'])
def test_broken_json_is_refused_by_file(tmp_path: Path, file: str, content: str) -> None:
    folder = checkpoints.copy("pi0", tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(ConfigError, match=file.replace(".", r"\.")):
        load(folder)


def test_a_checkpoint_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    folder = checkpoints.copy("pi0", tmp_path)
    elsewhere = (folder / "tokenizer.json").rename(tmp_path / "mine.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load(folder)
    load(folder, LoadOptions(tokenizer=elsewhere))


def test_a_renamed_camera_is_called_as_the_client_calls_it(tmp_path: Path) -> None:
    folder = checkpoints.copy("smolvla", tmp_path)
    renamed = {"observation.images.front": "observation.images.top"}
    checkpoints.edit_json(folder / PRE, lambda content: content["steps"][0]["config"].update(rename_map=renamed))
    assert load(folder).processing.cameras == ("front", "wrist", "empty_camera_0")


def test_relative_actions_are_read_with_the_joints_that_stay_absolute(tmp_path: Path) -> None:
    folder = checkpoints.copy("pi0", tmp_path)
    names = ["a", "b", "c", "d", "left_Gripper"]

    def change(content: Any) -> None:
        for step in content["steps"]:
            if step["registry_name"] == "relative_actions_processor":
                step["config"] = {"enabled": True, "exclude_joints": ["gripper"], "action_names": names}

    checkpoints.edit_json(folder / PRE, change)
    assert load(folder).processing.relative == (True, True, True, True, False)


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_openpis_layout_gives_the_same_network(tmp_path: Path, family: str) -> None:
    policy = pi0.load_openpi(checkpoints.openpi(family, tmp_path), OPTIONS, ROBOT)
    assert policy.family == family
    source = checkpoints.copy(family, tmp_path)
    head = f"model.{HEAD}"
    checkpoints.edit_weights(source, lambda s: s.update({f"model.{WORDS}": s[head].clone()}))
    reference = load(source)
    ours, theirs = dict(policy.network.named_parameters()), dict(reference.network.named_parameters())  # type: ignore[attr-defined]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.isfinite(chunk(policy)).all()


def test_openpi_statistics_are_chosen_by_asset(tmp_path: Path) -> None:
    folder = checkpoints.openpi("pi0", tmp_path)
    (folder / "assets" / "lab" / "arm").mkdir(parents=True)
    other = json.loads((folder / "assets" / "trossen" / "norm_stats.json").read_text())
    other["norm_stats"]["state"]["mean"][0] += 1
    (folder / "assets" / "lab" / "arm" / "norm_stats.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="lab/arm, trossen"):
        pi0.load_openpi(folder, OPTIONS, ROBOT)
    with pytest.raises(ConfigError, match="'franka' is not in"):
        pi0.load_openpi(folder, LoadOptions(allow_identity_normalization=True), Robot(6, 5, asset="franka"))
    ids = {
        pi0.load_openpi(folder, OPTIONS, Robot(6, 5, asset=a)).processing.statistics_id()
        for a in ("lab/arm", "trossen")
    }
    assert len(ids) == 2


def test_openpi_without_statistics_is_refused_unless_allowed(tmp_path: Path) -> None:
    folder = checkpoints.openpi("pi05", tmp_path)
    (folder / "assets" / "trossen" / "norm_stats.json").unlink()
    with pytest.raises(ConfigError, match="has no assets"):
        pi0.load_openpi(folder, OPTIONS, ROBOT)
    policy = pi0.load_openpi(folder, LoadOptions(allow_identity_normalization=True), ROBOT)
    assert policy.processing.action.mode is Mode.IDENTITY


def test_openpi_statistics_must_cover_the_robot(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="covers 6 channels of 7"):
        pi0.load_openpi(checkpoints.openpi("pi0", tmp_path), OPTIONS, Robot(7, 5))


def test_dtype_is_the_options(tmp_path: Path) -> None:
    policy = load(checkpoints.copy("pi0", tmp_path), LoadOptions(dtype=torch.bfloat16))
    assert {p.dtype for p in policy.network.parameters()} == {torch.bfloat16}  # type: ignore[attr-defined]
    assert not any(p.requires_grad for p in policy.network.parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_old_checkpoint_is_told_how_to_become_a_new_one(tmp_path: Path, family: str) -> None:
    folder = checkpoints.copy(family, tmp_path)
    old = {"normalize_inputs.buffer_observation_state.mean": torch.zeros(6)}
    checkpoints.edit_weights(folder, lambda stored: stored.update(old))
    with pytest.raises(ConfigError, match="migrate_policy_normalization"):
        load(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_networks_own_names_load_too(tmp_path: Path, family: str) -> None:
    """What a training run of ours saves: ``state_dict`` beside the same JSON files."""
    folder = checkpoints.copy(family, tmp_path)
    expected = load(folder)
    save_file(expected.network.state_dict(), folder / "model.safetensors")  # type: ignore[attr-defined]
    assert torch.equal(chunk(load(folder)), chunk(expected))
