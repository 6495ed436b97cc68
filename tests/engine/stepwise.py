"""A continuous policy for tests: its chunk is the observation's state, its pieces are written down."""

from __future__ import annotations

from dataclasses import replace

from realtime_omni.models.base import Checkpoint, ModelSpec, Step, StepBatch
from realtime_omni.models.null.policy import NullPolicy, NullPolicyOptions

STEPS = 3


class Stepwise(NullPolicy):
    """``pieces``: what was computed, in order: ``begin`` or ``step`` and the sessions that it served."""

    def __init__(self) -> None:
        super().__init__(NullPolicyOptions(state_dim=3, action_dim=2, horizon=4, steps=STEPS))
        self._continuous = replace(super().spec, continuous=True)
        self.pieces: list[tuple[str, tuple[str, ...]]] = []

    @property
    def spec(self) -> ModelSpec:
        return self._continuous

    def step(self, batch: StepBatch) -> Step:
        taken: dict[int, int] = {}
        while batch.active:
            if any(number not in taken for number in batch.active):
                yield Checkpoint("forward", "begin")
                fresh = [number for number in batch.active if number not in taken]
                taken |= dict.fromkeys(fresh, 0)
                self._note("begin", batch, fresh)
            yield Checkpoint("forward", "denoise")
            if any(number not in taken for number in batch.active):
                continue  # who has joined meanwhile is begun first
            self._note("step", batch, list(batch.active))
            for number in batch.active:
                taken[number] += 1
                if taken[number] == (batch.row(number).tick.observation.steps or STEPS):  # type: ignore[union-attr]
                    batch.finish(number, self._output(batch.row(number)))
        return {}

    def _note(self, what: str, batch: StepBatch, numbers: list[int]) -> None:
        self.pieces.append((what, tuple(str(batch.row(number).tick.session_id) for number in numbers)))
