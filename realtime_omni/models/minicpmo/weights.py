"""Checkpoints into the networks: OpenBMB's safetensors, one file or many, or a refusal that lists every name that does not fit.

Parameters that hold several of the checkpoint's one below the other (``qkv``, ``gate_up``) are filled piece by piece.
The talker's head is stored as a direction and a length a row (weight normalisation); it is multiplied out here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.weights import Names, match_names, refuse_quantised, shapes_in
from realtime_omni.models.minicpmo.ears import Ears
from realtime_omni.models.minicpmo.network import Language
from realtime_omni.models.minicpmo.talker import Talker

INDEX = "model.safetensors.index.json"
_HEAD = "tts.head_code.0.parametrizations.weight.original"

_DECODER = (
    (r"layers\.(\d+)\.norm1", r"layers.\1.input_layernorm.weight"),
    (r"layers\.(\d+)\.norm2", r"layers.\1.post_attention_layernorm.weight"),
    (r"layers\.(\d+)\.qkv", r"layers.\1.self_attn.{q,k,v}_proj.weight"),
    (r"layers\.(\d+)\.([qk])_norm", r"layers.\1.self_attn.\2_norm.weight"),
    (r"layers\.(\d+)\.out", r"layers.\1.self_attn.o_proj.weight"),
    (r"layers\.(\d+)\.gate_up", r"layers.\1.mlp.{gate,up}_proj.weight"),
    (r"layers\.(\d+)\.down", r"layers.\1.mlp.down_proj.weight"),
    (r"norm", r"norm.weight"),
)
_LANGUAGE = (
    (r"embed", "llm.model.embed_tokens.weight"),
    (r"head", "llm.lm_head.weight"),
    *((rf"decoder\.{ours}", f"llm.model.{theirs}") for ours, theirs in _DECODER),
)
_TALKER = (
    (r"embed_text", "tts.emb_text.weight"),
    (r"embed_code", "tts.emb_code.0.weight"),
    (r"project(\d)", r"tts.projector_semantic.linear\1.weight"),
    (r"project(\d)_bias", r"tts.projector_semantic.linear\1.bias"),
    (r"head", f"{_HEAD}1"),
    *((rf"decoder\.{ours}", f"tts.model.{theirs}") for ours, theirs in _DECODER),
)
_EARS = (
    (r"conv(\d)", r"apm.conv\1.weight"),
    (r"conv(\d)_bias", r"apm.conv\1.bias"),
    (r"positions", "apm.embed_positions.weight"),
    (r"layers\.(\d+)\.norm1", r"apm.layers.\1.self_attn_layer_norm.weight"),
    (r"layers\.(\d+)\.norm1_bias", r"apm.layers.\1.self_attn_layer_norm.bias"),
    (r"layers\.(\d+)\.qkv", r"apm.layers.\1.self_attn.{q,k,v}_proj.weight"),
    (r"layers\.(\d+)\.qkv_bias", r"apm.layers.\1.self_attn.{q,0,v}_proj.bias"),
    (r"layers\.(\d+)\.out", r"apm.layers.\1.self_attn.out_proj.weight"),
    (r"layers\.(\d+)\.out_bias", r"apm.layers.\1.self_attn.out_proj.bias"),
    (r"layers\.(\d+)\.norm2", r"apm.layers.\1.final_layer_norm.weight"),
    (r"layers\.(\d+)\.norm2_bias", r"apm.layers.\1.final_layer_norm.bias"),
    (r"layers\.(\d+)\.up", r"apm.layers.\1.fc1.weight"),
    (r"layers\.(\d+)\.up_bias", r"apm.layers.\1.fc1.bias"),
    (r"layers\.(\d+)\.down", r"apm.layers.\1.fc2.weight"),
    (r"layers\.(\d+)\.down_bias", r"apm.layers.\1.fc2.bias"),
    (r"norm", "apm.layer_norm.weight"),
    (r"norm_bias", "apm.layer_norm.bias"),
    (r"project(\d)", r"audio_projection_layer.linear\1.weight"),
    (r"project(\d)_bias", r"audio_projection_layer.linear\1.bias"),
)
"""Our parameter to the checkpoint's name; ``{a,b}``: pieces one below the other, ``0``: zeros that are not stored."""
_UNUSED = Names(
    rules=(), ignored=(r"vpm\..*", r"resampler\..*", r"tts\.projector_spk\..*", r"tts\.model\.embed_tokens\.weight")
)
"""Sight, and what the talker has for other ways of talking."""


