"""LingBot-World's real dimensions with random weights on several devices of one host: what a block costs, and its exchanges.

    realtime-omni bench world --model lingbot-geometry --parallel sp=2[,tp=2] --json [--scale full|tiny] [--device cuda]
        [--dtype bfloat16] [--compile] [--blocks 20] [--sessions 2] [--fp8 linear] [--pixels wan|tiny]
        [--against first.npy] [--keep first.npy]

Starts the other ranks itself; ``sp=1`` is one process, the same way. Geometry, weights and definitions are those of
:mod:`realtime_omni.bench.lingbot`: every rank draws the whole of each parameter from one seed and keeps its share.

``dit_ms``: a block's passes. ``exchange_ms``: what rank 0's collectives hold its device up, waiting for the others included,
an event around each, in blocks of their own; ``exchange_share`` of these blocks' time. ``first_block_ms``: from creating a
session to its first block, with everything compiled. ``resident_ms``: of each of two sessions that ask as soon as they have a
block. ``valid``: latents are finite, and the first block is that of ``--against`` (another run's ``--keep``) within
``--tolerance`` of its standard deviation, or in eight bits within ``--fp8-tolerance`` in the mean square.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from realtime_omni.bench.arguments import count, device, number
from realtime_omni.bench.conditions import commit, hardware, software, summary
from realtime_omni.bench.lingbot import (
    FP8,
    device_name,
    latency_ms,
    relative_error,
    start,
    walk,
    walk_together,
    warm_up,
    warm_up_blocks,
)
from realtime_omni.bench.lingbot_geometry import (
    CAMERA,
    GATES,
    SCALES,
    NoText,
    Scale,
    random_tiny_decoder,
    random_vae,
)
from realtime_omni.config import Config, EngineSection, KVSection, ParallelSection, SessionSection
from realtime_omni.models.common.fp8 import quantise
from realtime_omni.models.common.wan.network import Inputs
from realtime_omni.models.common.wan.ranks import RankedNetwork, RankReport, WanReplica
from realtime_omni.models.common.wan.sharded import ShardedTransformer, check_grid, share_of
from realtime_omni.models.common.wan.transformer import WanConfig, WanTransformer
from realtime_omni.models.common.wan.weights import parts_of
from realtime_omni.models.lingbot.model import LingBot
from realtime_omni.parallel.mesh import Grid, Mesh
from realtime_omni.parallel.team import Team
from realtime_omni.testing.inline import InlineEngine

SIZES = SCALES | {
    "tiny": Scale(
        replace(SCALES["tiny"].network, heads=8, head_dim=16),
        replace(SCALES["tiny"].settings, height=64, width=64),
    )
}
"""The smallest has heads and tokens for eight ranks."""


RESIDENT_BLOCKS = 10
"""At most so many turns of two sessions are timed."""


class Arguments(msgspec.Struct, frozen=True):
    """What the other ranks need to build theirs."""

    scale: str
    dtype: str
    compile: bool
    fp8: bool = False


def replica(mesh: Mesh, arguments: bytes) -> WanReplica:
    given = msgspec.msgpack.decode(arguments, type=Arguments)
    return WanReplica(share(given, mesh), compile_layers=given.compile)


def share(given: Arguments, mesh: Mesh) -> ShardedTransformer:
    """One rank's part of the network that ``bench.lingbot_geometry`` draws."""
    config = SIZES[given.scale].network
    dtype = getattr(torch, given.dtype)
    with torch.device("meta"):
        network = ShardedTransformer(config, mesh)
        whole = WanTransformer(config)
    heavy = frozenset(network.heavy_matrices())
    generator = torch.Generator(mesh.device).manual_seed(0)
    for name, parameter in whole.named_parameters():
        drawn = _drawn(name, parameter.shape, generator, dtype, mesh.device)
        path, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(path), leaf, nn.Parameter(_kept(name, drawn, mesh.grid), requires_grad=False))
        if given.fp8 and path in heavy and leaf == "bias":  # the weight came before
            quantise(network, [path])
    return network


