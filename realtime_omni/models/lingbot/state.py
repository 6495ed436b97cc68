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
from realtime_omni.models.common.wan.transformer import KeysValues
from realtime_omni.models.common.wan.vae import CodecState, ImageCondition, SlotShapes
from realtime_omni.models.lingbot.camera import Camera, is_pose


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt's keys and values: per layer [TOKENS, heads, head_dim] twice."""

    prompt: str
    layers: tuple[KeysValues, ...]


@dataclass(frozen=True, slots=True)
class LingBotState:
    """Between two ticks. ``picture`` uint8 [3, H, W]: what the session starts from, until the first block has used it."""

    camera: Camera
    picture: Tensor | None
    text: Text | None
    condition: ImageCondition
    decoder: CodecState
    """Fresh also after a block that nobody wanted pictures of."""
    tail: Tensor | None
    """The last latent frame, [1, C, h, w]: what a fresh decoder is warmed up with."""
    prompt: str
    """The session's first, in force while no event has changed it."""


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    pose: Annotated[list[Annotated[list[float], Meta(min_length=4, max_length=4)]], Meta(min_length=4, max_length=4)]
    pitch: float
    prompt: Annotated[str, Meta(min_length=1)]
    tensors: list[str]
    """Which of picture, tail and constant there are."""
    encoder: list[str | None]
    decoder: list[str | None]


def pack(state: LingBotState) -> PackedState:
    """Without the text's keys and values, which are made again from the prompt."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in (("picture", state.picture), ("tail", state.tail), ("constant", state.condition.constant)):
        if tensor is not None:
            tensors[name] = tensor
    plain = sorted(tensors)
    kinds = {}
    for name, codec in (("encoder", state.condition.encoder), ("decoder", state.decoder)):
        slots, kinds[name] = codec.pack()
        tensors.update({f"{name}.{slot}": tensor for slot, tensor in slots.items()})
    values = {"pose": state.camera.pose.tolist(), "pitch": state.camera.pitch, "prompt": state.prompt}
    values |= {"tensors": plain, **kinds}
    return PackedState(tensors, values)


def unpack(
    packed: PackedState,
    *,
    latent_shape: tuple[int, int, int, int],
    picture_shape: tuple[int, int, int],
    encoder: SlotShapes,
    decoder: SlotShapes,
    device: torch.device,
) -> LingBotState:
    """A state that goes on as the packed one. ``encoder``, ``decoder``: what the codec's full states look like.

    Raises ArgumentError."""
    try:
        found = msgspec.convert(dict(packed.values), _Saved)
    except msgspec.ValidationError as error:
        raise ArgumentError(f"the state is not valid: {error}", path="state") from None
    pose = np.array(found.pose, dtype=np.float64)
    if not np.isfinite(pose).all() or not is_pose(pose) or not abs(found.pitch) <= 90.0:
        raise ArgumentError("the state's camera is no pose", path="state")
    if {"picture", "tail", "constant"} & set(packed.tensors) != set(found.tensors):
        raise ArgumentError("the state lacks a tensor", path="state")
    unclaimed = {name: tensor.to(device) for name, tensor in packed.tensors.items()}
    frame = (1, *latent_shape[1:])
    picture = _claim(unclaimed, "picture", picture_shape, torch.uint8)
    tail = _claim(unclaimed, "tail", frame, torch.float32)
    constant = _claim(unclaimed, "constant", frame, torch.float32)
    codecs = []
    for name, kinds, like in (("encoder", found.encoder, encoder), ("decoder", found.decoder, decoder)):
        own = {key.removeprefix(f"{name}."): t for key, t in unclaimed.items() if key.startswith(f"{name}.")}
        codecs.append(CodecState.unpack(own, kinds, like))
        for key in own:
            del unclaimed[f"{name}.{key}"]
    if unclaimed:
        raise ArgumentError(f"the state has the tensors {sorted(unclaimed)}", path="state")
    condition = ImageCondition(codecs[0], constant)
    return LingBotState(Camera(pose, found.pitch), picture, None, condition, codecs[1], tail, found.prompt)


def _claim(unclaimed: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    tensor = unclaimed.pop(name, None)
    if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != dtype):
        raise ArgumentError(f"the state's {name} is {tensor.dtype} {tuple(tensor.shape)}", path="state")
    return tensor
