"""LingBot-World's real dimensions with random weights, in process: what a block costs, without a checkpoint.

    realtime-omni bench world --model lingbot-geometry --json [--scale full|small|tiny] [--device cuda] [--dtype bfloat16]
                                                              [--blocks 20] [--compile]

Latents only, through the engine: pages, sink and window, commits. Imports torch, numpy and msgspec, no codec, no server.

Weights are drawn N(0, 1 / fan_in); gates of the timestep at half of that and the camera's scale and shift at a twentieth, so
that activations stay within 0.1 to 10 over all layers, which is checked (zeros run faster and prove nothing). ``valid``: that,
finite latents, and the first block equal to that of the eager network within ``--tolerance`` of its standard deviation.

Definitions: ``block_ms`` from asking for a block to its latents on the CPU, steady state: after the window is full.
``floor_ms``: the arithmetic of all passes of a block at the rates that the same run measures for one large matrix product and
one large attention; ``of_floor`` is floor over p50.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from realtime_omni.bench.conditions import commit, hardware, software, summary
from realtime_omni.config import Config, EngineSection, KVSection, SessionSection
from realtime_omni.errors import ArgumentError
from realtime_omni.kv.attention.sdpa import fast_kernels
from realtime_omni.models.common.wan.text import TOKENS
from realtime_omni.models.common.wan.transformer import WanConfig, WanTransformer
from realtime_omni.models.lingbot.model import LingBot, Settings
from realtime_omni.session.values import ControlInput
from realtime_omni.testing.inline import InlineEngine

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
        replace(_FULL, layers=2, heads=2, head_dim=12, mlp_width=64, text_width=32),
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
        return torch.randn(TOKENS, self._width, generator=generator)


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


def config_for(device: str, dtype: Any, sessions: int, *, keep_gathered: bool) -> Config:
    """Nearly all of the device's free memory is for pages; only what these sessions need is taken."""
    return Config(
        model="lingbot-geometry",
        device=device,
        dtype=dtype,
        kv=KVSection(memory_fraction=0.6, requested_sessions=sessions, keep_gathered=keep_gathered),
        engine=EngineSection(max_batch=1),
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


def rates(config: WanConfig, settings: Settings, dtype: torch.dtype, device: str) -> dict[str, float]:
    """FLOP/s of one MLP matrix and of one layer's attention at these sizes, the best of 10."""
    cells = settings.height // 16 * (settings.width // 16)
    tokens, seen = cells * settings.frames_per_block, cells * (settings.window_frames + settings.sink_frames)
    a = torch.randn(tokens, config.width, device=device, dtype=dtype)
    b = torch.randn(config.width, config.mlp_width, device=device, dtype=dtype)
    q = torch.randn(1, config.heads, tokens, config.head_dim, device=device, dtype=dtype)
    k = torch.randn(1, config.heads, seen, config.head_dim, device=device, dtype=dtype)

    def attend() -> Tensor:
        with fast_kernels(q):
            return nn.functional.scaled_dot_product_attention(q, k, k)

    return {
        "linear": 2.0 * tokens * config.width * config.mlp_width / _best_s(lambda: a @ b, device),
        "attention": 4.0 * tokens * seen * config.width / _best_s(attend, device),
    }


def _best_s(work: Callable[[], object], device: str) -> float:
    taken = []
    for _ in range(13):
        _synchronize(device)
        began_s = time.perf_counter()
        work()
        _synchronize(device)
        taken.append(time.perf_counter() - began_s)
    return min(taken[3:])


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def walk(engine: InlineEngine, name: str, blocks: int) -> tuple[list[np.ndarray], list[float]]:
    """Latents and milliseconds of so many blocks with the key w held."""
    latents, taken = [], []
    for _ in range(blocks):
        began_s = time.perf_counter()
        latents.append(engine.next(name).artifacts["latents"].data)
        taken.append((time.perf_counter() - began_s) * 1000)
    return latents, taken


def opened(model: LingBot, config: Config, name: str) -> InlineEngine:
    engine = InlineEngine(model, config)
    engine.create(name, seed=1)
    engine.accept(name, 0, controls=[ControlInput("camera", "realtime_omni.held_keys.v1", {"keys": ["w"]})])
    return engine


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One run; see the module."""
    scale, dtype = SCALES[args.scale], getattr(torch, args.dtype)
    settings = replace(scale.settings, clean_pass=not args.no_clean_pass)
    network = random_network(scale.network, dtype=dtype, device=args.device)
    model = LingBot(
        network,
        NoText(scale.network.text_width),
        settings,
        name="lingbot-geometry",
        device=args.device,
        fingerprint="0" * 64,
    )
    config = config_for(args.device, args.dtype, 1, keep_gathered=not args.gather_each_pass)
    wrong: list[str] = []
    full = -(-(settings.window_frames + settings.sink_frames) // settings.frames_per_block)
    engine = opened(model, config, "eager")
    with Spreads(network) as spreads:
        (first, *_), _ = walk(engine, "eager", 1)
    low, high = min(spreads.seen), max(spreads.seen)
    if not LOW <= low <= high <= HIGH:
        wrong.append(f"activations spread from {low:.3g} to {high:.3g}")
    eager_ms: list[float] = []
    if args.eager_blocks:
        walk(engine, "eager", full)
        _, eager_ms = walk(engine, "eager", args.eager_blocks)
    engine.close("eager")
    if args.compile:
        network.compile_layers()
    began_s = time.perf_counter()
    engine.create("timed", seed=1)
    engine.accept("timed", 0, controls=[ControlInput("camera", "realtime_omni.held_keys.v1", {"keys": ["w"]})])
    (again, *_), (first_ms, *_) = walk(engine, "timed", 1)
    difference = float(np.abs(again - first).max() / first.std())
    if not difference <= args.tolerance:
        wrong.append(f"the first block differs from the eager one by {difference:.3g} standard deviations")
    walk(engine, "timed", full)
    warm_s = time.perf_counter() - began_s
    latents, taken = walk(engine, "timed", args.blocks)
    if not all(np.isfinite(block).all() for block in latents):
        wrong.append("latents are not finite")
    work, speed = flops(scale.network, settings), rates(scale.network, settings, dtype, args.device)
    passes = len(settings.labels) + settings.clean_pass
    floor_s = passes * (work["linear"] / speed["linear"] + work["attention"] / speed["attention"])
    floor_s += work["camera"] / speed["linear"]
    pictures = 4 * settings.frames_per_block
    return {
        "conditions": {
            "commit": commit(),
            "hardware": hardware() | _device(args.device),
            "software": software(),
            "config": {
                name: getattr(args, name)
                for name in ("scale", "device", "dtype", "compile", "no_clean_pass", "gather_each_pass")
            },
            "workload": f"{settings.height} x {settings.width}, {passes} passes, "
            f"{settings.sink_frames} + {settings.window_frames} frames",
            "warm_up_blocks": full + 1,
            "population": args.blocks,
        },
        "valid": not wrong,
        "wrong": wrong,
        "block_ms": summary(taken, 0.5, 0.99),
        "fps": pictures / statistics.median(taken) * 1000,
        "eager_block_ms": summary(eager_ms, 0.5) if eager_ms else None,
        "first_block_ms": first_ms,
        "warm_up_s": warm_s,
        "difference_to_eager": difference,
        "activations": {"low": low, "high": high},
        "tflop": {name: value / 1e12 for name, value in work.items()},
        "measured_tflop_per_s": {name: value / 1e12 for name, value in speed.items()},
        "floor_ms": floor_s * 1000,
        "of_floor": floor_s * 1000 / statistics.median(taken),
        "kv_bytes": engine.runner.memory().kv_pool,
        "peak_bytes": torch.cuda.max_memory_allocated() if args.device.startswith("cuda") else None,
    }


def _device(device: str) -> dict[str, object]:
    return {"device": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="realtime-omni bench world --model lingbot-geometry", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--scale", choices=sorted(SCALES), default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--eager-blocks", type=int, default=0, help="also measure so many without a compiler")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-clean-pass", action="store_true", help="the last denoise pass writes history")
    parser.add_argument("--gather-each-pass", action="store_true", help="19 GiB less, and slower")
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--json", action="store_true", help="as JSON (it always is)")
    result = measure(parser.parse_args(argv))
    print(json.dumps(result, indent=2))
    return 0 if result["valid"] else 1


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
