"""openpi's JAX parameters of pi0 and pi0.5 as this network's: names and axes, nothing else.

Axes as openpi's ``gemma.py``, ``siglip.py`` and ``lora.py`` store them, layers stacked in front: a dense kernel is
[L, in, out]; attention has q [L, h, D, d], kv [L, 2, g, D, d], out [L, h, d, D]; the MLP has gate and up [L, 2, D, F] and
down [L, F, D].
Linear weights here are [out, in]. Must not know how a checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realtime_omni.errors import ConfigError

Array = NDArray[Any]

_VISION = "PaliGemma/img/"
_BLOCK = f"{_VISION}Transformer/encoderblock/"
_HEADS = f"{_BLOCK}MultiHeadDotProductAttention_0/"
_LANGUAGE = "PaliGemma/llm/"
_LAYERS = f"{_LANGUAGE}layers/"
_TOWERS = (("language", ""), ("expert", "_1"))
"""Our name and openpi's suffix of the two towers."""
Params = Mapping[str, Array]


def convert(params: Params) -> dict[str, Array]:
    """Network name -> array. ``params``: flattened with ``/``, without a trailing ``/value``.

    Raises ConfigError that lists missing names, and names that have no use here (LoRA adapters, for instance)."""
    adaptive = f"{_LANGUAGE}final_norm_1/Dense_0/kernel" in params
    _refuse_other_names(set(params), expected_names(adaptive))
    found = dict(_vision(params))
    found["words.weight"] = params[f"{_LANGUAGE}embedder/input_embedding"]
    for tower, suffix in _TOWERS:
        found.update(_tower(params, tower, suffix, adaptive=adaptive and suffix == "_1"))
    found.update(_norm(params, "norm", f"{_LANGUAGE}final_norm_1", adaptive))
    for theirs, ours in _projections(adaptive).items():
        found[f"{ours}.weight"] = params[f"{theirs}/kernel"].T
        found[f"{ours}.bias"] = params[f"{theirs}/bias"]
    return {name: np.ascontiguousarray(value) for name, value in found.items()}


def expected_names(adaptive: bool) -> set[str]:
    """Every name of a pi0 (or, adaptive, pi0.5) model; the language tower's final norm too, which nobody reads."""
    dense = ("kernel", "bias")
    names = {f"{_LANGUAGE}embedder/input_embedding", f"{_LANGUAGE}final_norm/scale", f"{_VISION}pos_embedding"}
    names |= {f"{_VISION}{layer}/{part}" for layer in ("embedding", "head") for part in dense}
    names |= {f"{_VISION}Transformer/encoder_norm/{part}" for part in ("scale", "bias")}
    names |= {f"{_BLOCK}LayerNorm_{index}/{part}" for index in (0, 1) for part in ("scale", "bias")}
    names |= {f"{_BLOCK}MlpBlock_0/Dense_{index}/{part}" for index in (0, 1) for part in dense}
    names |= {f"{_HEADS}{layer}/{part}" for layer in ("query", "key", "value", "out") for part in dense}
    names |= {f"{layer}/{part}" for layer in _projections(adaptive) for part in dense}
    for _, suffix in _TOWERS:
        names |= {f"{_LAYERS}attn/{part}_einsum{suffix}/w" for part in ("q", "kv", "attn_vec")}
        names |= {f"{_LAYERS}mlp{suffix}/gating_einsum", f"{_LAYERS}mlp{suffix}/linear"}
        norms = [f"{_LAYERS}pre_attention_norm{suffix}", f"{_LAYERS}pre_ffw_norm{suffix}"]
        norms += [f"{_LANGUAGE}final_norm_1"] if suffix else []
        parts = [f"Dense_0/{part}" for part in dense] if adaptive and suffix else ["scale"]
        names |= {f"{norm}/{part}" for norm in norms for part in parts}
    return names


def _projections(adaptive: bool) -> dict[str, str]:
    """openpi's name -> ours."""
    both = {"action_in_proj": "action_in", "action_out_proj": "action_out"}
    if adaptive:
        return {**both, "time_mlp_in": "time_in", "time_mlp_out": "time_out"}
    return {**both, "state_proj": "state_in", "action_time_mlp_in": "time_in", "action_time_mlp_out": "time_out"}


