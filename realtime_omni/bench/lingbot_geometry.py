"""LingBot-World's real dimensions with random weights: networks, decoders and the arithmetic of a block.

Owns what :mod:`realtime_omni.bench.lingbot` and ``recipes/gpu/lingbot_speed.py`` measure. Imports torch, numpy and msgspec;
Wan's own decoder also needs diffusers.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from realtime_omni.config import Config, EngineSection, KVSection, SessionSection
from realtime_omni.errors import ArgumentError
from realtime_omni.float8 import to_e4m3
from realtime_omni.kv.attention.fp8 import Fp8Kernel
from realtime_omni.kv.attention.sdpa import TorchKernel
from realtime_omni.models.common.fp8 import Fp8Linear
from realtime_omni.models.common.wan.text import TOKENS
from realtime_omni.models.common.wan.tiny_decoder import TinyDecoder
from realtime_omni.models.common.wan.transformer import WanConfig, WanTransformer
from realtime_omni.models.common.wan.vae import WanVAE
from realtime_omni.models.lingbot.model import LingBot, Settings

GATES = 0.5
CAMERA = 0.05
LOW, HIGH = 0.1, 10.0
"""What the standard deviation of activations must stay between."""


@dataclass(frozen=True, slots=True)
class Scale:
    """One geometry."""

    network: WanConfig
    settings: Settings


_FULL = WanConfig(camera_channels=384)
SCALES = {
    "full": Scale(_FULL, Settings()),
    "small": Scale(
        replace(_FULL, layers=30, heads=12, mlp_width=8960),
        Settings(window_frames=9, sink_frames=0),
    ),
    "tiny": Scale(
        replace(_FULL, layers=2, heads=2, head_dim=16, mlp_width=64, text_width=32),
        Settings(height=32, width=48),
    ),
}
"""The 14B model at 480 x 832, one of 1.3B, and the same code in milliseconds."""


class NoText:
    """Random features for any prompt."""

    def __init__(self, width: int) -> None:
        self._width = width

    def check(self, prompt: str) -> None:
        if len(prompt) > TOKENS:
            raise ArgumentError("the prompt is too long", path="prompt")

    def encode(self, prompt: str) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(prompt.encode()))
        return torch.randn(TOKENS, self._width, generator=generator, device="cpu")


def random_network(config: WanConfig, *, dtype: torch.dtype, device: str) -> WanTransformer:
    """See the module; parameter by parameter, so that nothing is held twice."""
    with torch.device("meta"):
        network = WanTransformer(config)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in list(network.named_parameters()):
        owner: Any = network.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        if "norm" in name:
            drawn = (
                torch.ones(parameter.shape, device=device)
                if leaf == "weight"
                else torch.zeros(parameter.shape, device=device)
            )
        else:
            spread = 1.0 / parameter.shape[-1] ** 0.5
            spread *= GATES if name.startswith("time_projection") else 1.0
            spread *= CAMERA if ".camera.scale" in name or ".camera.shift" in name else 1.0
            drawn = torch.randn(parameter.shape, generator=generator, device=device, dtype=dtype) * spread
        setattr(owner, leaf, nn.Parameter(drawn.to(dtype), requires_grad=False))
    return network


def random_vae(dtype: torch.dtype, device: str, *, width: int = 96) -> WanVAE:
    """Wan's autoencoder as diffusers builds it, its weights as torch draws them. Raises ImportError."""
    import diffusers

    torch.manual_seed(0)
    with torch.device(device):
        modules: Any = diffusers.AutoencoderKLWan(base_dim=width)  # type: ignore[no-untyped-call]
    return WanVAE(modules.to(dtype))


def random_tiny_decoder(dtype: torch.dtype, device: str) -> TinyDecoder:
    torch.manual_seed(0)
    decoder = TinyDecoder().to(device=device, dtype=dtype)
    decoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return decoder.eval().requires_grad_(False)


def random_model(
    network: WanTransformer,
    settings: Settings,
    *,
    device: str,
    pixels: str = "none",
    dtype: torch.dtype,
    graphs: bool = False,
) -> LingBot:
    """``pixels``: ``none``, ``wan`` (narrower beside a narrow network) or ``tiny``."""
    width = 96 if network.config.heads > 2 else 8
    return LingBot(
        network,
        NoText(network.config.text_width),
        settings,
        name="lingbot-geometry",
        vae=random_vae(dtype, device, width=width) if pixels == "wan" else None,
        tiny=random_tiny_decoder(dtype, device) if pixels == "tiny" else None,
        graphs=graphs,
        device=device,
        fingerprint="0" * 64,
    )


