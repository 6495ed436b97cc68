"""Both transformers' passes over one token of every row as CUDA graphs: what a second has most of.

A pass costs its kernels then, not their launches. A few sizes of batches are captured, over memory that stays where it is
(:class:`~realtime_omni.kv.attention.rooms.Rooms`); rows that are filled up are nobody's. Nothing is kept between two ticks:
histories are copied into the rooms when a tick begins, the language model's from its pages, the talker's from the calls'
states. On the CPU the same memory is filled and the same work runs without a graph.

The pass over a second's first eleven tokens and the one over its last two stay plain. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from realtime_omni.kv.attention.rooms import Rooms
from realtime_omni.kv.storage import KVStorage
from realtime_omni.models.base import GrowingAttention
from realtime_omni.models.common.capture import Capture, fitting, sizes_up_to
from realtime_omni.models.minicpmo.network import Decoder, Language
from realtime_omni.models.minicpmo.settings import Settings
from realtime_omni.models.minicpmo.talker import Line, Past, Talker
from realtime_omni.models.minicpmo.thinking import Thinker
from realtime_omni.models.minicpmo.vocabulary import Marks


class Steps:
    """A decoder over one embedding of some rows. Its rooms may be exchanged; the graphs go with them."""

    shared_by_content = True  # scratch of a tick

    def __init__(self, decoder: Decoder, rooms: Rooms, capture: Capture) -> None:
        rows, like = fitting(rooms.rows), decoder.norm
        self.rooms = rooms
        self._decoder, self._capture = decoder, capture
        self._x = like.new_zeros(rows, len(like))
        self._hidden = torch.zeros_like(self._x)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self._graphs: dict[int, Callable[[], None]] = {}

    def __call__(self, x_BD: Tensor, rows: Sequence[int], columns: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Hidden states [B, D] after the last norm; row n's token goes to its column of room n."""
        count, size = len(x_BD), fitting(len(x_BD))
        graph = self.graph(size)  # before anything is filled in: the runs before a capture write
        self.rooms.place(rows, columns, size)
        self._x[:count].copy_(x_BD)
        self._positions[:count].copy_(torch.tensor(positions))
        graph()
        return self._hidden[:count].clone()

    def warm_up(self) -> None:
        """Capture every size."""
        for size in sizes_up_to(self.rooms.rows):
            self.graph(size)

    def graph(self, size: int) -> Callable[[], None]:
        """A pass over so many rows, captured when it is first asked for."""
        found = self._graphs.get(size)
        if found is None:
            self.rooms.place([], [], size)
            found = self._graphs[size] = self._capture(partial(self._work, size))
        return found

    def _work(self, size: int) -> None:
        self.rooms.look(size)
        hidden = self._decoder(self._x[:size, None], self._positions[:size, None], self.rooms.attend)
        self._hidden[:size].copy_(hidden[:, 0])


class CapturedThinker(Thinker):
    """``rows``: of a batch at most."""

    def __init__(
        self, language: Language, marks: Marks, settings: Settings, device: torch.device, rows: int, capture: Capture
    ) -> None:
        super().__init__(language, marks, settings, device)
        self._rows, self._capture = fitting(rows), capture
        self._steps: Steps | None = None

    def warm_up(self, storage: KVStorage) -> None:
        self._use(Rooms.of(storage, self._rows)).warm_up()

    def begin(self, growing: GrowingAttention) -> None:
        steps = self._steps
        if steps is None or not growing.fits(steps.rooms):
            steps = self._use(growing.rooms(self._rows))
        growing.use(steps.rooms)

    def read_one(
        self, growing: GrowingAttention, rows: Sequence[int], x_BD: Tensor, positions: Sequence[int]
    ) -> Tensor:
        assert self._steps is not None
        hidden = self._steps(x_BD, rows, growing.columns(rows), positions)
        growing.wrote(rows)
        return hidden

    def _use(self, rooms: Rooms) -> Steps:
        self._steps = Steps(self.language.decoder, rooms, self._capture)
        return self._steps


class TalkerRooms:
    """Lines of one tick after the other, in the same rooms. ``rows``: of a batch at most."""

    def __init__(self, talker: Talker, rows: int, capture: Capture) -> None:
        size, like = talker.decoder.config, talker.decoder.norm
        heads = (size.num_key_value_heads, size.head_dim)
        rooms = Rooms(
            size.num_hidden_layers,
            fitting(rows),
            size.max_position_embeddings,
            *heads,
            dtype=like.dtype,
            device=like.device,
        )
        self.steps = Steps(talker.decoder, rooms, capture)

    def lines(self, lines: Sequence[Line]) -> CapturedLines:
        return CapturedLines(self.steps, lines)


class CapturedLines:
    """Meets :class:`~realtime_omni.models.minicpmo.talker.Mind`."""

    def __init__(self, steps: Steps, lines: Sequence[Line]) -> None:
        self._steps, self._lines = steps, lines
        self._ends = [line.position for line in lines]

    def begin(self) -> Tensor:
        """Conditions are read side by side, one embedding a pass: as many passes as the longest has, whatever the rows."""
        rooms = self._steps.rooms
        for row, line in enumerate(self._lines):
            if line.past:
                past = torch.cat(line.past, dim=2)
                rooms.keys[:, row, : line.position].copy_(past[:, 0])
                rooms.values[:, row, : line.position].copy_(past[:, 1])
        conditions = [line.condition for line in self._lines]
        last = torch.empty_like(torch.stack([x_TD[0] for x_TD in conditions]))
        for token in range(max(map(len, conditions))):
            rows = [row for row, x_TD in enumerate(conditions) if token < len(x_TD)]
            last[rows] = self.step(rows, torch.stack([conditions[row][token] for row in rows]))
        return last

    def step(self, rows: Sequence[int], x_BD: Tensor) -> Tensor:
        places = [self._ends[row] for row in rows]
        for row in rows:
            self._ends[row] += 1
        return self._steps(x_BD, rows, places, places)

    def remembered(self) -> list[Past]:
        rooms = self._steps.rooms
        return [
            (
                *line.past,
                torch.stack((rooms.keys[:, row, line.position : end], rooms.values[:, row, line.position : end]), 1),
            )
            for row, (line, end) in enumerate(zip(self._lines, self._ends, strict=True))
        ]
