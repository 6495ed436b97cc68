"""What a DreamZero session is between two ticks, and how it is read back from a saved one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor

from realtime_omni.errors import ArgumentError
from realtime_omni.models.base import PackedState
from realtime_omni.models.common.conditioning import Conditioning
from realtime_omni.models.common.packing import unpack_values
from realtime_omni.models.common.wan.vae import CodecState, SlotShapes
from realtime_omni.models.common.wan.visual import claim, on_device

FRESH = CodecState()
"""A codec that has seen nothing."""


@dataclass(frozen=True, slots=True)
class Window:
    """What holds for one window of history, made from the picture that opens it.

    ``condition`` float32 [W, 4 + C, h, w]: mask and image latents of each of its frames, [W, 0, h, w] for a network that takes
    none. ``features`` [L, image_width], or None: of the picture."""

    condition: Tensor
    features: Tensor | None


@dataclass(frozen=True, slots=True)
class DreamZeroState:
    """``shown`` uint8 [n, 3, H, W]: the latest pictures, at most as many as a block is seen in; before the first tick the one
    that the session starts from. ``imagined`` float32 [F, C, h, w]: what comes next, as predicted. ``robot`` float32 [D]: where
    the robot is then, if its actions are executed. Window, imagined and robot are there from the first tick on."""

    prompt: str
    conditioning: Conditioning
    shown: Tensor | None = None
    encoder: CodecState = FRESH
    decoder: CodecState = FRESH
    window: Window | None = None
    imagined: Tensor | None = None
    robot: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class StateShapes:
    """What a model's states look like. ``features``: (L, image_width) or None; ``pictures``: the most that are kept."""

    picture: tuple[int, int, int]
    pictures: int
    block: tuple[int, int, int, int]
    condition: tuple[int, int, int, int]
    features: tuple[int, int] | None
    dtype: torch.dtype
    robot: int
    encoder: SlotShapes
    decoder: SlotShapes

    @property
    def nbytes(self) -> int:
        """Of one session at most, without what it is conditioned on."""
        floats = _count(self.block) + _count(self.condition) + self.robot
        features = 0 if self.features is None else _count(self.features) * self.dtype.itemsize
        slots = sum(slot.nbytes for part in (self.encoder, self.decoder) for slot in part if slot)
        return self.pictures * _count(self.picture) + 4 * floats + features + slots


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    prompt: Annotated[str, Meta(min_length=1)]
    begun: bool
    shown: Annotated[int, Meta(ge=0)]
    """How many pictures."""
    encoder: list[str | None]
    decoder: list[str | None]


def pack(state: DreamZeroState) -> PackedState:
    """Without what the session is conditioned on, which is made again."""
    tensors: dict[str, Tensor] = {}
    if state.shown is not None:
        tensors["shown"] = state.shown
    if state.window is not None and state.imagined is not None and state.robot is not None:
        tensors |= {"condition": state.window.condition, "imagined": state.imagined}
        tensors["robot"] = torch.from_numpy(state.robot)
        if state.window.features is not None:
            tensors["features"] = state.window.features
    values = {
        "prompt": state.prompt,
        "begun": state.window is not None,
        "shown": 0 if state.shown is None else len(state.shown),
    }
    for name, codec in (("encoder", state.encoder), ("decoder", state.decoder)):
        slots, values[name] = codec.pack()
        tensors.update({f"{name}.{slot}": tensor for slot, tensor in slots.items()})
    return PackedState(tensors, values)


def unpack(packed: PackedState, shapes: StateShapes, nothing: Conditioning, device: torch.device) -> DreamZeroState:
    """A state that goes on as the packed one. Raises ArgumentError."""
    found = unpack_values(packed, _Saved, packed.tensors)
    left = on_device(packed.tensors, device)
    if found.shown > shapes.pictures:
        raise ArgumentError(f"the state has {found.shown} pictures, at most {shapes.pictures} are kept", path="state")
    shown = claim(left, "shown", (found.shown, *shapes.picture), torch.uint8)
    condition = claim(left, "condition", shapes.condition, torch.float32)
    features = None if shapes.features is None else claim(left, "features", shapes.features, shapes.dtype)
    imagined = claim(left, "imagined", shapes.block, torch.float32)
    robot = claim(left, "robot", (shapes.robot,), torch.float32)
    codecs = []
    for name, kinds, like in (("encoder", found.encoder, shapes.encoder), ("decoder", found.decoder, shapes.decoder)):
        own = {key.removeprefix(f"{name}."): left.pop(key) for key in list(left) if key.startswith(f"{name}.")}
        codecs.append(CodecState.unpack(own, kinds, like))
    needed = [condition, imagined, robot, *([] if shapes.features is None else [features])]
    if left or (shown is None) != (found.shown == 0) or {tensor is not None for tensor in needed} != {found.begun}:
        raise ArgumentError("the state has tensors too many or too few", path="state")
    window = None if condition is None else Window(condition, features)
    at = None if robot is None else robot.cpu().numpy()
    return DreamZeroState(found.prompt, nothing, shown, codecs[0], codecs[1], window, imagined, at)


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))
