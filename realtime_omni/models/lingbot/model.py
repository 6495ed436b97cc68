"""LingBot-World v2, causal, behind the model contract.

Owns the order of a tick and a session's state. One tick, one block of latent frames::

    prepare   keys and values of the prompt, when it changed; what the session started from, as latents (constant after
              some blocks); keys or poses -> motion -> rays -> a scale and a shift per layer, once for all passes
    denoise   one pass per level, over history in pages and the block
    commit    one pass over the finished block at timestep 0 (or, with ``clean_pass: false``, the last denoise pass writes)
    decode    pictures, where they are asked for; on a second stream, beside the clean pass and the next tick

Nothing is kept on the model: a state holds the camera, the text's keys and values, the condition and the decoder's memory,
each an immutable value that the next state shares or replaces. Weights are the user's (CC BY-NC-SA); none are shipped.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from realtime_omni.errors import ArgumentError, ErrorCode, TickError
from realtime_omni.kv.capacity import KVSpec
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
from realtime_omni.models.common.conditioning import Conditioning, Parts
from realtime_omni.models.common.keys import OverriddenKeyReducer
from realtime_omni.models.common.noise import block_noise
from realtime_omni.models.common.side import OnHost, Pace, Side
from realtime_omni.models.common.wan import sampler
from realtime_omni.models.common.wan.blocks import FRAMES, LATENTS, declared, frames_of, latents_of
from realtime_omni.models.common.wan.graphs import GraphedNetwork
from realtime_omni.models.common.wan.network import Inputs, LocalNetwork, Network
from realtime_omni.models.common.wan.ranks import RankedNetwork
from realtime_omni.models.common.wan.text import TOKENS, TextEncoder
from realtime_omni.models.common.wan.tiny_decoder import TinyDecoder
from realtime_omni.models.common.wan.transformer import KeysValues, WanTransformer
from realtime_omni.models.common.wan.vae import TIME_STRIDE, CodecState, ImageCondition, WanVAE
from realtime_omni.models.common.wan.visual import (
    MASK_CHANNELS,
    Visual,
    VisualShapes,
    condition_of,
    decoded,
    fit,
)
from realtime_omni.models.lingbot import state as saved
from realtime_omni.models.lingbot.camera import (
    FOLD,
    Camera,
    default_intrinsics,
    fold,
    motions,
    move,
    rays,
    scaled_intrinsics,
)
from realtime_omni.models.lingbot.controls import TRAJECTORY, check_control, schemas
from realtime_omni.models.lingbot.state import LingBotState, PastBlock
from realtime_omni.session.values import (
    ChunkMetadata,
    SessionEvent,
    TickRequest,
)

if TYPE_CHECKING:
    from realtime_omni.config import Config

CAMERA_CHANNELS = 6 * FOLD**2
"""Of the network's camera input, per latent cell."""
PROMPTED, TEXT = "prompted", "text"
"""The one branch of what a session is conditioned on, and its one part."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a recipe decides. ``height`` and ``width`` in pixels, multiples of 16; frames are latent.

    ``labels``, ``shift`` and ``table``: see :mod:`realtime_omni.models.common.wan.sampler`. ``clean_pass`` false: the last
    denoise pass writes history, a fifth cheaper and another output. ``horizon``: pictures after which a session ends, or None.
    ``recache``: a new prompt also writes anew the blocks of the window that are no sink, before the first block that it rules.
    """

    height: int = 480
    width: int = 832
    frames_per_block: int = 3
    window_frames: int = 9
    sink_frames: int = 9
    labels: tuple[int, ...] = (1000, 750, 500, 250)
    shift: float = 5.0
    table: bool = False
    clean_pass: bool = True
    fps: float = 16.0
    default_prompt: str = "A walk through a quiet town, seen from the eyes of the walker."
    horizon: int | None = None
    recache: bool = False


