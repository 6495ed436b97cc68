"""What a LingBot session is between two ticks, and how it is read back from a saved one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from realtime_omni.errors import ArgumentError
from realtime_omni.models.base import PackedState
from realtime_omni.models.common.conditioning import Conditioning
from realtime_omni.models.common.wan.visual import Visual, VisualShapes, claim, on_device
from realtime_omni.models.lingbot.camera import Camera, is_pose


@dataclass(frozen=True, slots=True)
class PastBlock:
    """What a finished block is written from: its latents [F, C, h, w], its mask and condition [F, MASK_CHANNELS + C, h, w] and
    the network's camera input [F, 384, h, w]."""

    latents: Tensor
    condition: Tensor
    camera: Tensor

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.latents, self.condition, self.camera


@dataclass(frozen=True, slots=True)
class LingBotState:
    """Between two ticks. ``visual.picture`` is there until the first block has used it."""

    camera: Camera
    visual: Visual
    conditioning: Conditioning
    """The prompt's keys and values, per layer [TOKENS, heads, head_dim] twice, under the prompt."""
    prompt: str
    """The session's first, in force while no event has changed it."""
    past: tuple[PastBlock, ...] = ()
    """Blocks of the window that the next one may write anew, oldest first; none where a prompt only changes the text."""
    wrote: str | None = None
    """The prompt that ``past`` was written under."""


_PARTS = ("latents", "condition", "camera")


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    pose: Annotated[list[Annotated[list[float], Meta(min_length=4, max_length=4)]], Meta(min_length=4, max_length=4)]
    pitch: float
    prompt: Annotated[str, Meta(min_length=1)]
    wrote: str | None
    past: Annotated[int, Meta(ge=0)]
    tensors: list[str]
    encoder: list[str | None]
    decoder: list[str | None]


def pack(state: LingBotState) -> PackedState:
    """Without the text's keys and values, which are made again from the prompt."""
    tensors, values = state.visual.pack()
    values |= {"pose": state.camera.pose.tolist(), "pitch": state.camera.pitch, "prompt": state.prompt}
    values |= {"wrote": state.wrote, "past": len(state.past)}
    for number, block in enumerate(state.past):
        tensors |= {f"past{number}.{name}": part for name, part in zip(_PARTS, block.parts, strict=True)}
    return PackedState(tensors, values)


def unpack(
    packed: PackedState, shapes: VisualShapes, like: PastBlock, most_past: int, layers: int, device: torch.device
) -> LingBotState:
    """A state that goes on as the packed one; ``like``: what a past block looks like, of which there are at most ``most_past``;
    ``layers``: of the network. Raises ArgumentError."""
    try:
        found = msgspec.convert(dict(packed.values), _Saved)
    except msgspec.ValidationError as error:
        raise ArgumentError(f"the state is not valid: {error}", path="state") from None
    pose = np.array(found.pose, dtype=np.float64)
    if not np.isfinite(pose).all() or not is_pose(pose) or not abs(found.pitch) <= 90.0:
        raise ArgumentError("the state's camera is no pose", path="state")
    unclaimed = on_device(packed.tensors, device)
    visual = shapes.unpack(unclaimed, found.tensors, found.encoder, found.decoder)
    if found.past > most_past or (found.wrote is None) != (visual.tail is None):
        raise ArgumentError("the state's past does not belong to it", path="state")
    past = tuple(_past(unclaimed, number, like) for number in range(found.past))
    if unclaimed:
        raise ArgumentError(f"the state has the tensors {sorted(unclaimed)}", path="state")
    return LingBotState(Camera(pose, found.pitch), visual, Conditioning(layers), found.prompt, past, found.wrote)


def _past(unclaimed: dict[str, Tensor], number: int, like: PastBlock) -> PastBlock:
    parts = []
    for name, known in zip(_PARTS, like.parts, strict=True):
        part = claim(unclaimed, f"past{number}.{name}", tuple(known.shape), known.dtype)
        if part is None:
            raise ArgumentError("the state lacks a tensor", path="state")
        parts.append(part)
    return PastBlock(*parts)
