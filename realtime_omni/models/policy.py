"""The contract between the engine and a policy: a model that answers an observation with a chunk of actions.

A policy is a model (:class:`~realtime_omni.models.base.WorldModel`) in everything that the engine does with one: states are
immutable values, ``step`` is a generator with a checkpoint before every denoise step, a tick commits or leaves nothing
behind. Two things differ. Each of its ticks carries an observation (``row.tick.observation``), and ``spec.policy`` says what
one must hold. A policy reads no history, unless it is a world, too (``PolicySpec.imagines``): what it keeps of an observation
(a prefix to reuse, the chunk to continue) is in its state, so a reset forgets it and a failed tick changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from realtime_omni.errors import ArgumentError, ErrorCode
from realtime_omni.models.base import ControlReducer, LatestWinsReducer, ModelSpec, Step, StepBatch, WorldModel
from realtime_omni.session.observation import Observation
from realtime_omni.session.values import SessionEvent

ACTIONS = "actions"
"""Name of a policy's artifact: float32 [horizon, action_dim] in the robot's units, layout TA."""
SAMPLES = "samples"
"""Name of the artifact of a policy that draws several: float32 [samples, horizon, action_dim], layout NTA; the first is the
chunk's actions before any averaging with older chunks."""


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """What an observation must hold, and what comes back.

    ``cameras``: names that pictures may have. ``state_dim`` and ``action_dim``: the robot's channels, not the network's
    padded widths. ``steps``: denoise steps of a chunk. ``statistics``: feature to where the numbers that normalise it come
    from, for the handshake. ``joins``: a chunk can continue the one before (real-time chunking); ``rtc_modes``: the ways that
    an observation may ask for, the deployment's own first. ``max_frames``: pictures that a camera may send at once.
    ``imagines``: the policy is a world, too: a tick without an observation goes on from what was imagined.
    ``restarts_on_prompt``: its history belongs to one instruction, so another one begins a new episode.
    """

    cameras: tuple[str, ...]
    image_size: int
    state_dim: int
    horizon: int
    action_dim: int
    steps: int
    max_steps: int = 100
    relative: bool = False
    joins: bool = False
    rtc_modes: tuple[str, ...] = ()
    max_frames: int = 1
    imagines: bool = False
    restarts_on_prompt: bool = False
    statistics: Mapping[str, str] = field(default_factory=dict)

    def check(self, observation: Observation) -> None:
        """What every policy refuses. Raises ArgumentError, naming the field."""
        unknown = sorted(set(observation.images) - set(self.cameras))
        if unknown:
            known = ", ".join(self.cameras)
            raise ArgumentError(
                f"no camera {unknown[0]!r}; known: {known}", code=ErrorCode.IMAGE_INVALID, path=f"images.{unknown[0]}"
            )
        if self.cameras and not observation.images:
            raise ArgumentError("at least one picture is needed", code=ErrorCode.IMAGE_INVALID, path="images")
        for name, image in observation.images.items():
            if image.ndim == 4 and (self.max_frames == 1 or len(image) > self.max_frames):
                most = (
                    "one picture, [H, W, 3], is" if self.max_frames == 1 else f"at most {self.max_frames} pictures are"
                )
                raise ArgumentError(
                    f"images.{name} is a stack of {len(image)}; {most} taken",
                    code=ErrorCode.IMAGE_INVALID,
                    path=f"images.{name}",
                )
        if observation.state.shape != (self.state_dim,):
            raise ArgumentError(
                f"state has {observation.state.size} channels, this policy {self.state_dim}", path="state"
            )
        if observation.steps is not None and observation.steps > self.max_steps:
            raise ArgumentError(f"steps are at most {self.max_steps}", path="steps")
        asked = None if observation.join is None else observation.join.mode
        if asked is not None and asked not in self.rtc_modes:
            offered = ", ".join(self.rtc_modes) or "no choice"
            raise ArgumentError(f"join.mode: this deployment offers {offered}", path="join.mode")


@runtime_checkable
class PolicyModel(WorldModel, Protocol):
    """What a policy implements beside the rest of the contract; its ``spec.policy`` is set."""

    def check_observation(self, observation: Observation) -> None:
        """Raises ArgumentError, naming the field, for an observation that ``step`` could not compute from.

        Called on the engine's thread between the pieces of other ticks: it must be quick, and may leave what is slow to
        find out to ``step``."""
        ...


class PolicyBase:
    """What policies answer alike: they take no events, have no history and no start pictures, and hold nothing to give back."""

    @property
    def spec(self) -> ModelSpec:
        """With ``policy`` set."""
        raise NotImplementedError

    def understand(self, event: SessionEvent) -> str | None:
        raise ArgumentError("a policy takes observations, no events", path="event")

    def check_observation(self, observation: Observation) -> None:
        assert self.spec.policy is not None
        self.spec.policy.check(observation)

    def new_reducer(self) -> ControlReducer:
        return LatestWinsReducer()

    def needs_prefill(self, state: Any) -> bool:
        return False

    def prefill(self, batch: StepBatch) -> Step:
        raise NotImplementedError("a policy has no history")

    def close(self, state: Any) -> None:
        """Nothing beside the state itself."""

    def start_image(self, name: str) -> bytes:
        raise KeyError(name)
