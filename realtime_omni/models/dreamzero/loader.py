"""DreamZero from its checkpoint: a recipe's options become a model.

The root folder holds ``model-*.safetensors`` with ``action_head.model.*`` (the network) and its encoders, and
``experiment_cfg/metadata.json`` with the statistics of every embodiment. The encoders are Wan 2.1 I2V's and are read from
a folder in diffusers' layout, by options; the copies in the checkpoint are left alone. Dimensions are read off the tensors.
What two descriptions of DreamZero disagree about (frames of a block, actions of a chunk, ticks of a window) is an option.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.packing import fingerprint_of_files
from realtime_omni.models.common.wan.checkpoint import (
    Progress,
    Stored,
    head_size,
    part_of,
    read_json,
    root_of,
)
from realtime_omni.models.common.wan.clip import CLIPVision
from realtime_omni.models.common.wan.text import UMT5
from realtime_omni.models.common.wan.transformer import PATCH, WanConfig
from realtime_omni.models.common.wan.vae import WanVAE
from realtime_omni.models.common.wan.weights import NATIVE, load_transformer, shards
from realtime_omni.models.common.weights import Names
from realtime_omni.models.dreamzero.model import DreamZero, Settings
from realtime_omni.models.dreamzero.network import DreamZeroConfig, DreamZeroTransformer
from realtime_omni.models.dreamzero.robot import Layout, Quantiles, Robot
from realtime_omni.models.dreamzero.scene import Words

if TYPE_CHECKING:
    from realtime_omni.config import Config

Side = Annotated[int, Meta(ge=32, le=4096, multiple_of=32)]
Count = Annotated[int, Meta(ge=1, le=1024)]
Keys = Annotated[tuple[str, ...], Meta(min_length=1)]
PREFIX = "action_head.model."
METADATA = "experiment_cfg/metadata.json"

NAMES = Names(
    rules=(
        (r"^action_head\.model\.", ""),
        (r"^img_emb\.proj\.0\.", "image_norm_in."),
        (r"^img_emb\.proj\.1\.", "image_in."),
        (r"^img_emb\.proj\.3\.", "image_out."),
        (r"^img_emb\.proj\.4\.", "image_norm_out."),
        (r"\.cross_attn\.norm_k_img\.", ".image_k_norm."),
        (r"\.cross_attn\.([kv])_img\.", r".image_\1."),
        (r"^(state_encoder|action_decoder)\.layer1\.", r"\1.first."),
        (r"^(state_encoder|action_decoder)\.layer2\.", r"\1.second."),
        (r"^action_encoder\.W1\.", "action_encoder.first."),
        (r"^action_encoder\.W2\.", "action_encoder.second."),
        (r"^action_encoder\.W3\.", "action_encoder.third."),
        (r"^(state_encoder|action_encoder|action_decoder)\.(\w+)\.W$", r"\1.\2.weight"),
        (r"^(state_encoder|action_encoder|action_decoder)\.(\w+)\.b$", r"\1.\2.bias"),
        *NATIVE.rules,
    ),
    ignored=(*NATIVE.ignored, r"action_head\.(text_encoder|image_encoder|vae)\..*"),
)
"""The network's names in the root checkpoint."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The recipe's ``options``; see :class:`~realtime_omni.models.dreamzero.model.Settings` for what the numbers mean.

    ``encoders``: a folder of Wan 2.1 I2V in diffusers' layout (``tokenizer``, ``text_encoder``, ``image_encoder``, ``vae``).
    ``state_keys`` and ``action_keys``: vectors of the statistics, one behind the other; ``relative_keys``: those of them whose
    actions are added to the state."""

    checkpoint: str
    encoders: str
    embodiment: str
    cameras: Keys
    state_keys: Keys
    action_keys: Keys
    actions: Count
    frames_per_block: Count
    window_blocks: Annotated[int, Meta(ge=2, le=1024)]
    relative_keys: tuple[str, ...] = ()
    layout: Layout = "droid"
    states: Count = 1
    category: Annotated[int, Meta(ge=0)] = 0
    height: Side = 352
    width: Side = 640
    steps: Annotated[int, Meta(ge=1, le=100)] = 16
    guidance: Annotated[float, Meta(ge=0, le=100)] = 5.0
    shift: Annotated[float, Meta(gt=0, le=100)] = 5.0
    final_noise: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    fps: Annotated[float, Meta(gt=0, le=120)] = 5.0
    prompt_template: str = "{prompt}"
    prompt_lower: bool = False
    negative_prompt: str = ""
    default_prompt: Annotated[str, Meta(min_length=1)] = "do nothing"
    crop: Annotated[float, Meta(gt=0, le=1)] = 0.95
    compile: bool = False
    head_dim: Annotated[int, Meta(ge=6, le=512)] | None = None
    """Default: 128."""

    def settings(self) -> Settings:
        return Settings(
            height=self.height,
            width=self.width,
            frames_per_block=self.frames_per_block,
            window_blocks=self.window_blocks,
            actions=self.actions,
            states=self.states,
            steps=self.steps,
            guidance=self.guidance,
            shift=self.shift,
            final_noise=self.final_noise,
            category=self.category,
            fps=self.fps,
            words=Words(self.prompt_template, self.prompt_lower, self.negative_prompt),
            default_prompt=self.default_prompt,
        )


def load(config: Config) -> DreamZero:
    """Raises ConfigError, naming the option, the file or the tensors that do not fit."""
    options = config.options_as(Options)
    root = root_of(options.checkpoint)
    if config.kv.window_frames is not None or config.kv.sink_frames is not None:
        raise ConfigError("kv: the window is options.window_blocks; there is no sink", path="kv.window_frames")
    if "{prompt}" not in options.prompt_template:
        raise ConfigError("options.prompt_template: {prompt} is not in it", path="options.prompt_template")
    shape = dimensions(root, options.head_dim)
    if options.category >= shape.categories:
        raise ConfigError(f"options.category: the checkpoint has {shape.categories}", path="options.category")
    robot = read_robot(root, options, shape)
    dtype = getattr(torch, config.dtype)
    with torch.device("meta"):
        network = DreamZeroTransformer(shape)
    load_transformer(network, root, dtype=dtype, device=config.device, progress=Progress("weights"), names=NAMES)
    encoders = root_of(options.encoders, "options.encoders")
    if options.compile:
        network.compile_layers()
    return DreamZero(
        network,
        UMT5(encoders, dtype=dtype, device=config.device),
        WanVAE.load(part_of(encoders, None, "vae"), dtype=dtype, device=config.device),
        CLIPVision(part_of(encoders, None, "image_encoder"), dtype=dtype, device=config.device)
        if shape.image_width
        else None,
        robot,
        options.settings(),
        statistics=dict.fromkeys(("state", "actions"), f"{METADATA}: {options.embodiment}"),
        device=config.device,
        fingerprint=fingerprint_of_files(shards(root), repr(options.settings()), repr(robot), config.dtype),
    )


def dimensions(root: Path, head_dim: int | None = None) -> DreamZeroConfig:
    """Read off the checkpoint's shapes. Raises ConfigError when it holds no such network."""
    every = Stored.read(root).shapes
    own = {name.removeprefix(PREFIX): shape for name, shape in every.items() if name.startswith(PREFIX)}
    stored = Stored(root, own)
    patch, state = stored.matrix("patch_embedding.weight"), stored.matrix("state_encoder.layer1.W")
    width, cells = patch[0], PATCH * PATCH
    size = head_size(root, width, head_dim)
    return DreamZeroConfig(
        trunk=WanConfig(
            layers=stored.layers,
            heads=width // size,
            head_dim=size,
            mlp_width=stored.matrix("blocks.0.ffn.0.weight")[0],
            in_channels=patch[1],
            out_channels=stored.matrix("head.head.weight")[0] // cells,
            text_width=stored.matrix("text_embedding.0.weight")[1],
            frequencies=stored.matrix("time_embedding.0.weight")[1],
        ),
        image_width=stored.matrix("img_emb.proj.1.weight")[1] if "img_emb.proj.1.weight" in own else 0,
        state_width=state[-2],
        action_width=stored.matrix("action_encoder.W1.W")[-2],
        hidden=state[-1],
        categories=state[0],
    )


