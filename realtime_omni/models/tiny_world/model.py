"""tiny-world behind the model contract: the trained network, its sampler and its places.

Owns weights and start pictures. A session's state is its place, the last picture of each block in its window, with where it
stood and faced, and, until the prefill, the block to be written next: the picture it starts from, or its latest block;
everything else it remembers is KV. One tick: ``sampler_steps`` denoise passes, uint8 frames. The clean pass, which writes
keys and values, is deferred to the prefill.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor
from torch.nn import functional

from realtime_omni.errors import ArgumentError, ConfigError, ErrorCode
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
from realtime_omni.models.common.keys import KEYS, KeyReducer, check_control, schemas
from realtime_omni.models.common.noise import block_noise
from realtime_omni.models.common.packing import fingerprint, unpack_tensor, unpack_values
from realtime_omni.models.tiny_world import sampler
from realtime_omni.models.tiny_world.network import NetworkConfig, TinyWorldNet, poses
from realtime_omni.models.tiny_world.places import PLACES, place_index
from realtime_omni.models.tiny_world.prompts import nearest_place
from realtime_omni.models.tiny_world.recall import Past, recall, walked
from realtime_omni.session.values import Artifact, ArtifactSpec, ChunkMetadata, Modality, Representation, SessionEvent

if TYPE_CHECKING:
    from realtime_omni.config import Config

FPS = 8.0
"""What two CPU cores hold without falling behind, other work beside it included; a client may ask for another."""
CONTEXT_NOISE_STEP = 1000
"""The step counter of the noise that goes into the history, far from every denoise step's."""


