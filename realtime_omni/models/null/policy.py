"""A policy that computes nothing: it answers with numbers that show whose observation they come from.

What an observation, a session and the wire cost by themselves; also the smallest complete example of a policy. It can take
time, as an accelerator does: without using the processor, and once for a whole batch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta

from realtime_omni.kv.capacity import KVSpec
from realtime_omni.models.base import (
    Checkpoint,
    ModelSpec,
    PackedState,
    RowOutput,
    SessionSetup,
    Step,
    StepBatch,
    StepRow,
)
from realtime_omni.models.common.packing import fingerprint, unpack_values
from realtime_omni.models.policy import ACTIONS, PolicyBase, PolicySpec
from realtime_omni.session.values import Artifact, ArtifactSpec, ChunkMetadata, Modality, Representation

if TYPE_CHECKING:
    from realtime_omni.config import Config

Dim = Annotated[int, Meta(ge=1, le=65_536)]


class NullPolicyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The recipe's ``options``. ``policy_ms``: how long a batch takes, spread over the denoise steps."""

    policy_ms: Annotated[float, Meta(ge=0, le=600_000)] = 0.0
    steps: Annotated[int, Meta(ge=1, le=100)] = 10
    cameras: tuple[str, ...] = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    image_size: Dim = 224
    state_dim: Dim = 32
    horizon: Dim = 50
    action_dim: Dim = 32


@dataclass(frozen=True, slots=True)
class NullPolicyState:
    """``chunks`` answered in this epoch."""

    chunks: int = 0


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    chunks: Annotated[int, Meta(ge=0)]


class NullPolicy(PolicyBase):
    """``actions[i] = state + i``, as far as the state is wide, else ``i``."""

    def __init__(self, options: NullPolicyOptions | None = None) -> None:
        self.options = options if options is not None else NullPolicyOptions()
        o = self.options
        self._fingerprint = fingerprint("null-policy", repr(o))
        self._spec = ModelSpec(
            name="null-policy",
            kv=KVSpec.none(frames_per_block=1, model_owned_bytes_per_session=0),
            artifacts=(ArtifactSpec(ACTIONS, Modality.ACTION, Representation.DECODED, "TA", primary=True),),
            height=o.image_size,
            width=o.image_size,
            fps=1.0,
            frames_per_block=1,
            rollback_safe=True,
            policy=PolicySpec(
                cameras=o.cameras,
                image_size=o.image_size,
                state_dim=o.state_dim,
                horizon=o.horizon,
                action_dim=o.action_dim,
                steps=o.steps,
            ),
        )

    @classmethod
    def from_config(cls, config: Config) -> NullPolicy:
        return cls(config.options_as(NullPolicyOptions))

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def open(self, setup: SessionSetup) -> NullPolicyState:
        return NullPolicyState()

    def step(self, batch: StepBatch) -> Step:
        began_s, step_s = time.perf_counter(), self.options.policy_ms / self.options.steps / 1000
        for number in range(1, self.options.steps + 1):
            yield Checkpoint("forward", "denoise")
            if step_s:  # by the clock, so that sleeping too long once does not add up
                time.sleep(max(0.0, began_s + number * step_s - time.perf_counter()))
        return {number: self._output(batch.rows[number]) for number in batch.active}

    def pack(self, state: NullPolicyState) -> PackedState:
        return PackedState(values={"chunks": state.chunks})

    def unpack(self, packed: PackedState) -> NullPolicyState:
        return NullPolicyState(unpack_values(packed, _Saved).chunks)

    def fingerprint(self) -> str:
        return self._fingerprint

    def _output(self, row: StepRow) -> RowOutput:
        observation, options = row.tick.observation, self.options
        assert observation is not None
        actions = np.repeat(np.arange(options.horizon, dtype=np.float32)[:, None], options.action_dim, axis=1)
        width = min(options.action_dim, observation.state.size)
        actions[:, :width] += observation.state[:width]
        artifact = Artifact(ACTIONS, Modality.ACTION, Representation.DECODED, "TA", actions)
        following = NullPolicyState(row.state.chunks + 1)
        return RowOutput(ChunkMetadata.from_tick(row.tick), (artifact,), following)
