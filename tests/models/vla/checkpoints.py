"""Checkpoint folders for loader tests: the golden ones, copied and changed, and one in openpi's layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from parity.rebuilt import golden

GOLDEN = golden()


def copy(family: str, target: Path) -> Path:
    """A LeRobot checkpoint of tiny dimensions that may be changed."""
    folder = target / family
    shutil.copytree(GOLDEN / family, folder, ignore=shutil.ignore_patterns("trace.safetensors"))
    return folder


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors")


def step_of(folder: Path, processor: str, name: str) -> dict[str, Any]:
    """A processor step's entry, for reading."""
    steps = json.loads((folder / processor).read_text())["steps"]
    found: dict[str, Any] = next(step for step in steps if step["registry_name"] == name)
    return found


def openpi(family: str, target: Path) -> Path:
    """The golden weights as openpi's converter writes them: bare names, its config, statistics under assets."""
    source = GOLDEN / family
    folder = target / f"openpi_{family}"
    (folder / "assets" / "trossen").mkdir(parents=True)
    stored = {name.removeprefix("model."): value for name, value in load_file(source / "model.safetensors").items()}
    del stored[
        "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    ]  # tied: only the head is kept
    save_file(stored, folder / "model.safetensors")
    config = {"action_dim": 8, "action_horizon": 6, "paligemma_variant": "gemma_2b", "precision": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    state_file = step_of(source, "policy_preprocessor.json", "normalizer_processor")["state_file"]
    numbers = load_file(source / state_file)
    statistics = {
        ours: {name: numbers[f"{theirs}.{name}"].tolist() for name in ("mean", "std", "q01", "q99")}
        for ours, theirs in (("state", "observation.state"), ("actions", "action"))
    }
    (folder / "assets" / "trossen" / "norm_stats.json").write_text(json.dumps({"norm_stats": statistics}))
    for name in ("geometry.json", "tokenizer.json"):
        shutil.copy(source / name, folder / name)
    return folder