def read_robot(root: Path, options: Options, shape: DreamZeroConfig) -> Robot:
    """The embodiment's statistics. Raises ConfigError, naming what is missing or does not fit the network."""
    path = root / METADATA
    if not path.is_file():
        raise ConfigError(f"{METADATA} is missing: without statistics there are no actions", path="options.checkpoint")
    metadata = read_json(path)
    found = metadata.get(options.embodiment)
    if not isinstance(found, Mapping):
        known = ", ".join(sorted(metadata)) or "none"
        raise ConfigError(f"no embodiment {options.embodiment!r}; known: {known}", path="options.embodiment")
    statistics = found.get("statistics")
    state, states = _quantiles(statistics, "state", options.state_keys)
    actions, acted = _quantiles(statistics, "action", options.action_keys)
    for what, wide, limit in (("state", state, shape.state_width), ("action", actions, shape.action_width)):
        if len(wide.low) > limit:
            raise ConfigError(
                f"options.{what}_keys: {len(wide.low)} channels, the network has {limit}", path=f"options.{what}_keys"
            )
    unknown = [key for key in options.relative_keys if key not in acted or states.get(key) != acted[key]]
    if unknown:
        raise ConfigError(
            f"options.relative_keys: {unknown[0]} is no action beside a state of that name",
            path="options.relative_keys",
        )
    at = dict(zip(states, accumulate(states.values(), initial=0), strict=False))
    relative: list[int | None] = []
    for key, size in acted.items():
        relative += range(at[key], at[key] + size) if key in options.relative_keys else [None] * size
    try:
        return Robot(options.cameras, options.layout, state, actions, tuple(relative), options.crop)
    except ValueError as error:
        raise ConfigError(f"options.cameras: {error}", path="options.cameras") from None


def _quantiles(statistics: Any, what: str, keys: Sequence[str]) -> tuple[Quantiles, dict[str, int]]:
    """Of the vectors ``keys`` one behind the other, and how many channels each has."""
    low: list[float] = []
    high: list[float] = []
    sizes: dict[str, int] = {}
    for key in keys:
        path = f"{METADATA}: statistics.{what}.{key}"
        try:
            each = [[float(x) for x in statistics[what][key][name]] for name in ("q01", "q99")]
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{path}: q01 and q99 are lists of numbers", path=f"options.{what}_keys") from None
        pairs = list(zip(*each, strict=False))
        finite = all(math.isfinite(a) and math.isfinite(b) and a <= b for a, b in pairs)
        if not finite or not pairs or len(each[0]) != len(each[1]) or key in sizes:
            raise ConfigError(f"{path}: q01 and q99 do not belong together", path=f"options.{what}_keys")
        low, high, sizes[key] = low + each[0], high + each[1], len(each[0])
    return Quantiles(np.array(low, np.float32), np.array(high, np.float32)), sizes
