"""A call's state as a value, and its form in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from realtime_omni.errors import ArgumentError
from realtime_omni.models.base import PackedState
from realtime_omni.models.common.packing import unpack_tensor, unpack_values
from realtime_omni.models.moshi.codec import SEGMENT, CodecState
from realtime_omni.models.moshi.config import MimiConfig
from realtime_omni.models.moshi.prompts import MOST_TEXT_TOKENS
from realtime_omni.models.moshi.speaking import Count, Speech
from realtime_omni.session.values import canonical_json


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``voice`` and ``text`` (tokens): the prompt; it begins with the first frame, which may still change it, and ``prompted``
    of its steps are history. ``heard`` and ``said``: frames that
    the codec has seen of each side."""

    speech: Speech = Speech()
    voice: str | None = None
    text: Annotated[tuple[Count, ...], Meta(max_length=MOST_TEXT_TOKENS)] = ()
    begun: bool = False
    prompted: Count = 0
    heard: Count = 0
    said: Count = 0


@dataclass(frozen=True, slots=True)
class MoshiState:
    """``ring`` int64 [K, columns]: see :mod:`.streams`. ``ears`` and ``mouth``: the codec's, of the user's and the agent's
    sound. How many steps there were is the session's number of frames."""

    facts: Facts
    ring: Tensor
    ears: CodecState
    mouth: CodecState


def pack(state: MoshiState) -> PackedState:
    """Without copies of what is not joined."""
    tensors = {"ring": state.ring}
    for name, side in (("ears", state.ears), ("mouth", state.mouth)):
        tensors[f"{name}.memory"] = side.memory
        if parts := (*side.joined, *side.recent):
            tensors[f"{name}.past"] = torch.cat(parts, dim=2)
    facts = msgspec.structs.replace(state.facts, heard=state.ears.frames, said=state.mouth.frames)
    return PackedState(tensors, msgspec.to_builtins(facts))


def unpack(
    packed: PackedState,
    config: MimiConfig,
    ring: tuple[int, int],
    cards: tuple[int, int],
    carried: Mapping[str, int],
    device: torch.device | str,
) -> MoshiState:
    """``cards``: of text and codes; ``carried``: what each direction remembers. Raises ArgumentError."""
    names = ["ring", "ears.memory", "mouth.memory", *(n for n in ("ears.past", "mouth.past") if n in packed.tensors)]
    facts = unpack_values(packed, Facts, names)
    if canonical_json(msgspec.to_builtins(facts)) != canonical_json(packed.values):
        raise ArgumentError("the state is not complete", path="state")
    rings = unpack_tensor(packed, "ring", ring, dtype=torch.int64, device=device)
    limits = torch.tensor([cards[0], *[cards[1]] * (ring[0] - 1)], device=device)[:, None]
    if bool((rings < -1).any()) or bool((rings >= limits).any()) or any(t >= cards[0] for t in facts.text):
        raise ArgumentError("the state has tokens that do not exist", path="state.ring")
    sides = [_side(packed, n, f, config, carried[n], device) for n, f in (("ears", facts.heard), ("mouth", facts.said))]
    return MoshiState(facts, rings, *sides)


def _side(
    packed: PackedState, name: str, frames: int, config: MimiConfig, carried: int, device: torch.device | str
) -> CodecState:
    memory = unpack_tensor(packed, f"{name}.memory", (carried,), dtype=torch.float32, device=device)
    segments, recent = CodecState.parts(frames, config)
    past = packed.tensors.get(f"{name}.past")
    if not frames:
        if past is not None:
            raise ArgumentError(f"the state's {name} has a past before its first frame", path="state")
        return CodecState(0, _finite(memory, name))
    per = config.per_frame
    shape = (config.layers, 2, (segments * SEGMENT + recent) * per, config.heads, config.head_dim)
    whole = _finite(unpack_tensor(packed, f"{name}.past", shape, dtype=torch.float32, device=device), name)
    pieces = [part.clone() for part in torch.split(whole, [SEGMENT * per] * segments + [per] * recent, dim=2)]
    return CodecState(frames, _finite(memory, name), tuple(pieces[:segments]), tuple(pieces[segments:]))


def _finite(tensor: Tensor, name: str) -> Tensor:
    if not bool(tensor.isfinite().all()):
        raise ArgumentError(f"the state's {name} is not finite", path="state")
    return tensor
