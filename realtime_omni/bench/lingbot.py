"""LingBot-World's real dimensions with random weights, in process: what a block costs, without a checkpoint.

    realtime-omni bench world --model lingbot-geometry --json [--scale full|small|tiny] [--device cuda] [--dtype bfloat16]
        [--blocks 20] [--compile] [--graphs] [--fp8 off|linear|linear_attention] [--pixels none|wan|tiny] [--sessions 1]
        [--max-batch 1]

Through the engine: pages, sink and window, commits; no server, no encoder. Imports torch, numpy and msgspec; diffusers for
Wan's own decoder. ``recipes/gpu/lingbot_speed.py`` runs everything that the recipe's page tells, in one process.

Weights are drawn N(0, 1 / fan_in); gates of the timestep at half of that and the camera's scale and shift at a twentieth, so
that activations stay within 0.1 to 10 over all layers, which is checked (zeros run faster and prove nothing). ``valid``: that,
finite latents, and the first block equal to that of the eager network in full precision within ``--tolerance`` of its
standard deviation (with ``--fp8``: within ``--fp8-tolerance`` of it in the mean square; ``error`` is that number).

Definitions: ``block_ms`` from a session's block to its next one, steady state: see :func:`warm_up`. Latents are on the
CPU then, and so are the pictures of the block before: decoding a block runs beside the next one. ``latency_ms``: from asking
for a block to its last picture (latents only: the same as ``block_ms``) while nothing else runs. ``floor_ms``: the arithmetic
of all passes of a block at the rates that the same run measures for one large matrix product and one large attention, without
decoding; ``of_floor`` is floor over p50. With several sessions all of them ask for the next block as soon as they have one;
``solo_ms`` is the p50 of one of them before the others came.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from realtime_omni.bench.arguments import count, device, number
from realtime_omni.bench.conditions import commit, hardware, software, summary
from realtime_omni.bench.lingbot_geometry import (
    HIGH,
    LOW,
    SCALES,
    Spreads,
    config_for,
    floor_s,
    flops,
    random_model,
    random_network,
    rates,
)
from realtime_omni.engine.commands import Cancel
from realtime_omni.kv.attention import open_backend
from realtime_omni.models.common.fp8 import quantise
from realtime_omni.models.common.wan.transformer import WanTransformer
from realtime_omni.models.lingbot.model import Settings
from realtime_omni.session.values import Chunk, ControlInput, SessionId
from realtime_omni.testing.inline import MOST_CYCLES, InlineEngine

FP8 = ("off", "linear", "linear_attention")
LONGEST_OPENING = 40
"""Blocks."""


@dataclass(slots=True)
class Walk:
    """Blocks of a session, in order: milliseconds from one to the next, and latents where they were asked for."""

    taken_ms: list[float] = field(default_factory=list)
    latents: list[np.ndarray] = field(default_factory=list)

    @property
    def p50_ms(self) -> float:
        return statistics.median(self.taken_ms)

    def add(self, chunk: Chunk, taken_s: float) -> None:
        self.taken_ms.append(taken_s * 1000)
        if "latents" in chunk.artifacts:
            self.latents.append(chunk.artifacts["latents"].data)


def settled(engine: InlineEngine, name: str, outputs: Sequence[str]) -> Chunk:
    """The next chunk; its pictures may still be on their way."""
    ticket = engine.post_next(name, outputs=outputs)
    for _ in range(MOST_CYCLES):
        if engine.answered(ticket):
            chunk: Chunk = engine.result(ticket)
            return chunk
        engine.cycle()
    raise AssertionError("a chunk was never answered")


def walk(engine: InlineEngine, name: str, blocks: int, outputs: Sequence[str] = ("latents",)) -> Walk:
    """So many blocks, each asked for when the one before is settled and the pictures of the one before that are there."""
    found = Walk()
    before: Chunk | None = None
    last_s = time.perf_counter()
    for _ in range(blocks):
        chunk = settled(engine, name, outputs)
        if before is not None:
            before.fill()
        now_s = time.perf_counter()
        found.add(chunk, now_s - last_s)
        before, last_s = chunk, now_s
    if before is not None:
        before.fill()
    return found


def latency_ms(engine: InlineEngine, name: str, outputs: Sequence[str]) -> float:
    """From asking for a block to all of it."""
    began_s = time.perf_counter()
    engine.next(name, outputs=outputs)
    return (time.perf_counter() - began_s) * 1000


def walk_together(engine: InlineEngine, names: Sequence[str], blocks: int, outputs: Sequence[str]) -> dict[str, Walk]:
    """Every session asks again as soon as it has its block; those after the first, which meets an idle engine."""
    walks = {name: Walk() for name in names}
    before: dict[str, Chunk] = {}
    asked = {name: (engine.post_next(name, outputs=outputs), time.perf_counter()) for name in names}
    while min(len(w.taken_ms) for w in walks.values()) <= blocks:
        engine.cycle()
        for name, (ticket, at_s) in tuple(asked.items()):
            if not engine.answered(ticket):
                continue
            chunk: Chunk = engine.result(ticket)
            if name in before:
                before[name].fill()
            now_s = time.perf_counter()
            walks[name].add(chunk, now_s - at_s)
            before[name], asked[name] = chunk, (engine.post_next(name, outputs=outputs), now_s)
    for name, (ticket, _) in asked.items():
        engine.send(Cancel(ticket=0, session_id=SessionId(name), target=ticket))
    engine.rest()
    for each in walks.values():
        each.taken_ms = each.taken_ms[1:]
    return walks


def start(engine: InlineEngine, name: str) -> None:
    """A session with the key w held."""
    engine.create(name, seed=1)
    hold_w(engine, name, event_id=0)


def hold_w(engine: InlineEngine, name: str, *, event_id: int) -> None:
    engine.accept(name, event_id, controls=[ControlInput("camera", "realtime_omni.held_keys.v1", {"keys": ["w"]})])


def first_block(engine: InlineEngine, name: str) -> np.ndarray:
    """Latents of a fresh session, which is closed again."""
    start(engine, name)
    latents = walk(engine, name, 1).latents[0]
    engine.close(name)
    return latents


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """In the mean square, of the wanted one's."""
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def warm_up_blocks(settings: Settings) -> int:
    """Until the window is full."""
    return -(-(settings.window_frames + settings.sink_frames) // settings.frames_per_block)


def warm_up(engine: InlineEngine, name: str, settings: Settings, outputs: Sequence[str] = ("latents",)) -> int:
    """Walk a session until a block costs what every later one does: its window is full, and what it started from is no longer
    encoded (Wan's autoencoder: after eleven blocks). Returns how many blocks that took."""
    blocks = warm_up_blocks(settings)
    walk(engine, name, blocks, outputs)
    while engine.runner.model.spec.takes_image and engine.state_of(name).visual.condition.constant is None:
        if blocks == LONGEST_OPENING:
            raise RuntimeError("the image condition never becomes constant")
        walk(engine, name, 1, outputs)
        blocks += 1
    return blocks


def speed_up(engine: InlineEngine, network: WanTransformer, *, compiled: bool, fp8: str, keep_gathered: bool) -> None:
    """What a run is to be measured with; the network is that of ``engine``, and in eight bits there is no way back."""
    if fp8 != "off":
        quantise(network, network.heavy_matrices())
    if fp8 == "linear_attention":
        device = engine.config.device
        engine.runner.backend = open_backend(device=device, keep_gathered=keep_gathered, fp8=True)
    if compiled:
        network.compile_layers(fp8_attention=fp8 == "linear_attention")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One run; see the module."""
    scale, dtype = SCALES[args.scale], getattr(torch, args.dtype)
    settings = replace(scale.settings, clean_pass=not args.no_clean_pass)
    network = random_network(scale.network, dtype=dtype, device=args.device)
    model = random_model(network, settings, device=args.device, pixels=args.pixels, dtype=dtype, graphs=args.graphs)
    keep_gathered = not args.gather_each_pass
    config = config_for(args.device, args.dtype, args.sessions, keep_gathered=keep_gathered, max_batch=args.max_batch)
    wrong: list[str] = []
    outputs = ("latents",) if args.pixels == "none" else ("latents", "frames")
    engine = InlineEngine(model, config)
    with Spreads(network) as spreads:
        first = first_block(engine, "eager")
    low, high = min(spreads.seen), max(spreads.seen)
    if not LOW <= low <= high <= HIGH:
        wrong.append(f"activations spread from {low:.3g} to {high:.3g}")
    eager: Walk | None = None
    if args.eager_blocks:
        start(engine, "slow")
        warm_up(engine, "slow", settings, outputs)
        walk(engine, "slow", 1, outputs)
        eager = walk(engine, "slow", args.eager_blocks, outputs)
        engine.close("slow")
    speed_up(engine, network, compiled=args.compile, fp8=args.fp8, keep_gathered=keep_gathered)
    began_s = time.perf_counter()
    again = first_block(engine, "compiling")
    compile_s = time.perf_counter() - began_s
    names = [f"timed-{number}" for number in range(args.sessions)]
    start(engine, names[0])
    first_ms = latency_ms(engine, names[0], outputs)
    error, difference = relative_error(again, first), float(np.abs(again - first).max() / first.std())
    if args.fp8 == "off" and not difference <= args.tolerance:
        wrong.append(f"the first block differs from the eager one by {difference:.3g} standard deviations")
    if args.fp8 != "off" and not error <= args.fp8_tolerance:
        wrong.append(f"the first block is off by {error:.3g} in the mean square")
    full = warm_up(engine, names[0], settings, outputs)
    timed = [walk(engine, names[0], args.blocks, outputs)]
    solo_ms, whole_ms = timed[0].p50_ms, latency_ms(engine, names[0], outputs)
    if args.sessions > 1:
        for name in names[1:]:
            start(engine, name)
            walk(engine, name, full + 1, outputs)  # as many as the first
        timed = list(walk_together(engine, names, args.blocks, outputs).values())
    if not all(np.isfinite(block).all() for each in timed for block in each.latents):
        wrong.append("latents are not finite")
    work = flops(scale.network, settings)
    speed = rates(scale.network, settings, dtype, args.device, fp8=args.fp8)
    passes = len(settings.labels) + settings.clean_pass
    floor_ms = floor_s(work, speed, passes) * 1000
    taken = [ms for each in timed for ms in each.taken_ms]
    pictures = 4 * settings.frames_per_block
    return {
        "conditions": {
            "commit": commit(),
            "hardware": hardware() | device_name(args.device),
            "software": software(),
            "config": {name: value for name, value in vars(args).items() if name != "json"},
            "workload": f"{settings.height} x {settings.width}, {passes} passes, "
            f"{settings.sink_frames} + {settings.window_frames} frames",
            "warm_up_blocks": full + 1,
            "population": len(taken),
        },
        "valid": not wrong,
        "wrong": wrong,
        "block_ms": summary(taken, 0.5, 0.99),
        "latency_ms": whole_ms,
        "solo_ms": solo_ms,
        "fps": pictures * args.sessions / statistics.median(taken) * 1000,
        "eager_block_ms": summary(eager.taken_ms, 0.5) if eager else None,
        "first_block_ms": first_ms,
        "compile_s": compile_s,
        "difference_to_eager": difference,
        "error": error,
        "activations": {"low": low, "high": high},
        "tflop": {name: value / 1e12 for name, value in work.items()},
        "measured_tflop_per_s": {name: value / 1e12 for name, value in speed.items()},
        "floor_ms": floor_ms,
        "of_floor": floor_ms * args.sessions / statistics.median(taken),
        "kv_bytes": engine.runner.memory().kv_pool,
        "peak_bytes": torch.cuda.max_memory_allocated() if args.device.startswith("cuda") else None,
    }


def device_name(device: str) -> dict[str, object]:
    return {"device": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="realtime-omni bench world --model lingbot-geometry", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--scale", choices=sorted(SCALES), default="full")
    parser.add_argument("--device", type=device, default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--blocks", type=count(), default=20)
    parser.add_argument("--eager-blocks", type=count(0), default=0, help="also measure so many without a compiler")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--graphs", action="store_true", help="replay passes over full windows as CUDA graphs")
    parser.add_argument("--fp8", choices=FP8, default="off", help="matrices, or matrices and attention, in eight bits")
    parser.add_argument("--pixels", choices=("none", "wan", "tiny"), default="none")
    parser.add_argument("--sessions", type=count(), default=1)
    parser.add_argument("--max-batch", type=count(), default=1, help="sessions of one pass")
    parser.add_argument("--no-clean-pass", action="store_true", help="the last denoise pass writes history")
    parser.add_argument("--gather-each-pass", action="store_true", help="19 GiB less, and slower")
    parser.add_argument("--tolerance", type=number(), default=0.1)
    parser.add_argument("--fp8-tolerance", type=number(), default=0.2)
    parser.add_argument("--json", action="store_true", help="as JSON (it always is)")
    result = measure(parser.parse_args(argv))
    print(json.dumps(result, indent=2))
    return 0 if result["valid"] else 1


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
