"""DreamZero behind the model contract: a policy that answers an observation with actions, and a world that imagines pictures.

Owns the order of a tick. One tick, one block of F latent frames and one chunk of N actions::

    prepare   pictures -> latents; the prompt's and the picture's keys and values, when they changed
    commit    one pass over what was seen (or, without an observation, over what was imagined before), which becomes history
    denoise   passes over history, the block behind it, and registers for actions and state; pictures are guided by two
              branches of one batch, actions are the conditional branch's
    decode    pictures, where they are asked for

Nothing is kept on the model but what no session can change. A branch has pages of its own; a state holds the window, what the
session is conditioned on, and the codec's memories, each an immutable value that the next state shares or replaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realtime_omni.errors import ArgumentError, ErrorCode, TickError
from realtime_omni.kv.capacity import KVBranch, KVSpec
from realtime_omni.models.base import (
    Checkpoint,
    ControlReducer,
    ModelSpec,
    PackedState,
    RowOutput,
    SessionSetup,
    Step,
    StepBatch,
    StepRow,
)
from realtime_omni.models.common.conditioning import KeysValues, stacked
from realtime_omni.models.common.noise import block_noise
from realtime_omni.models.common.wan.clip import PictureEncoder
from realtime_omni.models.common.wan.text import TOKENS, TextEncoder
from realtime_omni.models.common.wan.transformer import Attend
from realtime_omni.models.common.wan.vae import SPACE_STRIDE, TIME_STRIDE, CodecState, WanVAE
from realtime_omni.models.common.wan.visual import MASK_CHANNELS, fit
from realtime_omni.models.dreamzero import state as saved
from realtime_omni.models.dreamzero.controls import OneBlockReducer, check_control, schemas
from realtime_omni.models.dreamzero.network import DreamZeroTransformer, Registers
from realtime_omni.models.dreamzero.robot import Robot
from realtime_omni.models.dreamzero.sampler import Memory, Schedule, step
from realtime_omni.models.dreamzero.scene import (
    CONDITIONAL,
    IMAGE,
    SHOWN,
    TEXT,
    UNCONDITIONAL,
    Scene,
    Scenes,
    Words,
    unsigned,
)
from realtime_omni.models.dreamzero.state import DreamZeroState, StateShapes
from realtime_omni.models.policy import ACTIONS, PolicyBase, PolicySpec
from realtime_omni.session.observation import Observation
from realtime_omni.session.values import Artifact, ArtifactSpec, ChunkMetadata, Modality, Representation, SessionEvent

if TYPE_CHECKING:
    from realtime_omni.config import Config

VIDEO_NOISE, ACTION_NOISE = 0, 1
"""Which of a chunk's draws they are."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a recipe decides. ``height`` and ``width``: of the canvas of all cameras, in pixels, multiples of 16.

    ``frames_per_block``: F, latent. ``window_blocks``: ticks of a window. ``actions`` and ``states``: registers of a block.
    ``guidance``: 1 or less leaves the unconditional branch out. ``final_noise``: the level at which pictures stop being
    denoised (0: not before they are clean). ``category``: which of the checkpoint's embodiments."""

    height: int = 352
    width: int = 640
    frames_per_block: int = 2
    window_blocks: int = 4
    actions: int = 24
    states: int = 1
    steps: int = 16
    guidance: float = 5.0
    shift: float = 5.0
    final_noise: float = 0.0
    category: int = 0
    fps: float = 5.0
    words: Words = field(default_factory=Words)
    default_prompt: str = "do nothing"


@dataclass(slots=True)
class _Sample:
    """One row's pictures and actions on their way, while its tick runs."""

    video: Tensor
    actions: Tensor
    video_memory: Memory | None = None
    action_memory: Memory | None = None


