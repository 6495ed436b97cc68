"""A call's state as a value, and its form in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from realtime_omni.errors import ArgumentError
from realtime_omni.models.base import PackedState
from realtime_omni.models.common.packing import unpack_tensor, unpack_values
from realtime_omni.models.minicpmo import mel
from realtime_omni.models.minicpmo.ears import Past
from realtime_omni.models.minicpmo.listening import Ear
from realtime_omni.models.minicpmo.mouth import MOST_PENDING, MOST_WAITING, Mouth
from realtime_omni.models.minicpmo.sampling import REMEMBERED
from realtime_omni.models.minicpmo.speaking import Count, Speaker
from realtime_omni.session.values import canonical_json

MOST_UNITS = 2048
"""Whose lengths are kept: more than any window has."""


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens before and after the voice's sound; ``voice``: its name, None without."""

    before: tuple[Count, ...] = ()
    after: tuple[Count, ...] = ()
    voice: str | None = None


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``begun``: the first second is there, so the prompt is settled; ``prompted``: blocks of it that are history.

    ``tokens``: of the language model, ever. ``frames``: of its history, ever. ``lengths``: tokens of the newest units, a byte
    each. ``turn_over``, ``chosen``: see :mod:`.units` and :mod:`.sampling`. ``turn_parts``: units of the talker's turn,
    each with its positions. ``waiting``: the mouth's codes; ``voiced``: whether it remembers a turn; ``pending``:
    samples to be heard. These four are the tensors' own in a running call, and filled in when it is saved.
    """

    prompt: Prompt = Prompt()
    speaker: Speaker = Speaker()
    ear: Ear = Ear()
    begun: bool = False
    prompted: Count = 0
    units: Count = 0
    tokens: Count = 0
    frames: Count = 0
    lengths: Annotated[bytes, Meta(max_length=MOST_UNITS)] = b""
    turn_over: bool = True
    chosen: Annotated[tuple[Count, ...], Meta(max_length=REMEMBERED)] = ()
    turn_parts: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    waiting: Annotated[tuple[Count, ...], Meta(max_length=MOST_WAITING)] = ()
    voiced: bool = False
    pending: Count = 0


@dataclass(frozen=True, slots=True)
class CallState:
    """``seconds``: the newest seconds of the user's sound, float32 [16000] each. ``past``: what the encoder remembers.
    ``first`` [tokens, D]: the first second's tokens, until they are history. ``turn``: what the talker remembers."""

    facts: Facts
    seconds: tuple[Tensor, ...]
    past: Past
    first: Tensor | None
    turn: Past
    mouth: Mouth

    @classmethod
    def fresh(cls, prompt: Prompt) -> CallState:
        return cls(Facts(prompt=prompt), (), (), None, (), Mouth.silent())


@dataclass(frozen=True, slots=True)
class Shapes:
    """What a saved state is held to. ``part``: of a remembered second, ``turn``: of a talker's position, without their
    lengths (``most_seconds``, ``most_positions``). ``blocks``: a call's prompt and first unit. ``unit_tokens``: the fewest
    and most of a unit. ``words`` and ``codes``: sizes of the vocabularies."""

    part: tuple[int, ...]
    turn: tuple[int, ...]
    first: tuple[int, ...]
    most_seconds: int
    most_positions: int
    blocks: int
    unit_tokens: tuple[int, int]
    words: int
    codes: int
    dtype: torch.dtype


def pack(state: CallState) -> PackedState:
    tensors: dict[str, Tensor] = {"pending": state.mouth.pending}
    for name, parts in (("seconds", state.seconds), ("past", state.past)):
        if parts:
            tensors[name] = torch.stack(parts)
    if state.first is not None:
        tensors["first"] = state.first
    if state.turn:
        tensors["turn"] = torch.cat(state.turn, dim=2)
    for key, tensor in (state.mouth.voice or {}).items():
        tensors[f"voice.{key}"] = tensor
    facts = msgspec.structs.replace(
        state.facts,
        turn_parts=tuple(part.shape[2] for part in state.turn),
        waiting=state.mouth.codes,
        voiced=state.mouth.voice is not None,
        pending=len(state.mouth.pending),
    )
    return PackedState(tensors, msgspec.to_builtins(facts))


