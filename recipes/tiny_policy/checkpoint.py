"""The trained policy as a folder in LeRobot's layout, which ``realtime_omni.models.pi0`` loads like any other.

config.json, geometry.json (this size is not a published one), model.safetensors (float16, the network's own names), the two
processor files with the statistics that they name, tokenizer.json (a word is a token).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from realtime_omni.models.pi0.loader import Geometry
from recipes.tiny_policy.pictures import CAMERAS
from recipes.tiny_policy.policy import EPS, Statistics
from recipes.tiny_policy.shape import BOS, HORIZON, PROMPT_TOKENS, STEPS, UNKNOWN, VOCABULARY
from recipes.tiny_policy.table import ACTION_DIM, STATE_DIM

MODES = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
BEFORE, AFTER = "policy_preprocessor_step_3_normalizer_processor", "policy_postprocessor_step_0_unnormalizer_processor"


def write(folder: Path, weights: Mapping[str, Tensor], statistics: Statistics, geometry: Geometry) -> None:
    """The whole folder; weights last and at once, so that a reader never finds half of them."""
    folder.mkdir(parents=True, exist_ok=True)
    _json(folder / "config.json", _config(geometry.vision.image_size))
    # `condition` is left out: pi0 has none.
    _json(folder / "geometry.json", {name: _numbers(part) for name, part in asdict(geometry).items()})
    _json(folder / "tokenizer.json", tokenizer())
    numbers = {
        "observation.state.mean": statistics.state_mean,
        "observation.state.std": statistics.state_std,
        "action.mean": statistics.action_mean,
        "action.std": statistics.action_std,
    }
    numbers = {name: value.detach().float().cpu().contiguous() for name, value in numbers.items()}
    for name, steps in (("policy_preprocessor", _before()), ("policy_postprocessor", _after())):
        _json(folder / f"{name}.json", {"name": name, "steps": steps})
    for name in (BEFORE, AFTER):
        save_file(numbers, folder / f"{name}.safetensors")
    part = folder / "model.part"
    save_file({name: value.detach().half().cpu().contiguous() for name, value in weights.items()}, part)
    os.replace(part, folder / "model.safetensors")


def _json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _numbers(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if value is not None}


def _config(size: int) -> dict[str, Any]:
    picture = {"type": "VISUAL", "shape": [3, size, size]}
    return {
        "type": "pi0",
        "input_features": {
            **{f"observation.images.{name}": picture for name in CAMERAS},
            "observation.state": {"type": "STATE", "shape": [STATE_DIM]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [ACTION_DIM]}},
        "chunk_size": HORIZON,
        "n_action_steps": HORIZON,
        "max_state_dim": STATE_DIM,
        "max_action_dim": ACTION_DIM,
        "num_inference_steps": STEPS,
        "image_resolution": [size, size],
        "tokenizer_max_length": PROMPT_TOKENS,
        "normalization_mapping": MODES,
    }


def _normalizer(name: str, state_file: str) -> dict[str, Any]:
    return {
        "registry_name": name,
        "config": {"eps": EPS, "norm_map": MODES},
        "state_file": f"{state_file}.safetensors",
    }


def _before() -> list[dict[str, Any]]:
    return [
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "pi0_new_line_processor", "config": {}},
        {"registry_name": "tokenizer_processor", "config": {"max_length": PROMPT_TOKENS}},
        _normalizer("normalizer_processor", BEFORE),
    ]


def _after() -> list[dict[str, Any]]:
    return [_normalizer("unnormalizer_processor", AFTER)]


def tokenizer() -> dict[str, Any]:
    """A ``tokenizer.json``: words and marks, a beginning in front, one id for every unknown word."""
    special = {
        name: {"id": index, "content": name, "special": True, **_PLAIN} for index, name in enumerate((BOS, UNKNOWN))
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(special.values()),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": r"\n|\w+|[^\w\s]"}, "behavior": "Isolated", "invert": False},
                {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {BOS: {"id": BOS, "ids": [0], "tokens": [BOS]}},
        },
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: index for index, word in enumerate(VOCABULARY)},
            "unk_token": UNKNOWN,
        },
    }


_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
