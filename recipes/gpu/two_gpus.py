"""What two GPUs of one host make of LingBot-World's geometry, in one process and one team of ranks. JSON lines.

    PYTHONPATH=.:protocols:clients/python python recipes/gpu/two_gpus.py [--limit-s 205] [--parts killed elsewhere]
    ... two_gpus.py --device cpu --scale tiny --dtype float32 --limit-s 120 --blocks 2 --no-compile       (its rehearsal)

``recipes/gpu/parallel_speed.py`` asks more, each in processes of its own; here the weights are drawn once. Definitions are
those of :mod:`realtime_omni.bench.lingbot_ranks`. Parts, the most important first, each begun only when there is time for it.
``--parts`` runs only some; a part that needs what one before has left then makes it or does without:

``sp2``            latents; milliseconds a block that each kind of exchange holds rank 0 up.
``pixels``         the same session, decoded by Wan's decoder on rank 0's device, beside the passes.
``one``            rank 0's weights as a whole network on its device alone, latents, and the speed-up.
``latents``        without the decoder; how far its first block is from that of ``one``.
``fp8``            matrices in eight bits on both ranks, and the error of its first block.
``killed``         the second rank dies within a block: what the session is told, and when; and when the device is idle then.
``elsewhere``      the whole network on the first device, Wan's decoder on the second.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from realtime_omni.bench.conditions import summary
from realtime_omni.bench.lingbot import first_block, latency_ms, relative_error, start, walk, warm_up_blocks
from realtime_omni.bench.lingbot_geometry import NoText, random_vae
from realtime_omni.bench.lingbot_geometry import config_for as whole_config
from realtime_omni.bench.lingbot_ranks import SIZES, Arguments, Passes, config_for, share
from realtime_omni.errors import OmniError
from realtime_omni.models.common.fp8 import quantise
from realtime_omni.models.common.wan.ranks import RankedNetwork, WanReplica
from realtime_omni.models.common.wan.sharded import ShardedTransformer
from realtime_omni.models.common.wan.transformer import WanTransformer
from realtime_omni.models.lingbot.model import LingBot
from realtime_omni.parallel.mesh import Grid, Mesh
from realtime_omni.parallel.team import Team
from realtime_omni.testing.inline import InlineEngine

LATENTS, PICTURES = ("latents",), ("latents", "frames")
CONSTANT_AFTER = 8
"""Blocks until the image condition, which Wan's encoder makes, stays what it is."""
EXCHANGES = ("queries", "keys", "values", "outputs")
"""Of a layer, in the order in which rank 0 waits for them."""
TIMEOUT_S = 90.0
"""Of a pass: the other rank may be compiling."""
PARTS = ("sp2", "pixels", "one", "latents", "fp8", "killed", "elsewhere")
KILL_AFTER_S = 0.4
LOST_WITHIN_S = 60.0


class Switched:
    """A rank whose matrices are put into eight bits on the way, by a message that begins with an exclamation mark."""

    def __init__(self, transformer: ShardedTransformer, *, compiled: bool) -> None:
        self._transformer = transformer
        self._compiled = compiled
        self._inner = WanReplica(transformer, compile_layers=compiled)

    def handle(self, message: bytes) -> bytes | None:
        if not message.startswith(b"!"):
            return self._inner.handle(message)
        to_eight_bits(self._transformer, compiled=self._compiled)
        return b"done"


def replica(mesh: Mesh, arguments: bytes) -> Switched:
    given = msgspec.msgpack.decode(arguments, type=Arguments)
    return Switched(share(given, mesh), compiled=given.compile)


@torch.no_grad()
def to_eight_bits(network: ShardedTransformer, *, compiled: bool) -> None:
    quantise(network, network.heavy_matrices())
    if compiled:
        network.compile_layers()


def whole_of(network: ShardedTransformer) -> WanTransformer:
    """The network that a rank of a sequence group holds all of, sharing its parameters."""
    with torch.device("meta"):
        whole = WanTransformer(network.config)
    for name, parameter in network.named_parameters():
        path, _, leaf = name.rpartition(".")
        setattr(whole.get_submodule(path), leaf, nn.Parameter(parameter.detach(), requires_grad=False))
    return whole


