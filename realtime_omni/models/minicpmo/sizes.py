"""What a call's state may hold: bytes for the plan, shapes for a saved one."""

from __future__ import annotations

import torch

from realtime_omni.models.minicpmo import mel, mouth
from realtime_omni.models.minicpmo.config import Config45, DecoderConfig, EarConfig
from realtime_omni.models.minicpmo.ears import POSITIONS, most_seconds
from realtime_omni.models.minicpmo.settings import Settings
from realtime_omni.models.minicpmo.state import Shapes
from realtime_omni.models.minicpmo.talker import CODES
from realtime_omni.models.minicpmo.thinking import CLOSING


def own_bytes(config: Config45, itemsize: int, voice_bytes: int) -> int:
    """Of a state, at most. ``voice_bytes``: the vocoder's."""
    tokens = POSITIONS // config.ears.pool * config.language.hidden_size * itemsize
    return (
        most_seconds(config.ears) * second_bytes(config.ears, itemsize)
        + config.talker.max_position_embeddings * position_bytes(config.talker, itemsize)
        + mel.KEPT_UNITS * 4 * mel.UNIT
        + tokens
        + 4 * mouth.MOST_PENDING
        + voice_bytes
    )


def past_bytes(config: Config45, settings: Settings, itemsize: int, voice_bytes: int) -> int:
    """Of an earlier state, beyond what later ones hold. The encoder and the talker each forget everything at once at most once
    in the seconds that a call may go back, so all earlier states together hold that once, and each its own second.
    (A turn of a second is forgotten every second, and holds no more than that.)"""
    whole = own_bytes(config, itemsize, 0)
    turn = (settings.unit_words + CODES) * position_bytes(config.talker, itemsize)
    each = second_bytes(config.ears, itemsize) + 4 * mel.UNIT + 4 * mouth.MOST_PENDING + turn + voice_bytes
    return each - (-whole // max(settings.rewind_units, 1))


def second_bytes(config: EarConfig, itemsize: int) -> int:
    """Of a second that the encoder remembers."""
    return 2 * config.encoder_layers * POSITIONS * config.d_model * itemsize


def position_bytes(config: DecoderConfig, itemsize: int) -> int:
    """Of a position that the talker remembers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize


def unit_tokens(config: Config45, settings: Settings) -> tuple[int, int]:
    """Of a unit, at least and at most: ``<unit>``, the second, what is written, ``</unit>``."""
    heard = POSITIONS // config.ears.pool
    return 1 + heard + CLOSING, 1 + heard + settings.unit_words + 1


def shapes(config: Config45, settings: Settings, blocks: int, dtype: torch.dtype) -> Shapes:
    """``blocks``: of a call's prompt and first unit."""
    ears, talker = config.ears, config.talker
    return Shapes(
        part=(ears.encoder_layers, 2, POSITIONS, ears.encoder_attention_heads, ears.head_dim),
        turn=(talker.num_hidden_layers, 2, talker.num_key_value_heads, talker.head_dim),
        first=(POSITIONS // ears.pool, config.language.hidden_size),
        most_seconds=most_seconds(ears),
        most_positions=talker.max_position_embeddings,
        blocks=blocks,
        unit_tokens=unit_tokens(config, settings),
        words=config.vocab_size,
        codes=config.audio_tokens,
        dtype=dtype,
    )
