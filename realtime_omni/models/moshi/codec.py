"""What a call remembers of one direction of the codec, as a value; and the frames of several calls in one pass.

Keys and values of a frame are written once and shared by every later state. So that a state has few parts, every
``SEGMENT`` frames are joined to one tensor; what attention cannot reach any more is left out by whole parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from realtime_omni.models.moshi.config import MimiConfig

SEGMENT = 16


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CodecState:
    """``frames``: how many there were. ``memory`` float32 [M]: the convolutions'. ``joined`` and ``recent``: keys and values
    [P, 2, L, H, d] of segments and of the frames since; what came first is gone, so the last of them is the newest."""

    frames: int
    memory: Tensor
    joined: tuple[Tensor, ...] = ()
    recent: tuple[Tensor, ...] = ()

    @classmethod
    def start(cls, carried: int, device: torch.device | str) -> CodecState:
        """Of a direction that remembers ``carried`` numbers."""
        return cls(0, torch.zeros(carried, device=device))

    def after(self, memory: Tensor, new: Tensor, context: int) -> CodecState:
        """With one frame more; the tensors become this state's own."""
        per_frame = new.shape[2]
        joined, recent = self.joined, (*self.recent, new)
        if len(recent) == SEGMENT:
            joined, recent = (*joined, torch.cat(recent, dim=2)), ()
        held = sum(part.shape[2] for part in (*joined, *recent))
        while joined and held - joined[0].shape[2] >= context - per_frame:
            held -= joined[0].shape[2]
            joined = joined[1:]
        return CodecState(self.frames + 1, memory, joined, recent)

    @staticmethod
    def parts(frames: int, config: MimiConfig) -> tuple[int, int]:
        """How many segments and single frames a state holds after so many."""
        whole, recent = divmod(frames, SEGMENT)
        missing = config.context - config.per_frame - recent * config.per_frame
        return min(whole, max(0, -(-missing // (SEGMENT * config.per_frame)))), recent

    @staticmethod
    def most_bytes(config: MimiConfig, carried: int) -> int:
        """Of a state, its parts counted whole."""
        position = config.layers * 2 * config.dimension * 4
        return 4 * carried + (config.context + SEGMENT * config.per_frame) * position

    @staticmethod
    def past_bytes(config: MimiConfig, carried: int) -> int:
        """Of an earlier state, beyond what later ones hold: its convolutions, what they have joined or left out since (two
        segments, whichever state it is), and as much for its own frame twice over."""
        position = config.layers * 2 * config.dimension * 4
        return 4 * carried + (2 * SEGMENT + 2) * config.per_frame * position


class Direction(Protocol):
    """``Mimi.encode`` or ``Mimi.decode``."""

    def __call__(
        self, frame: Tensor, memory: Tensor, past: Tensor, places: Tensor, frames: Tensor, /
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def run(
    direction: Direction, config: MimiConfig, frame: Tensor, states: Sequence[CodecState]
) -> tuple[Tensor, list[CodecState]]:
    """One frame of every row (sound [B, samples] or codes [B, N]) to the other side, and the states after."""
    device, context = frame.device, config.context
    longest = min(max(state.frames for state in states), (context - 1) // config.per_frame) * config.per_frame
    past = torch.zeros(len(states), config.layers, 2, longest, config.heads, config.head_dim, device=device)
    for row, state in enumerate(states):
        if parts := (*state.joined, *state.recent):
            whole = torch.cat(parts, dim=2)[:, :, -longest:]
            past[row, :, :, longest - whole.shape[2] :] = whole
    frames = torch.tensor([state.frames for state in states], device=device)
    places = frames[:, None] * config.per_frame + torch.arange(-longest, 0, device=device)
    memory = torch.stack([state.memory for state in states])
    out, memory, new = direction(frame, memory, past, places, frames)
    after = [
        state.after(memory[row].clone(), new[row].clone(), context) for row, state in enumerate(states)
    ]  # a view would keep the whole batch alive
    return out, after
