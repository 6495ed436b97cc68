"""Training clips in device memory.

Owns: a pool of simulator clips as uint8 (drawing once and reading often keeps the simulator out
of the step), and random batches from it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from recipes.tiny_world.simulator import PROPS, SIDE, Maps, Player, Simulator


def to_signed(frames: Tensor) -> Tensor:
    """uint8 0..255 to float -1..1."""
    return frames.float() / 127.5 - 1


class ClipPool:
    """Up to `capacity` clips of `frames` frames, drawn until full or `seconds` have passed.

    `players` take turns, `step` clips each. Where the walker stood and what was there is kept, too (`where`).
    """

    def __init__(
        self,
        simulator: Simulator,
        capacity: int,
        frames: int,
        seconds: float,
        seed: int,
        step: int = 2048,
        players: Sequence[Player] = (Player(),),
    ) -> None:
        self.generator = torch.Generator(device=simulator.device).manual_seed(seed)
        size, device = simulator.size, simulator.device
        self.frames = torch.empty(capacity, frames, 3, size, size, dtype=torch.uint8, device=device)
        self.keys = torch.empty(capacity, frames, 8, device=device)
        self.place = torch.empty(capacity, frames, dtype=torch.long, device=device)
        self.pose = torch.empty(capacity, frames, 4, device=device)
        self.solid = torch.empty(capacity, SIDE, SIDE, dtype=torch.uint8, device=device)
        self.props = torch.empty(capacity, PROPS, 2, device=device)
        self.count, began = 0, time.monotonic()
        turns = itertools.cycle(players)
        while self.count < capacity and (self.count == 0 or time.monotonic() - began < seconds):
            part = slice(self.count, min(self.count + step, capacity))
            drawn = simulator.clips(step, frames, self.generator, next(turns))
            rows = part.stop - part.start
            for kept, new in (
                (self.frames, drawn.frames),
                (self.keys, drawn.keys),
                (self.place, drawn.place),
                (self.pose, drawn.pose),
                (self.solid, drawn.maps.solid),
                (self.props, drawn.maps.props),
            ):
                kept[part] = new[:rows]
            self.count = part.stop
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        self.seconds = time.monotonic() - began

    def pick(self, rows: int) -> Tensor:
        return torch.randint(0, self.count, (rows,), generator=self.generator, device=self.frames.device)

    def batch(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """(frames in -1..1, keys, place) of random clips."""
        return self.clips(self.pick(rows))

    def clips(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(frames in -1..1, keys, place) of the clips `index`."""
        return to_signed(self.frames[index]), self.keys[index], self.place[index]

    def where(self, index: Tensor) -> tuple[Maps, Tensor]:
        """(maps, poses [B, F, 4]) of the clips `index`."""
        return Maps(self.solid[index].long(), self.props[index]), self.pose[index]

    def blocks(self, index: Tensor, block: Tensor, frames_per_block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Block `block` [B] of the clips `index` [B]: (frames, keys, place)."""
        frame = block[:, None] * frames_per_block + torch.arange(frames_per_block, device=block.device)
        row = index[:, None]
        return to_signed(self.frames[row, frame]), self.keys[row, frame], self.place[row, frame]
