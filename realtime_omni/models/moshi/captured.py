"""The stages as CUDA graphs: a tick costs what the networks cost, not one launch after the other.

A few sizes of batches are captured, each stage by itself, over memory that stays where it is; rows that are filled up are
nobody's. Keys and values over time are read on their pages (:mod:`realtime_omni.kv.attention.decode`).

What the codec remembers of a call is a value as ever (:class:`.codec.CodecState`). :class:`CodecRows` holds copies of the
latest values in the layout that a graph reads: one that follows from what its row holds is not loaded again. That is a cache
and nothing more: a call that was rewound, forked or restored, or whose tick failed, brings another value than the row holds,
and is loaded. On the CPU the same memory is filled and the same work runs without a graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from realtime_omni.kv.attention.decode import DecodePlan, DecodeRows
from realtime_omni.kv.storage import KVStorage
from realtime_omni.models.base import StepBatch
from realtime_omni.models.common.capture import Capture, fitting, sizes_up_to
from realtime_omni.models.moshi.codec import CodecState, Direction
from realtime_omni.models.moshi.config import MimiConfig
from realtime_omni.models.moshi.mimi import Mimi
from realtime_omni.models.moshi.stages import Heard, Rows, Stages, Thinking, owned


class CapturedStages(Stages):
    """See the module. ``most``: rows of a batch at most."""

    shared_by_content = True  # scratch of a tick, and copies of values that are known by identity

    def __init__(self, thinking: Thinking, mimi: Mimi, most: int, device: torch.device) -> None:
        super().__init__(thinking, mimi)
        capture, rows, codec = Capture(device), fitting(most), mimi.config
        samples = torch.zeros(rows, codec.frame_samples, device=device)
        codes = torch.zeros(rows, mimi.count, dtype=torch.int64, device=device)
        self._ears = CodecRows(mimi.encode, codec, mimi.encoder.carried, samples, codes, capture)
        self._mouth = CodecRows(mimi.decode, codec, mimi.decoder.carried, codes.clone(), samples.clone(), capture)
        self._thinker = Thinker(thinking, rows, mimi.count, capture, device)
        self._sizes = sizes_up_to(most)

    def warm_up(self, storage: KVStorage, *, prompts: bool) -> None:
        """Capture every size, so that no call waits for one: some ten seconds for 64 rows."""
        self._thinker.use(DecodeRows(storage, self._sizes[-1]))
        for size in self._sizes:
            for stage in (self._ears, self._thinker, self._mouth):
                stage.graph(size)
            if prompts:
                self._thinker.prompt_graph(size)

    def prompt(
        self,
        batch: StepBatch,
        rows: Rows,
        columns: Sequence[tuple[list[int], Tensor | None]],
    ) -> list[Tensor]:
        return self._thinker.prompt(batch.decoding(), rows, *self._given(columns, rows.rings[0].device))

    def listen(self, sound: Tensor, states: Sequence[CodecState]) -> tuple[Tensor, list[CodecState]]:
        return self._ears(sound, states)

    def think(self, batch: StepBatch, rows: Rows, heard: Heard) -> tuple[list[Tensor], Tensor]:
        return self._thinker(batch.decoding(), rows, heard)

    def speak(self, codes: Tensor, states: Sequence[CodecState]) -> tuple[Tensor, list[CodecState]]:
        return self._mouth(codes, states)


class Thinker:
    """The language model's step in fixed memory."""

    def __init__(self, thinking: Thinking, rows: int, codebooks: int, capture: Capture, device: torch.device) -> None:
        config = thinking.lm.config
        self._thinking, self._capture = thinking, capture
        self._rings = thinking.streams.start().repeat(rows, 1, 1)
        self._steps = torch.zeros(rows, dtype=torch.int64, device=device)
        self._user = torch.zeros(rows, config.n_q - config.own_streams, dtype=torch.int64, device=device)
        self._silenced = torch.zeros(rows, dtype=torch.bool, device=device)
        width = thinking.width
        self._chance = torch.ones(rows, 1 + codebooks, width, device=device) if width else None
        self._newest = torch.zeros(rows, 1 + codebooks, dtype=torch.int64, device=device)
        self._given = torch.zeros(rows, thinking.streams.count, dtype=torch.int64, device=device)
        self._embedded = torch.zeros(rows, config.dim, device=device)
        self._instead = torch.zeros(rows, dtype=torch.bool, device=device)
        self._decoding: DecodeRows | None = None
        self._graphs: dict[int, Callable[[], None]] = {}
        self._prompt_graphs: dict[int, Callable[[], None]] = {}

    def __call__(self, plan: DecodePlan, rows: Rows, heard: Heard) -> tuple[list[Tensor], Tensor]:
        count = len(rows.active)
        graph = self._ready(plan, rows, self.graph)
        self._user[:count].copy_(heard.user)
        self._silenced[:count].copy_(torch.tensor(heard.silenced))
        if self._chance is not None and heard.chance is not None:
            self._chance[:count].copy_(heard.chance)
        graph()
        plan.wrote(rows.active)
        return owned(self._rings[:count]), self._newest[:count].clone()

    def prompt(self, plan: DecodePlan, rows: Rows, given: Tensor, embedded: Tensor, instead: Tensor) -> list[Tensor]:
        """See :meth:`.stages.Thinking.prompted`."""
        count = len(rows.active)
        graph = self._ready(plan, rows, self.prompt_graph)
        self._given[:count].copy_(given)
        self._embedded[:count].copy_(embedded)
        self._instead[:count].copy_(instead)
        graph()
        plan.wrote(rows.active)
        return owned(self._rings[:count])

    def _ready(self, plan: DecodePlan, rows: Rows, graph_of: Callable[[int], Callable[[], None]]) -> Callable[[], None]:
        """The graph of so many rows, and everything in place that both kinds of step read."""
        count = len(rows.active)
        size = fitting(count)
        if self._decoding is None or not plan.fits(self._decoding, len(self._steps)):
            self.use(plan.rows(len(self._steps)))
        assert self._decoding is not None
        graph = graph_of(size)  # before anything is filled in: the runs before a capture write
        plan.fill(self._decoding, rows.active, size)
        self._steps[:size].copy_(torch.tensor([*rows.steps, *[0] * (size - count)]))  # at step 0 a ring is not read
        self._rings[:count].copy_(torch.stack(list(rows.rings)))
        return graph

    def use(self, memory: DecodeRows) -> None:
        """These pools from now on."""
        self._decoding = memory
        self._graphs.clear()
        self._prompt_graphs.clear()

    def graph(self, size: int) -> Callable[[], None]:
        """The step of so many rows, captured when it is first asked for."""
        return self._made(self._graphs, size, self._work)

    def prompt_graph(self, size: int) -> Callable[[], None]:
        """A prompt's step of so many rows, captured when it is first asked for."""
        return self._made(self._prompt_graphs, size, self._prompt_work)

    def _made(
        self, known: dict[int, Callable[[], None]], size: int, work: Callable[[int, DecodeRows], None]
    ) -> Callable[[], None]:
        found = known.get(size)
        if found is None:
            assert self._decoding is not None
            self._decoding.clear()
            self._steps.zero_()
            found = known[size] = self._capture(partial(work, size, self._decoding))
        return found

    def _prompt_work(self, size: int, memory: DecodeRows) -> None:
        rings = self._thinking.prompted(
            self._rings[:size],
            self._steps[:size],
            self._given[:size],
            self._embedded[:size],
            self._instead[:size],
            memory.attend,
        )
        self._rings[:size].copy_(rings)

    def _work(self, size: int, memory: DecodeRows) -> None:
        chance = None if self._chance is None else self._chance[:size]
        rings, newest = self._thinking(
            self._rings[:size], self._steps[:size], self._user[:size], self._silenced[:size], chance, memory.attend
        )
        self._rings[:size].copy_(rings)
        self._newest[:size].copy_(newest)


