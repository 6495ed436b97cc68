"""The causal video autoencoder of Wan, streaming: what it remembers between two calls is a value that a session owns.

The modules are diffusers' ``AutoencoderKLWan`` (imported when one is loaded). Its causal convolutions keep the last two
slices of their input in a list; here that list goes in and comes out with every call. Entries are replaced and never edited,
so a copy of the list is a snapshot, and a failed call has changed nothing. Decoding is bit for bit that of the whole clip,
however it is cut into calls: the first latent frame of a session becomes one picture, every later one four.

Shape legend: F latent frames, P pictures, C latent channels, h w the latent grid, H W = 8 h, 8 w pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realtime_omni.errors import ArgumentError, ConfigError
from realtime_omni.models.common.pretrained import load_pretrained
from realtime_omni.models.common.wan.vae_fast import hasten, kernel_for

TIME_STRIDE = 4
SPACE_STRIDE = 8
_REPEATED = "Rep"
"""How diffusers marks a temporal upsampler that has seen one frame only."""

Slot = Tensor | str | None


@dataclass(frozen=True, slots=True)
class SlotShape:
    """Of a slot that is full."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


SlotShapes = tuple[SlotShape | None, ...]


@dataclass(frozen=True, slots=True)
class CodecState:
    """What one direction of the codec remembers: a slot per causal convolution. Empty before the first frame."""

    slots: tuple[Slot, ...] = ()

    @property
    def is_fresh(self) -> bool:
        return not self.slots

    def on(self, device: torch.device) -> CodecState:
        """Where the codec computes; the same object when it is there."""
        if all(slot.device == device for slot in self.slots if isinstance(slot, Tensor)):
            return self
        return CodecState(tuple(slot.to(device) if isinstance(slot, Tensor) else slot for slot in self.slots))

    def equals(self, other: CodecState) -> bool:
        """Bit for bit."""
        return len(self.slots) == len(other.slots) and all(
            torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b
            for a, b in zip(self.slots, other.slots, strict=True)
        )

    def pack(self) -> tuple[dict[str, Tensor], list[str | None]]:
        """Tensors by name, and what every slot is: a name of one, ``Rep`` or None."""
        tensors = {f"slot{i}": slot for i, slot in enumerate(self.slots) if isinstance(slot, Tensor)}
        kinds = [f"slot{i}" if isinstance(slot, Tensor) else slot for i, slot in enumerate(self.slots)]
        return tensors, kinds

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], kinds: Sequence[str | None], like: SlotShapes) -> CodecState:
        """The inverse of :meth:`pack`. ``like``: what the codec's full state looks like.

        Raises ArgumentError on what :meth:`pack` would not have made."""
        if kinds and len(kinds) != len(like):
            raise ArgumentError(f"a codec's state has {len(kinds)} slots, not {len(like)}", path="state")
        slots: list[Slot] = []
        for number, (kind, known) in enumerate(zip(kinds, like, strict=False)):
            if kind is None or kind == _REPEATED:
                slots.append(kind)
                continue
            found = tensors.get(kind)
            if kind != f"slot{number}" or found is None or not _alike(found, known):
                raise ArgumentError(f"a codec's state has no valid slot {number}", path="state")
            slots.append(found)
        if set(tensors) != {kind for kind in kinds if kind is not None and kind != _REPEATED}:
            raise ArgumentError("a codec's state has tensors without a slot", path="state")
        return cls(tuple(slots))


def _alike(found: Tensor, known: SlotShape | None) -> bool:
    """The same in all but the number of remembered slices, one or two."""
    if known is None or found.dtype != known.dtype or found.dim() != len(known.shape):
        return False
    same = tuple(found.shape[:2]) == known.shape[:2] and tuple(found.shape[3:]) == known.shape[3:]
    return same and 1 <= found.shape[2] <= known.shape[2]


