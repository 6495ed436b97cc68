"""A LingBot of a few thousand parameters, with random weights that do not vanish."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from realtime_omni.errors import ArgumentError
from realtime_omni.models.common.wan.transformer import WanConfig, WanTransformer
from realtime_omni.models.common.wan.vae import WanVAE
from realtime_omni.models.lingbot.model import LingBot, Settings

CONFIG = WanConfig(
    layers=2,
    heads=2,
    head_dim=12,
    mlp_width=32,
    in_channels=12,
    out_channels=4,
    text_width=16,
    frequencies=32,
    camera_channels=384,
)


class HashedText:
    """Features that depend on the prompt and mean nothing."""

    def __init__(self, width: int, tokens: int = 5) -> None:
        self._width, self._tokens = width, tokens

    def check(self, prompt: str) -> None:
        if len(prompt) > 200:
            raise ArgumentError("the prompt is too long", path="prompt")

    def encode(self, prompt: str) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(prompt.encode()))
        return torch.randn(self._tokens, self._width, generator=generator)


def tiny_network(dtype: torch.dtype = torch.float64) -> WanTransformer:
    generator = torch.Generator().manual_seed(7)
    network = WanTransformer(CONFIG)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return network.to(dtype)


def tiny_vae() -> WanVAE:
    import diffusers

    torch.manual_seed(3)
    return WanVAE(
        diffusers.AutoencoderKLWan(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        )
    )


def tiny_lingbot(*, vae: bool = False, dtype: torch.dtype = torch.float32, **settings: Any) -> LingBot:
    chosen: dict[str, Any] = {"height": 32, "width": 48, "window_frames": 6, "sink_frames": 3}
    return LingBot(
        tiny_network(dtype),
        HashedText(CONFIG.text_width),
        Settings(**(chosen | settings)),
        name="tiny-lingbot",
        vae=tiny_vae() if vae else None,
        fingerprint="0" * 64,
    )