class LingBot:
    """The model. ``vae`` None: no condition beside an empty one, and latents only. ``tiny``: decodes in its place, or without
    one. ``graphs``: replay passes over full windows (not on several ranks)."""

    def __init__(
        self,
        network: WanTransformer | RankedNetwork,
        text: TextEncoder,
        settings: Settings,
        *,
        name: str = "lingbot-world",
        vae: WanVAE | None = None,
        tiny: TinyDecoder | None = None,
        graphs: bool = False,
        device: torch.device | str = "cpu",
        fingerprint: str = "",
    ) -> None:
        self.ranks = network if isinstance(network, RankedNetwork) else None
        self.network = (network.transformer if isinstance(network, RankedNetwork) else network).eval()
        self.network.requires_grad_(False)
        self._passes: Network = self.ranks or (GraphedNetwork if graphs else LocalNetwork)(self.network)
        self.settings = settings
        self._text = text
        self._vae = vae
        self._decoder = vae if tiny is None else tiny
        self._device = torch.device(device)
        self._side = Side(self._device if self._decoder is None else self._decoder.device)
        self._dtype = self.network.patches.weight.dtype
        self._levels = sampler.levels(settings.labels, settings.shift, table=settings.table)
        channels = self.network.config.out_channels
        self._visual = VisualShapes.of(vae, settings.height, settings.width, channels, tiny)
        self._fingerprint = fingerprint
        self._spec = self._describe(name)

    @classmethod
    def from_config(cls, config: Config) -> LingBot:
        from realtime_omni.models.lingbot.loader import load

        return load(config)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def open(self, setup: SessionSetup) -> LingBotState:
        """Raises ArgumentError: a prompt that is missing or too long, a picture that is none."""
        prompt = setup.prompt or self.settings.default_prompt
        if setup.start is not None:
            raise ArgumentError("this model has no start pictures", path="start")
        self._text.check(prompt)
        if setup.image is not None and self._vae is None:
            raise ArgumentError(
                "without an autoencoder no picture is taken", code=ErrorCode.IMAGE_INVALID, path="image"
            )
        size = (self.settings.height, self.settings.width)
        picture = None if setup.image is None else fit(setup.image, *size, self._device)
        nothing = Conditioning(self.network.config.layers)
        return LingBotState(Camera.start(), Visual.start(picture), nothing, prompt)

    def understand(self, event: SessionEvent) -> str | None:
        for control in event.controls:
            check_control(control, self.settings.frames_per_block)
        if event.prompt is not None:
            self._text.check(event.prompt)
        return event.prompt

    def new_reducer(self) -> ControlReducer:
        return OverriddenKeyReducer(self.settings.frames_per_block, TRAJECTORY)

    def needs_prefill(self, state: LingBotState) -> bool:
        return False

    def prefill(self, batch: StepBatch) -> Step:
        raise NotImplementedError("every block is written by its own tick")

    @torch.no_grad()
    def step(self, batch: StepBatch) -> Step:
        yield Checkpoint("forward", "prepare")
        texts = {number: self._understood(row) for number, row in enumerate(batch.rows)}
        yield from self._rewritten(batch, texts)
        conditions = {number: self._conditioned(row.state.visual) for number, row in enumerate(batch.rows)}
        cameras = {number: self._filmed(row) for number, row in enumerate(batch.rows)}
        active = batch.active
        injected = self._camera_cache([cameras[r][1] for r in active])
        x = {number: self._noise(row, 0) for number, row in enumerate(batch.rows)}
        clean: dict[int, Tensor] = {}
        passes, pace = len(self._levels), Pace(self._device)
        for index, level in enumerate(self._levels):
            yield Checkpoint("forward", "denoise")
            if batch.active != active:
                active = batch.active
                injected = self._camera_cache([cameras[r][1] for r in active])
            commit = not self.settings.clean_pass and index == passes - 1
            flow = self._passes.flow(self._inputs(batch, x, conditions, texts, injected, level.timestep), commit=commit)
            for position, r in enumerate(active):
                noise = partial(self._noise, batch.rows[r])
                clean[r], x[r] = sampler.after_pass(self._levels, index, x[r], flow[position], noise)
            pace.queued()
        pictures: dict[int, tuple[OnHost, CodecState]] = {}
        for r in batch.active:
            if FRAMES in batch.rows[r].outputs:
                yield Checkpoint("decode")
                if r in batch.active:
                    pictures[r] = self._decoded(batch.rows[r].state.visual, clean[r])
        if self.settings.clean_pass:
            yield Checkpoint("forward", "commit")
            if batch.active != active:
                active = batch.active
                injected = self._camera_cache([cameras[r][1] for r in active])
            self._passes.write(self._inputs(batch, clean, conditions, texts, injected, 0.0))
        del injected
        outputs: dict[int, RowOutput | Exception] = {}
        for r in batch.active:
            row = batch.rows[r]
            if not clean[r].isfinite().all():
                outputs[r] = TickError("the block is not finite")
                continue
            decoder, artifacts = CodecState(), []
            if LATENTS in row.outputs:
                artifacts.append(latents_of(clean[r]))
            if r in pictures:
                host, decoder = pictures[r]
                artifacts.append(frames_of(host.data, self._spec.fps, ready=host.ready))
            visual = Visual(None, conditions[r][1], decoder, clean[r][-1:].clone())
            block = PastBlock(clean[r], conditions[r][0], cameras[r][1])
            past = self._past(row, block)
            state = LingBotState(cameras[r][0], visual, texts[r], row.state.prompt, past, self._prompt(row))
            outputs[r] = RowOutput(ChunkMetadata.from_tick(row.tick), tuple(artifacts), state)
        return {r: outputs[r] for r in batch.active}

    def pack(self, state: LingBotState) -> PackedState:
        self._side.drain()
        return saved.pack(state)

    def unpack(self, packed: PackedState) -> LingBotState:
        F, C, h, w = self.latent_shape
        with torch.device("meta"):
            camera = torch.empty(F, CAMERA_CHANNELS, h, w, dtype=self._dtype)
            like = PastBlock(torch.empty(F, C, h, w), torch.empty(F, MASK_CHANNELS + C, h, w), camera)
        layers = self.network.config.layers
        state = saved.unpack(packed, self._visual, like, self._most_past, layers, self._device)
        self._text.check(state.prompt)
        return state

    def fingerprint(self) -> str:
        return self._fingerprint

    def close(self, state: LingBotState) -> None:
        """Only waits: what is decoded or copied of the state is done before anything of it is freed."""
        self._side.drain()

    def start_image(self, name: str) -> bytes:
        raise KeyError(name)

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """[F, C, h, w] of a block."""
        return (self.settings.frames_per_block, self.network.config.out_channels, *self._visual.grid)

    def rewritten_blocks(self, state: LingBotState, tick: TickRequest) -> int:
        """All that can be, when the prompt is not the one that they were written under."""
        return len(state.past) if (tick.prompt or state.prompt) != state.wrote else 0

    @property
    def _most_past(self) -> int:
        """Whole blocks that a block sees beside itself and the sink."""
        settings = self.settings
        return (settings.window_frames // settings.frames_per_block - 1) if settings.recache else 0

    def _past(self, row: StepRow, block: PastBlock) -> tuple[PastBlock, ...]:
        """The latest blocks without the sink's."""
        most = self._most_past
        if not most or row.frame_index < self.settings.sink_frames:
            return ()
        known: tuple[PastBlock, ...] = row.state.past
        return (*known, block)[-most:]

    def _rewritten(self, batch: StepBatch, texts: Mapping[int, Conditioning]) -> Generator[Checkpoint, None, None]:
        """Clean passes over the blocks that a new prompt writes anew, oldest first."""
        for r, row in enumerate(batch.rows):
            past: tuple[PastBlock, ...] = row.state.past
            frames = self.settings.frames_per_block
            for position, number in enumerate(batch.rewritten(r)):
                yield Checkpoint("forward", "recache")
                if r not in batch.active:
                    break
                block = past[position]
                self._passes.write(
                    Inputs(
                        torch.cat((block.latents, block.condition), dim=1)[None],
                        0.0,
                        [row.frame_index - (len(past) - position) * frames],
                        [texts[r].branches[PROMPTED][TEXT]],
                        self._camera_cache([block.camera]),
                        batch.attention(),
                        rows=(number,),
                    )
                )

    def _prompt(self, row: StepRow) -> str:
        """In force for this block."""
        prompt: str = row.tick.prompt or row.state.prompt
        return prompt

    def _understood(self, row: StepRow) -> Conditioning:
        """The prompt in force; encoded again when it is not the state's."""
        known: Conditioning = row.state.conditioning
        prompt = self._prompt(row)

        def encode() -> Parts:
            features = self._text.encode(prompt).to(device=self._device, dtype=self._dtype)
            return {TEXT: self._passes.text(features)}

        return known.capture(PROMPTED, prompt, encode)

    def _conditioned(self, visual: Visual) -> tuple[Tensor, ImageCondition]:
        """Mask and condition of the next block, [F, MASK_CHANNELS + C, h, w], and what follows."""
        return condition_of(self._vae, visual.condition, visual.picture, self.latent_shape, self._device)

    def _filmed(self, row: StepRow) -> tuple[Camera, Tensor]:
        """Where the camera is after the block, and the network's camera input [F, 384, h, w]."""
        height, width = self.settings.height, self.settings.width
        camera, poses = row.state.camera, []
        intrinsics = default_intrinsics(height, width)
        control = row.tick.controls[-1] if row.tick.controls else None
        if control is not None and control.schema == TRAJECTORY:
            poses = [np.array(pose, dtype=np.float64) for pose in control.data["poses"]]
            after = Camera.at(poses[-1])
            if "intrinsics" in control.data:
                intrinsics = scaled_intrinsics(np.array(control.data["intrinsics"], dtype=np.float64), height, width)
        else:
            after = camera
            script = control.data["frames"] if control is not None else ((),) * self.settings.frames_per_block
            for held in script:
                after = move(after, held)
                poses.append(after.pose)
        picture = rays(motions(camera.pose, poses), intrinsics, height, width, device=self._device)
        return after, fold(picture).to(self._dtype)

    def _camera_cache(self, cameras: Sequence[Tensor]) -> tuple[KeysValues, ...] | None:
        if not self.network.config.camera_channels or not cameras:
            return None
        return self._passes.camera(torch.stack(list(cameras)))

    def _inputs(
        self,
        batch: StepBatch,
        x: Mapping[int, Tensor],
        conditions: Mapping[int, tuple[Tensor, ImageCondition]],
        texts: Mapping[int, Conditioning],
        camera: tuple[KeysValues, ...] | None,
        timestep: float,
    ) -> Inputs:
        """Of the active rows."""
        active = batch.active
        return Inputs(
            torch.stack([torch.cat((x[r], conditions[r][0]), dim=1) for r in active]),
            timestep,
            [batch.rows[r].frame_index for r in active],
            [texts[r].branches[PROMPTED][TEXT] for r in active],
            camera,
            batch.attention(),
            rows=active,
        )

    def _decoded(self, visual: Visual, latents: Tensor) -> tuple[OnHost, CodecState]:
        """Pictures of a block, decoded beside whatever this tick and the next have to compute."""
        decoder = self._decoder
        assert decoder is not None
        reads = [latents] if visual.tail is None else [latents, visual.tail]
        pictures, following = self._side.run(lambda: decoded(decoder, visual, latents), *reads)
        return self._side.to_host(pictures), following

    def _noise(self, row: StepRow, step: int) -> Tensor:
        return block_noise(row.seed, row.tick.chunk_index, step, self.latent_shape, device=self._device)

    def _describe(self, name: str) -> ModelSpec:
        settings, config = self.settings, self.network.config
        F = settings.frames_per_block
        horizon = None
        if settings.horizon is not None:
            horizon = (settings.horizon + TIME_STRIDE - 1) // TIME_STRIDE // F * F
        return ModelSpec(
            name=name,
            kv=KVSpec(
                num_layers=config.layers,
                num_kv_heads=self._passes.kv_heads,
                head_dim=config.head_dim,
                tokens_per_frame=self._visual.grid[0] * self._visual.grid[1] // 4,
                frames_per_block=F,
                window_frames=settings.window_frames,
                sink_frames=settings.sink_frames,
                rewrite_frames=self._most_past * F,
                model_owned_bytes_per_session=self._state_bytes(),
            ),
            artifacts=declared(settings.fps, pictures=self._decoder is not None),
            height=settings.height,
            width=settings.width,
            fps=settings.fps,
            frames_per_block=F,
            pictures_per_frame=TIME_STRIDE,
            controls=schemas(F),
            default_prompt=settings.default_prompt,
            rollback_safe=True,
            horizon_frames=horizon,
            takes_image=self._vae is not None,
        )

    def _state_bytes(self) -> int:
        """Of one session beside its pages: the text's keys and values, pictures and the codec's memories, latents."""
        config = self.network.config
        text = 2 * config.layers * TOKENS * config.own_width * self._dtype.itemsize
        F, C, h, w = self.latent_shape
        past = F * h * w * (4 * (2 * C + MASK_CHANNELS) + CAMERA_CHANNELS * self._dtype.itemsize)
        return text + 4 * (C + MASK_CHANNELS) * h * w * (F + 1) + self._most_past * past + self._visual.nbytes
