"""The policy's dimensions and its words: pi0's network, small.

Owns: sizes, vocabulary, the tokens of each instruction. The network itself is ``realtime_omni.models.pi0``'s.
"""

from __future__ import annotations

import re

from realtime_omni.models.common.vla.decoder import DecoderConfig
from realtime_omni.models.common.vla.siglip import VisionConfig
from realtime_omni.models.pi0.loader import Geometry
from realtime_omni.models.pi0.network import Pi0Config
from recipes.tiny_policy.table import ACTION_DIM, INSTRUCTIONS, STATE_DIM

HORIZON = 16
EXECUTED = 8
"""Actions of a chunk that are executed before the next one begins."""
STEPS = 10
SIZE = 96
BOS, UNKNOWN, LINE_END = "<bos>", "<unk>", "\n"


def words_of(text: str) -> list[str]:
    return re.findall(r"\n|\w+|[^\w\s]", text)


VOCABULARY = (BOS, UNKNOWN, LINE_END, *sorted({word for text in INSTRUCTIONS for word in words_of(text)}))


def tokens_of(instruction: str) -> list[int]:
    """What the checkpoint's ``tokenizer.json`` makes of a prompt: the beginning, the words, a line end."""
    known = {word: number for number, word in enumerate(VOCABULARY)}
    return [0, *(known.get(word, 1) for word in words_of(instruction + LINE_END))]


PROMPT_TOKENS = max(len(tokens_of(text)) for text in INSTRUCTIONS)

SHIPPED = Geometry(
    vision=VisionConfig(image_size=SIZE, patch=12, width=192, layers=4, heads=4, mlp_width=768),
    language=DecoderConfig(width=192, layers=5, mlp_width=448, heads=4, kv_heads=2, head_dim=48),
    expert=DecoderConfig(width=128, layers=5, mlp_width=384, heads=4, kv_heads=2, head_dim=48),
)
TRY = Geometry(
    vision=VisionConfig(image_size=48, patch=8, width=64, layers=2, heads=2, mlp_width=128),
    language=DecoderConfig(width=64, layers=2, mlp_width=128, heads=2, kv_heads=1, head_dim=32),
    expert=DecoderConfig(width=64, layers=2, mlp_width=128, heads=2, kv_heads=1, head_dim=32),
)
"""Small enough to try the code on a CPU."""


def network_config(geometry: Geometry) -> Pi0Config:
    return Pi0Config(
        vision=geometry.vision,
        language=geometry.language,
        expert=geometry.expert,
        vocabulary=len(VOCABULARY),
        horizon=HORIZON,
        state_dim=STATE_DIM,
        action_dim=ACTION_DIM,
        steps=STEPS,
        prompt_tokens=PROMPT_TOKENS,
    )
