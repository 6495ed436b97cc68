"""GGUF once, safetensors ever after: the language model's file is dequantised, made int8 by rows and cached.

Dequantising takes seconds at every start and needs a library; the cached file maps in a tenth of one. It carries the
hash of what it was made from and the tokenizer's own description, so nothing else is read later.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from realtime_omni.errors import ConfigError
from realtime_omni.models.voice.lm.network import LlamaConfig, names, quantize
from realtime_omni.models.voice.lm.tokens import describe_tokenizer

LAYOUT = "2"
"""Of the cached file; another one is made anew."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a cached file holds: sizes, tensors by the names of :func:`.network.names`, the tokenizer as JSON."""

    config: LlamaConfig
    tensors: dict[str, Tensor]
    tokenizer: str


def load(gguf: Path) -> Checkpoint:
    """The checkpoint of a GGUF file, from the cache beside it, which is written when it is not there.

    Raises ConfigError for a file that is no llama of the kind :mod:`.network` computes."""
    cached = gguf.with_suffix(f".int8-{LAYOUT}.safetensors")
    if not cached.is_file():
        _save(_convert(gguf), cached)
    return _read(cached)


def _read(path: Path) -> Checkpoint:
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        config = LlamaConfig(**json.loads(about["config"]))
        expected = names(config)
        if {n: tuple(t.shape) for n, t in tensors.items() if not n.endswith(".scale")} != expected:
            raise ValueError("its tensors are not those of its configuration")
        return Checkpoint(config, tensors, about["tokenizer"])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path.name} is damaged ({error}); delete it, it is made again") from error


def _save(checkpoint: Checkpoint, path: Path) -> None:
    about = {"config": json.dumps(asdict(checkpoint.config)), "tokenizer": checkpoint.tokenizer}
    partial = path.with_suffix(f".{os.getpid()}.partial")
    save_file(checkpoint.tensors, partial, metadata=about)
    os.replace(partial, path)


def _convert(path: Path) -> Checkpoint:
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    found = {tensor.name: tensor for tensor in reader.tensors}

    def matrix(*parts: str) -> Tensor:
        try:
            each = [gguf.quants.dequantize(found[p].data, found[p].tensor_type) for p in parts]
        except KeyError as error:
            raise ConfigError(f"{path.name} has no tensor {error}") from None
        return torch.cat([torch.from_numpy(part.copy()) for part in each])

    sources: dict[str, tuple[str, ...]] = {"embedding": ("token_embd.weight",), "norm": ("output_norm.weight",)}
    for i in range(config.layers):
        block, ours = f"blk.{i}.", f"layers.{i}."
        sources[f"{ours}norm1"] = (f"{block}attn_norm.weight",)
        sources[f"{ours}norm2"] = (f"{block}ffn_norm.weight",)
        sources[f"{ours}qkv"] = tuple(f"{block}attn_{p}.weight" for p in "qkv")
        sources[f"{ours}out"] = (f"{block}attn_output.weight",)
        sources[f"{ours}gate_up"] = (f"{block}ffn_gate.weight", f"{block}ffn_up.weight")
        sources[f"{ours}down"] = (f"{block}ffn_down.weight",)
    tensors: dict[str, Tensor] = {}
    for name, shape in names(config).items():
        weight = matrix(*sources[name])
        if weight.shape != shape:
            raise ConfigError(f"{path.name}: {name} has shape {tuple(weight.shape)}, expected {shape}")
        if weight.dim() == 1:
            tensors[name] = weight
        else:
            tensors[name], tensors[f"{name}.scale"] = quantize(weight)
    return Checkpoint(config, tensors, describe_tokenizer(fields))


def _config(fields: dict[str, Any]) -> LlamaConfig:
    if fields.get("general.architecture") != "llama" or "llama.rope.scaling.type" in fields:
        raise ConfigError("only plain llama checkpoints are understood")
    return LlamaConfig(
        layers=fields["llama.block_count"],
        model=fields["llama.embedding_length"],
        hidden=fields["llama.feed_forward_length"],
        heads=fields["llama.attention.head_count"],
        kv_heads=fields["llama.attention.head_count_kv"],
        vocabulary=fields["llama.vocab_size"],
        rope_base=fields["llama.rope.freq_base"],
        norm_epsilon=fields["llama.attention.layer_norm_rms_epsilon"],
        context=fields["llama.context_length"],
    )