_Steps = Annotated[int, Meta(ge=-(2**31), le=2**31)]
Heading = tuple[_Steps, _Steps]
"""Where a session faces since it began: steps turned to the right, steps looked up."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The recipe's ``options``. ``steps``: denoise passes per block (default: what the weights were made for)."""

    steps: int | None = None
    fps: Annotated[float, Meta(gt=0, le=120)] = FPS


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A block that is not history yet. Compute dtype: ``pictures`` [F, 3, H, W] in [-1, 1], ``keys`` [F, 8] in {0, 1}.

    ``place`` is the one the block was made with, ``heading`` that before its first frame, ``chunk`` its index (-1: the start)
    and selects the context noise."""

    pictures: Tensor
    keys: Tensor
    place: int
    heading: Heading
    chunk: int


class _SavedBlock(msgspec.Struct, forbid_unknown_fields=True):
    place: Annotated[int, Meta(ge=0, lt=len(PLACES))]
    heading: Heading
    chunk: Annotated[int, Meta(ge=-1)]


@dataclass(frozen=True, slots=True)
class Remembered:
    """The last picture of a block [4, H, W] in [-1, 1] and how fine it is, in compute dtype, where it looks, and where it stood
    by the keys (`recall.walked`)."""

    picture: Tensor
    heading: Heading
    at: tuple[float, float, float]
    place: int


@dataclass(frozen=True, slots=True)
class TinyWorldState:
    """A session's own memory: ``past`` of the window's blocks, the latest last; it is never empty."""

    place: int
    past: tuple[Remembered, ...]
    unwritten: Unwritten | None

    @property
    def heading(self) -> Heading:
        return self.past[-1].heading


class _SavedSight(msgspec.Struct, forbid_unknown_fields=True):
    heading: Heading
    at: tuple[float, float, float]
    place: Annotated[int, Meta(ge=0, lt=len(PLACES))]


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    place: Annotated[int, Meta(ge=0, lt=len(PLACES))]
    past: Annotated[list[_SavedSight], Meta(min_length=1)]
    unwritten: _SavedBlock | None


class TinyWorld:
    """See the module docstring."""

    def __init__(
        self,
        network: TinyWorldNet,
        *,
        options: Options | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        options = options if options is not None else Options()
        config = network.config
        self.config = config
        self._net = network.to(device=device, dtype=dtype).eval().requires_grad_(False)
        self._dtype, self._device = dtype, torch.device(device)
        steps = config.sampler_steps if options.steps is None else options.steps
        if not 1 <= steps <= 64:
            raise ConfigError("options.steps must lie in 1..64", path="options.steps")
        self._levels = tuple(pairwise(sampler.schedule(steps, config.sampler_shift)))
        self._spec = _spec(config, options.fps, dtype)
        self._fingerprint = fingerprint("tiny-world", str(config), str(steps), weights=self._net)

    @classmethod
    def from_config(cls, config: Config) -> TinyWorld:
        """Load the packaged weights (float16 safetensors) in the configured dtype."""
        from safetensors.torch import load

        folder = files("realtime_omni.models.tiny_world") / "weights"
        network = TinyWorldNet(NetworkConfig.from_json((folder / "config.json").read_text(encoding="utf-8")))
        network.load_state_dict(load((folder / "model.safetensors").read_bytes()))
        return cls(
            network,
            options=config.options_as(Options),
            dtype=getattr(torch, config.dtype),
            device=config.device,
        )

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def open(self, setup: SessionSetup) -> TinyWorldState:
        """Raises ArgumentError: ``prompt_unknown``, ``image_invalid``, or a start picture that does not exist."""
        if setup.image is not None and setup.start is not None:
            raise ArgumentError("give an image or a start picture, not both", path="start")
        place, known = nearest_place(setup.prompt if setup.prompt is not None else PLACES[0].title)
        if setup.image is not None:
            return self._start(place, self._fit(setup.image))
        name = setup.start
        if name is None:
            own = [n for n in self._spec.starts if n.startswith(known.name)]
            if not own:  # no picture of this place is bundled: mid grey
                size = self.config.image_size
                return self._start(place, torch.zeros(3, size, size, device=self._device, dtype=self._dtype))
            name = own[setup.seed % len(own)]
        if name not in self._spec.starts:
            raise ArgumentError(f"no start picture {name!r}; known: {', '.join(self._spec.starts)}", path="start")
        return self._start(place, self._fit(_read_png(self.start_image(name))))

    def understand(self, event: SessionEvent) -> str | None:
        for control in event.controls:
            check_control(control, self.config.frames_per_block)
        return None if event.prompt is None else nearest_place(event.prompt)[1].title

    def new_reducer(self) -> ControlReducer:
        return KeyReducer(self.config.frames_per_block)

    def needs_prefill(self, state: TinyWorldState) -> bool:
        return state.unwritten is not None

    @torch.inference_mode()
    def prefill(self, batch: StepBatch) -> Step:
        """The clean pass. Written at the noise level that the network saw its history with in training."""
        attention, level = batch.attention(), self.config.context_noise
        yield Checkpoint("forward")
        active = batch.active
        blocks: list[Unwritten] = [batch.rows[r].state.unwritten for r in active]
        keys_BFK = torch.stack([b.keys for b in blocks])
        clean_BFCHW = torch.stack([b.pictures for b in blocks])
        levels = torch.full(clean_BFCHW.shape[:2], level, device=self._device)
        if level:
            noise = [
                self._noise(batch.rows[r].seed, b.chunk, CONTEXT_NOISE_STEP)
                for r, b in zip(active, blocks, strict=True)
            ]
            clean_BFCHW = sampler.add_noise(clean_BFCHW, torch.stack(noise), levels)
        self._net.commit(
            clean_BFCHW,
            levels.to(self._dtype),
            keys_BFK,
            self._places([b.place for b in blocks]),
            self._poses(batch, active, [b.heading for b in blocks], keys_BFK),
            partial(attention.attend, rows=active, commit=True),
            partial(attention.write, rows=active),
        )
        return {
            r: RowOutput(ChunkMetadata.from_tick(batch.rows[r].tick), (), replace(batch.rows[r].state, unwritten=None))
            for r in batch.active
        }

    @torch.inference_mode()
    def step(self, batch: StepBatch) -> Step:
        attention, frames = batch.attention(), self.config.frames_per_block
        keys, places, ends, sources, x = {}, {}, {}, {}, {}
        fine: dict[int, Tensor] = {}
        for number, row in enumerate(batch.rows):
            keys[number] = self._keys(row)
            places[number] = row.state.place if row.tick.prompt is None else nearest_place(row.tick.prompt)[0]
            ends[number] = self._end(row.state, keys[number])
            sources[number] = self._sources(row.state.past, *ends[number], places[number])
            x[number] = self._noise(row.seed, row.tick.chunk_index, 0)
        for level, following in self._levels:
            yield Checkpoint("forward")
            active = batch.active
            now, keys_BFK = torch.stack([x[r] for r in active]), torch.stack([keys[r] for r in active])
            before, seen = (torch.stack(part)[:, None] for part in zip(*(sources[r] for r in active), strict=True))
            x0, how_fine = self._net(
                now,
                torch.full((len(active), frames), level, device=self._device, dtype=self._dtype),
                keys_BFK,
                self._places([places[r] for r in active]),
                self._poses(batch, active, [batch.rows[r].state.heading for r in active], keys_BFK),
                before,
                seen,
                lambda layer, q, k, v, rows=active: attention.attend(layer, q, k, v, rows=rows, commit=False),
            )
            x.update(zip(active, sampler.step(now, x0, level, following), strict=True))
            fine.update(zip(active, how_fine, strict=True))
        if any(batch.rows[r].outputs for r in batch.active):
            yield Checkpoint("decode")
        return {
            r: self._output(batch.rows[r], places[r], x[r].clamp(-1, 1), fine[r][-1], keys[r], ends[r])
            for r in batch.active
        }

    def pack(self, state: TinyWorldState) -> PackedState:
        tensors = {f"past.{number}": one.picture for number, one in enumerate(state.past)}
        past = [{"heading": list(one.heading), "at": list(one.at), "place": one.place} for one in state.past]
        kept = None
        if state.unwritten is not None:
            block = state.unwritten
            tensors |= {"pictures": block.pictures, "keys": block.keys}
            kept = {"place": block.place, "heading": list(block.heading), "chunk": block.chunk}
        return PackedState(tensors, {"place": state.place, "past": past, "unwritten": kept})

    def unpack(self, packed: PackedState) -> TinyWorldState:
        saved = unpack_values(packed, _Saved, packed.tensors)
        past_names = [f"past.{number}" for number in range(len(saved.past))]
        if set(packed.tensors) != {*past_names, *(() if saved.unwritten is None else ("pictures", "keys"))}:
            raise ArgumentError(f"the state has the tensors {sorted(packed.tensors)}", path="state")
        if len(saved.past) > self._blocks:
            raise ArgumentError(f"the state remembers {len(saved.past)} blocks, at most {self._blocks}", path="state")
        shape = (4, *self._block_shape[2:])
        past = tuple(
            Remembered(
                unpack_tensor(packed, name, shape, dtype=self._dtype, device=self._device),
                one.heading,
                one.at,
                one.place,
            )
            for name, one in zip(past_names, saved.past, strict=True)
        )
        block, unwritten = saved.unwritten, None
        if block is not None:
            shapes = {"pictures": self._block_shape, "keys": (self.config.frames_per_block, len(KEYS))}
            shown, keys = (
                unpack_tensor(packed, name, shape, dtype=self._dtype, device=self._device)
                for name, shape in shapes.items()
            )
            unwritten = Unwritten(shown, keys, block.place, block.heading, block.chunk)
        return TinyWorldState(saved.place, past, unwritten)

    def fingerprint(self) -> str:
        return self._fingerprint

    def close(self, state: TinyWorldState) -> None:
        """Nothing beside the state itself."""

    def start_image(self, name: str) -> bytes:
        if name not in self._spec.starts:
            raise KeyError(name)
        return (files("realtime_omni.models.tiny_world") / "weights" / "starts" / f"{name}.png").read_bytes()

    def _start(self, place: int, picture_CHW: Tensor) -> TinyWorldState:
        """A session begins with a block that shows its picture and holds no key."""
        frames = self.config.frames_per_block
        still = torch.zeros(frames, len(KEYS), device=self._device, dtype=self._dtype)
        start = Unwritten(picture_CHW.expand(frames, -1, -1, -1), still, place, heading=(0, 0), chunk=-1)
        seen = torch.cat((picture_CHW, torch.ones_like(picture_CHW[:1])))
        return TinyWorldState(place, (Remembered(seen, (0, 0), (0.0, 0.0, 0.0), place),), start)

    @property
    def _blocks(self) -> int:
        """Blocks of the window, each of which leaves a picture."""
        return self.config.window_frames // self.config.frames_per_block

    @property
    def _block_shape(self) -> tuple[int, int, int, int]:
        return (self.config.frames_per_block, 3, self.config.image_size, self.config.image_size)

    def _noise(self, seed: int, chunk: int, step: int) -> Tensor:
        return block_noise(seed, chunk, step, self._block_shape, dtype=self._dtype, device=self._device)

    def _keys(self, row: StepRow) -> Tensor:
        """float [F, 8] of the reduced script of one block."""
        held = torch.zeros(self.config.frames_per_block, len(KEYS), device=self._device, dtype=self._dtype)
        for control in row.tick.controls:
            for frame, keys in enumerate(control.data["frames"]):
                for key in keys:
                    held[frame, KEYS.index(key)] = 1.0
        return held

    def _sources(
        self, past: Sequence[Remembered], heading_2: Tensor, at_3: Tensor, place: int
    ) -> tuple[Tensor, Tensor]:
        """(pictures [SOURCES, 4, H, W] of `Remembered`, their sights [SOURCES, 6]) of a block that ends there, in `place`."""
        remembered = Past(
            torch.tensor([[one.heading for one in past]]),
            torch.tensor([[one.at for one in past]], dtype=torch.float64),
            torch.tensor([[one.place for one in past]]),
            torch.arange(len(past), 0, -1)[None],
        )
        index, seen = recall(remembered, heading_2[None], at_3[None], torch.tensor([place]), self.config.turn_steps)
        return torch.stack([past[i].picture for i in index[0].tolist()]), seen[0].to(self._device)

    def _end(self, state: TinyWorldState, keys_FK: Tensor) -> tuple[Tensor, Tensor]:
        """(heading [2] long, position [3] float64) of the last frame of a block under `keys`, on the CPU."""
        keys, last = keys_FK[None].cpu(), state.past[-1]
        pose = poses(torch.zeros(1, dtype=torch.long), torch.tensor([last.heading]), keys, self.config.look_limit)
        at = walked(torch.tensor([last.at], dtype=torch.float64), keys, pose[..., 1], self.config.turn_steps)
        return pose[0, -1, 1:], at[0, -1]

    def _places(self, places: Sequence[int]) -> Tensor:
        column = torch.tensor(places, device=self._device)[:, None]
        return column.expand(-1, self.config.frames_per_block)

    def _poses(
        self, batch: StepBatch, active: tuple[int, ...], headings: Sequence[Heading], keys_BFK: Tensor
    ) -> Tensor:
        """[B, F, 3] long."""
        first = torch.tensor([batch.rows[r].frame_index for r in active], device=self._device)
        heading = torch.tensor(headings, device=self._device).view(-1, 2)
        return poses(first, heading, keys_BFK, self.config.look_limit)

    def _output(
        self,
        row: StepRow,
        place: int,
        picture_FCHW: Tensor,
        fine_1HW: Tensor,
        keys_FK: Tensor,
        end: tuple[Tensor, Tensor],
    ) -> RowOutput:
        artifacts = []
        if "frames" in row.outputs:
            data = ((picture_FCHW.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
            artifacts.append(
                Artifact("frames", Modality.VIDEO, Representation.DECODED, "TCHW", data, fps=self._spec.fps)
            )
        heading, at = end
        turned, looked = heading.tolist()
        after = (turned % self.config.turn_steps, looked)
        seen = torch.cat((picture_FCHW[-1], fine_1HW))
        last = Remembered(seen, after, (at[0].item(), at[1].item(), at[2].item()), place)
        block = Unwritten(picture_FCHW, keys_FK, place, row.state.heading, row.tick.chunk_index)
        state = TinyWorldState(place, (*row.state.past, last)[-self._blocks :], block)
        return RowOutput(ChunkMetadata.from_tick(row.tick), tuple(artifacts), state)

    def _fit(self, image: np.ndarray) -> Tensor:
        """Centre crop to a square, resize, [-1, 1]. Raises ArgumentError (``image_invalid``)."""
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ArgumentError("an image is uint8 [H, W, 3]", code=ErrorCode.IMAGE_INVALID, path="image")
        side = min(image.shape[:2])
        if side < 8:
            raise ArgumentError("the image is smaller than 8 pixels", code=ErrorCode.IMAGE_INVALID, path="image")
        top, left = (image.shape[0] - side) // 2, (image.shape[1] - side) // 2
        crop = np.array(image[top : top + side, left : left + side])  # a copy: the caller's may be read-only
        x = torch.from_numpy(crop).permute(2, 0, 1).float()[None] / 127.5 - 1
        size = self.config.image_size
        if side != size:
            x = functional.interpolate(x, (size, size), mode="bilinear", antialias=True, align_corners=False)
        return x[0].to(device=self._device, dtype=self._dtype)


def _spec(config: NetworkConfig, fps: float, dtype: torch.dtype) -> ModelSpec:
    starts = _start_names()
    return ModelSpec(
        name="tiny-world",
        kv=KVSpec(
            num_layers=config.layers,
            num_kv_heads=config.heads,
            head_dim=config.head_dim,
            tokens_per_frame=config.tokens_per_frame,
            frames_per_block=config.frames_per_block,
            window_frames=config.window_frames,
            sink_frames=config.sink_frames,
            layer_windows=config.layer_windows,
            dense_frames=config.dense_frames,
            model_owned_bytes_per_session=(
                dtype.itemsize
                * (
                    config.frames_per_block * (3 * config.image_size**2 + len(KEYS))
                    + 4 * config.image_size**2 * (config.window_frames // config.frames_per_block)
                )
            ),
        ),
        artifacts=(ArtifactSpec("frames", Modality.VIDEO, Representation.DECODED, "TCHW", fps=fps, primary=True),),
        height=config.image_size,
        width=config.image_size,
        fps=fps,
        frames_per_block=config.frames_per_block,
        controls=schemas(config.frames_per_block),
        prompts=tuple(p.title for p in PLACES),
        starts=starts,
        default_prompt=PLACES[0].title,
        start_prompts={name: PLACES[place_index(name.rsplit("-", 1)[0])].title for name in starts},
        rollback_safe=True,
        past_state_bytes=dtype.itemsize * 4 * config.image_size**2,
        takes_image=True,
    )


def _start_names() -> tuple[str, ...]:
    """Bundled start pictures, ``<place>-<n>``, in the order of the places."""
    folder = files("realtime_omni.models.tiny_world") / "weights" / "starts"
    names = [f.name for f in folder.iterdir()] if folder.is_dir() else []
    found = sorted(n.removesuffix(".png") for n in names if n.endswith(".png"))
    order = {p.name: i for i, p in enumerate(PLACES)}
    return tuple(sorted(found, key=lambda n: (order[n.rsplit("-", 1)[0]], n)))


def _read_png(data: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
