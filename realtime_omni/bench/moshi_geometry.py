"""Moshi's real dimensions with random weights: what a tick of many calls costs, without a checkpoint.

    python -m realtime_omni.bench.moshi_geometry [--calls 64] [--depth 8|16] [--ticks 400] [--scale full|tiny]
                                                 [--device cuda] [--dtype bfloat16]

Imports torch, numpy, safetensors and msgspec, no server. Every window is full: keys and values of 3,000 steps are drawn, calls
stand at different steps. In a tick: sound to the device, Mimi's encoder, the transformer over time, the depth transformer,
drawing with the sampler's own chance (counter-based, per call, on the CPU), Mimi's decoder, sound and words back. On CUDA
each of the four stages is a graph.

``valid``: sound and hidden states are finite, the graphs give the tokens of the same networks without them, and what calls say
differs. Definitions: ``tick_ms`` from the first byte to the device to the last one back, on the clock of the process;
``stages_ms`` the median of each stage by itself, synchronised; ``stream_gb`` the weights, keys and values that a tick must
read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from realtime_omni.bench.arguments import count, device
from realtime_omni.bench.conditions import commit, hardware, software, summary
from realtime_omni.bench.moshi_static import Calls
from realtime_omni.models.moshi.config import MOSHI_7B, LMConfig, MimiConfig
from realtime_omni.models.moshi.mimi import Mimi
from realtime_omni.models.moshi.network import MoshiLM
from realtime_omni.models.moshi.sampling import AUDIO, TEXT, races
from realtime_omni.models.moshi.weights import replace_parameters

DEADLINE_MS = 80.0
WARM_TICKS = 10
STAGE_RUNS = 20
WEIGHT_SCALE = 1.0
_TINY = LMConfig(
    dim=32,
    num_heads=4,
    num_layers=2,
    context=12,
    n_q=8,
    dep_q=4,
    card=32,
    text_card=48,
    delays=(0, 0, 1, 1, 1, 0, 1, 1, 1),
    depformer_dim=16,
    depformer_num_heads=2,
    depformer_num_layers=2,
    depformer_dim_feedforward=66,
)
SCALES: dict[str, tuple[LMConfig, MimiConfig]] = {
    "full": (MOSHI_7B, MimiConfig()),
    "tiny": (
        _TINY,
        MimiConfig(dimension=16, filters=2, heads=2, layers=2, hidden=32, context=10, bins=32, codebook_dim=8),
    ),
}


def draw_weights(network: nn.Module, dtype: torch.dtype, device: str, seed: int) -> None:
    """N(0, 1 / fan_in) for matrices and kernels, 1 for norms, 0.01 for layer scales, 0 for biases; N(0, 1) for tables."""
    generator = torch.Generator(device).manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
        if "bias" in name:
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(1.0)
        elif "scale" in name:
            tensor.fill_(0.01)
        elif "_emb" in name or "tables" in name:
            tensor.normal_(generator=generator)
        else:
            fan_in = parameter[0].numel() if name.endswith(".weight") else parameter.shape[-1]
            tensor.normal_(generator=generator).mul_(WEIGHT_SCALE / fan_in**0.5)
        made[name] = tensor
    replace_parameters(network, made)


def build(args: argparse.Namespace) -> Calls:
    """Calls in the middle of a long conversation."""
    config, codec = SCALES[args.scale]
    config = msgspec.structs.replace(config, dep_q=args.depth)
    with torch.device("meta"):
        lm, mimi = MoshiLM(config), Mimi(codec, config.own_streams)
    draw_weights(lm, getattr(torch, args.dtype), args.device, 1)
    draw_weights(mimi, torch.float32, args.device, 2)
    calls = Calls(lm, mimi, args.calls, args.depth, TEXT, AUDIO, masked=False)
    generator = torch.Generator(args.device).manual_seed(3)
    for tensor in (*calls.keys, *calls.values):
        tensor.normal_(generator=generator)
    calls.steps.copy_(config.context + 7 * torch.arange(args.calls, device=args.device))
    calls.rings.random_(0, config.card, generator=generator)
    for side in calls.sides.values():
        side.past.normal_(generator=generator)
        side.frames.copy_(calls.steps)
    return calls


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cuda = args.device.startswith("cuda")
    calls = build(args)
    pause: Callable[[], None] = torch.cuda.synchronize if cuda else _nothing
    microphone = 0.1 * torch.randn(args.calls, calls.sound.shape[1], generator=torch.Generator().manual_seed(4))
    wrong: list[str] = []
    if cuda:
        calls.running.fill_(False)
        calls.sound.copy_(microphone)
        calls.tick()
        eager = calls.newest.clone()
        calls.capture()
        calls.running.fill_(False)
        calls.tick()
        if not torch.equal(eager, calls.newest):
            wrong.append("the graphs give other tokens than the networks without them")
        calls.running.fill_(True)
    said: list[Tensor] = []
    times_ms: list[float] = []
    for number in range(WARM_TICKS + args.ticks):
        pause()
        began_s = time.perf_counter()
        said.append(tick(calls, microphone, number))
        if number >= WARM_TICKS:
            times_ms.append((time.perf_counter() - began_s) * 1000)
    stages_ms = {name: _median_ms(stage, pause) for name, stage in calls.stages.items()}
    if not bool(calls.out.isfinite().all()) or not bool(calls.hidden.isfinite().all()):
        wrong.append("sound or hidden states are not finite")
    if len(set(torch.stack(said)[:, :, 1].flatten().tolist())) < 4:
        wrong.append("the calls say the same all the time")
    return {
        "conditions": {
            "commit": commit(),
            "hardware": {**hardware(), "device": torch.cuda.get_device_name() if cuda else "cpu"},
            "software": software(),
            "workload": {
                "scale": args.scale,
                "dtype": args.dtype,
                "depth": args.depth,
                "window": calls.lm.config.context,
                "ticks": args.ticks,
                "graphs": cuda,
            },
        },
        "valid": not wrong,
        "wrong": wrong,
        "calls": args.calls,
        "tick_ms": {**summary(times_ms, 0.5, 0.99), "max": round(max(times_ms), 3)},
        "late": sum(ms > DEADLINE_MS for ms in times_ms),
        "stages_ms": stages_ms,
        "stream_gb": round(stream_bytes(calls, args.depth) / 1e9, 2),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else None,
    }


def tick(calls: Calls, microphone: Tensor, number: int) -> Tensor:
    """One tick with everything that belongs to it; the newest frame's tokens on the CPU."""
    draws, width = calls.races.shape[1:]
    chance = torch.stack([races(row, number, draws, width) for row in range(len(microphone))])
    calls.sound.copy_(microphone.roll(number, dims=1))
    calls.races.copy_(chance)
    calls.tick()
    calls.out.cpu()
    return calls.newest.to("cpu", copy=True)


