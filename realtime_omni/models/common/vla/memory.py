"""What a policy session remembers between two observations: a prefix that may serve again, and the chunks it planned.

Owns the state's parts, their bytes, and how the state is saved. The prefix is left out of what is saved: it is computed again.
Values only: nothing here is ever edited.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from realtime_omni.errors import ArgumentError
from realtime_omni.models.base import PackedState
from realtime_omni.models.common.packing import unpack_tensor, unpack_values
from realtime_omni.models.common.vla.attention import PrefixKV
from realtime_omni.models.common.vla.network import PolicyShape
from realtime_omni.models.common.vla.reuse import PrefixKey

MOST_PLANNED = 8
"""Chunks that an ensemble averages at most."""


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """One row, packed, without pi0's state token. ``key``: everything of the observation that it depends on."""

    key: PrefixKey
    kv: PrefixKV


@dataclass(frozen=True, slots=True)
class Planned:
    """A chunk that was handed out: action 0 belongs to ``tick``. ``model`` float32 [H, A] in model space, ``robot`` float32
    [H, a] in robot units, absolute; both on the CPU."""

    chunk: int
    tick: int
    model: Tensor
    robot: Tensor


@dataclass(frozen=True, slots=True)
class VLAState:
    """``planned``: oldest first; empty where chunks are not continued."""

    prefix: KeptPrefix | None = None
    planned: tuple[Planned, ...] = ()

    def planned_after(self, follows: int | None) -> tuple[Planned, ...]:
        """The planned chunks, if chunk ``follows`` is the latest of them."""
        if not self.planned or self.planned[-1].chunk != follows:
            return ()
        return self.planned


def state_bytes(shape: PolicyShape, cameras: int, channels: int, dtype_bytes: int, planned: int) -> int:
    """The most that a state can hold, in bytes: the longest prefix and ``planned`` chunks."""
    tokens = cameras * shape.picture_tokens + shape.prompt_tokens + 1
    prefix = 2 * shape.layers * tokens * shape.kv_heads * shape.head_dim * dtype_bytes + tokens
    return prefix + planned * shape.horizon * (shape.action_dim + channels) * 4


class _SavedChunk(msgspec.Struct, forbid_unknown_fields=True):
    chunk: Annotated[int, Meta(ge=0)]
    tick: Annotated[int, Meta(ge=0)]


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    planned: Annotated[list[_SavedChunk], Meta(max_length=MOST_PLANNED)]


def pack(state: VLAState) -> PackedState:
    tensors: dict[str, Tensor] = {}
    for number, planned in enumerate(state.planned):
        tensors |= {f"{number}.model": planned.model, f"{number}.robot": planned.robot}
    return PackedState(tensors, {"planned": [{"chunk": p.chunk, "tick": p.tick} for p in state.planned]})


def unpack(packed: PackedState, shape: PolicyShape, channels: int, most: int) -> VLAState:
    """Raises ArgumentError for what :func:`pack` would not have made of a session that keeps ``most`` chunks."""
    count = len(packed.tensors) // 2
    names = [f"{number}.{kind}" for number in range(count) for kind in ("model", "robot")]
    saved = unpack_values(packed, _Saved, names).planned
    if len(saved) != count or count > most:
        raise ArgumentError(f"the state has {len(saved)} planned chunks", path="state")
    if any(b.chunk <= a.chunk for a, b in pairwise(saved)):
        raise ArgumentError("the planned chunks do not rise", path="state")
    planned = []
    for number, chunk in enumerate(saved):
        model = _finite(packed, f"{number}.model", (shape.horizon, shape.action_dim))
        robot = _finite(packed, f"{number}.robot", (shape.horizon, channels))
        planned.append(Planned(chunk.chunk, chunk.tick, model, robot))
    return VLAState(planned=tuple(planned))


def _finite(packed: PackedState, name: str, shape: tuple[int, int]) -> Tensor:
    tensor = unpack_tensor(packed, name, shape, dtype=torch.float32, device="cpu")
    if not bool(tensor.isfinite().all()):
        raise ArgumentError(f"the state's {name} is not finite", path="state")
    return tensor
