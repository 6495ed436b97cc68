"""What a world model of the Wan family asks of its network: text, camera and passes, computed here or on several ranks.

Text and camera become values that the caller keeps and hands back as they are: only the network looks into them, and knows
them by the tensors that they consist of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from realtime_omni.models.base import BlockAttention
from realtime_omni.models.common.conditioning import stacked
from realtime_omni.models.common.wan.transformer import KeysValues, WanTransformer


class Network(Protocol):
    """One pass is over a block of some rows."""

    @property
    def kv_heads(self) -> int:
        """Heads whose keys and values lie in this process's pages."""
        ...

    def text(self, features: Tensor) -> tuple[KeysValues, ...]:
        """What passes need of encoded text [L, text_width]: of each layer, keys and values [L, heads, head_dim]."""
        ...

    def camera(self, pictures: Tensor) -> tuple[KeysValues, ...]:
        """What all passes over a block need of its camera input [B, F, camera_channels, H, W], layer by layer."""
        ...

    def flow(
        self,
        latents: Tensor,
        timestep: float,
        frames: Sequence[int],
        texts: Sequence[tuple[KeysValues, ...]],
        camera: tuple[KeysValues, ...] | None,
        attention: BlockAttention,
        *,
        rows: tuple[int, ...],
        commit: bool,
    ) -> Tensor:
        """The flow, float32 [B, F, out_channels, H, W], of latents [B, F, in_channels, H, W] at one timestep, 0..1000.

        ``frames``: of each row, the absolute number of its first frame; ``texts``: of each row; ``rows``: their numbers in
        the plan of ``attention``; ``commit``: whether this pass writes history."""
        ...


class LocalNetwork:
    """All of it in this process."""

    def __init__(self, transformer: WanTransformer) -> None:
        self.transformer = transformer

    @property
    def kv_heads(self) -> int:
        return self.transformer.config.heads

    def text(self, features: Tensor) -> tuple[KeysValues, ...]:
        return text_of_row(self.transformer, features)

    def camera(self, pictures: Tensor) -> tuple[KeysValues, ...]:
        return self.transformer.camera_cache(pictures)

    def flow(
        self,
        latents: Tensor,
        timestep: float,
        frames: Sequence[int],
        texts: Sequence[tuple[KeysValues, ...]],
        camera: tuple[KeysValues, ...] | None,
        attention: BlockAttention,
        *,
        rows: tuple[int, ...],
        commit: bool,
    ) -> Tensor:
        return forward(self.transformer, latents, timestep, frames, texts, camera, attention, rows=rows, commit=commit)


def text_of_row(transformer: WanTransformer, features: Tensor) -> tuple[KeysValues, ...]:
    return tuple((k[0], v[0]) for k, v in transformer.text_cache(features[None]))


def forward(
    transformer: WanTransformer,
    latents: Tensor,
    timestep: float,
    frames: Sequence[int],
    texts: Sequence[tuple[KeysValues, ...]],
    camera: tuple[KeysValues, ...] | None,
    attention: BlockAttention,
    *,
    rows: tuple[int, ...],
    commit: bool,
) -> Tensor:
    """One pass through the engine's pages; see :meth:`Network.flow`."""
    device = latents.device
    numbers = [torch.arange(first, first + latents.shape[1], device=device) for first in frames]
    flow: Tensor = transformer(
        latents,
        torch.full((len(rows),), timestep, device=device),
        torch.stack(numbers),  # a tensor of a list would be a copy that waits for the device
        stacked(texts),
        lambda layer, q, k, v: attention.attend(layer, q, k, v, rows=rows, commit=commit),
        camera=camera,
    )
    return flow