def stream_bytes(calls: Calls, depth: int) -> int:
    """Read at least once in a tick: both transformers' matrices, tables aside, and every key and value."""
    temporal = sum(p.nbytes for n, p in calls.lm.temporal.named_parameters() if "_emb" not in n)
    steps = sum(p.nbytes for n, p in calls.lm.depth.named_parameters() if "_emb" not in n)
    return temporal + steps * depth // calls.lm.config.dep_q + calls.keys.nbytes + calls.values.nbytes


def _median_ms(stage: Callable[[], None], pause: Callable[[], None]) -> float:
    """Of a stage that is repeated: the calls go on meanwhile, which costs the same."""
    times: list[float] = []
    for _ in range(STAGE_RUNS):
        pause()
        began_s = time.perf_counter()
        stage()
        pause()
        times.append((time.perf_counter() - began_s) * 1000)
    return round(statistics.median(times), 3)


def _nothing() -> None:
    """The CPU is synchronous."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="realtime-omni bench duplex --model moshi-geometry", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--scale", choices=sorted(SCALES), default="full")
    parser.add_argument("--calls", type=count(), default=64)
    parser.add_argument("--depth", type=count(), default=8, help="codebooks to compute; 16: both speakers'")
    parser.add_argument("--ticks", type=count(), default=400)
    parser.add_argument("--device", type=device, default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", action="store_true", help="as JSON (it always is)")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    result = measure(parse(argv))
    print(json.dumps(result, indent=2))
    return 0 if result["valid"] else 1


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
