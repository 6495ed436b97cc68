"""The SigLIP vision tower of PaliGemma and SmolVLM2 (Zhai et al. 2023, arXiv 2303.15343): pictures to patch features.

Owns: the modules and their dimensions. Must not know: how many cameras there are, what projects the features into a
language model. Shape legend: N pictures, S side in pixels, P patches per picture, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.models.common.vla.decoder import gelu, share

NORM_EPS = 1e-6
TILE = 128
"""Columns that a GPU's product computes at once."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Dimensions of a tower; the default is So400m/14 at 224, the tower of pi0 and pi0.5."""

    image_size: int = 224
    patch: int = 14
    width: int = 1152
    layers: int = 27
    heads: int = 16
    mlp_width: int = 4304

    def __post_init__(self) -> None:
        if self.image_size % self.patch:
            raise ValueError(f"image_size {self.image_size} is not a multiple of patch {self.patch}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")

    @property
    def side(self) -> int:
        """Patches along one side of a picture."""
        return self.image_size // self.patch

    @property
    def patches(self) -> int:
        return self.side * self.side


SO400M = VisionConfig()


class VisionLayer(nn.Module):
    """Pre-norm attention over all patches of a picture, then an MLP."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attn_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.up = nn.Linear(width, config.mlp_width)
        self.down = nn.Linear(config.mlp_width, width)
        self.qkv: tuple[Tensor, Tensor] | None = None
        self.mlp: tuple[Tensor, Tensor, Tensor] | None = None

    def fuse(self) -> None:
        """One product for queries, keys and values from now on, and an MLP filled up with zeros to whole tiles (So400m's 4304
        to 4352: 48 pictures on an H200 23.3 instead of 26.7 ms); see :meth:`DecoderLayer.fuse`."""
        parts = [self.q, self.k, self.v]
        self.qkv = share(parts), torch.cat([part.bias.detach() for part in parts])
        width, free = self.up.out_features, -self.up.out_features % TILE
        up, down = (
            functional.pad(self.up.weight.detach(), (0, 0, 0, free)),
            functional.pad(self.down.weight.detach(), (0, free)),
        )
        self.mlp = up, functional.pad(self.up.bias.detach(), (0, free)), down
        self.up.weight = nn.Parameter(up[:width], requires_grad=self.up.weight.requires_grad)
        self.down.weight = nn.Parameter(down[:, :width], requires_grad=self.down.weight.requires_grad)

    def forward(self, x_NPD: Tensor) -> Tensor:
        h = self.attn_norm(x_NPD)
        projected = (
            (self.q(h), self.k(h), self.v(h)) if self.qkv is None else functional.linear(h, *self.qkv).chunk(3, -1)
        )
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in projected)
        seen = functional.scaled_dot_product_attention(q, k, v)
        x_NPD = x_NPD + self.o(seen.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x_NPD)
        if self.mlp is None:
            return x_NPD + cast("Tensor", self.down(gelu(self.up(h))))
        up, bias, down = self.mlp
        return x_NPD + functional.linear(gelu(functional.linear(h, up, bias)), down, self.down.bias)


class VisionTower(nn.Module):
    """Pictures [N, 3, S, S] in [-1, 1] to features [N, P, D], patches in row order."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch = nn.Conv2d(3, config.width, config.patch, stride=config.patch)
        self.position = nn.Embedding(config.patches, config.width)
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=NORM_EPS)

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.patch(images.to(self.patch.weight.dtype)).flatten(2).transpose(1, 2)
        x = x + self.position.weight
        for layer in self.layers:
            x = layer(x)
        normed: Tensor = self.norm(x)
        return normed
