"""Matrix-Game 2 on a CUDA machine with random weights: is it right there, and how long does a block take? JSON lines.

    PYTHONPATH=.:protocols:clients/python python recipes/gpu/matrix_game_speed.py [--limit-s 90] [--parts latents]
    ... matrix_game_speed.py --device cpu --scale tiny --dtype float32                                  (its rehearsal)

``tiny``: a small network on the CPU and on the GPU, six blocks over the end of the window in float32. ``latents`` and
``pictures``: the published dimensions in bfloat16, 352 x 640, weights N(0, 1 / fan_in), keys held; pictures by Wan's decoder,
where diffusers is installed. Milliseconds from one block to the next, warm, 24 of them. ``--limit-s``: no part begins later.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realtime_omni.bench.lingbot import walk
from realtime_omni.bench.lingbot_geometry import config_for, random_vae
from realtime_omni.models.matrix_game.model import MatrixGame, Settings
from realtime_omni.models.matrix_game.network import MatrixGameConfig, MatrixGameTransformer
from realtime_omni.session.values import ControlInput
from realtime_omni.testing.inline import InlineEngine

TINY = MatrixGameConfig(
    layers=2,
    heads=2,
    head_dim=12,
    mlp_width=32,
    frequencies=32,
    context_width=20,
    action_layers=1,
    action_heads=2,
    action_head_dim=16,
    key_width=8,
)


PARTS = ("tiny", "latents", "pictures")


class Features:
    """Of any picture the same."""

    def __init__(self, width: int, tokens: int) -> None:
        self.tokens, self._width = tokens, width

    def encode(self, picture: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.tokens, self._width, generator=generator, device="cpu").to(picture.device)


def engine_of(
    config: MatrixGameConfig, device: str, dtype: torch.dtype, *, pictures: bool, **settings: Any
) -> InlineEngine:
    drawn_on = "cpu" if config is TINY else device
    with torch.device("meta"):
        network = MatrixGameTransformer(config).to(dtype)
    network.to_empty(device=device)
    generator = torch.Generator(drawn_on).manual_seed(7)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "norm" in name:
                parameter.fill_(name.endswith("weight"))
            else:
                drawn = torch.randn(parameter.shape, generator=generator, device=drawn_on)
                parameter.copy_(drawn / parameter.shape[-1] ** 0.5)
    model = MatrixGame(
        network,
        Features(config.context_width, 5 if config is TINY else 257),
        Settings(**settings),
        vae=random_vae(dtype, device, width=8 if config is TINY else 96) if pictures else None,
        device=device,
        fingerprint="0" * 64,
    )
    engine = InlineEngine(model, config_for(device, str(dtype).removeprefix("torch."), 1, keep_gathered=True))
    engine.create("a", seed=1)
    engine.accept("a", 0, controls=[ControlInput("camera", "realtime_omni.held_keys.v1", {"keys": ["w", "l"]})])
    return engine


def tiny(device: str) -> dict[str, Any]:
    walks = [
        np.stack(walk(engine_of(TINY, at, torch.float32, pictures=False, height=32, width=48), "a", 6).latents)
        for at in ("cpu", device)
    ]
    worst = float(np.abs(walks[0] - walks[1]).max())
    if not worst < 1e-3:
        raise AssertionError(f"latents differ by {worst}")
    return {"largest_difference_to_the_cpu": worst, "spread": float(walks[0].std())}


def timed(args: argparse.Namespace, *, pictures: bool) -> dict[str, Any]:
    full = args.scale == "full"
    size = {} if full else {"height": 32, "width": 48}
    engine = engine_of(
        MatrixGameConfig() if full else TINY, args.device, getattr(torch, args.dtype), pictures=pictures, **size
    )
    outputs = ("latents", "frames") if pictures else ("latents",)
    walk(engine, "a", 12, outputs)
    found = walk(engine, "a", 24 if full else 3, outputs)
    return {
        "block_ms": round(found.p50_ms, 1),
        "fps": round(12000 / statistics.median(found.taken_ms), 1),
        "finite": all(bool(np.isfinite(block).all()) for block in found.latents),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if args.device.startswith("cuda") else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--limit-s", type=float, default=90.0)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    began_s = time.monotonic()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "tiny": lambda: tiny(args.device),
        "latents": lambda: timed(args, pictures=False),
        "pictures": lambda: timed(args, pictures=True),
    }
    failed = False
    for name in args.parts:
        if time.monotonic() - began_s > args.limit_s:
            print(json.dumps({"part": name, "skipped": "no time is left"}), flush=True)
            continue
        part_s, work = time.monotonic(), parts[name]
        try:
            found = work()
        except Exception as error:
            failed, found = True, {"failed": f"{type(error).__name__}: {error}"[:800]}
        print(json.dumps({"part": name, **found, "seconds": round(time.monotonic() - part_s, 1)}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