class Checkpoint:
    """The tensors of a folder, whichever file each is in."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError: no weights, an index that does not fit its files, a name in two files, quantised weights."""
        self.folder = folder
        self.files = _files(folder)
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self.files:
            for name, shape in shapes_in(file).items():
                if name in self._file_of:
                    raise ConfigError(f"{name} is in {self._file_of[name].name} and in {file.name}", path=file.name)
                self._file_of[name], self.shapes[name] = file, shape

    def read(self, names: Mapping[str, Callable[[Tensor], Any]]) -> None:
        """Hand every named tensor to whom it is for, file by file."""
        for file in self.files:
            with safe_open(file, "pt") as tensors:
                for name in sorted(n for n in names if self._file_of[n] == file):
                    refuse_quantised(name, tensors.get_slice(name).get_dtype(), file.name)
                    names[name](tensors.get_tensor(name))


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ConfigError(f"{folder.name} lacks model.safetensors and {INDEX}", path="options.checkpoint")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{INDEX} cannot be read", path=INDEX) from None
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise ConfigError(f"{INDEX} names files outside its folder", path=INDEX)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{folder.name} lacks {', '.join(missing)}", path="options.checkpoint")
    return [folder / name for name in names]


def load_networks(
    checkpoint: Checkpoint,
    language: Language,
    ears: Ears,
    talker: Talker,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Fill the networks, which may stand on the ``meta`` device; nothing is held twice.

    Raises ConfigError that lists missing and unexpected names and different shapes; the networks are then unchanged."""
    networks = (language, ears, talker)
    _, empty_pieces = _targets(networks, dtype, "meta")
    wanted = {name: tuple(piece.shape) for name, piece in empty_pieces.items()}
    match_names(checkpoint.shapes, _UNUSED, {**wanted, f"{_HEAD}0": (talker.head.shape[0], 1)}, checkpoint.folder.name)
    parameters, pieces = _targets(networks, dtype, device)
    lengths: list[Tensor] = []
    fill: dict[str, Callable[[Tensor], Any]] = {name: piece.copy_ for name, piece in pieces.items()}
    checkpoint.read({**fill, f"{_HEAD}0": lengths.append})
    head = parameters[2]["head"]
    direction = head.float()
    head.copy_(lengths[0].to(direction) * direction / direction.norm(dim=1, keepdim=True))
    for network, tensors in zip(networks, parameters, strict=True):
        _replace(network, tensors)


def _targets(
    networks: tuple[Language, Ears, Talker], dtype: torch.dtype, device: torch.device | str
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """New parameters of each network by our names, and the parts of them that stored tensors fill, by theirs."""
    language, _, talker = networks
    heads = (_head_sizes(language.decoder), None, _head_sizes(talker.decoder))
    made: list[dict[str, Tensor]] = []
    pieces: dict[str, Tensor] = {}
    for network, table, split in zip(networks, (_LANGUAGE, _EARS, _TALKER), heads, strict=True):
        shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
        made.append({name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()})
        for name, whole in made[-1].items():
            pieces.update(_pieces(_stored(name, table), whole, split))
    return made, pieces


def _head_sizes(decoder: Any) -> tuple[int, int, int]:
    size = decoder.config
    each = (size.num_attention_heads, size.num_key_value_heads, size.num_key_value_heads)
    return tuple(n * size.head_dim for n in each)


def _stored(name: str, table: tuple[tuple[str, str], ...]) -> str:
    pattern, stored = next(rule for rule in table if re.fullmatch(rule[0], name))
    return re.sub(pattern, stored, name)


def _pieces(stored: str, whole: Tensor, heads: tuple[int, int, int] | None) -> list[tuple[str, Tensor]]:
    """Stored names and the part of ``whole`` that each fills."""
    found = re.search(r"\{(.*)\}", stored)
    if found is None:
        return [(stored, whole)]
    parts = found.group(1).split(",")
    sizes = list(heads) if heads is not None and len(parts) == 3 else [len(whole) // len(parts)] * len(parts)
    split = zip(parts, torch.split(whole, sizes), strict=True)
    return [(stored.replace(found.group(0), part), piece) for part, piece in split if part != "0"]


def _replace(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(path), leaf, nn.Parameter(tensor, requires_grad=False))