class WanVAE:
    """Latents and pictures, a few frames at a time. All methods are pure functions of their arguments."""

    def __init__(self, modules: torch.nn.Module) -> None:
        """``modules``: an ``AutoencoderKLWan``."""
        self._vae: Any = modules.eval().requires_grad_(False)
        config: Any = self._vae.config
        parameter: Tensor = next(self._vae.parameters())
        self._dtype = parameter.dtype
        if parameter.is_cuda:
            decoder: Any = self._vae.decoder
            hasten(decoder, kernel_for(parameter.device))

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=parameter.device).view(1, -1, 1, 1, 1)

        self._mean, self._std = column(config.latents_mean), column(config.latents_std)

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype, device: torch.device | str) -> WanVAE:
        """From a folder in diffusers' layout (``config.json`` and safetensors). Raises ConfigError."""
        try:
            import diffusers
        except ImportError:
            raise ConfigError("Wan's autoencoder needs the package diffusers", path="options.vae") from None
        kind = diffusers.AutoencoderKLWan
        return cls(load_pretrained(kind, folder, what="autoencoder", path="options.vae", dtype=dtype, device=device))

    def slot_shapes(self, height: int, width: int) -> tuple[SlotShapes, SlotShapes]:
        """Of an encoder's and a decoder's state after enough frames of this size; found without computing anything."""
        with torch.device("meta"):
            ghost = WanVAE(type(self._vae).from_config(self._vae.config))
            pictures = torch.zeros(2 * TIME_STRIDE + 1, 3, height, width)
            latents = torch.zeros(3, self.channels, height // SPACE_STRIDE, width // SPACE_STRIDE)
            states = ghost.encode(pictures, CodecState())[1], ghost.decode(latents, CodecState())[1]
        return tuple(  # type: ignore[return-value]
            tuple(SlotShape(tuple(s.shape), self._dtype) if isinstance(s, Tensor) else None for s in state.slots)
            for state in states
        )

    @property
    def device(self) -> torch.device:
        return self._mean.device

    @property
    def channels(self) -> int:
        """C."""
        return int(self._vae.config.z_dim)

    @torch.no_grad()
    def decode(self, latents: Tensor, state: CodecState) -> tuple[Tensor, CodecState]:
        """Pictures, float32 [P, 3, H, W] in [-1, 1], of normalised latents [F, C, h, w]; P = 4 F, or 4 F - 3 at first."""
        z = latents.transpose(0, 1)[None].float() * self._std + self._mean
        slots = self._slots(state, self._vae.decoder)
        pictures = []
        for index, frame in enumerate(
            torch.split(z.to(self._dtype), 1, dim=2)
        ):  # one by one also where it need not be: same bits
            first = state.is_fresh and index == 0
            x = self._vae.post_quant_conv(frame)
            pictures.append(self._vae.decoder(x, feat_cache=slots, feat_idx=[0], first_chunk=first))
        out = torch.cat(pictures, dim=2).float().clamp(-1, 1)
        return out[0].transpose(0, 1), CodecState(tuple(slots))

    @torch.no_grad()
    def encode(self, pictures: Tensor, state: CodecState) -> tuple[Tensor, CodecState]:
        """Normalised latents (the distribution's mode), float32 [F, C, h, w], of pictures [P, 3, H, W] in [-1, 1].

        P is a multiple of 4, or one more at first. Raises ValueError otherwise."""
        lone = 1 if state.is_fresh else 0
        if pictures.shape[0] < 1 or (pictures.shape[0] - lone) % TIME_STRIDE:
            raise ValueError(f"{pictures.shape[0]} pictures are no whole latent frames (first: {bool(lone)})")
        x = pictures.transpose(0, 1)[None].to(self._dtype)
        pieces = (*torch.split(x[:, :, :lone], 1, dim=2), *torch.split(x[:, :, lone:], TIME_STRIDE, dim=2))
        slots = self._slots(state, self._vae.encoder)
        latents = [
            self._vae.quant_conv(self._vae.encoder(piece, feat_cache=slots, feat_idx=[0]))
            for piece in pieces
            if piece.shape[2]
        ]
        mode = torch.cat(latents, dim=2).chunk(2, dim=1)[0].float()
        return ((mode - self._mean) / self._std)[0].transpose(0, 1), CodecState(tuple(slots))

    def _slots(self, state: CodecState, part: torch.nn.Module) -> list[Slot]:
        if not state.is_fresh:
            return list(state.slots)
        kind = type(self._vae.decoder.conv_in)
        return [None] * sum(isinstance(module, kind) for module in part.modules())


@dataclass(frozen=True, slots=True)
class ImageCondition:
    """The latents that say what a session started from: the picture, then emptiness, encoded as one endless clip.

    The encoder forgets: after some blocks of empty frames neither its state nor what it yields changes any more. From then
    on ``constant`` is the answer for ever, and nothing is encoded: a session has no horizon.
    """

    encoder: CodecState
    constant: Tensor | None = None

    @classmethod
    def start(cls) -> ImageCondition:
        return cls(CodecState())


def next_condition(
    vae: WanVAE, condition: ImageCondition, frames: int, picture: Tensor | None, size: tuple[int, int]
) -> tuple[Tensor, ImageCondition]:
    """Latents [frames, C, h, w] of the next block, and what follows. ``picture`` [3, H, W] in [-1, 1]: at the first block,
    where there is one."""
    if condition.constant is not None:
        return condition.constant.expand(frames, -1, -1, -1), condition
    count = TIME_STRIDE * frames - (TIME_STRIDE - 1 if condition.encoder.is_fresh else 0)
    clip = torch.zeros(count, 3, *size, device=vae.device)
    if condition.encoder.is_fresh and picture is not None:
        clip[0] = picture
    latents, state = vae.encode(clip, condition.encoder.on(vae.device))
    still = all(torch.equal(latents[0], latent) for latent in latents[1:])
    if still and state.equals(condition.encoder):
        return latents, ImageCondition(CodecState(), latents[:1].clone())
    return latents, ImageCondition(state)