def _vision(params: Params) -> Iterator[tuple[str, Array]]:
    yield "vision.patch.weight", params[f"{_VISION}embedding/kernel"].transpose(3, 2, 0, 1)
    yield "vision.patch.bias", params[f"{_VISION}embedding/bias"]
    yield "vision.position.weight", params[f"{_VISION}pos_embedding"][0]
    yield "vision.norm.weight", params[f"{_VISION}Transformer/encoder_norm/scale"]
    yield "vision.norm.bias", params[f"{_VISION}Transformer/encoder_norm/bias"]
    yield "projector.weight", params[f"{_VISION}head/kernel"].T
    yield "projector.bias", params[f"{_VISION}head/bias"]
    stacked = {
        "attn_norm.weight": params[f"{_BLOCK}LayerNorm_0/scale"],
        "attn_norm.bias": params[f"{_BLOCK}LayerNorm_0/bias"],
        "mlp_norm.weight": params[f"{_BLOCK}LayerNorm_1/scale"],
        "mlp_norm.bias": params[f"{_BLOCK}LayerNorm_1/bias"],
        "up.weight": params[f"{_BLOCK}MlpBlock_0/Dense_0/kernel"].swapaxes(1, 2),
        "up.bias": params[f"{_BLOCK}MlpBlock_0/Dense_0/bias"],
        "down.weight": params[f"{_BLOCK}MlpBlock_0/Dense_1/kernel"].swapaxes(1, 2),
        "down.bias": params[f"{_BLOCK}MlpBlock_0/Dense_1/bias"],
        "o.weight": _merged(params[f"{_HEADS}out/kernel"], 1, 2).swapaxes(1, 2),
        "o.bias": params[f"{_HEADS}out/bias"],
    }
    for ours, theirs in (("q", "query"), ("k", "key"), ("v", "value")):
        stacked[f"{ours}.weight"] = _merged(params[f"{_HEADS}{theirs}/kernel"], 2, 3).swapaxes(1, 2)
        stacked[f"{ours}.bias"] = _merged(params[f"{_HEADS}{theirs}/bias"], 1, 2)
    yield from _unstacked("vision.layers", stacked)


def _tower(params: Params, tower: str, suffix: str, *, adaptive: bool) -> Iterator[tuple[str, Array]]:
    q = params[f"{_LAYERS}attn/q_einsum{suffix}/w"]
    kv = params[f"{_LAYERS}attn/kv_einsum{suffix}/w"]
    gated = params[f"{_LAYERS}mlp{suffix}/gating_einsum"]
    stacked = {
        "q.weight": _merged(q.swapaxes(2, 3), 1, 2),
        "k.weight": _merged(kv[:, 0].swapaxes(2, 3), 1, 2),
        "v.weight": _merged(kv[:, -1].swapaxes(2, 3), 1, 2),
        "o.weight": _merged(params[f"{_LAYERS}attn/attn_vec_einsum{suffix}/w"], 1, 2).swapaxes(1, 2),
        "gate.weight": gated[:, 0].swapaxes(1, 2),
        "up.weight": gated[:, -1].swapaxes(1, 2),
        "down.weight": params[f"{_LAYERS}mlp{suffix}/linear"].swapaxes(1, 2),
        **_norm(params, "attn_norm", f"{_LAYERS}pre_attention_norm{suffix}", adaptive),
        **_norm(params, "mlp_norm", f"{_LAYERS}pre_ffw_norm{suffix}", adaptive),
    }
    yield from _unstacked(tower, stacked)


def _norm(params: Params, ours: str, theirs: str, adaptive: bool) -> dict[str, Array]:
    """A norm, stacked or not; an adaptive one is a dense layer in the order scale, shift, gate on both sides."""
    if not adaptive:
        return {f"{ours}.weight": params[f"{theirs}/scale"]}
    kernel = params[f"{theirs}/Dense_0/kernel"]
    return {f"{ours}.dense.weight": kernel.swapaxes(-1, -2), f"{ours}.dense.bias": params[f"{theirs}/Dense_0/bias"]}


def _unstacked(prefix: str, stacked: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    for name, values in stacked.items():
        for index, value in enumerate(values):
            yield f"{prefix}.{index}.{name}", value


def _merged(array: Array, first: int, second: int) -> Array:
    """Two neighbouring axes as one."""
    shape = array.shape
    return array.reshape(*shape[:first], shape[first] * shape[second], *shape[second + 1 :])


def _refuse_other_names(there: set[str], expected: set[str]) -> None:
    lists = (("missing", expected - there), ("unknown", there - expected))
    parts = [f"{title}: {', '.join(sorted(names))}" for title, names in lists if names]
    if parts:
        raise ConfigError(f"params are not a pi0 or pi0.5 model; {'; '.join(parts)}", path="params")
