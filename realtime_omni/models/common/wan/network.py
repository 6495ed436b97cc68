"""What a world model of the Wan family asks of its network: text, camera and passes, computed here or on several ranks.

Text and camera become values that the caller keeps and hands back as they are: only the network looks into them, and knows
them by the tensors that they consist of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from realtime_omni.models.base import BlockAttention
from realtime_omni.models.common.conditioning import stacked
from realtime_omni.models.common.wan.transformer import KeysValues, WanTransformer


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of one pass over a block of some rows.

    ``latents`` [B, F, in_channels, H, W] at one ``timestep``, 0..1000; ``frames``: of each row, the absolute number of its
    first frame; ``texts``: of each row; ``rows``: their numbers in the plan of ``attention``."""

    latents: Tensor
    timestep: float
    frames: Sequence[int]
    texts: Sequence[tuple[KeysValues, ...]]
    camera: tuple[KeysValues, ...] | None
    attention: BlockAttention
    rows: tuple[int, ...]


class Network(Protocol):
    """Passes, and what is made for them beforehand."""

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

    def flow(self, inputs: Inputs, *, commit: bool) -> Tensor:
        """The flow, float32 [B, F, out_channels, H, W]; ``commit``: the pass writes history, too."""
        ...

    def write(self, inputs: Inputs) -> None:
        """The history that ``flow(commit=True)`` writes, without the flow: the last layer stops at its keys and values."""
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

    def flow(self, inputs: Inputs, *, commit: bool) -> Tensor:
        return flow(self.transformer, inputs, commit=commit)

    def write(self, inputs: Inputs) -> None:
        write(self.transformer, inputs)


def text_of_row(transformer: WanTransformer, features: Tensor) -> tuple[KeysValues, ...]:
    return tuple((k[0], v[0]) for k, v in transformer.text_cache(features[None]))


def flow(transformer: WanTransformer, inputs: Inputs, *, commit: bool) -> Tensor:
    """One pass through the engine's pages; see :meth:`Network.flow`."""
    attend = partial(inputs.attention.attend, rows=inputs.rows, commit=commit)
    made: Tensor = transformer(*_tensors(inputs), attend, camera=inputs.camera)
    return made


def write(transformer: WanTransformer, inputs: Inputs) -> None:
    """The same for its keys and values; see :meth:`Network.write`."""
    attention, rows = inputs.attention, inputs.rows
    attend = partial(attention.attend, rows=rows, commit=True)
    transformer.commit(*_tensors(inputs), attend, partial(attention.write, rows=rows), camera=inputs.camera)


def _tensors(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, tuple[KeysValues, ...]]:
    """Latents, timesteps [B], frame numbers [B, F], and texts stacked."""
    latents, device = inputs.latents, inputs.latents.device
    numbers = [torch.arange(first, first + latents.shape[1], device=device) for first in inputs.frames]
    timesteps = torch.full((len(inputs.rows),), inputs.timestep, device=device)
    return (
        latents,
        timesteps,
        torch.stack(numbers),
        stacked(inputs.texts),
    )  # a tensor of a list would wait for the device