def config_for(device: str, dtype: Any, sessions: int, *, keep_gathered: bool, max_batch: int = 1) -> Config:
    """Nearly all of the device's free memory is for pages; only what these sessions need is taken."""
    return Config(
        model="lingbot-geometry",
        device=device,
        dtype=dtype,
        kv=KVSection(memory_fraction=0.9, requested_sessions=sessions, keep_gathered=keep_gathered),
        engine=EngineSection(max_batch=max_batch),
        session=SessionSection(max_sessions=sessions),
    )


class Spreads:
    """Standard deviations of what every layer yields, while it is on."""

    def __init__(self, network: WanTransformer) -> None:
        self.seen: list[float] = []
        self._layers: list[Any] = list(network.layers)

    def __enter__(self) -> Spreads:
        for layer in self._layers:
            plain = layer.after

            def watched(*parts: Any, plain: Callable[..., Tensor] = plain) -> Tensor:
                out = plain(*parts)
                self.seen.append(float(out.float().std()))
                return out

            layer.after = watched
        return self

    def __exit__(self, *error: object) -> None:
        for layer in self._layers:
            del layer.after


def flops(config: WanConfig, settings: Settings) -> dict[str, float]:
    """Of one pass with a full window: linear maps, attention; ``camera``: once a block."""
    cells = settings.height // 16 * (settings.width // 16)
    tokens = cells * settings.frames_per_block
    seen = cells * (settings.window_frames + settings.sink_frames)
    width = config.width
    per_token = 4 * width**2 + 2 * width**2 + 2 * width * config.mlp_width  # q k v o, cross q o, MLP
    attention = 4.0 * tokens * (seen + TOKENS) * width * config.layers
    camera = 2.0 * tokens * 4 * width**2 * config.layers if config.camera_channels else 0.0
    return {"linear": 2.0 * tokens * per_token * config.layers, "attention": attention, "camera": camera}


def rates(
    config: WanConfig, settings: Settings, dtype: torch.dtype, device: str, *, fp8: str = "off"
) -> dict[str, float]:
    """FLOP/s of one MLP matrix and of one layer's attention at these sizes, the best of 10, in eight bits where ``fp8``
    (``off``, ``linear``, ``linear_attention``) says so; activations are quantised within."""
    cells = settings.height // 16 * (settings.width // 16)
    tokens, seen = cells * settings.frames_per_block, cells * (settings.window_frames + settings.sink_frames)
    a = torch.randn(tokens, config.width, device=device, dtype=dtype)
    b = torch.randn(config.mlp_width, config.width, device=device, dtype=dtype)
    eight = None if fp8 == "off" else Fp8Linear(b, None)
    q = torch.randn(1, config.heads, tokens, config.head_dim, device=device, dtype=dtype)
    kernel = Fp8Kernel(device) if fp8 == "linear_attention" else TorchKernel()
    k = torch.randn(1, seen, config.heads, config.head_dim, device=device, dtype=dtype).transpose(1, 2)
    k = k if kernel.dtype is None else to_e4m3(k)
    return {
        "linear": 2.0
        * tokens
        * config.width
        * config.mlp_width
        / best_s(lambda: a @ b.t() if eight is None else eight(a), device),
        "attention": 4.0 * tokens * seen * config.width / best_s(lambda: kernel(q, k, k, None), device),
    }


def floor_s(work: dict[str, float], speed: dict[str, float], passes: int) -> float:
    """What the arithmetic of a block takes at these rates; a clean pass counts as a whole one, though its last
    layer ends at its keys and values."""
    per_pass = work["linear"] / speed["linear"] + work["attention"] / speed["attention"]
    return passes * per_pass + work["camera"] / speed["linear"]


def best_s(work: Callable[[], object], device: str) -> float:
    """Seconds, the least of ten."""
    taken = []
    for _ in range(13):
        synchronize(device)
        began_s = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - began_s)
    return min(taken[3:])


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
