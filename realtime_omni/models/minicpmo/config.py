"""Sizes of the three networks, and what of a checkpoint's ``config.json`` decides them.

Owns the refusal of what this implementation does not compute. Source of the names and defaults: the published configuration of
MiniCPM-o 4.5 (OpenBMB, Apache-2.0), read as facts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from realtime_omni.errors import ConfigError


class DecoderConfig(msgspec.Struct, frozen=True):
    """Of a causal transformer with rotary positions, under transformers' names. ``qk_norm``: heads of q and k are normed,
    as in Qwen3."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    qk_norm: bool = False


class EarConfig(msgspec.Struct, frozen=True):
    """Of the Whisper encoder, under transformers' names. ``pool``: positions that become one token of the language model."""

    d_model: int = 1024
    encoder_layers: int = 24
    encoder_attention_heads: int = 16
    encoder_ffn_dim: int = 4096
    num_mel_bins: int = 80
    max_source_positions: int = 1500
    pool: int = 5

    def __post_init__(self) -> None:
        if self.d_model % self.encoder_attention_heads or self.encoder_ffn_dim != 4 * self.d_model:
            raise ValueError("d_model must be a whole number per head, encoder_ffn_dim four times as wide")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.encoder_attention_heads


class Config45(msgspec.Struct, frozen=True):
    """Of the whole model. ``vocab_size``: of the language model. ``text_tokens`` and ``audio_tokens``: of the talker, the
    last audio token ends its speech. ``audio_bos``: the talker's token that sound begins with."""

    language: DecoderConfig
    vocab_size: int
    ears: EarConfig
    talker: DecoderConfig
    text_tokens: int
    audio_tokens: int
    audio_bos: int


_LANGUAGE_FIXED: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "rope_scaling": None,
    "audio_chunk_length": 1.0,
    "init_audio": True,
    "init_tts": True,
}
"""Keys whose other values would need another network."""
_EARS_FIXED: Mapping[str, object] = {"activation_function": "gelu", "scale_embedding": False}
_TALKER_FIXED: Mapping[str, object] = {
    "backbone_model": "llama",
    "projector_type": "mlp",
    "condition_type": "hidden_text_merge",
    "num_vq": 1,
    "hidden_act": "silu",
}


def read_config(folder: Path) -> Config45:
    """What ``config.json`` says. Raises ConfigError: missing, no JSON, or another network."""
    try:
        raw = json.loads((folder / "config.json").read_bytes())
    except OSError:
        raise ConfigError(f"{folder.name} lacks config.json", path="config.json") from None
    except ValueError:
        raise ConfigError("config.json is no JSON", path="config.json") from None
    if not isinstance(raw, dict) or raw.get("model_type") != "minicpmo":
        raise ConfigError("config.json is not that of a MiniCPM-o", path="config.json")
    return config_of(raw)


def config_of(raw: Mapping[str, Any]) -> Config45:
    """Raises ConfigError naming what is missing or does not fit."""
    try:
        ears, talker = raw["audio_config"], raw["tts_config"]
        _refuse(raw, _LANGUAGE_FIXED, "")
        _refuse(ears, _EARS_FIXED, "audio_config.")
        _refuse(talker, _TALKER_FIXED, "tts_config.")
        heads, width = talker["num_attention_heads"], talker["hidden_size"]
        return Config45(
            language=msgspec.convert({**_rope(raw), "qk_norm": True}, DecoderConfig),
            vocab_size=raw["vocab_size"],
            ears=msgspec.convert({**ears, "pool": raw.get("audio_pool_step", EarConfig.pool)}, EarConfig),
            talker=msgspec.convert({**_rope(talker), "head_dim": width // heads}, DecoderConfig),
            text_tokens=talker["num_text_tokens"],
            audio_tokens=talker["num_audio_tokens"],
            audio_bos=talker["audio_bos_token_id"],
        )
    except KeyError as error:
        raise ConfigError(f"config.json lacks {error}", path="config.json") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.json: {error}", path="config.json") from None


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Newer files write the base of the rotary positions into a table of its own."""
    inner = raw.get("rope_parameters")
    return {**raw, "rope_theta": inner["rope_theta"]} if isinstance(inner, dict) and "rope_theta" in inner else raw


def _refuse(raw: Mapping[str, Any], fixed: Mapping[str, object], prefix: str) -> None:
    wrong = [f"{prefix}{k}={raw[k]!r}" for k, value in fixed.items() if k in raw and raw[k] != value]
    if wrong:
        raise ConfigError(f"config.json describes another network: {', '.join(wrong)}", path="config.json")
