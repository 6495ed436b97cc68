"""A DreamZero of a few thousand parameters, with random weights that do not vanish, and a codec that costs nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models.lingbot.tiny import HashedText, tiny_vae
from realtime_omni.models.common.wan.transformer import WanConfig
from realtime_omni.models.common.wan.vae import TIME_STRIDE, CodecState, SlotShape, SlotShapes, WanVAE
from realtime_omni.models.dreamzero.model import DreamZero, Settings
from realtime_omni.models.dreamzero.network import DreamZeroConfig, DreamZeroTransformer
from realtime_omni.models.dreamzero.robot import Quantiles, Robot
from realtime_omni.models.dreamzero.scene import Words
from realtime_omni.session.observation import Observation

CHANNELS = 4
CONFIG = DreamZeroConfig(
    trunk=WanConfig(
        layers=2,
        heads=2,
        head_dim=12,
        mlp_width=32,
        in_channels=3 * CHANNELS,
        out_channels=CHANNELS,
        text_width=16,
        frequencies=32,
    ),
    image_width=8,
    state_width=10,
    action_width=6,
    hidden=16,
    categories=2,
)
CAMERAS = ("wrist", "left", "right")
ROBOT = Robot(
    cameras=CAMERAS,
    layout="droid",
    state=Quantiles(np.array([-1, -2, 0, 5], np.float32), np.array([1, 2, 4, 5], np.float32)),
    actions=Quantiles(np.array([-0.5, -0.5, -0.5, 0], np.float32), np.array([0.5, 0.25, 0.5, 1], np.float32)),
    relative=(0, 1, 2, None),
)


class PatchVAE(WanVAE):
    """A causal codec of averages: a latent is a mean of four pictures (the first: of one) and a memory of the latent before."""

    def __init__(self) -> None:
        self._dtype = torch.float32

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def channels(self) -> int:
        return CHANNELS

    def slot_shapes(self, height: int, width: int) -> tuple[SlotShapes, SlotShapes]:
        slot = SlotShape((1, CHANNELS, 1, height // 8, width // 8), torch.float32)
        return (slot,), (slot,)

    def encode(self, pictures: Tensor, state: CodecState) -> tuple[Tensor, CodecState]:
        lone = 1 if state.is_fresh else 0
        assert (len(pictures) - lone) % TIME_STRIDE == 0
        small = functional.avg_pool2d(pictures.float(), 8)
        groups = [*small[:lone, None], *small[lone:].unflatten(0, (-1, TIME_STRIDE))]
        before = torch.zeros_like(small[:1, :1]) if state.is_fresh else state.slots[0][:, :1, 0]
        latents = []
        for group in groups:
            latents.append(torch.cat((group.mean(0, keepdim=True), 0.5 * before), dim=1))
            before = latents[-1][:, :1]
        return torch.cat(latents), CodecState((latents[-1][:, :, None].clone(),))

    def decode(self, latents: Tensor, state: CodecState) -> tuple[Tensor, CodecState]:
        pictures, before = [], None if state.is_fresh else state.slots[0][0, :, 0]
        for latent in latents.float():
            mixed = latent if before is None else 0.75 * latent + 0.25 * before
            frame = functional.interpolate(mixed[None, :3], scale_factor=8)
            pictures.append(frame.expand(1 if before is None else TIME_STRIDE, -1, -1, -1))
            before = latent
        return torch.cat(pictures).clamp(-1, 1), CodecState((before[None, :, None].clone(),))


class MeanColours:
    """Features that depend on a picture and mean nothing."""

    tokens = 3

    def encode(self, picture: Tensor) -> Tensor:
        return functional.adaptive_avg_pool2d(picture.float() / 255, (1, CONFIG.image_width))[:, 0]


def tiny_network(dtype: torch.dtype = torch.float32, config: DreamZeroConfig = CONFIG) -> DreamZeroTransformer:
    generator = torch.Generator().manual_seed(11)
    network = DreamZeroTransformer(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return network.to(dtype)


def tiny_dreamzero(*, wan: bool = False, dtype: torch.dtype = torch.float32, **settings: Any) -> DreamZero:
    """``wan``: with the real autoencoder's classes, slow."""
    chosen: dict[str, Any] = {
        "height": 32,
        "width": 64,
        "actions": 5,
        "steps": 3,
        "words": Words("a robot {prompt}", lower=True, negative="blurry"),
    }
    return DreamZero(
        tiny_network(dtype),
        HashedText(CONFIG.trunk.text_width),
        tiny_vae() if wan else PatchVAE(),
        MeanColours(),
        ROBOT,
        Settings(**(chosen | settings)),
        name="tiny-dreamzero",
        fingerprint="0" * 64,
    )


def seen(number: int, *, pictures: int | None = None, prompt: str = "push", **more: Any) -> Observation:
    """What the robot sees at a step: pictures of its own, of all cameras."""
    random = np.random.default_rng(number)
    shape = (20, 40, 3) if pictures is None else (pictures, 20, 40, 3)
    images = {name: random.integers(0, 256, shape, np.uint8) for name in CAMERAS}
    return Observation(images, random.uniform(-1, 1, 4).astype(np.float32), prompt, **more)
