"""Matrix-Game 2 behind the model contract.

Owns the order of a tick and a session's state. One tick, one block of latent frames::

    prepare   features of the start picture, once a session; the picture as latents (constant after some blocks); keys and
              mouse as what each latent frame sees of them
    denoise   one pass per level, over history in pages, the action layers' history and the block
    commit    one pass over the finished block at timestep 0, which writes both histories
    decode    pictures, where they are asked for

Nothing is kept on the model. The history of self-attention is in pages; that of the action layers, whose keys belong to places
of the picture and not to tokens of a sequence, is a value in the state. Weights are the user's (MIT); none are shipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

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
from realtime_omni.models.common.conditioning import Conditioning, Parts, stacked
from realtime_omni.models.common.keys import OverriddenKeyReducer
from realtime_omni.models.common.noise import block_noise
from realtime_omni.models.common.wan import sampler
from realtime_omni.models.common.wan.blocks import FRAMES, LATENTS, declared, frames_of, latents_of
from realtime_omni.models.common.wan.clip import PictureEncoder
from realtime_omni.models.common.wan.transformer import KeysValues
from realtime_omni.models.common.wan.vae import TIME_STRIDE, CodecState, ImageCondition, WanVAE
from realtime_omni.models.common.wan.visual import MASK_CHANNELS, Visual, VisualShapes, condition_of, fit, pictures_of
from realtime_omni.models.matrix_game import state as saved
from realtime_omni.models.matrix_game.actions import ActionHistory, Remembered
from realtime_omni.models.matrix_game.controls import ACTIONS, Action, actions_of, check_control, schemas
from realtime_omni.models.matrix_game.network import Acted, MatrixGameTransformer
from realtime_omni.models.matrix_game.state import MatrixGameState
from realtime_omni.session.values import ChunkMetadata, SessionEvent

if TYPE_CHECKING:
    from realtime_omni.config import Config

GREY = 128
"""Of the picture that a session starts from when it is given none, as in the published demonstrations."""
LOOKING, PICTURE = "looking", "picture"
"""The one branch of what a session is conditioned on, and its one part; made from its start picture, which never changes."""
START = "start"
_BEFORE = 3
"""Latent frames before a frame whose actions it sees."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a recipe decides. ``height`` and ``width`` in pixels, multiples of 16; frames are latent. ``window_frames`` are
    what a block sees, itself included. ``labels``, ``shift``: see :mod:`realtime_omni.models.common.wan.sampler`."""

    height: int = 352
    width: int = 640
    frames_per_block: int = 3
    window_frames: int = 6
    labels: tuple[int, ...] = (1000, 666, 333)
    shift: float = 5.0
    fps: float = 25.0


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Of one row, for all passes of its tick."""

    conditioning: Conditioning
    condition: Tensor
    following: ImageCondition
    actions: tuple[Action, ...]
    mouse: Tensor
    keys: Tensor


