"""Writes ``golden/names.json``: every stored name and shape of the published sizes, as lerobot 0.6.1 builds them.

Run as ``make_vla_golden.py`` is; nothing is allocated (meta device). Layers are folded: ``layers.*`` stands for the
listed numbers. SmolVLA's language model comes from a hub, so its published dimensions are written out here.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi0.modeling_pi0 import PI0Policy
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.modeling_pi05 import PI05Policy
from lerobot.policies.smolvla import smolvlm_with_expert
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from transformers import SmolVLMConfig

TARGET = Path(__file__).parent / "golden" / "names.json"

TEXT = {
    "model_type": "llama",
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_hidden_layers": 32,
    "vocab_size": 49280,
}
TEXT |= {"num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 64, "rms_norm_eps": 1e-5}
VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
VISION |= {"image_size": 512, "patch_size": 16}


class Tokenizer:
    fake_image_token_id = global_image_token_id = 0


class Processor:
    tokenizer = Tokenizer()


def folded(module: torch.nn.Module) -> dict[str, list[int]]:
    """``<name> <shape>``, with ``*`` for a layer's number -> the numbers it stands for."""
    result: dict[str, list[int]] = {}
    for name, value in module.state_dict().items():
        key = re.sub(r"\.layers\.\d+\.", ".layers.*.", name) + f" {list(value.shape)}"
        result.setdefault(key, []).extend(int(number) for number in re.findall(r"\.layers\.(\d+)\.", name))
    return result


def features() -> dict[str, Any]:
    return {
        "input_features": {
            "observation.images.a": PolicyFeature(FeatureType.VISUAL, (3, 224, 224)),
            "observation.state": PolicyFeature(FeatureType.STATE, (14,)),
        },
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (14,))},
        "device": "cpu",
    }


if __name__ == "__main__":
    names = {}
    torch.nn.Module.to = lambda self, *a, **k: self  # meta tensors cannot be moved
    smolvlm_with_expert.AutoProcessor.from_pretrained = staticmethod(lambda *a, **k: Processor())
    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        names["pi0"] = folded(PI0Policy(PI0Config(**features())))
        names["pi05"] = folded(PI05Policy(PI05Config(**features())))
        SmolVLMConfig(text_config=TEXT, vision_config=VISION, scale_factor=4).save_pretrained(folder)
        names["smolvla"] = folded(SmolVLAPolicy(SmolVLAConfig(vlm_model_name=folder, **features())))
    tables = [
        f"{json.dumps(policy)}: {{\n"
        + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in table.items())
        + "\n}"
        for policy, table in names.items()
    ]
    TARGET.write_text("{\n" + ",\n".join(tables) + "\n}\n")
    print(TARGET.stat().st_size, "bytes")
