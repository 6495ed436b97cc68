"""Pictures of a session of the Wan family: the one it starts from, the condition made of it, and what its decoder remembers.

Owns: a :class:`Visual`, the part of a session's state that has to do with pictures, and how it is saved; a given picture cut
to a model's shape; the condition of a block; its pictures. Must not know: a network, a batch, a session.

Shape legend: F latent frames, P pictures, C latent channels, h w the latent grid, H W = 8 h, 8 w pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from realtime_omni.errors import ArgumentError, ErrorCode
from realtime_omni.models.common.wan.tiny_decoder import TinyDecoder
from realtime_omni.models.common.wan.vae import (
    SPACE_STRIDE,
    CodecState,
    ImageCondition,
    SlotShapes,
    WanVAE,
    next_condition,
)

MASK_CHANNELS = 4
"""Of a network's input: 1 where the condition is a given picture."""
SMALLEST, LARGEST = 16, 4096
"""Pixels per side of a picture that can be taken."""


@dataclass(frozen=True, slots=True)
class Visual:
    """Between two ticks. ``picture`` uint8 [3, H, W]: what the session starts from, for as long as the model needs it."""

    picture: Tensor | None
    condition: ImageCondition
    decoder: CodecState
    """Fresh also after a block that nobody wanted pictures of."""
    tail: Tensor | None
    """The last latent frame, [1, C, h, w]: what a fresh decoder is warmed up with. None before the first block."""

    @classmethod
    def start(cls, picture: Tensor | None) -> Visual:
        return cls(picture, ImageCondition.start(), CodecState(), None)

    def pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name, and which of them there are: ``tensors``, ``encoder``, ``decoder`` as in :class:`Packed`."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in (("picture", self.picture), ("tail", self.tail), ("constant", self.condition.constant)):
            if tensor is not None:
                tensors[name] = tensor
        values: dict[str, Any] = {"tensors": sorted(tensors)}
        for name, codec in (("encoder", self.condition.encoder), ("decoder", self.decoder)):
            slots, values[name] = codec.pack()
            tensors.update({f"{name}.{slot}": tensor for slot, tensor in slots.items()})
        return tensors, values


@dataclass(frozen=True, slots=True)
class VisualShapes:
    """What a model's visual states look like: pictures of ``height`` x ``width``, ``channels`` of latents, full codecs."""

    height: int
    width: int
    channels: int
    encoder: SlotShapes = ()
    decoder: SlotShapes = ()

    @classmethod
    def of(
        cls, vae: WanVAE | None, height: int, width: int, channels: int, tiny: TinyDecoder | None = None
    ) -> VisualShapes:
        """``tiny``: decodes in the autoencoder's place."""
        encoder: SlotShapes = ()
        decoder: SlotShapes = ()
        if vae is not None:
            encoder, decoder = vae.slot_shapes(height, width)
        if tiny is not None:
            decoder = tiny.slot_shapes(height, width)
        return cls(height, width, channels, encoder, decoder)

    @property
    def grid(self) -> tuple[int, int]:
        """(h, w)."""
        return self.height // SPACE_STRIDE, self.width // SPACE_STRIDE

    @property
    def nbytes(self) -> int:
        """Of one session at most."""
        h, w = self.grid
        slots = sum(slot.nbytes for part in (self.encoder, self.decoder) for slot in part if slot)
        return slots + 3 * self.height * self.width + 2 * 4 * self.channels * h * w

    def unpack(
        self,
        unclaimed: dict[str, Tensor],
        plain: Sequence[str],
        encoder: Sequence[str | None],
        decoder: Sequence[str | None],
    ) -> Visual:
        """The inverse of :meth:`Visual.pack`; takes its tensors out of ``unclaimed``.

        Raises ArgumentError on what :meth:`Visual.pack` would not have made."""
        if {"picture", "tail", "constant"} & set(unclaimed) != set(plain):
            raise ArgumentError("the state lacks a tensor", path="state")
        frame = (1, self.channels, *self.grid)
        picture = claim(unclaimed, "picture", (3, self.height, self.width), torch.uint8)
        tail = claim(unclaimed, "tail", frame, torch.float32)
        constant = claim(unclaimed, "constant", frame, torch.float32)
        codecs = []
        for name, kinds, like in (("encoder", encoder, self.encoder), ("decoder", decoder, self.decoder)):
            own = {key.removeprefix(f"{name}."): t for key, t in unclaimed.items() if key.startswith(f"{name}.")}
            codecs.append(CodecState.unpack(own, kinds, like))
            for key in own:
                del unclaimed[f"{name}.{key}"]
        return Visual(picture, ImageCondition(codecs[0], constant), codecs[1], tail)


