"""Checkpoints into the networks: kyutai's and NVIDIA's safetensors, or a refusal that lists every name that does not fit.

Parameters that hold every depth step one above the other are stored in one of two ways: a tensor per step
(``in_projs.3.weight``) or all steps in one (``in_proj_weight``). PersonaPlex can predict both speakers' codebooks; where its
file has attention weights of the first half of the depth steps only, they serve for the second half, too (as in NVIDIA's
loader).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from realtime_omni.models.common.weights import Names, match_names, refuse_quantised, shapes_in
from realtime_omni.models.moshi.mimi import Mimi
from realtime_omni.models.moshi.network import MoshiLM

_LM_NAMES = (
    (r"^temporal\.layers\.(\d+)\.qkv$", r"transformer.layers.\1.self_attn.in_projs.0.weight"),
    (r"^temporal\.layers\.(\d+)\.out$", r"transformer.layers.\1.self_attn.out_projs.0.weight"),
    (r"^temporal\.layers\.(\d+)\.gate_up$", r"transformer.layers.\1.gating.linear_in.weight"),
    (r"^temporal\.layers\.(\d+)\.down$", r"transformer.layers.\1.gating.linear_out.weight"),
    (r"^temporal\.layers\.(\d+)\.(norm\d)$", r"transformer.layers.\1.\2.alpha"),
    (r"^temporal\.text_emb$", "text_emb.weight"),
    (r"^temporal\.audio_emb\.(\d+)$", r"emb.\1.weight"),
    (r"^temporal\.norm$", "out_norm.alpha"),
    (r"^temporal\.text_head$", "text_linear.weight"),
    (r"^depth\.layers\.(\d+)\.qkv$", r"depformer.layers.\1.self_attn.in_projs.{step}.weight"),
    (r"^depth\.layers\.(\d+)\.out$", r"depformer.layers.\1.self_attn.out_projs.{step}.weight"),
    (r"^depth\.layers\.(\d+)\.gate_up$", r"depformer.layers.\1.gating.{step}.linear_in.weight"),
    (r"^depth\.layers\.(\d+)\.down$", r"depformer.layers.\1.gating.{step}.linear_out.weight"),
    (r"^depth\.layers\.(\d+)\.(norm\d)$", r"depformer.layers.\1.\2.alpha"),
    (r"^depth\.inputs\.(\d+)$", r"depformer_in.\1.weight"),
    (r"^depth\.text_emb$", "depformer_text_emb.weight"),
    (r"^depth\.audio_emb\.(\d+)$", r"depformer_emb.\1.weight"),
    (r"^depth\.heads\.(\d+)$", r"linears.\1.weight"),
)
"""Our names to kyutai's."""
_WHOLE = Names(rules=((r"\.(in|out)_proj(?:_weight|\.weight)\[(\d+)\]$", r".\1_projs.\2.weight"),))
_ATTENTION = re.compile(r"\.self_attn\.(in|out)_proj(_weight|\.weight)$")


@dataclass(frozen=True, slots=True)
class _Target:
    parameter: str
    step: int | None
    shape: tuple[int, ...]


def depth_steps_in(file: Path) -> int:
    """How many codebooks the file's depth transformer predicts."""
    return sum(re.fullmatch(r"linears\.\d+\.weight", name) is not None for name in shapes_in(file))


