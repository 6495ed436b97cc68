"""Sizes of the language model and of Mimi, and what of a checkpoint's ``config.json`` decides them.

Owns the refusal of what this implementation does not compute: nothing of a configuration is ignored in silence.
Source of the names and of the 7B values: kyutai's published configurations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from realtime_omni.errors import ConfigError


class LMConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the language model, under the names of ``config.json``.

    ``n_q``: audio streams of both speakers; ``dep_q``: how many of them the depth transformer can predict; ``card`` and
    ``text_card``: tokens, one more of each stands for "nothing yet". ``delays``: steps per stream, text first. ``context``:
    steps that attention reaches back, its own included.
    """

    dim: int
    num_heads: int
    num_layers: int
    context: int
    n_q: int
    dep_q: int
    card: int
    text_card: int
    delays: tuple[int, ...]
    depformer_dim: int
    depformer_num_heads: int
    depformer_num_layers: int
    depformer_dim_feedforward: int
    hidden_scale: float = 4.125
    max_period: float = 10_000
    existing_text_padding_id: int = 3
    existing_text_end_padding_id: int = 0

    def __post_init__(self) -> None:
        if self.dim % (2 * self.num_heads) or self.depformer_dim % self.depformer_num_heads:
            raise ValueError("dim must be an even number per head, depformer_dim a whole one")
        if len(self.delays) != self.n_q + 1 or min(self.delays) < 0:
            raise ValueError(f"delays has {len(self.delays)} numbers, not {self.n_q + 1} of 0 or more")
        if not 0 < self.dep_q <= self.n_q or self.context < 1:
            raise ValueError("dep_q must lie in 1..n_q, context be positive")

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def hidden(self) -> int:
        """Of the gated layer: two thirds of ``hidden_scale * dim``."""
        return gated_hidden(self.dim, int(self.hidden_scale * self.dim))

    @property
    def depth_hidden(self) -> int:
        return gated_hidden(self.depformer_dim, self.depformer_dim_feedforward)

    @property
    def own_streams(self) -> int:
        """Audio streams of the agent; the user's are the rest."""
        return self.n_q // 2


def gated_hidden(dim: int, feedforward: int) -> int:
    """Width of a gated layer with as many weights as a plain one of width ``feedforward`` (kyutai: 21/8 of ``dim`` where
    that is 4 of ``dim``)."""
    return 21 * dim // 8 if feedforward == 4 * dim else 2 * feedforward // 3


MOSHI_7B = LMConfig(
    dim=4096,
    num_heads=32,
    num_layers=32,
    context=3000,
    n_q=16,
    dep_q=8,
    card=2048,
    text_card=32_000,
    delays=(0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1),
    depformer_dim=1024,
    depformer_num_heads=16,
    depformer_num_layers=6,
    depformer_dim_feedforward=4224,
)


class MimiConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the codec. ``ratios``: upsampling factors of the decoder, in its order; ``hidden``: of the transformers' layers;
    ``context``: positions that attention reaches back, of which there are ``per_frame`` in a frame; ``bins``: codes of one of
    the ``codebooks`` that the quantizer has."""

    dimension: int = 512
    filters: int = 64
    ratios: tuple[int, ...] = (8, 6, 5, 4)
    kernel: int = 7
    residual_kernel: int = 3
    last_kernel: int = 3
    compress: int = 2
    heads: int = 8
    layers: int = 8
    hidden: int = 2048
    context: int = 250
    max_period: float = 10_000
    codebooks: int = 32
    bins: int = 2048
    codebook_dim: int = 256
    sample_rate: int = 24_000
    frame_rate: float = 12.5

    @property
    def frame_samples(self) -> int:
        return round(self.sample_rate / self.frame_rate)

    @property
    def per_frame(self) -> int:
        return self.frame_samples // math.prod(self.ratios)

    @property
    def head_dim(self) -> int:
        return self.dimension // self.heads


def mimi_config(raw: Mapping[str, Any]) -> MimiConfig:
    """From the keys of kyutai's ``mimi_config.json``. Raises ConfigError for another network."""
    try:
        seanet, transformer, quantizer = raw["seanet"], raw["transformer"], raw["quantizer"]
        wrong = [
            name
            for name, fits in (
                ("seanet", seanet["n_residual_layers"] == 1 and seanet["true_skip"] and seanet["norm"] == "none"),
                ("seanet.pad_mode", seanet["pad_mode"] == "constant" and seanet["activation"] == "ELU"),
                ("transformer", transformer["gating"] == "none" and transformer["norm"] == "layer_norm"),
                ("transformer.d_model", transformer["d_model"] == seanet["dimension"]),
                ("transformer.positional_embedding", transformer["positional_embedding"] == "rope"),
            )
            if not fits
        ]
        if wrong:
            raise ConfigError(f"mimi_config.json describes another codec: {', '.join(wrong)}", path="mimi_config.json")
        return MimiConfig(
            dimension=seanet["dimension"],
            filters=seanet["n_filters"],
            ratios=tuple(seanet["ratios"]),
            kernel=seanet["kernel_size"],
            residual_kernel=seanet["residual_kernel_size"],
            last_kernel=seanet["last_kernel_size"],
            compress=seanet["compress"],
            heads=transformer["num_heads"],
            layers=transformer["num_layers"],
            hidden=transformer["dim_feedforward"],
            context=transformer["context"],
            max_period=transformer["max_period"],
            codebooks=quantizer["n_q"],
            bins=quantizer["bins"],
            codebook_dim=quantizer["dimension"],
            sample_rate=raw["sample_rate"],
            frame_rate=raw["frame_rate"],
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"mimi_config.json lacks {error}", path="mimi_config.json") from None


_EXPECTED: Mapping[str, object] = {
    "causal": True,
    "layer_scale": None,
    "gating": "silu",
    "norm": "rms_norm_f32",
    "positional_embedding": "rope",
    "depformer_layer_scale": None,
    "depformer_multi_linear": True,
    "depformer_gating": "silu",
    "depformer_pos_emb": "none",
    "depformer_weights_per_step": True,
    "depformer_causal": True,
    "demux_second_stream": False,
    "conditioners": {},
    "cross_attention": False,
    "model_type": "moshi",
}
"""Keys whose other values would need another network."""
_UNUSED = frozenset(
    (
        *("depformer_context", "depformer_max_period", "moshi_name", "mimi_name", "tokenizer_name", "lm_gen_config"),
        *("model_id", "fuser", "version", "stt_config", "tts_config"),
    )
)


def read_config(folder: Path) -> LMConfig | None:
    """What ``config.json`` says; None: there is none, or it has no sizes (NVIDIA's). Raises ConfigError."""
    file = folder / "config.json"
    if not file.exists():
        return None
    try:
        raw = json.loads(file.read_bytes())
    except ValueError:
        raise ConfigError("config.json is no JSON", path="config.json") from None
    if not isinstance(raw, dict) or "dim" not in raw:
        return None
    return lm_config(raw)


def lm_config(raw: Mapping[str, Any]) -> LMConfig:
    """Raises ConfigError naming every key that does not fit."""
    known = set(LMConfig.__struct_fields__)
    wrong = [
        f"{key}={value!r}"
        for key, value in sorted(raw.items())
        if key not in known and key not in _UNUSED and not (key in _EXPECTED and _EXPECTED[key] == value)
    ]
    if wrong:
        raise ConfigError(f"config.json describes another network: {', '.join(wrong)}", path="config.json")
    try:
        return msgspec.convert({key: raw[key] for key in raw.keys() & known}, LMConfig)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"config.json: {error}", path="config.json") from None
