"""A tick's three pieces of device work over the rows of a batch, and a prompt's, call by call to the device: the reference.

Owns nothing of a call: states and rings go in, and what follows them comes out as values of their own.
:mod:`.captured` does the same with graphs.

Shapes: B rows, K streams, N codebooks, W candidates of a draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from realtime_omni.kv.storage import KVStorage
from realtime_omni.models.base import StepBatch
from realtime_omni.models.moshi.codec import CodecState, run
from realtime_omni.models.moshi.mimi import Mimi
from realtime_omni.models.moshi.network import Attend, MoshiLM
from realtime_omni.models.moshi.sampling import Chance, draw
from realtime_omni.models.moshi.streams import Streams


@dataclass(frozen=True, slots=True)
class Thinking:
    """The language model's step of a frame: pure, on tensors. ``hush`` int64 [generated]: what a silenced agent remembers."""

    lm: MoshiLM
    streams: Streams
    text: Chance
    audio: Chance
    hush: Tensor

    @property
    def width(self) -> int:
        """W; 0 where nothing is drawn by chance."""
        return max(self.text.width(self.lm.config.text_card), self.audio.width(self.lm.config.card))

    def __call__(
        self, rings: Tensor, steps: Tensor, user: Tensor, silenced: Tensor, chance: Tensor | None, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """``rings`` [B, K, columns], ``steps`` [B], ``user`` [B, N], ``silenced`` bool [B], ``chance`` [B, 1 + N, W] or None.

        Returns the rings after the step, and the newest whole frame [B, generated]. A silenced agent remembers that it was
        silent, whatever it would have said."""
        tokens, rings = self.streams.read(rings, steps, user)
        temporal, codebooks = self.lm.temporal, self.streams.generated - 1
        hidden, logits = temporal(temporal.embed(tokens), steps[:, None], attend)
        text = draw(logits.float(), self.text, None if chance is None else chance[:, 0])

        def choose(step: int, each: Tensor) -> Tensor:
            return draw(each, self.audio, None if chance is None else chance[:, 1 + step])

        codes = self.lm.depth(hidden, text, codebooks, choose)
        made = torch.where(silenced[:, None], self.hush, torch.cat((text[:, None], codes), dim=1))
        rings = self.streams.write(rings, steps, made)
        return rings, self.streams.frame(rings, steps)

    def prompted(
        self, rings: Tensor, steps: Tensor, given: Tensor, embedded: Tensor, instead: Tensor, attend: Attend
    ) -> Tensor:
        """The rings after a step of a prompt: all streams hold ``given`` [B, K]; the first layer reads ``embedded`` [B, D]
        where ``instead`` bool [B] says so. Keys and values are all that is left of it."""
        temporal = self.lm.temporal
        tokens, rings = self.streams.read(rings, steps, given, first=0)
        x = temporal.embed(tokens)
        x = torch.where(instead[:, None, None], embedded[:, None].to(x.dtype), x)
        temporal(x, steps[:, None], attend)
        return self.streams.write(rings, steps, given[:, : self.streams.generated])


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a batch that take a step: their numbers, and where each stands, its ring of streams and its step."""

    active: tuple[int, ...]
    rings: Sequence[Tensor]
    steps: Sequence[int]


@dataclass(frozen=True, slots=True)
class Heard:
    """What a step of theirs is given; see :class:`Thinking`. ``user`` lies on the device, ``chance`` on the CPU."""

    user: Tensor
    silenced: Sequence[bool]
    chance: Tensor | None


class Stages:
    """Plain calls, kernel by kernel."""

    def __init__(self, thinking: Thinking, mimi: Mimi) -> None:
        self._thinking, self._mimi = thinking, mimi

    def warm_up(self, storage: KVStorage, *, prompts: bool) -> None:
        """Make ready for ticks over these pools, before there is a call. ``prompts``: calls may begin with one."""

    def prompt(
        self,
        batch: StepBatch,
        rows: Rows,
        columns: Sequence[tuple[list[int], Tensor | None]],
    ) -> list[Tensor]:
        """The rings after a step of a prompt whose ``columns`` are :func:`.prompts.column`'s. Writes the active rows' keys and
        values."""
        device = rows.rings[0].device
        given, embedded, instead = self._given(columns, device)
        after = self._thinking.prompted(
            torch.stack(list(rows.rings)),
            torch.tensor(rows.steps, device=device),
            given,
            embedded,
            instead,
            partial(batch.attention().attend, rows=rows.active, commit=True),
        )
        return owned(after)

    def _given(
        self, columns: Sequence[tuple[list[int], Tensor | None]], device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`Thinking.prompted` takes them."""
        config = self._thinking.lm.config
        nothing = torch.zeros(config.dim, device=device)
        embedded = torch.stack([nothing if each is None else each.to(nothing) for _, each in columns])
        given = torch.tensor([tokens for tokens, _ in columns], device=device)
        return given, embedded, torch.tensor([each is not None for _, each in columns], device=device)

    def listen(self, sound: Tensor, states: Sequence[CodecState]) -> tuple[Tensor, list[CodecState]]:
        """Sound [B, samples] to codes [B, N], both on the device, and the states after."""
        return run(self._mimi.encode, self._mimi.config, sound, states)

    def think(self, batch: StepBatch, rows: Rows, heard: Heard) -> tuple[list[Tensor], Tensor]:
        """What :class:`Thinking` returns. Writes the active rows' keys and values."""
        device = heard.user.device
        after, newest = self._thinking(
            torch.stack(list(rows.rings)),
            torch.tensor(rows.steps, device=device),
            heard.user,
            torch.tensor(heard.silenced, device=device),
            None if heard.chance is None else heard.chance.to(device),
            partial(batch.attention().attend, rows=rows.active, commit=True),
        )
        return owned(after), newest

    def speak(self, codes: Tensor, states: Sequence[CodecState]) -> tuple[Tensor, list[CodecState]]:
        """Codes [B, N] to sound [B, samples], and the states after."""
        return run(self._mimi.decode, self._mimi.config, codes, states)


def owned(rows: Tensor) -> list[Tensor]:
    """A copy of every row, in memory of its own: a view would keep the whole batch alive."""
    copies = [torch.empty_like(row, memory_format=torch.contiguous_format) for row in rows.unbind()]
    torch._foreach_copy_(copies, list(rows.unbind()))
    return copies
