"""What a LingBot session is between two ticks, and how it is read back from a saved one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta

from realtime_omni.errors import ArgumentError
from realtime_omni.models.base import PackedState
from realtime_omni.models.common.conditioning import Conditioning
from realtime_omni.models.common.wan.visual import Visual, VisualShapes, on_device
from realtime_omni.models.lingbot.camera import Camera, is_pose


@dataclass(frozen=True, slots=True)
class LingBotState:
    """Between two ticks. ``visual.picture`` is there until the first block has used it."""

    camera: Camera
    visual: Visual
    conditioning: Conditioning
    """The prompt's keys and values, per layer [TOKENS, heads, head_dim] twice, under the prompt."""
    prompt: str
    """The session's first, in force while no event has changed it."""


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    pose: Annotated[list[Annotated[list[float], Meta(min_length=4, max_length=4)]], Meta(min_length=4, max_length=4)]
    pitch: float
    prompt: Annotated[str, Meta(min_length=1)]
    tensors: list[str]
    encoder: list[str | None]
    decoder: list[str | None]


def pack(state: LingBotState) -> PackedState:
    """Without the text's keys and values, which are made again from the prompt."""
    tensors, values = state.visual.pack()
    values |= {"pose": state.camera.pose.tolist(), "pitch": state.camera.pitch, "prompt": state.prompt}
    return PackedState(tensors, values)


def unpack(packed: PackedState, shapes: VisualShapes, layers: int, device: torch.device) -> LingBotState:
    """A state that goes on as the packed one; ``layers``: of the network. Raises ArgumentError."""
    try:
        found = msgspec.convert(dict(packed.values), _Saved)
    except msgspec.ValidationError as error:
        raise ArgumentError(f"the state is not valid: {error}", path="state") from None
    pose = np.array(found.pose, dtype=np.float64)
    if not np.isfinite(pose).all() or not is_pose(pose) or not abs(found.pitch) <= 90.0:
        raise ArgumentError("the state's camera is no pose", path="state")
    unclaimed = on_device(packed.tensors, device)
    visual = shapes.unpack(unclaimed, found.tensors, found.encoder, found.decoder)
    if unclaimed:
        raise ArgumentError(f"the state has the tensors {sorted(unclaimed)}", path="state")
    return LingBotState(Camera(pose, found.pitch), visual, Conditioning(layers), found.prompt)
