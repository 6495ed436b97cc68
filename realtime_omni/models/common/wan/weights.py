"""Checkpoints of Wan transformers into ours: sharded safetensors, either layout, straight to the device.

Two layouts hold the same tensors under other names: the *native* one (Wan's and LingBot's own repositories) and that of
*diffusers*. Both are renamed to one vocabulary, in which matrices that we keep as one (queries, keys and values) are still
apart; a parameter is then made of the stored tensors that it consists of, one below the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.fp8 import Fp8Linear
from realtime_omni.models.common.wan.sharded import share_of, whole_shape
from realtime_omni.models.common.weights import Names, match_names, refuse_quantised, shapes_in
from realtime_omni.parallel.mesh import Grid

Progress = Callable[[int, int], None]
"""Called with the bytes that are in place and the bytes in all."""

NATIVE = Names(
    rules=(
        (r"^blocks\.", "layers."),
        (r"\.self_attn\.norm_([qk])\.", r".attention.\1_norm."),
        (r"\.self_attn\.o\.", ".attention.out."),
        (r"\.self_attn\.([qkv])\.", r".attention.\1."),
        (r"\.cross_attn\.norm_([qk])\.", r".cross.\1_norm."),
        (r"\.cross_attn\.o\.", ".cross.out."),
        (r"\.cross_attn\.([qkv])\.", r".cross.\1."),
        (r"\.norm3\.", ".cross_norm."),
        (r"\.ffn\.0\.", ".up."),
        (r"\.ffn\.2\.", ".down."),
        (r"\.cam_injector_layer1\.", ".camera.first."),
        (r"\.cam_injector_layer2\.", ".camera.second."),
        (r"\.cam_(scale|shift)_layer\.", r".camera.\1."),
        (r"^patch_embedding\.", "patches."),
        (r"^patch_embedding_wancamctrl\.", "camera_patches."),
        (r"^c2ws_hidden_states_layer1\.", "camera_first."),
        (r"^c2ws_hidden_states_layer2\.", "camera_second."),
        (r"^text_embedding\.0\.", "text_in."),
        (r"^text_embedding\.2\.", "text_out."),
        (r"^time_embedding\.0\.", "time_in."),
        (r"^time_embedding\.2\.", "time_out."),
        (r"^time_projection\.1\.", "time_projection."),
        (r"^head\.head\.", "head."),
        (r"^head\.modulation$", "head_modulation"),
    ),
    ignored=(r"freqs",),
)
"""Wan's and LingBot's own names."""

DIFFUSERS = Names(
    rules=(
        (r"^blocks\.", "layers."),
        (r"\.attn1\.norm_([qk])\.", r".attention.\1_norm."),
        (r"\.attn1\.to_out\.0\.", ".attention.out."),
        (r"\.attn1\.to_([qkv])\.", r".attention.\1."),
        (r"\.attn2\.norm_([qk])\.", r".cross.\1_norm."),
        (r"\.attn2\.to_out\.0\.", ".cross.out."),
        (r"\.attn2\.to_([qkv])\.", r".cross.\1."),
        (r"\.norm2\.", ".cross_norm."),
        (r"\.ffn\.net\.0\.proj\.", ".up."),
        (r"\.ffn\.net\.2\.", ".down."),
        (r"\.scale_shift_table$", ".modulation"),
        (r"\.cam_injector_layer1\.", ".camera.first."),
        (r"\.cam_injector_layer2\.", ".camera.second."),
        (r"\.cam_(scale|shift)_layer\.", r".camera.\1."),
        (r"^patch_embedding\.", "patches."),
        (r"^patch_embedding_wancamctrl\.", "camera_patches."),
        (r"^c2ws_hidden_states_layer1\.", "camera_first."),
        (r"^c2ws_hidden_states_layer2\.", "camera_second."),
        (r"^condition_embedder\.text_embedder\.linear_1\.", "text_in."),
        (r"^condition_embedder\.text_embedder\.linear_2\.", "text_out."),
        (r"^condition_embedder\.time_embedder\.linear_1\.", "time_in."),
        (r"^condition_embedder\.time_embedder\.linear_2\.", "time_out."),
        (r"^condition_embedder\.time_proj\.", "time_projection."),
        (r"^proj_out\.", "head."),
        (r"^scale_shift_table$", "head_modulation"),
    ),
    ignored=(r"rope\..*",),
)
"""Names of diffusers' ``WanTransformer3DModel``, with LingBot's camera layers under their native names."""

_FUSED = (
    (r"\.attention\.qkv\.", (".attention.q.", ".attention.k.", ".attention.v.")),
    (r"\.cross\.kv\.", (".cross.k.", ".cross.v.")),
    (r"\.image_kv\.", (".image_k.", ".image_v.")),
)


@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor that fills some rows of a parameter."""

    name: str
    rows: int


