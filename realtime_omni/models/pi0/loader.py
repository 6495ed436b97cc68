"""pi0 and pi0.5 from a folder: LeRobot's layout, or openpi's PyTorch port.

Owns: what stored names are called here and which network a configuration means. The files themselves are read by
``models.common.vla``; names, shapes or statistics that do not fit are refused with a list.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.vla import lerobot, openpi
from realtime_omni.models.common.vla.decoder import DecoderConfig
from realtime_omni.models.common.vla.geometry import read_geometry
from realtime_omni.models.common.vla.images import Fit
from realtime_omni.models.common.vla.policy import LoadOptions, Policy
from realtime_omni.models.common.vla.prompts import PromptForm
from realtime_omni.models.common.vla.siglip import VisionConfig
from realtime_omni.models.common.vla.weights import PROJECTION_RULES, TRANSFORMER_RULES
from realtime_omni.models.common.weights import Names, load_weights, shapes_in
from realtime_omni.models.pi0.network import GEMMA_2B, GEMMA_300M, Pi0Config, Pi0Network

WEIGHTS = "model.safetensors"
VARIANTS = {"gemma_2b": GEMMA_2B, "gemma_300m": GEMMA_300M}

_RULES = (
    (r"^model\.", ""),
    (r"^paligemma_with_expert\.paligemma\.(model\.)?vision_tower\.(vision_model\.)?", "vision."),
    (r"^paligemma_with_expert\.paligemma\.(model\.)?multi_modal_projector\.linear\.", "projector."),
    (r"^paligemma_with_expert\.paligemma\.(model\.)?language_model\.embed_tokens\.", "words."),
    (r"^paligemma_with_expert\.paligemma\.(model\.)?language_model\.layers\.", "language."),
    (r"^paligemma_with_expert\.gemma_expert\.model\.layers\.", "expert."),
    (r"^paligemma_with_expert\.gemma_expert\.model\.norm\.", "norm."),
    *TRANSFORMER_RULES,
    *PROJECTION_RULES,
)
_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
_UNUSED = (
    r"paligemma_with_expert\.gemma_expert\.lm_head\.weight",
    r"paligemma_with_expert\.gemma_expert\.model\.embed_tokens\.weight",
    r"paligemma_with_expert\.paligemma\.(model\.)?language_model\.norm\.weight",
)
_UNUSED_IN_PI05 = (r"state_in\.(weight|bias)", r"expert\.\d+\.(attn|mlp)_norm\.weight", r"norm\.weight")


def names(adaptive: bool) -> Names:
    """Stored names of either layout. Files may hold the language head in place of the tied embedding."""
    return Names(_RULES, _UNUSED + (_UNUSED_IN_PI05 if adaptive else ()), ((_HEAD, "words.weight"),))


@dataclass(frozen=True, slots=True)
class Geometry:
    """``geometry.json`` of a pi0 or pi0.5 checkpoint."""

    vision: VisionConfig
    language: DecoderConfig
    expert: DecoderConfig


class LeRobotPi0(lerobot.PolicyConfig, frozen=True):
    """``config.json`` of type pi0 or pi05."""

    paligemma_variant: str = "gemma_2b"
    action_expert_variant: str = "gemma_300m"
    num_inference_steps: int = 10
    image_resolution: tuple[int, int] = (224, 224)


class OpenPi(msgspec.Struct, frozen=True):
    """``config.json`` that openpi's converter writes."""

    action_dim: int = 32
    action_horizon: int = 50
    paligemma_variant: str = "gemma_2b"
    action_expert_variant: str = "gemma_300m"


def load_lerobot(folder: Path, options: LoadOptions) -> Policy:
    """A LeRobot checkpoint of type ``pi0`` or ``pi05``. Raises ConfigError; says what does not fit."""
    config = lerobot.read_config(folder, LeRobotPi0)
    if config.type not in ("pi0", "pi05"):
        raise ConfigError(f"config.json: type {config.type!r} is neither pi0 nor pi05", path="type")
    if config.image_resolution[0] != config.image_resolution[1]:
        raise ConfigError("config.json: image_resolution must be square", path="image_resolution")
    adaptive = config.type == "pi05"
    geometry = _geometry(folder, config.paligemma_variant, config.action_expert_variant, config.image_resolution[0])
    dims = Pi0Config(
        adaptive=adaptive,
        vision=geometry.vision,
        language=geometry.language,
        expert=geometry.expert,
        horizon=config.chunk_size,
        state_dim=config.max_state_dim,
        action_dim=config.max_action_dim,
        steps=config.num_inference_steps,
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
        fit=Fit.CENTRED,
        form=PromptForm.STATE if adaptive else PromptForm.LINE,
    )
    return Policy(config.type, network, processing, sources)


def load_openpi(folder: Path, options: LoadOptions, robot: openpi.Robot) -> Policy:
    """A checkpoint of openpi's PyTorch port; ``robot`` says what its code says and its files do not.

    Whether it is pi0 or pi0.5 is read from the names of the weights. Raises ConfigError; says what does not fit."""
    config = openpi.read_config(folder, OpenPi)
    stored = map(names(adaptive=False).of, shapes_in(folder / WEIGHTS))
    adaptive = "norm.dense.weight" in stored
    geometry = _geometry(folder, config.paligemma_variant, config.action_expert_variant, 224)
    prompt_tokens = robot.prompt_tokens or (200 if adaptive else 48)
    dims = Pi0Config(
        adaptive=adaptive,
        vision=geometry.vision,
        language=geometry.language,
        expert=geometry.expert,
        horizon=config.action_horizon,
        state_dim=config.action_dim,
        action_dim=config.action_dim,
        prompt_tokens=prompt_tokens,
    )
    network = _network(folder, dims, options)
    processing, sources = openpi.make_processing(
        folder,
        options,
        robot,
        image_size=geometry.vision.image_size,
        vocabulary=network.config.vocabulary,
        form=PromptForm.STATE if adaptive and robot.discrete_state else PromptForm.CLEAN_LINE,
        quantiles=adaptive,
        prompt_tokens=prompt_tokens,
        padded_dim=config.action_dim,
    )
    return Policy("pi05" if adaptive else "pi0", network, processing, sources)


def _geometry(folder: Path, language: str, expert: str, image_size: int) -> Geometry:
    own = read_geometry(folder, Geometry)
    if own is not None:
        return own
    for name in (language, expert):
        if name not in VARIANTS:
            raise ConfigError(
                f"config.json: variant {name!r} is not known; known are {', '.join(VARIANTS)}, and geometry.json describes "
                "any other",
                path="paligemma_variant",
            )
    return Geometry(VisionConfig(image_size=image_size), VARIANTS[language], VARIANTS[expert])


def _network(folder: Path, config: Pi0Config, options: LoadOptions) -> Pi0Network:
    """The network with the file's vocabulary and weights."""
    known = names(config.adaptive)
    for name, shape in shapes_in(folder / WEIGHTS).items():
        if known.of(name) in ("words.weight", _HEAD):
            config = replace(config, vocabulary=shape[0])
    network = Pi0Network(config).eval().requires_grad_(False)
    load_weights(network, folder / WEIGHTS, known, dtype=options.dtype, device=options.device)
    return network