class MatrixGame:
    """The model. ``vae`` None: latents only, and no condition beside an empty one."""

    def __init__(
        self,
        network: MatrixGameTransformer,
        pictures: PictureEncoder,
        settings: Settings,
        *,
        name: str = "matrix-game",
        vae: WanVAE | None = None,
        device: torch.device | str = "cpu",
        fingerprint: str = "",
    ) -> None:
        self.network = network.eval().requires_grad_(False)
        self.settings = settings
        self._pictures = pictures
        self._vae = vae
        self._device = torch.device(device)
        self._dtype = network.patches.weight.dtype
        self._levels = sampler.levels(settings.labels, settings.shift)
        self._visual = VisualShapes.of(vae, settings.height, settings.width, network.config.out_channels)
        self._tokens = self._visual.grid[0] * self._visual.grid[1] // 4
        self._fingerprint = fingerprint
        self._spec = self._describe(name)

    @classmethod
    def from_config(cls, config: Config) -> MatrixGame:
        from realtime_omni.models.matrix_game.loader import load

        return load(config)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """[F, C, h, w] of a block."""
        return (self.settings.frames_per_block, self.network.config.out_channels, *self._visual.grid)

    def open(self, setup: SessionSetup) -> MatrixGameState:
        """Raises ArgumentError: a prompt, a picture that is none."""
        if setup.prompt is not None:
            raise _no_prompt()
        if setup.start is not None:
            raise ArgumentError("this model has no start pictures", path="start")
        if setup.image is not None and self._vae is None:
            raise ArgumentError(
                "without an autoencoder no picture is taken", code=ErrorCode.IMAGE_INVALID, path="image"
            )
        size = (self.settings.height, self.settings.width)
        if setup.image is None:
            picture = torch.full((3, *size), GREY, dtype=torch.uint8, device=self._device)
        else:
            picture = fit(setup.image, *size, self._device)
        nothing = Conditioning(self.network.config.layers, (PICTURE,))
        return MatrixGameState(Visual.start(picture), self.network.no_history(self._tokens), nothing)

    def understand(self, event: SessionEvent) -> str | None:
        for control in event.controls:
            check_control(control, self.settings.frames_per_block)
        if event.prompt is not None:
            raise _no_prompt()
        return None

    def new_reducer(self) -> ControlReducer:
        return OverriddenKeyReducer(self.settings.frames_per_block, ACTIONS)

    def needs_prefill(self, state: MatrixGameState) -> bool:
        return False

    def prefill(self, batch: StepBatch) -> Step:
        raise NotImplementedError("every block is written by its own tick")

    @torch.no_grad()
    def step(self, batch: StepBatch) -> Step:
        yield Checkpoint("forward", "prepare")
        ready = {number: self._prepare(row) for number, row in enumerate(batch.rows)}
        x = {number: self._noise(row, 0) for number, row in enumerate(batch.rows)}
        clean: dict[int, Tensor] = {}
        for index, level in enumerate(self._levels):
            yield Checkpoint("forward", "denoise")
            active, attention = batch.active, batch.attention()
            attend = partial(attention.attend, rows=active, commit=False)
            flows, _ = self.network(*self._inputs(batch, ready, x, level.timestep), attend)
            for r, flow in zip(active, flows, strict=True):
                noise = partial(self._noise, batch.rows[r])
                clean[r], x[r] = sampler.after_pass(self._levels, index, x[r], flow, noise)
        yield Checkpoint("forward", "commit")
        remembered = self._committed(batch, ready, clean)
        outputs: dict[int, RowOutput | Exception] = {}
        for r in batch.active:
            row, decoder, artifacts = batch.rows[r], CodecState(), []
            if not clean[r].isfinite().all():
                outputs[r] = TickError("the block is not finite")
                continue
            if LATENTS in row.outputs:
                artifacts.append(latents_of(clean[r]))
            if FRAMES in row.outputs:
                yield Checkpoint("decode")
                if r not in batch.active:
                    continue
                assert self._vae is not None
                pictures, decoder = pictures_of(self._vae, row.state.visual, clean[r])
                artifacts.append(frames_of(pictures, self._spec.fps))
            state = self._next(row.state, ready[r], decoder, clean[r], remembered[r])
            outputs[r] = RowOutput(ChunkMetadata.from_tick(row.tick), tuple(artifacts), state)
        return {r: outputs[r] for r in batch.active}

    def pack(self, state: MatrixGameState) -> PackedState:
        return saved.pack(state)

    def unpack(self, packed: PackedState) -> MatrixGameState:
        empty = self.network.no_history(self._tokens)
        nothing = Conditioning(self.network.config.layers, (PICTURE,))
        return saved.unpack(packed, self._visual, empty, nothing, self._held_frames, self._device)

    def fingerprint(self) -> str:
        return self._fingerprint

    def close(self, state: MatrixGameState) -> None:
        """Nothing beside the state itself."""

    def start_image(self, name: str) -> bytes:
        raise KeyError(name)

    @property
    def _held_frames(self) -> int:
        """Frames that the action layers remember: what the next block sees beside itself."""
        return self.settings.window_frames - self.settings.frames_per_block

    def _prepare(self, row: StepRow) -> _Prepared:
        state: MatrixGameState = row.state
        visual, first = state.visual, state.visual.tail is None
        conditioning = state.conditioning.capture(LOOKING, START, lambda: self._looked_at(visual))
        picture = visual.picture if first and self._vae is not None else None
        condition, following = condition_of(self._vae, visual.condition, picture, self.latent_shape, self._device)
        control = row.tick.controls[-1] if row.tick.controls else None
        actions = actions_of(control, self.settings.frames_per_block)
        keys, mouse = seen_actions(state.recent, actions)
        return _Prepared(conditioning, condition, following, actions, mouse.to(self._device), keys.to(self._device))

    def _looked_at(self, visual: Visual) -> Parts:
        assert visual.picture is not None
        features = self._pictures.encode(visual.picture).to(device=self._device, dtype=self._dtype)
        return {PICTURE: tuple((k[0], v[0]) for k, v in self.network.context_cache(features[None]))}

    def _committed(
        self, batch: StepBatch, ready: dict[int, _Prepared], clean: dict[int, Tensor]
    ) -> dict[int, list[Remembered]]:
        """The clean pass; what the action layers of each active row remember of the block."""
        active, attention = batch.active, batch.attention()
        kept = self.network.commit(
            *self._inputs(batch, ready, clean, 0.0),
            partial(attention.attend, rows=active, commit=True),
            partial(attention.write, rows=active),
        )
        return dict(zip(active, kept, strict=True))

    def _inputs(
        self, batch: StepBatch, ready: dict[int, _Prepared], x: dict[int, Tensor], timestep: float
    ) -> tuple[Tensor, Tensor, Tensor, tuple[KeysValues, ...], Acted, list[ActionHistory]]:
        """What the network is given of the active rows, beside their attention."""
        active = batch.active
        first = torch.tensor([batch.rows[r].frame_index for r in active], device=self._device)[:, None]
        return (
            torch.stack([torch.cat((x[r], ready[r].condition), dim=1) for r in active]),
            torch.full((len(active),), timestep, device=self._device),
            first + torch.arange(self.settings.frames_per_block, device=self._device),
            stacked([ready[r].conditioning.branches[LOOKING][PICTURE] for r in active]),
            Acted(torch.stack([ready[r].mouse for r in active]), torch.stack([ready[r].keys for r in active])),
            [batch.rows[r].state.history for r in active],
        )

    def _next(
        self,
        state: MatrixGameState,
        ready: _Prepared,
        decoder: CodecState,
        latents: Tensor,
        remembered: Sequence[Remembered],
    ) -> MatrixGameState:
        visual = Visual(state.visual.picture, ready.following, decoder, latents[-1:].clone())
        recent = (*state.recent, *ready.actions)[-_BEFORE:]
        return MatrixGameState(visual, state.history.then(remembered, self._held_frames), ready.conditioning, recent)

    def _noise(self, row: StepRow, step: int) -> Tensor:
        return block_noise(row.seed, row.tick.chunk_index, step, self.latent_shape, device=self._device)

    def _describe(self, name: str) -> ModelSpec:
        settings, config = self.settings, self.network.config
        return ModelSpec(
            name=name,
            kv=KVSpec(
                num_layers=config.layers,
                num_kv_heads=config.heads,
                head_dim=config.head_dim,
                tokens_per_frame=self._tokens,
                frames_per_block=settings.frames_per_block,
                window_frames=settings.window_frames,
                model_owned_bytes_per_session=self._state_bytes(),
            ),
            artifacts=declared(settings.fps, pictures=self._vae is not None),
            height=settings.height,
            width=settings.width,
            fps=settings.fps,
            frames_per_block=settings.frames_per_block,
            pictures_per_frame=TIME_STRIDE,
            controls=schemas(settings.frames_per_block),
            rollback_safe=True,
            takes_image=self._vae is not None,
        )

    def _state_bytes(self) -> int:
        """Of one session beside its pages: the picture's keys and values, the action layers' history, latents, pictures."""
        config, size = self.network.config, self._dtype.itemsize
        context = 2 * config.layers * self._pictures.tokens * config.width * size
        places = (self._tokens + 1) * self._held_frames
        history = 2 * config.action_layers * places * config.actions.inner * size
        F, C, h, w = self.latent_shape
        return context + history + 4 * (C + MASK_CHANNELS) * h * w * (F + 1) + self._visual.nbytes


def seen_actions(recent: Sequence[Action], actions: Sequence[Action]) -> tuple[Tensor, Tensor]:
    """Keys [F, 12, keys] and mouse [F, 12, 2], float32, that the frames of a block see: of a frame's twelve pictures one
    belongs to the third frame before it, four each to the two before it, three to itself. Before the first frame it was as
    in it."""
    before = list(recent) if recent else [actions[0]]
    before = [before[0]] * (_BEFORE - len(before)) + before
    line = [*before, *actions]
    seen = [
        [line[i], *[line[i + 1]] * TIME_STRIDE, *[line[i + 2]] * TIME_STRIDE, *[line[i + 3]] * (TIME_STRIDE - 1)]
        for i in range(len(actions))
    ]
    keys = torch.tensor([[pressed for pressed, _ in frame] for frame in seen])
    return keys, torch.tensor([[moved for _, moved in frame] for frame in seen])


def _no_prompt() -> ArgumentError:
    return ArgumentError("this model reads no prompt", code=ErrorCode.PROMPT_UNKNOWN, path="prompt")