def unpack(packed: PackedState, shapes: Shapes, device: torch.device | str) -> CallState:
    """Raises ArgumentError. What the vocoder remembers is the vocoder's to check."""
    facts = unpack_values(packed, Facts, packed.tensors)
    if canonical_json(msgspec.to_builtins(facts)) != canonical_json(packed.values):
        raise ArgumentError("the state is not complete", path="state")
    _check_numbers(facts, shapes)
    seconds = min(facts.units, mel.KEPT_UNITS)
    past = (facts.units - 1) % shapes.most_seconds + 1 if facts.units else 0
    wanted: dict[str, tuple[int, ...]] = {"pending": (facts.pending,)}
    if seconds:
        wanted |= {"seconds": (seconds, mel.UNIT), "past": (past, *shapes.part)}
    if facts.begun and facts.prompted < shapes.blocks:
        wanted["first"] = shapes.first
    if facts.turn_parts:
        wanted["turn"] = (*shapes.turn[:2], sum(facts.turn_parts), *shapes.turn[2:])
    voice = {n.removeprefix("voice."): t for n, t in packed.tensors.items() if n.startswith("voice.")}
    if set(packed.tensors) != {*wanted, *(f"voice.{name}" for name in voice)} or (voice and not facts.voiced):
        raise ArgumentError(f"the state has the tensors {sorted(packed.tensors)}", path="state")
    sound = ("pending", "seconds")
    read = {
        name: _finite(
            unpack_tensor(
                packed,
                name,
                shape,
                dtype=torch.float32 if name in sound else shapes.dtype,
                device="cpu" if name in sound else device,
            ),
            name,
        )
        for name, shape in wanted.items()
    }
    turn = torch.split(read["turn"], list(facts.turn_parts), dim=2) if facts.turn_parts else ()
    return CallState(
        facts,
        _parts(read.get("seconds")),
        _parts(read.get("past")),
        read.get("first"),
        tuple(part.clone() for part in turn),
        Mouth(voice if facts.voiced else None, facts.waiting, read["pending"]),
    )


def _parts(tensor: Tensor | None) -> tuple[Tensor, ...]:
    return () if tensor is None else tuple(part.clone() for part in tensor)


def _check_numbers(facts: Facts, shapes: Shapes) -> None:
    """Raises ArgumentError where they contradict each other, or name tokens that do not exist."""
    prompt, speaker = facts.prompt, facts.speaker
    words = (*prompt.before, *prompt.after, *facts.chosen, *speaker.unread)
    written = facts.units if facts.prompted == shapes.blocks else 0
    least, most = shapes.unit_tokens
    fits = (
        all(token < shapes.words for token in words)
        and all(code < shapes.codes for code in facts.waiting)
        and facts.begun == (facts.units > 0)
        and facts.prompted <= (shapes.blocks if facts.begun else 0)
        and (facts.units <= 1 or facts.prompted == shapes.blocks)
        and facts.frames == facts.prompted + max(facts.units - 1, 0)
        and len(facts.lengths) == min(written, MOST_UNITS)
        and all(least <= length <= most for length in facts.lengths)
        and facts.tokens >= sum(facts.lengths)
        and sum(facts.turn_parts) <= shapes.most_positions
        and facts.pending <= MOST_PENDING
        and (facts.voiced or not facts.waiting)
    )
    if not fits:
        raise ArgumentError("the state's numbers do not fit together", path="state")


def _finite(tensor: Tensor, name: str) -> Tensor:
    if not bool(tensor.isfinite().all()):
        raise ArgumentError(f"the state's {name} is not finite", path="state")
    return tensor