def claim(unclaimed: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Take a saved tensor, None where there is none. Raises ArgumentError when it is another one."""
    tensor = unclaimed.pop(name, None)
    if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != dtype):
        raise ArgumentError(f"the state's {name} is {tensor.dtype} {tuple(tensor.shape)}", path="state")
    return tensor


def on_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Saved tensors to claim from."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def fit(image: np.ndarray, height: int, width: int, device: torch.device) -> Tensor:
    """Centre crop to a model's shape, resized, uint8 [3, H, W]. Raises ArgumentError (``image_invalid``)."""
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ArgumentError("an image is uint8 [H, W, 3]", code=ErrorCode.IMAGE_INVALID, path="image")
    tall, wide = image.shape[:2]
    if min(tall, wide) < SMALLEST or max(tall, wide) > LARGEST:
        raise ArgumentError(
            f"the image is {wide} x {tall}; a side has {SMALLEST} to {LARGEST} pixels",
            code=ErrorCode.IMAGE_INVALID,
            path="image",
        )
    if tall * width > wide * height:
        cut = round(wide * height / width)
        image = image[(tall - cut) // 2 :][:cut]
    else:
        cut = round(tall * width / height)
        image = image[:, (wide - cut) // 2 :][:, :cut]
    x = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
    x = functional.interpolate(x, (height, width), mode="bilinear", antialias=True, align_corners=False)
    return x[0].round().clamp(0, 255).to(device=device, dtype=torch.uint8)


def condition_of(
    vae: WanVAE | None,
    condition: ImageCondition,
    picture: Tensor | None,
    shape: tuple[int, int, int, int],
    device: torch.device,
) -> tuple[Tensor, ImageCondition]:
    """Mask and condition of the next block, [F, MASK_CHANNELS + C, h, w], and what follows. ``shape``: (F, C, h, w);
    ``picture``: at a session's first block, where it starts from one. Zeros without an autoencoder."""
    F, C, h, w = shape
    if vae is None:
        return torch.zeros(F, MASK_CHANNELS + C, h, w, device=device), condition
    start = None if picture is None else picture.float() / 127.5 - 1
    latents, following = next_condition(vae, condition, F, start, (SPACE_STRIDE * h, SPACE_STRIDE * w))
    mask = torch.zeros(F, MASK_CHANNELS, h, w, device=device)
    if picture is not None:
        mask[0] = 1.0
    return torch.cat((mask, latents.to(device)), dim=1), following


def decoded(decoder: WanVAE | TinyDecoder, visual: Visual, latents: Tensor) -> tuple[Tensor, CodecState]:
    """uint8 [P, 3, H, W] on the decoder's device, of a block's latents [F, C, h, w], and what the decoder remembers then."""
    before = visual.decoder.on(decoder.device)
    if before.is_fresh and visual.tail is not None:
        _, before = decoder.decode(visual.tail.to(decoder.device), before)
    pictures, following = decoder.decode(latents.to(decoder.device), before)
    return ((pictures + 1) * 127.5).round().clamp(0, 255).to(torch.uint8), following


def pictures_of(decoder: WanVAE | TinyDecoder, visual: Visual, latents: Tensor) -> tuple[np.ndarray, CodecState]:
    """:func:`decoded`, on the host."""
    pictures, following = decoded(decoder, visual, latents)
    return pictures.cpu().numpy(), following