class Bench:
    """One team, and one engine at a time."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.cuda: bool = args.device.startswith("cuda")
        self.scale = SIZES[args.scale]
        self.dtype = getattr(torch, args.dtype)
        self.full = warm_up_blocks(self.scale.settings)
        self.found: dict[str, Any] = {}
        self.end_s = time.monotonic() + args.limit_s
        given = Arguments(args.scale, args.dtype, args.compile)
        self.team = Team(
            Grid(0, 2, 1),
            device=args.device,
            replica="two_gpus:replica",
            arguments=msgspec.msgpack.encode(given),
            timeout_s=TIMEOUT_S,
        )
        self.transformer = share(given, self.team.mesh)
        self.network = RankedNetwork(self.transformer, self.team, compile_layers=args.compile)
        self.engine: InlineEngine | None = None

    def part(self, name: str, needs_s: float, work: Callable[[], dict[str, Any]]) -> None:
        """``needs_s``: on two H200s, compiled."""
        if name not in self.args.parts:
            return
        left_s = self.end_s - time.monotonic()
        if left_s < needs_s:
            say(name, skipped=f"{left_s:.0f} of {needs_s:.0f} s are left")
            return
        began_s = time.monotonic()
        try:
            found = work()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            found = {"failed": f"{type(error).__name__}: {error}"[:1500]}
        say(name, **found, seconds=round(time.monotonic() - began_s, 1))

    def open(self, network: Any, *, device: torch.device, decoder: str | None) -> InlineEngine:
        """A new engine in the place of the one before; ``decoder``: the device of Wan's."""
        self.engine = None
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        width = 96 if self.cuda else 8
        model = LingBot(
            network,
            NoText(self.scale.network.text_width),
            self.scale.settings,
            name="lingbot-geometry",
            vae=None if decoder is None else random_vae(self.dtype, decoder, width=width),
            device=device,
            fingerprint="0" * 64,
        )
        if network is self.network:
            how = Namespace(**vars(self.args), sessions=2, gather_each_pass=False, fp8="off", timeout_s=TIMEOUT_S)
            config = config_for(how, self.team.mesh.grid)
        else:
            config = whole_config(str(device), self.args.dtype, 1, keep_gathered=True)
        self.engine = InlineEngine(model, config)
        return self.engine

    def steady(self, name: str, outputs: tuple[str, ...], blocks: int) -> dict[str, Any]:
        """Of a session that is warm."""
        assert self.engine is not None
        one = walk(self.engine, name, 2, outputs)  # a change of outputs shows in the blocks after it
        timed = walk(self.engine, name, blocks, outputs)
        finite = all(bool(np.isfinite(block).all()) for block in one.latents + timed.latents)
        pictures = 4 * self.scale.settings.frames_per_block
        return {
            "block_ms": summary(timed.taken_ms, 0.5, 0.99),
            "fps": round(pictures / timed.p50_ms * 1000, 2),
            "blocks": blocks,
            "finite": finite,
            "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if self.cuda else None,
        }

    def pictures(self) -> str | None:
        """Where Wan's decoder runs; None where diffusers is not to be had."""
        try:
            random_vae(torch.float32, "cpu", width=8)
        except Exception as error:
            say("diffusers", missing=f"{type(error).__name__}: {error}"[:600])
            return None
        return str(self.team.mesh.device)

    def warm(self) -> InlineEngine:
        """The ranks' engine with Wan's decoder and a warm session "a"."""
        engine = self.open(self.network, device=self.team.mesh.device, decoder=self.pictures())
        start(engine, "a")
        walk(engine, "a", self.full + CONSTANT_AFTER)
        return engine

    def sp2(self) -> dict[str, Any]:
        engine = self.warm()
        passes = Passes(self.network)
        found = self.steady("a", LATENTS, self.args.blocks)
        self.found["sp2_ms"] = found["block_ms"]["p50"]
        passes.stop()
        return found | {"dit_ms": summary(passes.block_ms[2:], 0.5, 0.99), "exchanges_ms": self.exchanges(engine)}

    def exchanges(self, engine: InlineEngine) -> dict[str, float]:
        """Milliseconds of a block, by kind."""
        blocks, found = 2, dict.fromkeys(EXCHANGES, 0.0)
        meter = self.network.measure()
        walk(engine, "a", blocks)
        each = meter.take_each()
        self.network.stop_measuring()
        exchanged = [ms for kind, ms in each if kind == "exchange"]
        for position, ms in enumerate(exchanged):
            found[EXCHANGES[position % len(EXCHANGES)]] += ms
        found["other"] = sum(ms for kind, ms in each if kind != "exchange")
        return {kind: round(ms / blocks, 2) for kind, ms in found.items()} | {
            "count": len(exchanged) // blocks,
            "median_us": round(statistics.median(exchanged) * 1000, 1),
        }

    def pixels(self) -> dict[str, Any]:
        if self.engine is None:
            self.warm()
        assert self.engine is not None
        found = self.steady("a", PICTURES, self.args.blocks)
        return found | {"latency_ms": latency_ms(self.engine, "a", PICTURES)}

    def one(self) -> dict[str, Any]:
        whole = self.found["whole"] = whole_of(self.transformer)
        if self.args.compile:
            whole.compile_layers()
        engine = self.open(whole, device=self.team.mesh.device, decoder=None)
        self.found["one"] = first_block(engine, "first")
        start(engine, "a")
        walk(engine, "a", self.full)
        found = self.steady("a", LATENTS, 6)
        if "sp2_ms" not in self.found:
            return found
        return found | {"speed_up": round(found["block_ms"]["p50"] / self.found["sp2_ms"], 3)}

    def elsewhere(self) -> dict[str, Any]:
        whole = self.found.get("whole") or whole_of(self.transformer)
        engine = self.open(whole, device=self.team.mesh.device, decoder="cuda:1" if self.cuda else "cpu")
        start(engine, "a")
        walk(engine, "a", self.full + CONSTANT_AFTER, PICTURES)
        return self.steady("a", PICTURES, 5)

    def latents(self) -> dict[str, Any]:
        """The ranks' engine once more, without the decoder; a session "b" is warm in it."""
        engine = self.open(self.network, device=self.team.mesh.device, decoder=None)
        first, whole = first_block(engine, "first"), self.found.get("one")
        start(engine, "b")
        self.found["b"] = walk(engine, "b", self.full)
        found = self.steady("b", LATENTS, 5)
        if whole is None:  # the part before had no time
            return found
        difference = float(np.abs(first - whole).max() / whole.std())
        return found | {"difference": difference, "error": relative_error(first, whole)}

    def fp8(self) -> dict[str, Any]:
        if "b" not in self.found:
            engine = self.open(self.network, device=self.team.mesh.device, decoder=None)
            start(engine, "b")
            self.found["b"] = walk(engine, "b", self.full)
        assert self.engine is not None
        self.team.ask(b"!")
        to_eight_bits(self.transformer, compiled=self.args.compile)
        first = first_block(self.engine, "first")
        found = self.steady("b", LATENTS, self.args.blocks)
        return found | ({"error": relative_error(first, self.found["one"])} if "one" in self.found else {})

    def killed(self) -> dict[str, Any]:
        """A rank dies while the device works for it."""
        if "b" not in self.found:  # the part that opens the ranks' engine for it had no time
            start(self.open(self.network, device=self.team.mesh.device, decoder=None), "b")
        engine = self.engine
        assert engine is not None
        walk(engine, "b", 2)
        at: list[float] = []

        def kill() -> None:
            at.append(time.monotonic())
            os.kill(self.network.processes[0], signal.SIGKILL)

        threading.Timer(KILL_AFTER_S, kill).start()
        deadline_s = time.monotonic() + LOST_WITHIN_S
        told = "nothing"
        blocks = 0
        while time.monotonic() < deadline_s:
            try:
                walk(engine, "b", 1)
                blocks += 1
            except OmniError as error:
                told = f"{error.code}: {error}"
                break
        after_s = time.monotonic() - at[0]
        found = {"told": told, "after_s": round(after_s, 3), "blocks_before": blocks}
        say("killed: told", **found)  # what comes next may not end
        refused = {
            "b": self.refusal(lambda: walk(engine, "b", 1)),
            "new": self.refusal(lambda: start(engine, "another")),
        }
        if self.cuda:
            torch.cuda.synchronize(self.team.mesh.device)
            found["idle_after_s"] = round(time.monotonic() - at[0], 3)
        return found | {"refused": refused, "fault": self.network.fault}

    def refusal(self, work: Callable[[], Any]) -> str:
        try:
            work()
        except OmniError as error:
            return str(error.code)
        return "nothing"


def say(part: str, **what: Any) -> None:
    print(json.dumps({"part": part, **what}), flush=True)


def end_at(limit_s: float) -> None:
    """Whatever hangs then, and also where the interpreter's lock is held: then without a word, but with the stacks."""

    def end() -> None:
        say("out of time", limit_s=limit_s)
        faulthandler.dump_traceback()
        os._exit(3)  # the ranks end with their pipes

    faulthandler.dump_traceback_later(limit_s + 3, exit=True)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit-s", type=float, default=205.0)
    parser.add_argument("--scale", choices=sorted(SIZES), default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    args = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
    end_at(args.limit_s + 5)
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # the other ranks import this file
    began_s = time.monotonic()
    bench = Bench(args)
    say("start", torch=torch.__version__, seconds=round(time.monotonic() - began_s, 1))
    try:
        bench.part("sp2", 40, bench.sp2)
        bench.part("pixels", 15, bench.pixels)
        bench.part("one", 45, bench.one)
        bench.part("latents", 30, bench.latents)
        bench.part("fp8", 25, bench.fp8)
        bench.part("killed", 5, bench.killed)
        bench.part("elsewhere", 35, bench.elsewhere)
    finally:
        bench.team.close()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # what a device still does must not keep the process alive
