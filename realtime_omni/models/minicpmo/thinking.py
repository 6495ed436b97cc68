"""The language model in a tick: it reads a second, and writes until its unit ends, for all calls at once.

Owns the passes of a unit: ``<unit>`` and the second's tokens, one pass; each further token, one pass over the calls
that go on; the end and ``</unit>``, one pass over all. What a call's context holds is what was read and written, none
more: no call waits with tokens of its own for another.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import embedding

from realtime_omni.models.base import Checkpoint, GrowingAttention, StepBatch
from realtime_omni.models.minicpmo.network import Language, sent
from realtime_omni.models.minicpmo.sampling import choose_words
from realtime_omni.models.minicpmo.settings import Settings
from realtime_omni.models.minicpmo.units import Unit
from realtime_omni.models.minicpmo.vocabulary import Marks

CLOSING = 2
"""Tokens: what ends a unit, and ``</unit>``."""


@dataclass(slots=True)
class Writing:
    """One call's unit on its way. ``start``: its first position. ``second`` [n, D]: what was heard. ``chosen``: words that the
    model chose lately; ``draws``: two numbers a word. ``said``: words of this unit and what the model thought at each."""

    unit: Unit
    start: int
    second: Tensor
    chosen: list[int]
    draws: Sequence[tuple[float, float]]
    said: list[tuple[int, Tensor]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Of the whole unit, once it has ended."""
        return 1 + len(self.second) + len(self.unit.tokens) + 1

    @property
    def next_position(self) -> int:
        """Of the token that was written last, which is not read yet."""
        return self.start + 1 + len(self.second) + len(self.unit.tokens) - 1


class Thinker:
    """The language model and how its words are drawn."""

    def __init__(self, language: Language, marks: Marks, settings: Settings, device: torch.device) -> None:
        self.language = language.eval()
        self._marks, self._settings, self._device = marks, settings, device

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """[n, D]."""
        return embedding(sent(tokens, self._device), self.language.embed)

    def read(self, growing: GrowingAttention, rows: Sequence[int], x_BTD: Tensor, starts: Sequence[int]) -> Tensor:
        """Hidden states [B, D] after the last of T tokens, which are the rows' history from now on."""
        steps = torch.arange(x_BTD.shape[1], device=self._device)
        positions = sent(starts, self._device)[:, None] + steps

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return growing.attend(layer, q, k, v, rows=rows)

        hidden: Tensor = self.language.decoder(x_BTD, positions, attend)
        return hidden[:, -1]

    def warm_up(self) -> None:
        """Make ready before there is a call. Here: nothing to do."""

    def begin(self, growing: GrowingAttention) -> None:
        """Before the first pass of a tick that writes. Here: nothing to do."""

    def go_on(self, growing: GrowingAttention, rows: Sequence[int], x_BTD: Tensor, starts: Sequence[int]) -> Tensor:
        """As :meth:`read`, in a tick that writes."""
        return self.read(growing, rows, x_BTD, starts)

    def write(
        self, batch: StepBatch, growing: GrowingAttention, writing: Mapping[int, Writing]
    ) -> Generator[Checkpoint, None, None]:
        """Fill the units of all rows that stay active."""
        self.begin(growing)
        rows = list(writing)
        opening = self.embed([self._marks.unit])
        x = torch.stack([torch.cat((opening, writing[n].second)) for n in rows])
        hidden = self.go_on(growing, rows, x, [writing[n].start for n in rows])
        thoughts = dict(zip(rows, hidden, strict=True))
        while rows := self._choose(writing, thoughts):
            yield Checkpoint("forward", "think")
            rows = [n for n in rows if n in batch.active]
            thoughts = {}
            if rows:
                x = self.embed([writing[n].unit.tokens[-1] for n in rows])
                hidden = self.go_on(growing, rows, x[:, None], [writing[n].next_position for n in rows])
                thoughts = dict(zip(rows, hidden, strict=True))
        yield Checkpoint("forward", "think")
        rows = [n for n in batch.active if n in writing]
        if rows:
            ends = [token for n in rows for token in (writing[n].unit.tokens[-1], self._marks.unit_end)]
            x = self.embed(ends).view(len(rows), CLOSING, -1)
            self.go_on(growing, rows, x, [writing[n].next_position for n in rows])
            growing.finish(rows)

    def _choose(self, writing: Mapping[int, Writing], thoughts: Mapping[int, Tensor]) -> list[int]:
        """Each row's next token; the rows whose unit goes on."""
        for n, thought in thoughts.items():
            tokens = writing[n].unit.tokens
            if len(tokens) > 1:  # the decision is not spoken
                writing[n].said.append((tokens[-1], thought))
        rows = [n for n in thoughts if writing[n].unit.chooses]
        chosen: dict[int, int] = {}
        if rows:
            logits = self.language.logits(torch.stack([thoughts[n] for n in rows]))
            before = [writing[n].chosen for n in rows]
            draws = [writing[n].draws[len(writing[n].unit.tokens)] for n in rows]
            words = choose_words(logits, self._marks, self._settings.text, before, draws)
            chosen = dict(zip(rows, words, strict=True))
        for n in thoughts:
            writing[n].unit.write(chosen.get(n))
            if n in chosen and chosen[n] != self._marks.chunk_eos:
                writing[n].chosen.append(chosen[n])
        return [n for n in thoughts if not writing[n].unit.done]