def _drawn(
    name: str, shape: torch.Size, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """As :func:`realtime_omni.bench.lingbot_geometry.random_network` draws it."""
    if "norm" in name:
        return torch.full(shape, float(name.endswith(".weight")), dtype=dtype, device=device)
    spread = 1.0 / shape[-1] ** 0.5
    spread *= GATES if name.startswith("time_projection") else 1.0
    spread *= CAMERA if ".camera.scale" in name or ".camera.shift" in name else 1.0
    drawn = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    return drawn.mul_(spread)


def _kept(name: str, drawn: Tensor, grid: Grid) -> Tensor:
    parts = parts_of(name, drawn.shape)
    kept = []
    for part, piece in zip(parts, drawn.tensor_split(len(parts)), strict=True):
        own = share_of(part.name, piece.shape, grid)
        kept.append(torch.zeros_like(piece) if own is None else piece[own])
    return torch.cat(kept) if len(kept) > 1 else kept[0].clone()


class Passes:
    """Milliseconds from asking for a block's first pass to the end of its last, for which the network waits."""

    def __init__(self, network: RankedNetwork) -> None:
        self.block_ms: list[float] = []
        self._network = network
        self._flow, self._write = network.flow, network.write
        self._began_s: float | None = None
        network.flow, network.write = self._timed_flow, self._timed_write  # type: ignore[method-assign]

    def stop(self) -> None:
        """Leave the network as it was."""
        del self._network.flow, self._network.write

    def _timed_flow(self, inputs: Inputs, *, commit: bool) -> Tensor:
        self._begin()
        flow = self._flow(inputs, commit=commit)
        if commit:
            self._end()
        return flow

    def _timed_write(self, inputs: Inputs) -> None:
        self._begin()
        self._write(inputs)
        self._end()

    def _begin(self) -> None:
        if self._began_s is None:
            self._began_s = time.perf_counter()

    def _end(self) -> None:
        assert self._began_s is not None
        self.block_ms.append((time.perf_counter() - self._began_s) * 1000)
        self._began_s = None


def config_for(args: argparse.Namespace, grid: Grid) -> Config:
    return Config(
        model="lingbot-geometry",
        device=args.device,
        dtype=args.dtype,
        kv=KVSection(
            memory_fraction=0.9,
            requested_sessions=args.sessions,
            keep_gathered=not args.gather_each_pass,
            fp8_attention=args.fp8 == "linear_attention",
        ),
        engine=EngineSection(max_batch=1),
        session=SessionSection(max_sessions=args.sessions),
        parallel=ParallelSection(sp=grid.sequence_size, tp=grid.tensor_size, timeout_s=args.timeout_s),
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One run; see the module."""
    grid = grid_of(args.parallel)
    scale = SIZES[args.scale]
    config: WanConfig = scale.network
    settings = replace(scale.settings, clean_pass=not args.no_clean_pass)
    cells = settings.height // 16 * (settings.width // 16)
    check_grid(config, cells * settings.frames_per_block, grid)
    given = Arguments(args.scale, args.dtype, args.compile, args.fp8 != "off")
    began_s = time.perf_counter()
    team = Team(
        grid,
        device=args.device,
        replica="realtime_omni.bench.lingbot_ranks:replica",
        arguments=msgspec.msgpack.encode(given),
        timeout_s=args.timeout_s,
    )
    try:
        network = RankedNetwork(share(given, team.mesh), team, compile_layers=args.compile)
        pictures = args.decoder_device or args.device
        model = LingBot(
            network,
            NoText(config.text_width),
            settings,
            name="lingbot-geometry",
            vae=random_vae(getattr(torch, args.dtype), pictures) if args.pixels == "wan" else None,
            tiny=random_tiny_decoder(getattr(torch, args.dtype), pictures) if args.pixels == "tiny" else None,
            device=team.mesh.device,
            fingerprint="0" * 64,
        )
        engine = InlineEngine(model, config_for(args, grid))
        return _measured(args, engine, network, time.perf_counter() - began_s)
    finally:
        team.close()


def _measured(args: argparse.Namespace, engine: InlineEngine, network: RankedNetwork, start_s: float) -> dict[str, Any]:
    settings = SIZES[args.scale].settings
    outputs = ("latents",) if args.pixels == "none" else ("latents", "frames")
    began_s = time.perf_counter()
    start(engine, "warm")
    first = walk(engine, "warm", warm_up_blocks(settings) + 1, outputs).latents[0]
    engine.close("warm")
    warm_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    start(engine, "timed")
    engine.next("timed", outputs=outputs)
    first_ms = (time.perf_counter() - began_s) * 1000
    full = warm_up(engine, "timed", settings, outputs)
    passes = Passes(network)
    timed = walk(engine, "timed", args.blocks, outputs)
    dit_ms = list(passes.block_ms)
    whole_ms = latency_ms(engine, "timed", outputs)
    meter = network.measure()
    metered = walk(engine, "timed", args.metered, outputs)
    exchange_ms = meter.take_ms() / args.metered
    network.stop_measuring()
    resident = []
    if args.sessions > 1:
        start(engine, "other")
        walk(engine, "other", full, outputs)
        turns = walk_together(engine, ["timed", "other"], min(args.blocks, RESIDENT_BLOCKS), outputs)
        resident = [ms for each in turns.values() for ms in each.taken_ms]
    reports = network.reports()
    wrong, difference, error = _wrong(first, timed.latents, args)
    if args.keep:
        np.save(args.keep, first)
    pictures = 4 * settings.frames_per_block
    return {
        "conditions": {
            "commit": commit(),
            "hardware": hardware() | device_name(args.device),
            "software": software(),
            "config": {name: value for name, value in vars(args).items() if name not in ("json", "keep", "against")},
            "workload": f"{settings.height} x {settings.width}, {len(settings.labels) + (not args.no_clean_pass)} passes, "
            f"{settings.sink_frames} + {settings.window_frames} frames",
            "warm_up_blocks": full + 1,
            "population": args.blocks,
        },
        "valid": not wrong,
        "wrong": wrong,
        "ranks": len(reports) + 1,
        "block_ms": summary(timed.taken_ms, 0.5, 0.99),
        "dit_ms": summary(dit_ms, 0.5, 0.99),
        "latency_ms": whole_ms,
        "fps": pictures / timed.p50_ms * 1000,
        "exchange_ms": exchange_ms,
        "exchange_share": exchange_ms / statistics.mean(metered.taken_ms),
        "first_block_ms": first_ms,
        "resident_ms": summary(resident, 0.5, 0.99) if resident else None,
        "difference": difference,
        "error": error,
        "start_s": start_s,
        "warm_up_s": warm_s,
        "kv_bytes_of_rank": engine.runner.memory().kv_pool,
        "peak_bytes": _peaks(args.device, reports),
    }


def _wrong(
    first: np.ndarray, latents: Sequence[np.ndarray], args: argparse.Namespace
) -> tuple[list[str], float | None, float | None]:
    """What is, and how far the first block is from another run's: at most in its standard deviations, in the mean square."""
    wrong: list[str] = []
    if not all(np.isfinite(block).all() for block in latents):
        wrong.append("latents are not finite")
    if not args.against:
        return wrong, None, None
    other = np.load(args.against)
    difference, error = float(np.abs(first - other).max() / other.std()), relative_error(first, other)
    if args.fp8 == "off" and not difference <= args.tolerance:
        wrong.append(f"the first block differs from that of {args.against} by {difference:.3g} standard deviations")
    if args.fp8 != "off" and not error <= args.fp8_tolerance:
        wrong.append(f"the first block is off by {error:.3g} in the mean square")
    return wrong, difference, error


def _peaks(device: str, reports: Sequence[RankReport]) -> list[int] | None:
    if not device.startswith("cuda"):
        return None
    return [torch.cuda.max_memory_allocated(), *(report.peak_bytes for report in reports)]


def grid_of(text: str) -> Grid:
    """``sp=2``, ``tp=2`` or ``sp=2,tp=2``. Raises ArgumentTypeError."""
    sizes = {"sp": 1, "tp": 1}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in sizes or not value.isdecimal() or int(value) < 1:
            raise argparse.ArgumentTypeError(f"write it as sp=2, tp=2 or sp=2,tp=2, not {text!r}")
        sizes[name] = int(value)
    return Grid(0, sizes["sp"], sizes["tp"])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="realtime-omni bench world --model lingbot-geometry", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--parallel", required=True)
    parser.add_argument("--scale", choices=sorted(SIZES), default="full")
    parser.add_argument("--device", type=device, default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--blocks", type=count(), default=20)
    parser.add_argument("--metered", type=count(), default=3, help="blocks whose exchanges are timed")
    parser.add_argument("--sessions", type=int, choices=(1, 2), default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-clean-pass", action="store_true", help="the last denoise pass writes history")
    parser.add_argument("--gather-each-pass", action="store_true", help="less memory, and slower")
    parser.add_argument("--timeout-s", type=number(), default=120.0, help="of every exchange")
    parser.add_argument("--keep", help="write the first block's latents here, as .npy")
    parser.add_argument("--against", help="what another run kept")
    parser.add_argument("--fp8", choices=FP8, default="off", help="matrices, or matrices and attention, in eight bits")
    parser.add_argument("--pixels", choices=("none", "wan", "tiny"), default="none", help="decoded beside the passes")
    parser.add_argument("--decoder-device", type=device, help="default: the first rank's")
    parser.add_argument("--fp8-tolerance", type=number(), default=0.2)
    parser.add_argument("--tolerance", type=number(), default=0.1)
    parser.add_argument("--json", action="store_true", help="as JSON (it always is)")
    args = parser.parse_args(argv)
    try:
        grid_of(args.parallel)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    result = measure(args)
    print(json.dumps(result, indent=2))
    return 0 if result["valid"] else 1


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
