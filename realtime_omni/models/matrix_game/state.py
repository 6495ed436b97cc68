"""What a Matrix-Game session is between two ticks, and how it is read back from a saved one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from realtime_omni.errors import ArgumentError
from realtime_omni.models.base import PackedState
from realtime_omni.models.common.conditioning import Conditioning
from realtime_omni.models.common.wan.visual import Visual, VisualShapes, claim, on_device
from realtime_omni.models.matrix_game.actions import ActionHistory
from realtime_omni.models.matrix_game.controls import KEYBOARD, MOUSE_LIMIT, Action

Pressed = Annotated[float, Meta(ge=0, le=1)]
Moved = Annotated[float, Meta(ge=-MOUSE_LIMIT, le=MOUSE_LIMIT)]


@dataclass(frozen=True, slots=True)
class MatrixGameState:
    """Between two ticks. ``visual.picture`` stays: what the network looks at is made of it again when it is not known.

    ``recent``: the actions of the last three latent frames, those before the first being like it; empty at first.
    ``conditioning``: per layer, the keys and values of the picture's features."""

    visual: Visual
    history: ActionHistory
    conditioning: Conditioning
    recent: tuple[Action, ...] = ()


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    keys: Annotated[
        list[Annotated[list[Pressed], Meta(min_length=len(KEYBOARD), max_length=len(KEYBOARD))]], Meta(max_length=3)
    ]
    mouse: Annotated[list[tuple[Moved, Moved]], Meta(max_length=3)]
    tensors: list[str]
    encoder: list[str | None]
    decoder: list[str | None]


def pack(state: MatrixGameState) -> PackedState:
    """Without the conditioning, which is made again from the picture."""
    tensors, values = state.visual.pack()
    tensors |= {"mouse": state.history.mouse, "keyboard": state.history.keyboard}
    values |= {
        "keys": [list(pressed) for pressed, _ in state.recent],
        "mouse": [list(moved) for _, moved in state.recent],
    }
    return PackedState(tensors, values)


def unpack(
    packed: PackedState,
    shapes: VisualShapes,
    empty: ActionHistory,
    nothing: Conditioning,
    most_frames: int,
    device: torch.device,
) -> MatrixGameState:
    """A state that goes on as the packed one. ``empty``: a history without frames, for its other dimensions; ``nothing``: a
    conditioning without branches.

    Raises ArgumentError."""
    try:
        found = msgspec.convert(dict(packed.values), _Saved)
    except msgspec.ValidationError as error:
        raise ArgumentError(f"the state is not valid: {error}", path="state") from None
    unclaimed = on_device(packed.tensors, device)
    history = ActionHistory(
        _frames(unclaimed, "mouse", empty.mouse, 3, most_frames),
        _frames(unclaimed, "keyboard", empty.keyboard, 2, most_frames),
    )
    visual = shapes.unpack(unclaimed, found.tensors, found.encoder, found.decoder)
    if unclaimed:
        raise ArgumentError(f"the state has the tensors {sorted(unclaimed)}", path="state")
    if history.mouse.shape[3] != history.frames or len(found.keys) != len(found.mouse) or visual.picture is None:
        raise ArgumentError("the state's parts do not belong together", path="state")
    recent = tuple((tuple(pressed), moved) for pressed, moved in zip(found.keys, found.mouse, strict=True))
    return MatrixGameState(visual, history, nothing, recent)


def _frames(unclaimed: dict[str, Tensor], name: str, like: Tensor, axis: int, most: int) -> Tensor:
    """A remembered tensor of at most so many frames along ``axis``."""
    tensor = unclaimed.get(name)
    if tensor is None or tensor.dim() != like.dim() or tensor.shape[axis] > most:
        raise ArgumentError(f"the state's {name} is missing or too long", path="state")
    shape = list(like.shape)
    shape[axis] = tensor.shape[axis]
    found = claim(unclaimed, name, tuple(shape), like.dtype)
    assert found is not None
    return found
