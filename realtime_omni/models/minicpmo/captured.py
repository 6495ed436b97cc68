"""The passes of both transformers as CUDA graphs: what a second has most of.

A pass costs its kernels then, not their launches. A few sizes of batches are captured for each number of tokens that a pass
has, over memory that stays where it is (:class:`~realtime_omni.kv.attention.rooms.Rooms`); rows that are filled up are
nobody's. Nothing is kept between two ticks: histories are copied into the rooms when a tick begins, the language model's from
its pages, the talker's from the calls' states. On the CPU the same memory is filled and the same work runs without a graph.
A call's prompt is read plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from realtime_omni.kv.attention.rooms import Rooms
from realtime_omni.models.base import GrowingAttention
from realtime_omni.models.common.capture import Capture, fitting, sizes_up_to
from realtime_omni.models.minicpmo.network import Decoder, Language, sent
from realtime_omni.models.minicpmo.settings import Settings
from realtime_omni.models.minicpmo.talker import Line, Past, Talker
from realtime_omni.models.minicpmo.thinking import CLOSING, Thinker
from realtime_omni.models.minicpmo.vocabulary import Marks


class Steps:
    """A decoder over some embeddings of some rows. ``lengths``: how many embeddings a row may have in a pass."""

    shared_by_content = True  # scratch of a tick

    def __init__(self, decoder: Decoder, rooms: Rooms, lengths: Collection[int], capture: Capture) -> None:
        rows, like = rooms.rows, decoder.norm
        self.rooms = rooms
        self._decoder, self._capture = decoder, capture
        self._x = {tokens: like.new_zeros(rows, tokens, len(like)) for tokens in lengths}
        self._hidden = {tokens: torch.zeros_like(x) for tokens, x in self._x.items()}
        self._positions = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self._graphs: dict[tuple[int, int], Callable[[], None]] = {}

    def __call__(self, x_BTD: Tensor, rows: Sequence[int], columns: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Hidden states [B, T, D] after the last norm; the tokens of row n go to room n from their column on. All rooms up to
        the last of these rows have part in the pass."""
        tokens, size = x_BTD.shape[1], fitting(max(rows) + 1)
        graph = self._graph(size, tokens)  # before anything is filled in: the runs before a capture write
        self.rooms.place(rows, columns, tokens, size)
        places = [0] * size
        for row, position in zip(rows, positions, strict=True):
            places[row] = position
        self._positions[:size].copy_(torch.tensor(places), non_blocking=True)
        at = sent(rows, x_BTD.device)
        self._x[tokens].index_copy_(0, at, x_BTD)
        graph()
        return self._hidden[tokens].index_select(0, at)

    def warm_up(self) -> None:
        """Capture every size."""
        for tokens in self._x:
            for size in sizes_up_to(self.rooms.rows):
                self._graph(size, tokens)

    def _graph(self, size: int, tokens: int) -> Callable[[], None]:
        """A pass over so many rows, captured when it is first asked for."""
        found = self._graphs.get((size, tokens))
        if found is None:
            self.rooms.place([], [], tokens, size)
            found = self._graphs[size, tokens] = self._capture(partial(self._work, size, tokens))
        return found

    def _work(self, size: int, tokens: int) -> None:
        positions = self._positions[:size, None] + torch.arange(tokens, device=self._positions.device)
        hidden = self._decoder(self._x[tokens][:size], positions, self.rooms.look(size, tokens))
        self._hidden[tokens][:size].copy_(hidden)


class CapturedThinker(Thinker):
    """``rooms``: for a batch of calls. ``opening``: tokens of a unit's first pass."""

    def __init__(
        self,
        language: Language,
        marks: Marks,
        settings: Settings,
        device: torch.device,
        *,
        rooms: Rooms,
        opening: int,
        capture: Capture,
    ) -> None:
        super().__init__(language, marks, settings, device)
        self._steps = Steps(language.decoder, rooms, (opening, 1, CLOSING), capture)

    def warm_up(self) -> None:
        self._steps.warm_up()

    def begin(self, growing: GrowingAttention) -> None:
        growing.use(self._steps.rooms)

    def go_on(self, growing: GrowingAttention, rows: Sequence[int], x_BTD: Tensor, starts: Sequence[int]) -> Tensor:
        hidden = self._steps(x_BTD, rows, growing.columns(rows), starts)
        growing.wrote(rows, x_BTD.shape[1])
        return hidden[:, -1]


class TalkerRooms:
    """Lines of one tick after the other, in the same rooms. ``rows``: of a batch at most; ``words``: of a condition."""

    def __init__(self, talker: Talker, *, rows: int, words: int, capture: Capture) -> None:
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
        self._words = words
        self.steps = Steps(talker.decoder, rooms, (words, 1), capture)

    def lines(self, lines: Sequence[Line]) -> CapturedLines:
        return CapturedLines(self.steps, lines, self._words)


class CapturedLines:
    """Meets :class:`~realtime_omni.models.minicpmo.talker.Mind`."""

    def __init__(self, steps: Steps, lines: Sequence[Line], words: int) -> None:
        self._steps, self._lines, self._words = steps, lines, words
        self._ends = [line.position for line in lines]

    def begin(self) -> Tensor:
        """Conditions are read in one pass, filled up: what follows takes the places behind them."""
        rooms, rows = self._steps.rooms, range(len(self._lines))
        conditions = [line.condition for line in self._lines]
        x = conditions[0].new_zeros(len(rows), self._words, conditions[0].shape[1])
        for row, line in enumerate(self._lines):
            rooms.begin(row, line.position)
            if line.past:
                past = torch.cat(line.past, dim=2)
                rooms.keys[:, row, : line.position].copy_(past[:, 0])
                rooms.values[:, row, : line.position].copy_(past[:, 1])
            x[row, : len(line.condition)] = line.condition
        hidden = self._steps(x, rows, self._ends, self._ends)
        self._ends = [line.position + len(line.condition) for line in self._lines]
        return torch.stack([hidden[row, len(x_TD) - 1] for row, x_TD in enumerate(conditions)])

    def step(self, rows: Sequence[int], x_BD: Tensor) -> Tensor:
        places = [self._ends[row] for row in rows]
        for row in rows:
            self._ends[row] += 1
        return self._steps(x_BD[:, None], rows, places, places)[:, 0]

    def remembered(self) -> list[Past]:
        rooms = self._steps.rooms
        return [
            (
                *line.past,
                torch.stack((rooms.keys[:, row, line.position : end], rooms.values[:, row, line.position : end]), 1),
            )
            for row, (line, end) in enumerate(zip(self._lines, self._ends, strict=True))
        ]
