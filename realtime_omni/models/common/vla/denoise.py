"""The flow loops of a batch, one step at a time: rows that go by the same rule take their steps together.

Rows join and leave between two steps, each with a time of its own. Owns the grouping of rows, their times, and what happens
when one leaves. Must not know: observations, units, sessions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from realtime_omni.models.common.vla.attention import PrefixKV
from realtime_omni.models.common.vla.devices import placed
from realtime_omni.models.common.vla.flow import Euler, StepRule, time_of
from realtime_omni.models.common.vla.stages import Stages
from realtime_omni.rtc.modes import Mode, Settings, resolve, step_rule
from realtime_omni.rtc.previous import Previous


@dataclass(frozen=True, slots=True)
class FlowRow:
    """One row before its first step; the samples of one observation are rows of one ``number``.

    ``kv``: its prefix, one row; ``state`` [state_dim]; ``noise`` [H, A]; ``left`` [n, A]: what is left of the chunk that is
    executed, in model space (n may be 0); ``delay``: actions of the new chunk that will be in the past; ``mode``: how it
    continues what is left."""

    number: int
    kv: PrefixKV
    state: Tensor
    noise: Tensor
    steps: int
    left: Tensor
    delay: int
    mode: Mode


class Flow:
    """Rows of one number of steps and one resolved mode, however far each has come."""

    def __init__(self, stages: Stages, steps: int, settings: Settings) -> None:
        self._stages = stages
        self._settings = settings
        self._rows: tuple[FlowRow, ...] = ()
        self._taken: tuple[int, ...] = ()
        """Steps that each row has taken."""
        self._x = torch.empty(0, device=stages.device)
        self._step_s = -1.0 / steps
        self._times = placed(torch.tensor([time_of(step, steps) for step in range(steps)]), stages.device)

    @property
    def is_empty(self) -> bool:
        return not self._rows

    def join(self, rows: Sequence[FlowRow]) -> None:
        began = self._rule(rows).start(torch.stack([row.noise for row in rows]))
        self._x = torch.cat((self._x, began)) if self._rows else began
        self._arrange((*self._rows, *rows), (*self._taken, *(0 for _ in rows)))

    def step(self, active: Collection[int]) -> dict[int, Tensor]:
        """One step of every row that is still wanted; the chunks [samples, H, A] of those that are done."""
        self._keep([i for i, row in enumerate(self._rows) if row.number in active])
        if self.is_empty:
            return {}
        t = self._times[self._next]
        self._x = self._guide.step(self._velocity, self._x, t, self._step_s)
        self._next += 1
        self._taken = tuple(taken + 1 for taken in self._taken)
        done = [i for i, taken in enumerate(self._taken) if taken == len(self._times)]
        samples: dict[int, list[Tensor]] = {}
        for i in done:
            samples.setdefault(self._rows[i].number, []).append(self._x[i])
        self._keep([i for i in range(len(self._rows)) if i not in done])
        return {number: torch.stack(chunks) for number, chunks in samples.items()}

    def _keep(self, kept: list[int]) -> None:
        if len(kept) == len(self._rows):
            return
        self._x = self._x[kept]
        self._arrange(tuple(self._rows[i] for i in kept), tuple(self._taken[i] for i in kept))

    def _arrange(self, rows: tuple[FlowRow, ...], taken: tuple[int, ...]) -> None:
        self._rows, self._taken = rows, taken
        if self.is_empty:
            return
        self._next = placed(torch.tensor(taken), self._stages.device)
        self._velocity = self._stages.velocity([row.kv for row in rows], [row.state for row in rows])
        self._guide = self._rule(rows)

    def _rule(self, rows: Sequence[FlowRow]) -> StepRule:
        if not any(len(row.left) for row in rows):
            return Euler()
        noise = rows[0].noise
        previous = Previous.of([row.left for row in rows], *noise.shape).to(noise.device)
        return step_rule(self._settings, previous, [row.delay for row in rows]) or Euler()


class Flows:
    """All rows under way, by number of steps and mode."""

    def __init__(self, stages: Stages, settings: Settings) -> None:
        self._stages = stages
        self._settings = settings
        self._flows: dict[tuple[int, Mode], Flow] = {}

    def join(self, rows: Sequence[FlowRow]) -> None:
        """A row with nothing left of an old chunk goes by the plain rule."""
        groups: dict[tuple[int, Mode], list[FlowRow]] = {}
        for row in rows:
            horizon = self._stages.network.shape.horizon
            mode = resolve(row.mode, row.delay, horizon) if len(row.left) else Mode.NONE
            groups.setdefault((row.steps, mode), []).append(row)
        for (steps, mode), group in groups.items():
            if (steps, mode) not in self._flows:
                self._flows[steps, mode] = Flow(self._stages, steps, replace(self._settings, mode=mode))
            self._flows[steps, mode].join(group)

    def step(self, active: Collection[int]) -> dict[int, Tensor]:
        """One step of every row that is still wanted; the chunks of those that are done, by number."""
        chunks: dict[int, Tensor] = {}
        for key, flow in tuple(self._flows.items()):
            chunks |= flow.step(active)
            if flow.is_empty:
                del self._flows[key]
        return chunks
