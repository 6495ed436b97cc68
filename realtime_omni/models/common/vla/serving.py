"""A loaded policy as a model of the engine: observations in, chunks of actions out, batched over sessions.

Owns the tick: pictures, prefix, denoise steps, robot units, and which of it is shared or reused. Must not know: a family's
network or checkpoint layout. Pictures of all rows that join are encoded together, prefixes too; a row whose pictures and
words are those of its session's last observation takes the prefix from its state, and what other sessions saw from the
caches that all share. Denoise steps run on all rows that go by
the same rule; between two of them rows join and leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from realtime_omni.errors import ArgumentError, OmniError, TickError
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
from realtime_omni.models.common.noise import block_noise
from realtime_omni.models.common.packing import fingerprint
from realtime_omni.models.common.vla import memory
from realtime_omni.models.common.vla.denoise import FlowRow, Flows
from realtime_omni.models.common.vla.devices import placed, placed_together
from realtime_omni.models.common.vla.graphs import Speed, open_stages
from realtime_omni.models.common.vla.images import signed
from realtime_omni.models.common.vla.memory import MOST_PLANNED, KeptPrefix, Planned, VLAState
from realtime_omni.models.common.vla.network import PolicyInputs
from realtime_omni.models.common.vla.policy import Policy
from realtime_omni.models.common.vla.reuse import Identity, PrefixKey, Reuse
from realtime_omni.models.policy import ACTIONS, SAMPLES, PolicyBase, PolicySpec
from realtime_omni.rtc.ensemble import Stamped, ensemble
from realtime_omni.rtc.modes import Mode, Settings
from realtime_omni.rtc.previous import remaining
from realtime_omni.session.observation import Observation
from realtime_omni.session.values import Artifact, ArtifactSpec, ChunkMetadata, Modality, Representation

NO_JOIN = Settings(mode=Mode.NONE)
READ_ROWS = 4
"""Observations that are read before their pictures are encoded: a device works on these while the next ones are read."""


@dataclass(slots=True)
class _Row:
    """One row under way. ``prefix``: from its state, or once it is computed."""

    row: StepRow
    observation: Observation
    inputs: PolicyInputs
    key: PrefixKey
    prefix: KeptPrefix | None
    features: Tensor | None = None


class VLAModel(PolicyBase):
    """A :class:`~realtime_omni.models.policy.PolicyModel`. ``rtc``: how chunks continue each other; ``rtc_modes``: what an
    observation may ask for; ``reuse``: keep a session's prefix for its next observation; ``cache_mib``: keep pictures and
    prefixes for all sessions, by content."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        *,
        device: str = "cpu",
        rtc: Settings = NO_JOIN,
        rtc_modes: tuple[Mode, ...] = (),
        reuse: bool = True,
        speed: Speed = "plain",
        cache_mib: int = 0,
    ) -> None:
        self.policy = policy
        self.network = policy.network
        self._device = torch.device(device)
        self._stages = open_stages(policy.network, self._device, len(policy.processing.cameras), speed)
        self._rtc = rtc
        self._rtc_modes = rtc_modes or (rtc.mode,)
        self._keeps_prefix = reuse
        self._most_planned = max({Mode.NONE: 0, Mode.ENSEMBLE: MOST_PLANNED}.get(mode, 1) for mode in self._rtc_modes)
        self._spec = self._declare(name)
        self.shared = Reuse(self._identity(), cache_mib << 20)

    def _declare(self, name: str) -> ModelSpec:
        shape, processing = self.network.shape, self.policy.processing
        weights = next(cast(nn.Module, self.network).parameters())
        owned = memory.state_bytes(
            shape, len(processing.cameras), processing.action_channels, weights.dtype.itemsize, self._most_planned
        )
        return ModelSpec(
            name=name,
            kv=KVSpec.none(frames_per_block=1, model_owned_bytes_per_session=owned),
            artifacts=(
                ArtifactSpec(ACTIONS, Modality.ACTION, Representation.DECODED, "TA", primary=True),
                ArtifactSpec(SAMPLES, Modality.ACTION, Representation.DECODED, "NTA"),
            ),
            height=shape.image_size,
            width=shape.image_size,
            fps=1.0,
            frames_per_block=1,
            rollback_safe=True,
            continuous=True,
            policy=PolicySpec(
                cameras=processing.cameras,
                image_size=shape.image_size,
                state_dim=processing.state_channels,
                horizon=shape.horizon,
                action_dim=processing.action_channels,
                steps=shape.steps,
                relative=processing.relative is not None,
                joins=any(mode is not Mode.NONE for mode in self._rtc_modes),
                rtc_modes=tuple(mode.value for mode in self._rtc_modes),
                statistics=self.policy.statistics,
            ),
        )

    def _identity(self) -> Identity:
        processing = self.policy.processing
        dtype = str(next(cast(nn.Module, self.network).parameters()).dtype)
        return Identity(
            self._spec.name,
            processing.statistics_id(),
            dtype,
            processing.image_size,
            processing.fit.value,
            str(self._device),
        )

    def capture(self, rows: int) -> None:
        """Prepare for batches of up to ``rows`` robots, where there are graphs; when it is not called, the first of each size
        waits. Called before anybody counts free memory, since graphs have buffers of their own."""
        if self._device.type == "cuda":
            self._stages.warm_up(rows)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def open(self, setup: SessionSetup) -> VLAState:
        return VLAState()

    def check_observation(self, observation: Observation) -> None:
        super().check_observation(observation)
        shape = self.network.shape
        if observation.noise is not None and observation.noise.shape != (shape.horizon, shape.action_dim):
            raise ArgumentError(f"noise is [{shape.horizon}, {shape.action_dim}]", path="noise")

    def step(self, batch: StepBatch) -> Step:
        """Whoever has joined is begun, then everybody takes a step; whoever has taken the last one is done."""
        rows: dict[int, _Row] = {}
        flows = Flows(self._stages, self._rtc)
        while batch.active:
            if any(number not in rows for number in batch.active):
                yield Checkpoint("forward", "images")
                fresh = self._begin(batch, rows)
                yield Checkpoint("forward", "prefix")
                self._join(flows, [number for number in fresh if number in batch.active], rows)
            yield Checkpoint("forward", "denoise")
            if any(number not in rows for number in batch.active):
                continue  # who has joined meanwhile is begun first
            rows = {number: row for number, row in rows.items() if number in batch.active}  # nobody else is kept alive
            with torch.no_grad():
                chunks = flows.step(batch.active)
            for number, chunk in chunks.items():
                batch.finish(number, self._output(rows.pop(number), chunk))
            self._stages.pace()
        return {}

    def pack(self, state: VLAState) -> PackedState:
        return memory.pack(state)

    def unpack(self, packed: PackedState) -> VLAState:
        return memory.unpack(packed, self.network.shape, self.policy.processing.action_channels, self._most_planned)

    @property
    def cached(self) -> Sequence[object]:
        return self.shared.values

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        settings = (self._spec.name, self.policy.processing.statistics_id(), repr(self.network.shape), repr(self._rtc))
        return fingerprint(*settings, weights=cast(nn.Module, self.network))

    # ------------------------------------------------------------------ before the first denoise step

    def _begin(self, batch: StepBatch, rows: dict[int, _Row]) -> list[int]:
        """Read the observations of those who have joined, and encode their pictures; the numbers that can go on."""
        joined = [number for number in batch.active if number not in rows]
        fresh: list[int] = []
        for first in range(0, len(joined), READ_ROWS):
            some = []
            for number in joined[first : first + READ_ROWS]:
                try:
                    rows[number] = self._read(batch.row(number))
                except OmniError as refused:  # this observation cannot be used; the others can
                    batch.finish(number, refused)
                else:
                    some.append(number)
            self._encode_pictures([rows[number] for number in some if rows[number].prefix is None])
            fresh += some
        return fresh

    def _join(self, flows: Flows, numbers: Sequence[int], rows: Mapping[int, _Row]) -> None:
        if not numbers:
            return
        self._compute_prefixes([rows[number] for number in numbers if rows[number].prefix is None])
        with torch.no_grad():
            flows.join([flow for number in numbers for flow in self._flow_rows(number, rows[number])])

    def _read(self, row: StepRow) -> _Row:
        """Raises ArgumentError."""
        observation = row.tick.observation
        assert observation is not None
        prompt = observation.prompt or row.tick.prompt
        if prompt is None:
            raise ArgumentError("an instruction is needed", path="prompt")
        processing = self.policy.processing
        inputs = processing.inputs(observation.images, observation.state, prompt, raw=True)
        key = self.shared.key(observation.images, processing.cameras, inputs, self.network.shape)
        kept = row.state.prefix
        if kept is None or kept.key != key:
            known = self.shared.prefixes.get(key)
            kept = None if known is None else KeptPrefix(key, known)
        return _Row(row, observation, inputs, key, kept)

    @torch.no_grad()
    def _encode_pictures(self, rows: Sequence[_Row]) -> None:
        """Every picture that is not known, once, in one batch; a masked slot costs nothing and is zero."""
        found: dict[bytes, Tensor] = {}
        fresh: dict[bytes, Tensor] = {}
        for row in rows:
            for slot, content in enumerate(row.key.pictures):
                if content is None or content in found or content in fresh:
                    continue
                known = self.shared.picture(content)
                if known is None:
                    fresh[content] = row.inputs.images[0, slot]
                else:
                    found[content] = known
        found |= self._encoded(fresh)
        for row in rows:
            there = [None if content is None else found[content] for content in row.key.pictures]
            blank = torch.zeros_like(next(features for features in there if features is not None))
            row.features = torch.stack([blank if features is None else features for features in there])
            row.inputs = replace(row.inputs, images=torch.empty(1, 0))  # nothing reads them any more

    def _encoded(self, fresh: Mapping[bytes, Tensor]) -> dict[bytes, Tensor]:
        """Features of pictures by content; they are kept for later."""
        if not fresh:
            return {}
        images = list(fresh.values())
        if len({image.dtype for image in images}) > 1:
            images = [signed(image[None])[0] for image in images]
        encoded = dict(zip(fresh, self._stages.features(placed_together(images, self._device)), strict=True))
        for content, features in encoded.items():
            self.shared.keep_picture(content, features)
        return encoded

    @torch.no_grad()
    def _compute_prefixes(self, rows: Sequence[_Row]) -> None:
        if not rows:
            return
        features = torch.stack([row.features for row in rows if row.features is not None])
        for row, kv in zip(rows, self._stages.prefixes(features, _stacked(rows).to(self._device)), strict=True):
            row.prefix = KeptPrefix(row.key, kv)
            self.shared.prefixes.put(row.key, kv, kv.nbytes)
            row.features = None

    def _flow_rows(self, number: int, row: _Row) -> list[FlowRow]:
        assert row.prefix is not None
        join = row.observation.join
        first = FlowRow(
            number,
            row.prefix.kv,
            placed(row.inputs.state[0], self._device),
            placed(self._noise(row, 0), self._device),
            self._steps(row),
            self._left(row),
            0 if join is None else min(join.delay, self.network.shape.horizon),
            self._mode(row),
        )
        others = range(1, row.observation.samples)
        return [first, *(replace(first, noise=placed(self._noise(row, sample), self._device)) for sample in others)]

    def _mode(self, row: _Row) -> Mode:
        join = row.observation.join
        return self._rtc.mode if join is None or join.mode is None else Mode(join.mode)

    def _steps(self, row: _Row) -> int:
        return self.network.shape.steps if row.observation.steps is None else row.observation.steps

    def _noise(self, row: _Row, sample: int) -> Tensor:
        observation, shape = row.observation, (self.network.shape.horizon, self.network.shape.action_dim)
        if observation.noise is not None:
            return torch.from_numpy(np.array(observation.noise))
        if observation.seed is not None:
            return block_noise(observation.seed, 0, sample, shape)
        return block_noise(row.row.seed, row.row.tick.chunk_index, sample, shape)

    def _left(self, row: _Row) -> Tensor:
        """What is left of the chunk that the robot executes [n, A], as the network would see it from this observation."""
        join = row.observation.join
        planned = () if join is None else row.row.state.planned_after(join.follows)
        if join is None or not planned or join.tick < planned[-1].tick:
            return torch.zeros(0, self.network.shape.action_dim)
        latest = planned[-1]
        if self.policy.processing.relative is None:
            return remaining(latest.model, latest.tick, join.tick)
        robot = remaining(latest.robot, latest.tick, join.tick).numpy()
        return self.policy.processing.model_actions(robot, row.observation.state)

    # ------------------------------------------------------------------ after the last one

    def _output(self, row: _Row, chunks: Tensor) -> RowOutput | Exception:
        """``chunks`` [samples, H, A] in model space; the robot executes the first."""
        models = chunks.detach().float().cpu().clone()
        samples = np.stack([self.policy.processing.robot_actions(m, row.observation.state) for m in models])
        if not np.isfinite(samples).all():
            return TickError("the policy's actions are not finite")
        actions = samples[0]
        planned = self._plan(row, models[0].clone(), torch.from_numpy(actions.copy()))
        if self._mode(row) is Mode.ENSEMBLE and planned:
            stamped = [Stamped(p.tick, p.robot) for p in planned]
            actions = ensemble(stamped, planned[-1].tick).numpy()
        made = {
            ACTIONS: Artifact(ACTIONS, Modality.ACTION, Representation.DECODED, "TA", actions),
            SAMPLES: Artifact(SAMPLES, Modality.ACTION, Representation.DECODED, "NTA", samples),
        }
        following = VLAState(row.prefix if self._keeps_prefix else None, planned)
        wanted = tuple(made[name] for name in row.row.outputs)
        return RowOutput(ChunkMetadata.from_tick(row.row.tick), wanted, following)

    def _plan(self, row: _Row, model: Tensor, robot: Tensor) -> tuple[Planned, ...]:
        join = row.observation.join
        if join is None or not self._most_planned:
            return ()
        before = row.row.state.planned_after(join.follows)
        latest = Planned(int(row.row.tick.chunk_index), join.tick, model, robot)
        return (*(p for p in before if p.tick <= join.tick), latest)[-self._most_planned :]


def _stacked(rows: Sequence[_Row]) -> PolicyInputs:
    return PolicyInputs.stack([row.inputs for row in rows])