def load_lm(network: MoshiLM, file: Path, *, dtype: torch.dtype, device: torch.device | str) -> None:
    """Fill the language model, which may stand on the ``meta`` device; nothing is held twice.

    Raises ConfigError that lists missing and unexpected names and different shapes, or names a tensor that is quantised; the
    network is then unchanged."""
    targets = _targets(network)
    stored = shapes_in(file)
    slots: dict[str, tuple[str, int | None, int]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in stored.items():
        wanted = _steps_of(name, network) if _ATTENTION.search(name) else 0
        if not wanted:
            slots[name], shapes[name] = (name, None, 1), shape
            continue
        rows = _rows_of(name, network)
        held = shape[0] // rows if shape[0] % rows == 0 and shape[0] else 1
        serves = 2 * held if 2 * held == wanted and name.startswith("depformer.") else held
        for step in range(serves):
            slots[f"{name}[{step}]"] = (name, step % held, held)
            shapes[f"{name}[{step}]"] = (shape[0] // held, *shape[1:])
    found = match_names(shapes, _WHOLE, {name: t.shape for name, t in targets.items()}, file.name)
    _refuse_integers(file, {slots[name][0] for name in found.values()})
    parameters = {
        name: torch.empty(p.shape, dtype=dtype, device=device) for name, p in network.named_parameters(recurse=True)
    }
    with safe_open(file, "pt") as tensors:
        for name, target in targets.items():
            source, slot, held = slots[found[name]]
            tensor = _slot(tensors.get_tensor(source), slot, held)
            into = parameters[target.parameter]
            (into if target.step is None else into[target.step]).copy_(tensor)
    replace_parameters(network, parameters)


def _refuse_integers(file: Path, names: Iterable[str]) -> None:
    with safe_open(file, "pt") as tensors:
        for name in sorted(names):
            refuse_quantised(name, tensors.get_slice(name).get_dtype(), file.name)


def replace_parameters(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give every named parameter a new tensor."""
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(path), leaf, nn.Parameter(tensor, requires_grad=False))


def _targets(network: MoshiLM) -> dict[str, _Target]:
    """Stored name -> where it goes."""
    targets: dict[str, _Target] = {}
    for name, parameter in network.named_parameters():
        pattern, stored = next(rule for rule in _LM_NAMES if re.fullmatch(rule[0], name))
        stored = re.sub(pattern, stored, name)
        shape = tuple(parameter.shape)
        if "{step}" not in stored:
            targets[stored] = _Target(name, None, shape)
            continue
        for step in range(shape[0]):
            targets[stored.replace("{step}", str(step))] = _Target(name, step, shape[1:])
    return targets


def _steps_of(name: str, network: MoshiLM) -> int:
    if name.startswith("depformer."):
        return network.config.dep_q
    return 1 if name.startswith("transformer.") else 0


def _rows_of(name: str, network: MoshiLM) -> int:
    dim = network.config.depformer_dim if name.startswith("depformer.") else network.config.dim
    return 3 * dim if ".in_proj" in name else dim


def _slot(tensor: Tensor, slot: int | None, held: int) -> Tensor:
    return tensor if slot is None else tensor.view(held, -1, *tensor.shape[1:])[slot]


def load_mimi(network: Mimi, file: Path, *, device: torch.device | str) -> None:
    """Fill the codec with float32 numbers; codebooks that are not used are left out. Raises ConfigError as :func:`load_lm`."""
    stored = shapes_in(file)
    names = _mimi_names(network)
    tables = {name: rows for name, rows in names.items() if not isinstance(rows, str)}
    wanted = {
        stored: tuple(network.get_parameter(name).shape) for name, stored in names.items() if isinstance(stored, str)
    }
    bins, dim = network.config.bins, network.config.codebook_dim
    for prefixes in tables.values():
        for prefix in prefixes:
            wanted |= {prefix + "embedding_sum": (bins, dim), prefix + "cluster_usage": (bins,)}
    flat = {name: _pointwise(shape, wanted.get(_MIMI.of(name))) for name, shape in stored.items()}
    found = match_names(flat, _MIMI, wanted, file.name)
    _refuse_integers(file, set(found.values()))
    parameters = {}
    with safe_open(file, "pt") as tensors:
        for name, parameter in network.named_parameters():
            source = names[name]
            if isinstance(source, str):
                tensor = tensors.get_tensor(found[source]).float().reshape(parameter.shape)
            else:
                tensor = torch.stack([_centres(tensors, found, prefix) for prefix in source])
            parameters[name] = tensor.to(device)
    replace_parameters(network, parameters)


_MIMI = Names(
    rules=(
        (r"\.in_proj(_weight|\.weight)$", ".in_projs.0.weight"),
        (r"\.out_proj\.weight$", ".out_projs.0.weight"),
        (r"\._codebook\.embed_sum$", "._codebook.embedding_sum"),
        (r"\._codebook\.cluster_size$", "._codebook.cluster_usage"),
    ),
    ignored=(r"quantizer\..*\._codebook\..*",),
)
_MIMI_LAYER = {
    "norm1": "norm1.weight",
    "norm1_bias": "norm1.bias",
    "norm2": "norm2.weight",
    "norm2_bias": "norm2.bias",
    "qkv": "self_attn.in_projs.0.weight",
    "out": "self_attn.out_projs.0.weight",
    "up": "linear1.weight",
    "down": "linear2.weight",
    "scale1": "layer_scale_1.scale",
    "scale2": "layer_scale_2.scale",
}
_USED_AT_LEAST = 1e-5
"""Of an entry's share, by which its sum is divided."""


def _mimi_names(network: Mimi) -> dict[str, str | list[str]]:
    """Our names to kyutai's; a quantizer's tables to the prefixes of its codebooks."""
    out: dict[str, str | list[str]] = {}
    for name, _ in network.named_parameters():
        side, _, rest = name.partition(".")
        match rest.split("."):
            case ["tables"]:
                rvq, count = ("rvq_first", 1) if side == "semantic" else ("rvq_rest", network.count - 1)
                out[name] = [f"quantizer.{rvq}.vq.layers.{i}._codebook." for i in range(count)]
            case [("inputs" | "outputs") as way]:
                rvq = "rvq_first" if side == "semantic" else "rvq_rest"
                out[name] = f"quantizer.{rvq}.{way[:-1]}_proj.weight"
            case ["resample", leaf]:
                out[name] = (
                    f"downsample.conv.conv.conv.{leaf}"
                    if side == "encoder"
                    else f"upsample.convtr.convtr.convtr.{leaf}"
                )
            case ["transformer", "layers", index, part]:
                out[name] = f"{side}_transformer.transformer.layers.{index}.{_MIMI_LAYER[part]}"
            case [("first" | "last") as end, leaf]:
                place = 0 if end == "first" else 3 * len(network.config.ratios) + 2
                out[name] = f"{side}.model.{place}.conv.conv.{leaf}"
            case ["strided", index, leaf]:
                kind = "conv.conv" if side == "encoder" else "convtr.convtr"
                out[name] = f"{side}.model.{3 * int(index) + (3 if side == 'encoder' else 2)}.{kind}.{leaf}"
            case ["residuals", index, part, leaf]:
                place = 3 * int(index) + (1 if side == "encoder" else 3)
                out[name] = f"{side}.model.{place}.block.{1 if part == 'narrow' else 3}.conv.conv.{leaf}"
            case _:
                raise AssertionError(f"no stored name for {name}")
    return out


def _centres(tensors: Any, found: Mapping[str, str], prefix: str) -> Tensor:
    """The entries of a codebook: running sums over running shares."""
    total: Tensor = tensors.get_tensor(found[prefix + "embedding_sum"]).float()
    share: Tensor = tensors.get_tensor(found[prefix + "cluster_usage"]).float()
    return total / share.clamp_min(_USED_AT_LEAST)[:, None]


def _pointwise(shape: tuple[int, ...], wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """A kernel [out, in, 1] serves as a matrix."""
    return shape[:2] if wanted is not None and len(wanted) == 2 and len(shape) == 3 and shape[2] == 1 else shape
