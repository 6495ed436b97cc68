"""A model with somebody watching: it passes every call on and counts what was opened and closed."""

from __future__ import annotations

from typing import Any, cast

from realtime_omni.models.base import (
    ControlReducer,
    ModelSpec,
    PackedState,
    RewritingModel,
    SessionSetup,
    Step,
    StepBatch,
    WorldModel,
)
from realtime_omni.models.policy import PolicyModel
from realtime_omni.session.observation import Observation
from realtime_omni.session.values import SessionEvent, TickRequest


class WatchedModel:
    """A :class:`~realtime_omni.models.base.WorldModel` around another."""

    def __init__(self, inner: WorldModel) -> None:
        self.inner = inner
        self.opened = self.closed = 0

    def forget(self) -> None:
        """Count from zero again."""
        self.opened = self.closed = 0

    @property
    def spec(self) -> ModelSpec:
        return self.inner.spec

    def open(self, setup: SessionSetup) -> Any:
        state = self.inner.open(setup)
        self.opened += 1
        return state

    def close(self, state: Any) -> None:
        self.inner.close(state)
        self.closed += 1

    def understand(self, event: SessionEvent) -> str | None:
        return self.inner.understand(event)

    def check_observation(self, observation: Observation) -> None:
        assert isinstance(self.inner, PolicyModel)
        self.inner.check_observation(observation)

    def new_reducer(self) -> ControlReducer:
        return self.inner.new_reducer()

    def needs_prefill(self, state: Any) -> bool:
        return self.inner.needs_prefill(state)

    def rewritten_blocks(self, state: Any, tick: TickRequest) -> int:
        return cast("RewritingModel", self.inner).rewritten_blocks(state, tick)

    def prefill(self, batch: StepBatch) -> Step:
        return self.inner.prefill(batch)

    def step(self, batch: StepBatch) -> Step:
        return self.inner.step(batch)

    def pack(self, state: Any) -> PackedState:
        return self.inner.pack(state)

    def unpack(self, packed: PackedState) -> Any:
        state = self.inner.unpack(packed)
        self.opened += 1
        return state

    def fingerprint(self) -> str:
        return self.inner.fingerprint()

    def start_image(self, name: str) -> bytes:
        return self.inner.start_image(name)