class CodecRows:
    """One direction of the codec: the latest values in fixed memory, and passes over some of them. Its last row is nobody's."""

    def __init__(
        self, direction: Direction, config: MimiConfig, carried: int, given: Tensor, made: Tensor, capture: Capture
    ) -> None:
        """``given`` and ``made`` [rows, ...]: memory for a frame on both sides."""
        rows, device = len(given), given.device
        past = (config.layers, 2, config.context, config.heads, config.head_dim)
        new = (config.layers, 2, config.per_frame, config.heads, config.head_dim)
        self._direction, self._config, self._capture = direction, config, capture
        self._memory, self._past = (
            torch.zeros(rows + 1, carried, device=device),
            torch.zeros(rows + 1, *past, device=device),
        )
        self._held: list[weakref.ref[CodecState] | None] = [None] * rows
        self._places = torch.arange(config.context, device=device)
        self._given, self._made = given, made
        self._at, self._frames = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        self._memory_after, self._new = (
            torch.zeros(rows, carried, device=device),
            torch.zeros(rows, *new, device=device),
        )
        self._graphs: dict[int, Callable[[], None]] = {}

    def __call__(self, given: Tensor, states: Sequence[CodecState]) -> tuple[Tensor, list[CodecState]]:
        """One frame [B, ...] of every state; what it became, and the states after."""
        rows, count, size = self._placed(states), len(states), fitting(len(states))
        graph = self.graph(size)
        self._fill(rows, [state.frames for state in states], size)
        self._given[:count].copy_(given)
        for row in rows:
            # Its memory is changed in place: should anything fail from here on, it is loaded again.
            self._held[row] = None
        graph()
        memories, new, context = owned(self._memory_after[:count]), owned(self._new[:count]), self._config.context
        after = [s.after(m, n, context) for s, m, n in zip(states, memories, new, strict=True)]
        for row, state in zip(rows, after, strict=True):
            self._held[row] = weakref.ref(state)
        return self._made[:count].clone(), after

    def _fill(self, rows: list[int], frames: list[int], size: int) -> None:
        """Rows to go over, and how many frames they have seen; nobody's for the rest."""
        spare = size - len(rows)
        self._at[:size].copy_(torch.tensor(rows + [len(self._held)] * spare))
        self._frames[:size].copy_(torch.tensor(frames + [0] * spare))

    def _placed(self, states: Sequence[CodecState]) -> list[int]:
        """The row of every state, loaded where none held it: into one that nobody needs, or that this batch does not."""
        held = {
            id(there): row for row, ref in enumerate(self._held) if ref is not None and (there := ref()) is not None
        }
        found = [held.pop(id(state), None) for state in states]  # popped: two forks of one value are two rows
        others = set(held.values())
        free = iter(sorted(set(range(len(self._held))).difference(found), key=lambda row: (row in others, row)))
        placed: list[int] = []
        for state, row in zip(states, found, strict=True):
            if row is None:
                row = next(free)
                self._load(row, state)
            placed.append(row)
        return placed

    def _load(self, row: int, state: CodecState) -> None:
        config = self._config
        self._held[row] = None
        self._memory[row].copy_(state.memory)
        if parts := (*state.joined, *state.recent):
            last = state.frames * config.per_frame
            past = torch.cat(parts, dim=2)[:, :, -config.context :]
            positions = torch.arange(last - past.shape[2], last, device=past.device)
            self._past[row].index_copy_(2, positions % config.context, past)

    def graph(self, size: int) -> Callable[[], None]:
        """A pass over so many rows, captured when it is first asked for."""
        found = self._graphs.get(size)
        if found is None:
            self._fill([], [], size)  # the runs before a capture change nobody's row
            found = self._graphs[size] = self._capture(partial(self._work, size))
        return found

    def _work(self, size: int) -> None:
        """A position stands at its number modulo ``context``; those of a frame are written behind the pass, in the place of the
        oldest, which later frames cannot reach."""
        config, per, at, frames = self._config, self._config.per_frame, self._at[:size], self._frames[:size]
        newest = frames[:, None] * per - 1
        places = newest - (newest - self._places) % config.context  # of what is there; negative: nothing yet
        made, memory, new = self._direction(self._given[:size], self._memory[at], self._past[at], places, frames)
        own = (newest + 1 + torch.arange(per, device=newest.device)) % config.context
        self._past[at[:, None], :, :, own] = new.permute(0, 3, 1, 2, 4, 5)
        self._memory[at] = memory
        self._memory_after[:size].copy_(memory)
        self._new[:size].copy_(new)
        self._made[:size].copy_(made)
