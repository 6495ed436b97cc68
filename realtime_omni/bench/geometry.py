"""pi0's real dimensions with random weights: what a chunk costs, without a checkpoint.

Owns the stand-ins for what a checkpoint brings: tokens made from words, statistics of one. The numbers that come out mean
nothing; the time that they take does.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import torch

from realtime_omni.models.common.vla.decoder import DecoderConfig
from realtime_omni.models.common.vla.graphs import Speed
from realtime_omni.models.common.vla.images import Fit
from realtime_omni.models.common.vla.normalize import Normalizer
from realtime_omni.models.common.vla.openpi import CAMERAS
from realtime_omni.models.common.vla.policy import Policy
from realtime_omni.models.common.vla.processing import Processing
from realtime_omni.models.common.vla.prompts import PromptForm
from realtime_omni.models.common.vla.serving import VLAModel
from realtime_omni.models.common.vla.siglip import VisionConfig
from realtime_omni.models.pi0.network import Pi0Config, Pi0Network

if TYPE_CHECKING:
    from realtime_omni.config import Config

_TOWER = DecoderConfig(width=32, layers=2, mlp_width=48, heads=4, kv_heads=1, head_dim=8)
TINY = Pi0Config(
    vision=VisionConfig(image_size=224, patch=56, width=16, layers=1, heads=2, mlp_width=24),
    language=_TOWER,
    expert=_TOWER,
    vocabulary=1000,
)
"""The same code in milliseconds, for tests of the bench."""


class GeometryOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    scale: Literal["full", "tiny"] = "full"
    speed: Speed = "auto"


class WordTokenizer:
    """A beginning-of-text token and one id per word."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def encode(self, text: str) -> Sequence[int]:
        return [2, *(zlib.crc32(word.encode()) % self._vocabulary for word in text.split())]


class Pi0Geometry(VLAModel):
    """``realtime_omni.bench.geometry:Pi0Geometry`` where a recipe names a model."""

    @classmethod
    def from_config(cls, config: Config) -> Pi0Geometry:
        options = config.options_as(GeometryOptions)
        dims = TINY if options.scale == "tiny" else Pi0Config()
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, config.dtype))  # 3.2 G parameters are never held in float32
        try:
            with torch.device(config.device):
                network = Pi0Network(dims).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(before)
        policy = Policy("pi0", network, _processing(dims))
        model = cls("pi0-geometry", policy, device=config.device, speed=options.speed)
        model.capture(config.engine.max_batch)
        return model


def _processing(dims: Pi0Config) -> Processing:
    return Processing(
        cameras=CAMERAS,
        image_size=dims.vision.image_size,
        fit=Fit.CENTRED,
        prompt=PromptForm.LINE,
        prompt_tokens=dims.prompt_tokens,
        tokenizer=WordTokenizer(dims.vocabulary),
        vocabulary=dims.vocabulary,
        state=Normalizer.identity(),
        action=Normalizer.identity(),
        state_channels=dims.state_dim,
        action_channels=dims.action_dim,
        state_dim=dims.state_dim,
        action_dim=dims.action_dim,
    )
