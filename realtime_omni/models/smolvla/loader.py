"""SmolVLA from a folder in LeRobot's layout.

Owns: what stored names are called here and which network a configuration means. The files themselves are read by
``models.common.vla``; names, shapes or statistics that do not fit are refused with a list.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.vla import lerobot
from realtime_omni.models.common.vla.decoder import DecoderConfig
from realtime_omni.models.common.vla.geometry import read_geometry
from realtime_omni.models.common.vla.images import Fit
from realtime_omni.models.common.vla.policy import LoadOptions, Policy
from realtime_omni.models.common.vla.prompts import PromptForm
from realtime_omni.models.common.vla.siglip import VisionConfig
from realtime_omni.models.common.vla.weights import PROJECTION_RULES, TRANSFORMER_RULES
from realtime_omni.models.common.weights import Names, load_weights, shapes_in
from realtime_omni.models.smolvla.network import SIGLIP_BASE_512, SMOLVLM2_500M, SmolVLAConfig, SmolVLANetwork

WEIGHTS = "model.safetensors"
VLM_LAYERS = 32
"""Layers of the published language model, all of which a checkpoint may keep."""

_HEAD = "vlm_with_expert.vlm.lm_head.weight"
NAMES = Names(
    rules=(
        (r"^model\.", ""),
        (r"^vlm_with_expert\.vlm\.model\.vision_model\.", "vision."),
        (r"^vlm_with_expert\.vlm\.model\.connector\.modality_projection\.proj\.", "projector."),
        (r"^vlm_with_expert\.vlm\.model\.text_model\.embed_tokens\.", "words."),
        (r"^vlm_with_expert\.vlm\.model\.text_model\.layers\.", "language."),
        (r"^vlm_with_expert\.lm_expert\.layers\.", "expert."),
        (r"^vlm_with_expert\.lm_expert\.norm\.", "norm."),
        *TRANSFORMER_RULES,
        *PROJECTION_RULES,
    ),
    ignored=(r"vlm_with_expert\.vlm\.model\.text_model\.norm\.weight",),
    aliases=((_HEAD, "words.weight"),),
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """``geometry.json`` of a SmolVLA checkpoint; ``language.layers`` counts the layers that are kept."""

    vision: VisionConfig
    language: DecoderConfig
    shuffle: int


class LeRobotSmolVLA(lerobot.PolicyConfig, frozen=True):
    """``config.json`` of type smolvla."""

    vlm_model_name: str = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    num_steps: int = 10
    resize_imgs_with_padding: tuple[int, int] | None = (512, 512)
    attention_mode: str = "cross_attn"
    num_vlm_layers: int = 16
    num_expert_layers: int = -1
    self_attn_every_n_layers: int = 2
    expert_width_multiplier: float = 0.75
    add_image_special_tokens: bool = False
    adapt_to_pi_aloha: bool = False


def load_lerobot(folder: Path, options: LoadOptions) -> Policy:
    """A LeRobot checkpoint of type ``smolvla``. Raises ConfigError; says what does not fit."""
    config = lerobot.read_config(folder, LeRobotSmolVLA)
    geometry = read_geometry(folder, Geometry) or _published(config)
    _refuse_unsupported(config, geometry)
    dims = SmolVLAConfig(
        vision=geometry.vision,
        language=geometry.language,
        expert_width=int(geometry.language.width * config.expert_width_multiplier),
        joint_every=config.self_attn_every_n_layers,
        shuffle=geometry.shuffle,
        horizon=config.chunk_size,
        state_dim=config.max_state_dim,
        action_dim=config.max_action_dim,
        steps=config.num_steps,
        prompt_tokens=config.tokenizer_max_length,
        min_period=config.min_period,
        max_period=config.max_period,
    )
    lerobot.refuse_old_layout(shapes_in(folder / WEIGHTS))
    network = _network(folder, dims, options)
    processing, sources = lerobot.make_processing(
        folder,
        config,
        options,
        image_size=geometry.vision.image_size,
        vocabulary=network.config.vocabulary,
        fit=Fit.TOP_LEFT,
        form=PromptForm.LINE,
    )
    return Policy("smolvla", network, processing, sources)


def _published(config: LeRobotSmolVLA) -> Geometry:
    if "SmolVLM2-500M" not in config.vlm_model_name:
        raise ConfigError(
            f"config.json: the dimensions of {config.vlm_model_name!r} are not known; geometry.json describes them",
            path="vlm_model_name",
        )
    layers = config.num_vlm_layers if config.num_vlm_layers > 0 else VLM_LAYERS
    return Geometry(SIGLIP_BASE_512, replace(SMOLVLM2_500M, layers=layers), shuffle=4)


def _refuse_unsupported(config: LeRobotSmolVLA, geometry: Geometry) -> None:
    """Settings that would change the policy and have no counterpart here."""
    size = geometry.vision.image_size
    refused = {
        "type": config.type != "smolvla",
        "attention_mode": config.attention_mode != "cross_attn",
        "num_vlm_layers": config.num_vlm_layers > 0 and config.num_vlm_layers != geometry.language.layers,
        "num_expert_layers": config.num_expert_layers not in (-1, 0, geometry.language.layers),
        "resize_imgs_with_padding": config.resize_imgs_with_padding != (size, size),
        "add_image_special_tokens": config.add_image_special_tokens,
        "adapt_to_pi_aloha": config.adapt_to_pi_aloha,
    }
    wrong = [name for name, is_wrong in refused.items() if is_wrong]
    if wrong:
        raise ConfigError(f"config.json: no support for these values of {', '.join(wrong)}", path=wrong[0])


def _network(folder: Path, config: SmolVLAConfig, options: LoadOptions) -> SmolVLANetwork:
    """The network with the file's vocabulary and weights."""
    for name, shape in shapes_in(folder / WEIGHTS).items():
        if NAMES.of(name) in ("words.weight", _HEAD):
            config = replace(config, vocabulary=shape[0])
    network = SmolVLANetwork(config).eval().requires_grad_(False)
    load_weights(network, folder / WEIGHTS, NAMES, dtype=options.dtype, device=options.device)
    return network