def layout_of(stored: Sequence[str]) -> Names:
    """Which of the two layouts these names are of. Raises ConfigError when neither."""
    if any(name.startswith("condition_embedder.") for name in stored):
        return DIFFUSERS
    if any(name.startswith("time_embedding.") for name in stored):
        return NATIVE
    raise ConfigError("the checkpoint's names are neither Wan's own nor those of diffusers", path="checkpoint")


def shards(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder, by name. Raises ConfigError when there is none."""
    found = tuple(sorted(folder.glob("*.safetensors")))
    if not found:
        raise ConfigError(f"{folder.name}: no safetensors file in it", path="checkpoint")
    return found


def parts_of(parameter: str, shape: Sequence[int]) -> tuple[Part, ...]:
    """What a parameter is made of, under the common vocabulary."""
    for pattern, names in _FUSED:
        if re.search(pattern, parameter):
            return tuple(Part(re.sub(pattern, name, parameter), shape[0] // len(names)) for name in names)
    return (Part(parameter, shape[0]),)


_WHOLE = Grid()


def load_transformer(
    network: nn.Module,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
    fp8: Collection[str] = (),
    grid: Grid = _WHOLE,
    names: Names | None = None,
) -> None:
    """Fill a network that may stand on the ``meta`` device, tensor by tensor; nothing is held twice, and of a network that is
    a share (``grid``) only its part is read.

    ``fp8``: names of linear maps that are quantised as soon as their weight is there
    (:class:`~realtime_omni.models.common.fp8.Fp8Linear`). ``names``: of a layout that is neither of the two.

    Raises ConfigError that lists missing and unexpected names, other shapes, a name in two shards, a tensor that is stored
    twice or quantised, or a file that is no safetensors; the network is then unchanged."""
    where, stored = _survey(shards(folder))
    names = layout_of(tuple(stored)) if names is None else names
    wanted = {
        part.name: whole_shape(part.name, (part.rows, *parameter.shape[1:]), grid.tensor_size)
        for name, parameter in network.named_parameters()
        for part in parts_of(name, parameter.shape)
    }
    flat = {name: _flat(shape, wanted.get(names.of(name), ())) for name, shape in stored.items()}
    found = match_names(flat, names, wanted, folder.name)
    total = sum(p.numel() for p in network.parameters()) * dtype.itemsize
    done = 0
    with ExitStack() as stack:
        files = {path: stack.enter_context(safe_open(path, "pt")) for path in set(where.values())}
        for name in found.values():
            refuse_quantised(name, files[where[name]].get_slice(name).get_dtype(), where[name].name)
        for name, parameter in list(network.named_parameters()):
            filled = torch.empty(parameter.shape, dtype=dtype, device=device)
            start = 0
            for part in parts_of(name, parameter.shape):
                source = files[where[found[part.name]]].get_slice(found[part.name])
                kept = share_of(part.name, wanted[part.name], grid)
                own = filled[start : start + part.rows]
                if kept is None:
                    own.zero_()
                else:
                    own.copy_(source[kept].view(own.shape))
                start += part.rows
            done += filled.nbytes
            path, _, leaf = name.rpartition(".")
            if path in fp8 and leaf == "weight":
                _replace(network, path, Fp8Linear(filled, None))  # its bias follows, as a parameter of its own
            else:
                _replace(network, name, nn.Parameter(filled, requires_grad=False))
            if progress is not None:
                progress(done, total)


def _survey(paths: Sequence[Path]) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
    where: dict[str, Path] = {}
    stored: dict[str, tuple[int, ...]] = {}
    for path in paths:
        for name, shape in shapes_in(path).items():
            if name in where:
                raise ConfigError(f"{name} is in {where[name].name} and in {path.name}", path=path.name)
            where[name], stored[name] = path, shape
    return where, stored


def _flat(shape: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """A kernel [out, in, 1, 2, 2] serves as a matrix [out, in * 4], a modulation [1, n, D] as [n, D]."""
    if len(shape) == 5 and len(target) == 2:
        return (shape[0], math.prod(shape[1:]))
    if len(shape) == 3 and len(target) == 2 and shape[0] == 1:
        return shape[1:]
    return shape


def _replace(network: nn.Module, name: str, parameter: nn.Parameter | nn.Module) -> None:
    path, _, leaf = name.rpartition(".")
    owner: Any = network.get_submodule(path) if path else network
    setattr(owner, leaf, parameter)
