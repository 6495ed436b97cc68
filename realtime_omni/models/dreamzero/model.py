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

from collections.abc import Mapping
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
from realtime_omni.models.common.noise import block_noise
from realtime_omni.models.common.wan.blocks import FRAMES, LATENTS, frames_of, latents_of
from realtime_omni.models.common.wan.clip import PictureEncoder
from realtime_omni.models.common.wan.text import TOKENS, TextEncoder
from realtime_omni.models.common.wan.vae import SPACE_STRIDE, TIME_STRIDE, CodecState, WanVAE
from realtime_omni.models.common.wan.visual import MASK_CHANNELS, fit
from realtime_omni.models.dreamzero import state as saved
from realtime_omni.models.dreamzero.controls import OneBlockReducer, check_control, schemas
from realtime_omni.models.dreamzero.network import DreamZeroTransformer
from realtime_omni.models.dreamzero.passes import Passes, Sample, Schedules
from realtime_omni.models.dreamzero.robot import Robot
from realtime_omni.models.dreamzero.scene import (
    CONDITIONAL,
    SHOWN,
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
        passes = self._passes(batch, scenes)
        for frames in sorted({scene.frames for scene in scenes.values()}):
            yield Checkpoint("forward", "commit")
            rows = tuple(r for r in batch.active if scenes[r].frames == frames)
            if rows:
                passes.commit(rows)
        samples = {r: self._sample(batch.rows[r], scene) for r, scene in scenes.items()}
        for index in range(max(sample.schedules.steps for sample in samples.values())):
            yield Checkpoint("forward", "denoise")
            rows = tuple(r for r in batch.active if index < samples[r].schedules.steps)
            if rows:
                passes.denoise(rows, index, samples)
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
            if LATENTS in row.outputs:
                artifacts.append(latents_of(sample.video))
            if FRAMES in row.outputs:
                yield Checkpoint("decode")
                if r not in batch.active:
                    continue
                pictures, decoder = self._decoded(scene, sample.video)
                artifacts.append(frames_of(pictures, self.settings.fps))
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

    def _passes(self, batch: StepBatch, scenes: Mapping[int, Scene]) -> Passes:
        settings = self.settings
        return Passes(
            self.network,
            batch,
            scenes,
            branches=self.branches,
            guidance=settings.guidance,
            category=settings.category,
        )

    def _sample(self, row: StepRow, scene: Scene) -> Sample:
        """Noise for pictures and actions, and how it is denoised."""
        settings, seen = self.settings, row.tick.observation
        steps = settings.steps if seen is None or seen.steps is None else seen.steps
        seed, chunk = row.seed, int(row.tick.chunk_index)
        if seen is not None and seen.seed is not None:
            seed, chunk = seen.seed, 0
        video = block_noise(seed, chunk, VIDEO_NOISE, self.latent_shape, device=self._device)
        if seen is not None and seen.noise is not None:
            actions = torch.from_numpy(np.array(seen.noise)).to(self._device)
        else:
            shape = (settings.actions, self.network.shape.action_width)
            actions = block_noise(seed, chunk, ACTION_NOISE, shape, device=self._device)
        robot = np.zeros((settings.states, self.network.shape.state_width), np.float32)
        robot[:, : len(scene.robot)] = self.robot.state.normalised(scene.robot)
        schedules = Schedules.of(steps, settings.shift, settings.final_noise)
        return Sample(schedules, torch.from_numpy(robot).to(self._device), video, actions)

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
        sample: Sample,
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
                ArtifactSpec(FRAMES, Modality.VIDEO, Representation.DECODED, "TCHW", fps=settings.fps),
                ArtifactSpec(LATENTS, Modality.VIDEO, Representation.LATENT, "TCHW"),
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
