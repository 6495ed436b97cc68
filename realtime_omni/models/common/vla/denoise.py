"""The flow loop of a batch, one step at a time: rows that go by the same rule take their steps together.

Owns the grouping of rows and what happens when one leaves. Must not know: observations, units, sessions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from realtime_omni.models.common.vla.attention import PrefixKV
from realtime_omni.models.common.vla.flow import Euler, StepRule, time_of
from realtime_omni.models.common.vla.stages import Stages
from realtime_omni.rtc.modes import Mode, Settings, resolve, step_rule
from realtime_omni.rtc.previous import Previous


@dataclass(frozen=True, slots=True)
class FlowRow:
    """One row before its first step. ``kv``: its prefix, one row; ``state`` [state_dim]; ``noise`` [H, A]; ``left`` [n, A]:
    what is left of the chunk that is executed, in model space (n may be 0); ``delay``: actions of the new chunk that will
    be in the past."""

    number: int
    kv: PrefixKV
    state: Tensor
    noise: Tensor
    steps: int
    left: Tensor
    delay: int


class Flow:
    """Rows of one number of steps and one resolved mode."""

    def __init__(self, stages: Stages, rows: Sequence[FlowRow], settings: Settings) -> None:
        self._stages = stages
        self._settings = settings
        self._rows = tuple(rows)
        self._rule: StepRule = Euler()
        self._arrange()
        self._x = self._rule.start(torch.stack([row.noise for row in rows]))

    def step(self, number: int, active: Collection[int]) -> None:
        """Step ``number`` for those rows that are still wanted."""
        self._keep(active)
        steps = self._rows[0].steps if self._rows else 0
        if number >= steps:
            return
        t = torch.full((len(self._rows),), time_of(number, steps), dtype=torch.float32, device=self._x.device)
        self._x = self._rule.step(self._velocity, self._x, t, -1.0 / steps)

    def chunks(self) -> dict[int, Tensor]:
        """Row number -> chunk [H, A] in model space."""
        return {row.number: chunk for row, chunk in zip(self._rows, self._x, strict=True)}

    def _keep(self, active: Collection[int]) -> None:
        kept = [i for i, row in enumerate(self._rows) if row.number in active]
        if len(kept) == len(self._rows):
            return
        self._rows = tuple(self._rows[i] for i in kept)
        self._x = self._x[kept]
        if kept:
            self._arrange()

    def _arrange(self) -> None:
        self._velocity = self._stages.velocity([row.kv for row in self._rows], [row.state for row in self._rows])
        noise = self._rows[0].noise
        previous = Previous.of([row.left for row in self._rows], *noise.shape).to(noise.device)
        self._rule = step_rule(self._settings, previous, [row.delay for row in self._rows]) or Euler()


def make_flows(stages: Stages, rows: Sequence[FlowRow], settings: Settings) -> tuple[Flow, ...]:
    """Rows by steps and mode. A row with nothing left of an old chunk goes by the plain rule."""
    groups: dict[tuple[int, Mode], list[FlowRow]] = {}
    for row in rows:
        mode = resolve(settings.mode, row.delay, stages.network.shape.horizon) if len(row.left) else Mode.NONE
        groups.setdefault((row.steps, mode), []).append(row)
    return tuple(Flow(stages, group, replace(settings, mode=mode)) for (_, mode), group in groups.items())
