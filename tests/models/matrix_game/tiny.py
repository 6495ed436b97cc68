"""A Matrix-Game of a few thousand parameters, with random weights that do not vanish."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.lingbot.tiny import tiny_vae
from realtime_omni.models.matrix_game.model import MatrixGame, Settings
from realtime_omni.models.matrix_game.network import MatrixGameConfig, MatrixGameTransformer

CONFIG = MatrixGameConfig(
    layers=2,
    heads=2,
    head_dim=12,
    mlp_width=32,
    in_channels=12,
    out_channels=4,
    frequencies=32,
    context_width=20,
    action_layers=1,
    action_heads=2,
    action_head_dim=16,
    key_width=8,
)


class Averaged:
    """Features that depend on the picture and mean little."""

    tokens = 5

    def encode(self, picture: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.tokens, CONFIG.context_width, generator=generator) + picture.float().mean() / 64


def tiny_network(dtype: torch.dtype = torch.float64) -> MatrixGameTransformer:
    generator = torch.Generator().manual_seed(7)
    network = MatrixGameTransformer(CONFIG)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return network.to(dtype)


def tiny_matrix_game(*, vae: bool = False, dtype: torch.dtype = torch.float32, **settings: Any) -> MatrixGame:
    chosen: dict[str, Any] = {"height": 32, "width": 48}
    return MatrixGame(
        tiny_network(dtype),
        Averaged(),
        Settings(**(chosen | settings)),
        name="tiny-matrix-game",
        vae=tiny_vae() if vae else None,
        fingerprint="0" * 64,
    )
