"""The converted file, ``token2wav.safetensors``: both networks under their published names; its shapes tell their sizes.

Weight normalisation (Salimans & Kingma 2016, arXiv 1602.07868) is multiplied out; the converter does it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.weights import Names, match_names, refuse_quantised, shapes_in
from realtime_omni.models.minicpmo.vocoder.encoder import EncoderSizes
from realtime_omni.models.minicpmo.vocoder.estimator import EstimatorSizes
from realtime_omni.models.minicpmo.vocoder.flow import Flow, FlowSizes
from realtime_omni.models.minicpmo.vocoder.hift import HiFT, HiFTSizes

FILE = "token2wav.safetensors"
KINDS = ("flow", "hift")
"""What the names of either network begin with."""
Shapes = Mapping[str, tuple[int, ...]]
_ESTIMATOR = "decoder.estimator."


def flow_sizes(shapes: Shapes, file: str) -> FlowSizes:
    """Raises ConfigError where the names that tell sizes are missing."""
    try:
        codes, channels = shapes["input_embedding.weight"]
        heads = shapes["encoder.encoders.0.self_attn.pos_bias_u"][0]
        wide = shapes[f"{_ESTIMATOR}in_proj.weight"][0]
        head = shapes[f"{_ESTIMATOR}blocks.0.attn.q_norm.weight"][0]
        mels, speaker = shapes["spk_embed_affine_layer.weight"]
        return FlowSizes(
            codes,
            speaker,
            EncoderSizes(
                channels,
                heads,
                shapes["encoder.encoders.0.feed_forward.w_1.weight"][0],
                _count(shapes, r"encoder\.encoders\.(\d+)\..*"),
                _count(shapes, r"encoder\.up_encoders\.(\d+)\..*"),
                "encoder.encoders.0.self_attn.linear_k.bias" in shapes,
            ),
            EstimatorSizes(
                wide,
                _count(shapes, r"decoder\.estimator\.blocks\.(\d+)\..*"),
                shapes[f"{_ESTIMATOR}blocks.0.attn.to_q.weight"][0] // head,
                head,
                shapes[f"{_ESTIMATOR}blocks.0.mlp.fc1.weight"][0],
                mels,
            ),
        )
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        raise ConfigError(f"{file} is not a flow of token2wav: {error} is missing or has another shape") from None


def hift_sizes(shapes: Shapes, file: str) -> HiFTSizes:
    """Raises ConfigError where the names that tell sizes are missing."""
    try:
        channels, mels, _ = shapes["conv_pre.weight"]
        return HiFTSizes(mels, channels, shapes["f0_predictor.classifier.weight"][1])
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError(f"{file} is not token2wav's HiFT: {error} is missing or has another shape") from None


def match(network: nn.Module, shapes: Shapes, file: str) -> None:
    """Raises ConfigError that lists every missing and unexpected name and other shape."""
    wanted = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    match_names(shapes, Names(rules=()), wanted, file)


def networks_for(flow: Shapes, hift: Shapes, steps: int, file: str) -> tuple[Flow, HiFT]:
    """Networks without memory that the names and shapes fit. Raises ConfigError that lists what does not."""
    sizes = flow_sizes(flow, file), hift_sizes(hift, file)
    try:
        with torch.device("meta"):
            networks = Flow(sizes[0], steps), HiFT(sizes[1])
    except (RuntimeError, ValueError, ArithmeticError) as error:  # none has no heads, or more channels than numbers
        raise ConfigError(f"{file}: the shapes are no network's: {error}"[:300]) from None
    for network, shapes in zip(networks, (flow, hift), strict=True):
        match(network, shapes, file)
    if networks[0].sizes.estimator.mels != networks[1].conv_pre.in_channels:
        raise ConfigError(f"{file}: the flow and the generator have other mel bins")
    return networks


def load(path: Path, *, steps: int, dtype: torch.dtype, device: torch.device | str) -> tuple[Flow, HiFT]:
    """The flow in ``dtype``, the generator at least in float32. Raises ConfigError."""
    shapes = shapes_in(path)
    flow_of, hift_of = ({n.removeprefix(f"{k}."): s for n, s in shapes.items() if n.startswith(f"{k}.")} for k in KINDS)
    if len(flow_of) + len(hift_of) != len(shapes):
        raise ConfigError(f"{path.name} holds names of neither network", path=path.name)
    networks = networks_for(flow_of, hift_of, steps, path.name)
    with safe_open(path, "pt") as file:
        for kind, network, wide in zip(
            KINDS, networks, (dtype, torch.promote_types(dtype, torch.float32)), strict=True
        ):
            made: dict[str, Tensor] = {}
            for name, _ in network.named_parameters():
                refuse_quantised(name, file.get_slice(f"{kind}.{name}").get_dtype(), path.name)
                made[name] = file.get_tensor(f"{kind}.{name}").to(device=device, dtype=wide)
            network.load_state_dict(made, assign=True)
            network.eval().requires_grad_(requires_grad=False)
    return networks


def _count(shapes: Shapes, pattern: str) -> int:
    """How many there are; where numbers are left out, `match` says which names are missing."""
    numbers = {found[1] for name in shapes if (found := re.fullmatch(pattern, name))}
    if not numbers:
        raise KeyError(pattern)
    return len(numbers)
