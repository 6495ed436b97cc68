"""What an image-conditioned model of the Wan family looks at besides latents: the features of CLIP's vision tower.

Owns what is done to a picture before the tower sees it. The module is transformers' (imported when one is loaded); whatever
has :meth:`PictureEncoder.encode` may stand in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.pretrained import load_pretrained

TOKENS = 257
"""One for the whole picture and 16 x 16 patches of 14 pixels."""
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's training pictures (arXiv 2103.00020, as published with its weights)."""


class PictureEncoder(Protocol):
    """A picture to features."""

    @property
    def tokens(self) -> int:
        """L."""
        ...

    def encode(self, picture: Tensor) -> Tensor:
        """[L, context_width] of a picture uint8 [3, H, W]."""
        ...


class CLIPVision:
    """The layer before the last of the tower in ``folder`` (``config.json`` and safetensors, as transformers writes it)."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device | str) -> None:
        """Raises ConfigError, naming what is missing."""
        try:
            from transformers import CLIPVisionModel
        except ImportError:
            raise ConfigError(
                "the image encoder needs the package transformers", path="options.image_encoder"
            ) from None
        self._model: Any = load_pretrained(
            CLIPVisionModel,
            folder,
            what="image encoder",
            path="options.image_encoder",
            dtype=dtype,
            device=device,
        )
        self._dtype, self._device = dtype, device

    @property
    def tokens(self) -> int:
        config = self._model.config
        return 1 + (int(config.image_size) // int(config.patch_size)) ** 2

    @torch.no_grad()
    def encode(self, picture: Tensor) -> Tensor:
        pixels = prepared(picture.to(self._device), int(self._model.config.image_size)).to(self._dtype)
        found: Tensor = self._model(pixel_values=pixels[None], output_hidden_states=True).hidden_states[-2][0]
        return found


def prepared(picture: Tensor, size: int) -> Tensor:
    """float32 [3, size, size]: the whole picture uint8 [3, H, W], squeezed bicubically, in units of CLIP's statistics."""
    x = functional.interpolate(picture[None].float() / 255, (size, size), mode="bicubic", align_corners=False)[0]
    mean, std = (torch.tensor(values, device=x.device)[:, None, None] for values in (MEAN, STD))
    return (x - mean) / std