class DreamZero(PolicyBase):
    """The model. ``images`` None: a network that looks at no picture beside the latents."""

    def __init__(
        self,
        network: DreamZeroTransformer,
        text: TextEncoder,
        vae: WanVAE,
        images: PictureEncoder | None,
        robot: Robot,
        settings: Settings,
        *,
        name: str = "dreamzero",
        statistics: Mapping[str, str] | None = None,
        device: torch.device | str = "cpu",
        fingerprint: str = "",
    ) -> None:
        self.network = network.eval().requires_grad_(False)
        self.robot = robot
        self.settings = settings
        self.branches = (CONDITIONAL, UNCONDITIONAL) if settings.guidance > 1 else (CONDITIONAL,)
        self._text = text
        self._device = torch.device(device)
        self._grid = (settings.height // SPACE_STRIDE, settings.width // SPACE_STRIDE)
        self._vae = vae
        self._fingerprint = fingerprint
        self.scenes = Scenes(
            network,
            text,
            vae,
            images,
            robot,
            settings.words,
            size=(settings.height, settings.width),
            frames=settings.frames_per_block,
            blocks=settings.window_blocks,
            guided=len(self.branches) > 1,
        )
        self._shapes = self._state_shapes(images)
        self._spec = self._describe(name, images, statistics or {})

    @classmethod
    def from_config(cls, config: Config) -> DreamZero:
        from realtime_omni.models.dreamzero.loader import load

        return load(config)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def open(self, setup: SessionSetup) -> DreamZeroState:
        """Raises ArgumentError: a prompt that is too long, a picture that is none."""
        prompt = setup.prompt or self.settings.default_prompt
        if setup.start is not None:
            raise ArgumentError("this model has no start pictures", path="start")
        self._text.check(self.settings.words.of(prompt))
        shown = None
        if setup.image is not None:
            shown = fit(setup.image, self.settings.height, self.settings.width, self._device)[None]
        return DreamZeroState(prompt, self.scenes.nothing(), shown)

    def understand(self, event: SessionEvent) -> str | None:
        for control in event.controls:
            check_control(control, len(self.robot.state.low))
        if event.prompt is not None:
            self._text.check(self.settings.words.of(event.prompt))
        return event.prompt

    def check_observation(self, observation: Observation) -> None:
        super().check_observation(observation)
        if observation.prompt is not None:
            self._text.check(self.settings.words.of(observation.prompt))
        shape = (self.settings.actions, self.network.shape.action_width)
        if observation.noise is not None and observation.noise.shape != shape:
            raise ArgumentError(f"noise is {list(shape)} here", path="noise")
        if observation.samples > 1:
            raise ArgumentError("this policy draws one chunk", path="samples")
        if len({image.ndim == 4 and len(image) for image in observation.images.values()}) > 1:
            raise ArgumentError("all cameras must have as many pictures", code=ErrorCode.IMAGE_INVALID, path="images")

    def new_reducer(self) -> ControlReducer:
        return OneBlockReducer()

    @torch.no_grad()
    def step(self, batch: StepBatch) -> Step:
        yield Checkpoint("forward", "prepare")
        scenes = {r: self.scenes.of(batch.rows[r]) for r in batch.active}
        for frames in sorted({scene.frames for scene in scenes.values()}):
            yield Checkpoint("forward", "commit")
            rows = tuple(r for r in batch.active if scenes[r].frames == frames)
            if rows:
                self._commit(batch, rows, scenes)
        schedules = {r: self._schedule(batch.rows[r]) for r in scenes}
        samples = {r: self._noise(batch.rows[r]) for r in scenes}
        for index in range(max(schedule.steps for schedule in schedules.values())):
            yield Checkpoint("forward", "denoise")
            rows = tuple(r for r in batch.active if index < schedules[r].steps)
            if rows:
                self._denoise(batch, rows, index, scenes, schedules, samples)
        outputs: dict[int, RowOutput | Exception] = {}
        for r in batch.active:
            row, scene, sample = batch.rows[r], scenes[r], samples[r]
            if not (sample.video.isfinite().all() and sample.actions.isfinite().all()):
                outputs[r] = TickError("the block is not finite")
                continue
            actions = self.robot.act(sample.actions.cpu().numpy(), scene.robot)
            decoder, artifacts = CodecState(), []
            if ACTIONS in row.outputs:
                artifacts.append(Artifact(ACTIONS, Modality.ACTION, Representation.DECODED, "TA", actions))
            if "latents" in row.outputs:
                data = sample.video.cpu().numpy()
                artifacts.append(Artifact("latents", Modality.VIDEO, Representation.LATENT, "TCHW", data))
            if "frames" in row.outputs:
                yield Checkpoint("decode")
                if r not in batch.active:
                    continue
                pictures, decoder = self._decoded(scene, sample.video)
                artifacts.append(
                    Artifact("frames", Modality.VIDEO, Representation.DECODED, "TCHW", pictures, fps=self.settings.fps)
                )
            outputs[r] = RowOutput(
                ChunkMetadata.from_tick(row.tick),
                tuple(artifacts),
                self._following(row.state, scene, sample, actions, decoder),
            )
        return {r: outputs[r] for r in batch.active}

    def pack(self, state: DreamZeroState) -> PackedState:
        return saved.pack(state)

    def unpack(self, packed: PackedState) -> DreamZeroState:
        state = saved.unpack(packed, self._shapes, self.scenes.nothing(), self._device)
        self._text.check(self.settings.words.of(state.prompt))
        return state

    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """[F, C, h, w] of a block."""
        return (self.settings.frames_per_block, self.network.config.out_channels, *self._grid)

    def _commit(self, batch: StepBatch, rows: Sequence[int], scenes: Mapping[int, Scene]) -> None:
        """The clean pass over what becomes history, without registers; all rows have as many frames."""
        text, image = self._given(rows, scenes)
        latents = torch.stack([self._conditioned(scenes[r], scenes[r].context, scenes[r].start) for r in rows])
        starts = torch.tensor([scenes[r].start for r in rows], device=self._device)
        self.network.joint(
            self._for_branches(latents),
            torch.zeros(len(rows) * len(self.branches), device=self._device),
            self._for_branches(starts[:, None] + torch.arange(latents.shape[1], device=self._device)),
            text,
            image,
            self._attend(batch, rows, commit=True),
        )

    def _denoise(
        self,
        batch: StepBatch,
        rows: Sequence[int],
        index: int,
        scenes: Mapping[int, Scene],
        schedules: Mapping[int, Schedule],
        samples: Mapping[int, _Sample],
    ) -> None:
        """One step of every row, pictures and actions together."""
        settings = self.settings
        text, image = self._given(rows, scenes)
        latents = torch.stack([self._conditioned(scenes[r], samples[r].video, scenes[r].ahead) for r in rows])
        ahead = torch.tensor([scenes[r].ahead for r in rows], device=self._device)
        t_video = torch.tensor([schedules[r].timestep(index) for r in rows], device=self._device)
        plain = [self._action_schedule(schedules[r]) for r in rows]
        registers = Registers(
            self._for_branches(torch.stack([samples[r].actions for r in rows])),
            self._for_branches(torch.stack([self._robot_state(scenes[r]) for r in rows])),
            self._for_branches(torch.tensor([schedule.timestep(index) for schedule in plain], device=self._device)),
            self._for_branches((ahead - 1) // settings.frames_per_block),
        )
        flow, acted = self.network.joint(
            self._for_branches(latents),
            self._for_branches(t_video),
            self._for_branches(ahead[:, None] + torch.arange(settings.frames_per_block, device=self._device)),
            text,
            image,
            self._attend(batch, rows, ahead=True),
            registers,
            category=settings.category,
        )
        assert acted is not None
        flow, acted = guided(flow, acted, len(rows), settings.guidance)
        for position, r in enumerate(rows):
            sample = samples[r]
            sample.video, sample.video_memory = step(
                schedules[r], index, sample.video, flow[position], sample.video_memory
            )
            sample.actions, sample.action_memory = step(
                plain[position], index, sample.actions, acted[position], sample.action_memory
            )

    def _attend(self, batch: StepBatch, rows: Sequence[int], *, commit: bool = False, ahead: bool = False) -> Attend:
        """Every branch over pages of its own: the batch is the rows of one branch, then those of the other."""
        plans = [batch.attention(branch) for branch in self.branches]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            each = zip(plans, *(part.chunk(len(plans)) for part in (q, k, v)), strict=True)
            return torch.cat([plan.attend(layer, *qkv, rows=rows, commit=commit, ahead=ahead) for plan, *qkv in each])

        return attend

    def _given(
        self, rows: Sequence[int], scenes: Mapping[int, Scene]
    ) -> tuple[tuple[KeysValues, ...], tuple[KeysValues, ...] | None]:
        """Text and image of every row in every branch."""
        held = [scenes[r].conditioning.branches[branch] for branch in self.branches for r in rows]
        text = stacked([each[TEXT] for each in held])
        return text, stacked([each[IMAGE] for each in held]) if IMAGE in held[0].parts else None

    def _conditioned(self, scene: Scene, latents: Tensor, start: int) -> Tensor:
        """The network's input [F, C_in, h, w]: latents, and what the window's picture says of these frames."""
        return torch.cat((latents, scene.window.condition[start : start + len(latents)]), dim=1)

    def _for_branches(self, x: Tensor) -> Tensor:
        return torch.cat([x] * len(self.branches))

    def _robot_state(self, scene: Scene) -> Tensor:
        """The state registers [S, state_width], padded with zeros."""
        padded = np.zeros((self.settings.states, self.network.shape.state_width), np.float32)
        padded[:, : len(scene.robot)] = self.robot.state.normalised(scene.robot)
        return torch.from_numpy(padded).to(self._device)

    def _schedule(self, row: StepRow) -> Schedule:
        """Of the pictures."""
        observation = row.tick.observation
        steps = self.settings.steps if observation is None or observation.steps is None else observation.steps
        return Schedule.of(steps, self.settings.shift, final_noise=self.settings.final_noise)

    def _action_schedule(self, schedule: Schedule) -> Schedule:
        """Actions are always denoised to the end."""
        return schedule if not self.settings.final_noise else Schedule.of(schedule.steps, self.settings.shift)

    def _noise(self, row: StepRow) -> _Sample:
        observation, seed, chunk = row.tick.observation, row.seed, int(row.tick.chunk_index)
        if observation is not None and observation.seed is not None:
            seed, chunk = observation.seed, 0
        shape = (self.settings.actions, self.network.shape.action_width)
        video = block_noise(seed, chunk, VIDEO_NOISE, self.latent_shape, device=self._device)
        if observation is not None and observation.noise is not None:
            return _Sample(video, torch.from_numpy(np.array(observation.noise)).to(self._device))
        return _Sample(video, block_noise(seed, chunk, ACTION_NOISE, shape, device=self._device))

    def _decoded(self, scene: Scene, latents: Tensor) -> tuple[NDArray[np.uint8], CodecState]:
        """uint8 [4 F, 3, H, W]: what was imagined, decoded behind what was seen."""
        decoder = scene.decoder
        if decoder.is_fresh:
            _, decoder = self._vae.decode(scene.context[-1:], decoder)
        pictures, following = self._vae.decode(latents, decoder)
        return unsigned(pictures).cpu().numpy(), following

    def _following(
        self,
        state: DreamZeroState,
        scene: Scene,
        sample: _Sample,
        actions: NDArray[np.float32],
        decoder: CodecState,
    ) -> DreamZeroState:
        moves = actions.shape[1] == len(scene.robot)
        return DreamZeroState(
            state.prompt,
            scene.conditioning,
            scene.shown,
            scene.encoder,
            decoder,
            scene.window,
            sample.video.clone(),
            actions[-1].copy() if moves else scene.robot,
        )

    def _state_shapes(self, images: PictureEncoder | None) -> StateShapes:
        settings, config = self.settings, self.network.config
        encoder, decoder = self._vae.slot_shapes(settings.height, settings.width)
        extra = 0 if config.in_channels == config.out_channels else MASK_CHANNELS + config.out_channels
        return StateShapes(
            picture=(3, settings.height, settings.width),
            pictures=SHOWN,
            block=self.latent_shape,
            condition=(self.scenes.total_frames, extra, *self._grid),
            features=None if images is None else (images.tokens, self.network.shape.image_width),
            dtype=self.network.patches.weight.dtype,
            robot=len(self.robot.state.low),
            encoder=encoder,
            decoder=decoder,
        )

    def _describe(self, name: str, images: PictureEncoder | None, statistics: Mapping[str, str]) -> ModelSpec:
        settings, config = self.settings, self.network.config
        F = settings.frames_per_block
        tokens = TOKENS + (0 if images is None else images.tokens)
        given = (
            len(self.branches) * 2 * config.layers * tokens * config.width * self.network.patches.weight.dtype.itemsize
        )
        return ModelSpec(
            name=name,
            kv=KVSpec(
                num_layers=config.layers,
                num_kv_heads=config.heads,
                head_dim=config.head_dim,
                tokens_per_frame=self._grid[0] * self._grid[1] // 4,
                frames_per_block=F,
                window_frames=self.scenes.window_frames,
                branches=tuple(KVBranch(branch, i) for i, branch in enumerate(self.branches)),
                scratch_tokens_per_branch=settings.actions + settings.states,
                model_owned_bytes_per_session=given + self._shapes.nbytes,
                reset_at_boundary=True,
                opening_frames=1,
            ),
            artifacts=(
                ArtifactSpec(ACTIONS, Modality.ACTION, Representation.DECODED, "TA", primary=True),
                ArtifactSpec("frames", Modality.VIDEO, Representation.DECODED, "TCHW", fps=settings.fps),
                ArtifactSpec("latents", Modality.VIDEO, Representation.LATENT, "TCHW"),
            ),
            height=settings.height,
            width=settings.width,
            fps=settings.fps,
            frames_per_block=F,
            pictures_per_frame=TIME_STRIDE,
            first_frame_pictures=TIME_STRIDE,
            controls=schemas(len(self.robot.state.low)),
            default_prompt=settings.default_prompt,
            rollback_safe=True,
            takes_image=True,
            policy=PolicySpec(
                cameras=self.robot.cameras,
                image_size=min(settings.height, settings.width) // 2,
                state_dim=len(self.robot.state.low),
                horizon=settings.actions,
                action_dim=len(self.robot.relative),
                steps=settings.steps,
                relative=any(channel is not None for channel in self.robot.relative),
                statistics=statistics,
                max_frames=TIME_STRIDE * F,
                imagines=True,
                restarts_on_prompt=True,
            ),
        )


def guided(flow: Tensor, acted: Tensor, rows: int, guidance: float) -> tuple[Tensor, Tensor]:
    """Both branches' flows [2 rows, ...], or one's, to one [rows, ...]: ``u + g (c - u)`` for pictures, ``c`` for actions."""
    if len(flow) == rows:
        return flow, acted
    conditional, unconditional = flow[:rows], flow[rows:]
    return unconditional + guidance * (conditional - unconditional), acted[:rows]
