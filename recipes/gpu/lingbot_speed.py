"""LingBot's geometry on a CUDA machine: everything that recipes/lingbot_world.md tells of speed, in one process. JSON lines.

    PYTHONPATH=.:protocols:clients/python python recipes/gpu/lingbot_speed.py [--limit-s 420]       (one H200)
    ... lingbot_speed.py --device cpu --scale tiny --dtype float32                                  (its own test: two minutes)

Needs torch, numpy, msgspec and safetensors; diffusers for Wan's own decoder, nvidia-cudnn-frontend for attention in eight
bits. Parts in order of worth, each on its own so that one failure hides no other, none begun when its time would be over:

``rates``     of a matrix and an attention, in bfloat16 and in eight bits, with the error of eight bits.
``full``      the 14B model: block 0 without a compiler; compiled: latents, no clean pass, pixels, the first chunk of a session,
              the most expensive kernels; the same with matrices and then with attention in eight bits, and their errors.
``two``       two resident worlds.
``small``     the 1.3B geometry at 4 + 1 and 2 + 1 passes, as CUDA graphs: latents, the small decoder, Wan's.
``vae``       Wan's decoder and encoder alone, in several ways.
``batch``     the same network at 1,560 and 4,680 tokens a pass, 1 to 8 sessions.
``contract``  a tiny network in float32: the same latents as on the CPU over a rolling window, reset, eviction, exact metadata,
              and the memory after 100 sessions.

Definitions are those of :mod:`realtime_omni.bench.lingbot`. Exit status 0: nothing that ran failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
from torch import Tensor

from realtime_omni.bench.conditions import summary
from realtime_omni.bench.lingbot import (
    Walk,
    device_name,
    first_block,
    hold_w,
    latency_ms,
    relative_error,
    speed_up,
    start,
    walk,
    walk_together,
    warm_up,
    warm_up_blocks,
)
from realtime_omni.bench.lingbot_geometry import (
    SCALES,
    Spreads,
    best_s,
    config_for,
    floor_s,
    flops,
    random_model,
    random_network,
    random_vae,
    rates,
    synchronize,
)
from realtime_omni.float8 import to_e4m3
from realtime_omni.kv.attention.fp8 import Fp8Kernel
from realtime_omni.kv.attention.sdpa import TorchKernel
from realtime_omni.models.common.wan.transformer import WanTransformer
from realtime_omni.models.common.wan.vae import CodecState
from realtime_omni.models.common.wan.vae_fast import hasten, kernel_for
from realtime_omni.models.lingbot.model import LingBot, Settings
from realtime_omni.testing.inline import InlineEngine

LATENTS, PICTURES = ("latents",), ("latents", "frames")


class Parts:
    """What is left of the time, and one JSON line for everything that is found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device: str = args.device
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        self.blocks: int = args.blocks
        self.failed = False
        self._wanted = args.parts
        self._end_s = time.monotonic() + args.limit_s

    def say(self, part: str, **what: Any) -> None:
        print(json.dumps({"part": part, **what}), flush=True)

    def part(self, name: str, needs_s: float, work: Callable[[], dict[str, Any] | None]) -> None:
        """``needs_s``: on one H200. Names are matched by their first word against ``--parts``."""
        if (self._wanted and name.split()[0] not in self._wanted) or any(word in name for word in self.args.skip):
            return
        if time.monotonic() + needs_s > self._end_s:
            self.say(name, skipped="no time is left")
            return
        began_s = time.monotonic()
        try:
            found = work() or {}
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.failed = True
            found = {"failed": f"{type(error).__name__}: {error}"[:1500]}
        self.say(name, **found, seconds=round(time.monotonic() - began_s, 1))

    def peak_gb(self) -> float | None:
        return round(torch.cuda.max_memory_allocated() / 1e9, 1) if self.device.startswith("cuda") else None


class World:
    """One network in one engine, whose sessions go on while what it runs with changes."""

    def __init__(
        self,
        parts: Parts,
        scale: str,
        settings: Settings,
        *,
        sessions: int,
        pixels: str,
        max_batch: int = 1,
        graphs: bool = False,
    ) -> None:
        self.parts = parts
        self.geometry = SCALES[scale].network
        self.settings = settings
        self.network: WanTransformer = random_network(self.geometry, dtype=parts.dtype, device=parts.device)
        self.sessions, self.max_batch, self.graphs = sessions, max_batch, graphs
        self.fp8 = "off"
        self.open(pixels)

    def open(self, pixels: str, settings: Settings | None = None) -> None:
        """A new engine for the network."""
        parts = self.parts
        self.settings = settings or self.settings
        self.close()
        self.model: LingBot = random_model(
            self.network, self.settings, device=parts.device, pixels=pixels, dtype=parts.dtype, graphs=self.graphs
        )
        config = config_for(parts.device, parts.args.dtype, self.sessions, keep_gathered=True, max_batch=self.max_batch)
        self.engine = InlineEngine(self.model, config)

    def close(self) -> None:
        """Give the engine's memory back."""
        self.__dict__.pop("engine", None)
        self.__dict__.pop("model", None)
        gc.collect()
        if self.parts.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def speed_up(self, fp8: str = "off", *, dynamic: bool = False) -> None:
        """Compiled; in eight bits what ``fp8`` says beyond what already is."""
        if self.parts.device.startswith("cuda"):
            torch._dynamo.reset()
        matrices = "off" if self.fp8 != "off" else fp8
        compiled = self.parts.args.compile
        if fp8 == "linear_attention" and self.fp8 != "off":
            from realtime_omni.kv.attention import open_backend

            self.engine.runner.backend = open_backend(device=self.parts.device, keep_gathered=True, fp8=True)
            if compiled:
                self.network.compile_layers(fp8_attention=True)
        else:
            speed_up(self.engine, self.network, compiled=compiled and not dynamic, fp8=matrices, keep_gathered=True)
        if compiled and dynamic:
            self.network.compile_layers(dynamic=True)
        self.fp8 = fp8

    def clean_pass(self, on: bool) -> None:
        self.settings = self.model.settings = replace(self.settings, clean_pass=on)

    def row(self, name: str, outputs: Sequence[str], blocks: int | None = None) -> dict[str, Any]:
        """Steady state of a session that is warm."""
        one = walk(self.engine, name, 1, outputs)  # a change of outputs or passes shows in the block after it
        found = walk(self.engine, name, blocks or self.parts.blocks, outputs)
        return (
            self.told([found]) | {"latency_ms": round(latency_ms(self.engine, name, outputs), 1)} | finite([one, found])
        )

    def told(self, walks: Sequence[Walk]) -> dict[str, Any]:
        taken = [ms for each in walks for ms in each.taken_ms]
        pictures = 4 * self.settings.frames_per_block
        return {
            "block_ms": summary(taken, 0.5, 0.99),
            "fps": round(pictures * len(walks) / statistics.median(taken) * 1000, 2),
            "blocks": len(taken),
            "peak_gb": self.parts.peak_gb(),
        }

    def floor_ms(self) -> dict[str, Any]:
        work = flops(self.geometry, self.settings)
        speed = rates(self.geometry, self.settings, self.parts.dtype, self.parts.device, fp8=self.fp8)
        passes = len(self.settings.labels) + self.settings.clean_pass
        return {
            "floor_ms": round(floor_s(work, speed, passes) * 1000, 1),
            "tflop_per_s": {name: round(value / 1e12, 1) for name, value in speed.items()},
        }


def finite(walks: Sequence[Walk]) -> dict[str, Any]:
    return {"finite": all(bool(np.isfinite(block).all()) for each in walks for block in each.latents)}


def diffusers_fault() -> str | None:
    """Why Wan's own decoder is not there; None: it is."""
    try:
        import diffusers

        diffusers.AutoencoderKLWan  # noqa: B018 - it is imported when it is looked up
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:600]
    return None


def has_diffusers() -> bool:
    return diffusers_fault() is None


# ---------------------------------------------------------------------------------------------------------------- rates


def rates_of(parts: Parts, fp8: str) -> dict[str, Any]:
    scale = SCALES[parts.args.scale]
    found = rates(scale.network, scale.settings, parts.dtype, parts.device, fp8=fp8)
    return {name: round(value / 1e12, 1) for name, value in found.items()}


def attention_error(parts: Parts) -> dict[str, Any]:
    """Of eight bits against the dtype, by standard normal numbers, at the full shape and at one that is no multiple of 128."""
    config = SCALES[parts.args.scale].network
    found = {}
    for tokens, seen in ((parts.args.tokens, 6 * parts.args.tokens), (77, 391)):
        q, k, v = (
            torch.randn(1, n, config.heads, config.head_dim, device=parts.device, dtype=parts.dtype).transpose(1, 2)
            for n in (tokens, seen, seen)
        )
        kernel = Fp8Kernel(parts.device)
        exact = TorchKernel()(q, k, v, None).float()
        got = kernel(q, to_e4m3(k), to_e4m3(v), None).float()
        found[f"{tokens} x {seen}"] = round(float((got - exact).norm() / exact.norm()), 4)
    plans = getattr(getattr(kernel, "_on_gpu", None), "_plans", {})
    return {"error": found, "out": [str(plan.out_dtype) for plan in plans.values()]}


def vae_ms(parts: Parts) -> dict[str, Any]:
    """One block of three latent frames, in several ways; the states are those of a session under way."""
    scale, settings = parts.args.scale, SCALES[parts.args.scale].settings
    height, width = settings.height, settings.width
    latents = torch.randn(3, 16, height // 8, width // 8, device=parts.device)
    empty = torch.zeros(12, 3, height, width, device=parts.device)
    vae = random_vae(parts.dtype, parts.device, width=8 if scale == "tiny" else 96)
    modules, state, begun = vae._vae, CodecState(), CodecState()
    for _ in range(3):
        _, state = vae.decode(latents, state)
    _, begun = vae.encode(empty[:9], begun)
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        found[name] = round(best_s(work, parts.device) * 1000, 1)
        parts.say("vae", **found)

    @torch.no_grad()
    def together() -> Tensor:
        z = latents.transpose(0, 1)[None].float() * vae._std + vae._mean
        x = modules.post_quant_conv(z.to(parts.dtype))
        pictures: Tensor = modules.decoder(x, feat_cache=list(state.slots), feat_idx=[0], first_chunk=False)
        return pictures.float().clamp(-1, 1)[0].transpose(0, 1)

    timed("as it is served", lambda: vae.decode(latents, state))
    timed("three frames at once", together)
    found["their difference"] = float((together() - vae.decode(latents, state)[0]).abs().max())
    timed("encoding", lambda: vae.encode(empty, begun))
    hasten(modules.encoder, kernel_for(torch.device(parts.device)))
    timed("encoding, channels last", lambda: vae.encode(empty, begun))
    torch.backends.cudnn.benchmark = True
    timed("cudnn searches", lambda: vae.decode(latents, state))
    timed("cudnn searches, three frames at once", together)
    torch.backends.cudnn.benchmark = False
    return found


# ----------------------------------------------------------------------------------------------------------------- full


def kernels(world: World, name: str) -> dict[str, Any]:
    """Milliseconds of the most expensive kernels of one block."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        walk(world.engine, name, 1)
        synchronize(world.parts.device)
    rows = [
        (event.key, round(event.self_device_time_total / 1000, 2), event.count)
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA and event.self_device_time_total
    ]
    rows.sort(key=lambda row: -row[1])
    groups: dict[str, float] = {}
    for key, ms, _ in rows:
        group = next((group for group, marks in KERNELS.items() if any(mark in key for mark in marks)), "other")
        groups[group] = round(groups.get(group, 0.0) + ms, 1)
    return {
        "total_ms": round(sum(groups.values()), 1),
        "groups_ms": groups,
        "kernels": [(key[:60], ms, count) for key, ms, count in rows[:25]],
    }


KERNELS = {
    "attention": ("sdpa", "flash"),
    "matrices": ("nvjet", "gemm", "cutlass"),
    "fused": ("_mix_kernel", "_activate_kernel", "_head_kernel"),
    "compiled": ("triton_",),
}
"""Words in a kernel's name, in the order in which they are looked for."""


def full(parts: Parts) -> None:
    """The large model; see the module. One session, "a", is under way from the first compiled block on."""
    scale, on_gpu = parts.args.scale, parts.device.startswith("cuda")
    held: dict[str, World] = {}
    reference: dict[str, np.ndarray] = {}
    pixels = "wan" if has_diffusers() else "none"

    def begin() -> dict[str, Any]:
        world = held["world"] = World(parts, scale, SCALES[scale].settings, sessions=2, pixels=pixels)
        with Spreads(world.network) as spreads:
            reference["eager"] = first_block(world.engine, "eager")
        return {"pixels": pixels, "activations": [round(min(spreads.seen), 3), round(max(spreads.seen), 3)]}

    def compiled() -> dict[str, Any]:
        world = held["world"]
        world.speed_up()
        began_s = time.perf_counter()
        again = first_block(world.engine, "compiling")
        compile_s = time.perf_counter() - began_s
        start(world.engine, "a")
        warm_up(world.engine, "a", world.settings)
        state = world.engine.state_of("a")
        return {
            "compile_s": round(compile_s, 1),
            "difference": round(float(np.abs(again - reference["eager"]).max() / reference["eager"].std()), 4),
            "error": round(relative_error(again, reference["eager"]), 5),
            "condition_is_constant": state.visual.condition.constant is not None,
        }

    def rows(kind: str, needs_s: float) -> None:
        """Latents, pixels, and both without the clean pass; about four times ``needs_s`` on one H200."""
        world = held.get("world")
        if world is None:
            return
        parts.part(f"full {kind}: latents", needs_s, lambda: world.row("a", LATENTS) | world.floor_ms())
        parts.part(f"full {kind}: no clean pass", needs_s, lambda: without(world, LATENTS))
        if pixels == "wan":
            parts.part(f"full {kind}: pixels", needs_s, lambda: world.row("a", PICTURES, parts.blocks))
            parts.part(f"full {kind}: pixels, no clean pass", needs_s, lambda: without(world, PICTURES))

    def without(world: World, outputs: Sequence[str]) -> dict[str, Any]:
        world.clean_pass(False)
        try:
            return world.row("a", outputs, parts.blocks) | world.floor_ms()
        finally:
            world.clean_pass(True)

    def fresh() -> dict[str, Any]:
        """From creating a session to its first block; kernels are warm."""
        world, taken = held["world"], {}
        for outputs in (LATENTS, PICTURES) if pixels == "wan" else (LATENTS,):
            began_s = time.perf_counter()
            start(world.engine, "new")
            world.engine.next("new", outputs=outputs)
            taken[outputs[-1]] = round((time.perf_counter() - began_s) * 1000, 1)
            world.engine.close("new")
        return {"first_chunk_ms": taken}

    def eight(fp8: str) -> dict[str, Any]:
        world = held["world"]
        world.speed_up(fp8)
        began_s = time.perf_counter()
        again = first_block(world.engine, "eight")
        walk(world.engine, "a", 2)
        return {
            "compile_s": round(time.perf_counter() - began_s, 1),
            "error": round(relative_error(again, reference["eager"]), 5),
        }

    def two() -> dict[str, Any]:
        world = held["world"]
        solo = walk(world.engine, "a", 4).p50_ms
        start(world.engine, "b")
        warm_up(world.engine, "b", world.settings)
        both = walk_together(world.engine, ("a", "b"), 4, LATENTS)
        each = {name: round(found.p50_ms, 1) for name, found in both.items()}
        world.engine.close("b")
        return {"solo_ms": round(solo, 1), "each_ms": each, "ratio": round(max(each.values()) / solo, 3)}

    def graphed() -> dict[str, Any]:
        """Latents again, passes replayed; a new engine."""
        world = held["world"]
        world.graphs = True
        world.open("none")
        if world.fp8 == "linear_attention":
            world.speed_up("linear_attention")
        start(world.engine, "g")
        walk(world.engine, "g", warm_up_blocks(world.settings) + 3)
        return world.row("g", LATENTS)

    parts.part("full begin", 45, begin)
    if "eager" not in reference:
        return
    parts.part("full compiled", 50, compiled)
    rows("bf16", 30)
    parts.part("full first chunk", 8, fresh)
    if on_gpu:
        parts.part("full kernels bf16", 12, lambda: kernels(held["world"], "a"))
    parts.part("full eight bits: matrices", 30, lambda: eight("linear"))
    rows("fp8 matrices", 20)
    if on_gpu:
        parts.part("full kernels fp8 matrices", 12, lambda: kernels(held["world"], "a"))
    parts.part("full eight bits: attention", 12, lambda: eight("linear_attention"))
    rows("fp8", 16)
    if on_gpu:
        parts.part("full kernels fp8 attention", 10, lambda: kernels(held["world"], "a"))
    parts.part("two worlds", 40, two)
    parts.part("full fp8: graphs", 30, graphed)
    held.pop("world").close()


# ---------------------------------------------------------------------------------------------------------------- small


def small(parts: Parts) -> None:
    """The small geometry end to end."""
    scale = "small" if parts.args.scale == "full" else parts.args.scale
    settings = SCALES[scale].settings
    held: dict[str, World] = {}

    def begin() -> dict[str, Any]:
        world = held["world"] = World(parts, scale, settings, sessions=1, pixels="tiny", graphs=True)
        world.speed_up()
        return row("4 + 1 passes, tiny decoder", settings, PICTURES)

    def row(name: str, chosen: Settings, outputs: Sequence[str]) -> dict[str, Any]:
        world = held["world"]
        if world.settings != chosen or "engine" not in world.__dict__:
            world.open("wan" if "wan" in name else "tiny", chosen)
        start(world.engine, "s")
        warm_up(world.engine, "s", chosen, outputs)
        walk(world.engine, "s", 3, outputs)
        found = world.row("s", outputs, 2 * parts.blocks)
        world.engine.close("s")
        return found | (world.floor_ms() if outputs == LATENTS else {})

    two = replace(settings, labels=(1000, 500))
    parts.part("small 4 + 1 passes, tiny decoder", 35, begin)
    if "world" not in held:
        return

    def without_graphs() -> dict[str, Any]:
        world = held["world"]
        world.graphs = False
        try:
            world.open("tiny", settings)
            return row("tiny", settings, PICTURES)
        finally:
            world.graphs = True
            world.close()

    parts.part("small 4 + 1 passes, tiny decoder, without graphs", 10, without_graphs)
    parts.part("small 4 + 1 passes, latents", 8, lambda: row("latents", settings, LATENTS))
    parts.part("small 2 + 1 passes, tiny decoder", 8, lambda: row("tiny", two, PICTURES))
    parts.part("small 2 + 1 passes, latents", 8, lambda: row("latents", two, LATENTS))
    if has_diffusers():
        for name, chosen in (("4 + 1", settings), ("2 + 1", two)):
            held["world"].close()
            parts.part(f"small {name} passes, Wan's decoder", 15, lambda chosen=chosen: row("wan", chosen, PICTURES))
        held["world"].close()

    def eight() -> dict[str, Any]:
        held["world"].open("tiny", two)
        held["world"].speed_up("linear")
        return row("tiny", two, PICTURES)

    parts.part("small 2 + 1 passes, tiny decoder, fp8 matrices", 25, eight)
    parts.part("small 4 + 1 passes, tiny decoder, fp8 matrices", 10, lambda: row("tiny", settings, PICTURES))
    held.pop("world").close()


def batch(parts: Parts) -> None:
    """What sharing a pass gains."""
    scale = "small" if parts.args.scale == "full" else parts.args.scale
    settings = SCALES[scale].settings
    held: dict[str, World] = {}

    def begin() -> None:
        world = held["world"] = World(parts, scale, settings, sessions=8, pixels="none", max_batch=8, graphs=True)
        world.speed_up(dynamic=True)

    def row(frames: int, sessions: int) -> dict[str, Any]:
        world = held["world"]
        chosen = replace(settings, frames_per_block=frames)
        if world.settings != chosen:
            world.open("none", chosen)
        names = [f"s{number}" for number in range(sessions)]
        for name in names:
            start(world.engine, name)
        for _ in range(warm_up_blocks(chosen) + 1):
            world.engine.next_all(names, outputs=LATENTS)
        taken = []
        for _ in range(max(parts.blocks, 6)):
            began_s = time.perf_counter()
            world.engine.next_all(names, outputs=LATENTS)
            taken.append((time.perf_counter() - began_s) * 1000)
        for name in names:
            world.engine.close(name)
        block_ms = statistics.median(taken)
        return {"block_ms": round(block_ms, 1), "fps_of_all": round(4 * frames * sessions / block_ms * 1000, 1)}

    parts.part("batch begin", 10, begin)
    if "world" not in held:
        return
    for frames in (1, 3):
        for sessions in (1, 2, 4, 8):
            parts.part(
                f"batch {frames} frames a pass, {sessions} sessions",
                20 if sessions < 4 else 8,
                lambda frames=frames, sessions=sessions: row(frames, sessions),
            )
    held.pop("world").close()


# ------------------------------------------------------------------------------------------------------------- contract


def contract(parts: Parts) -> dict[str, Any]:
    """See the module."""
    scale = SCALES["tiny"]
    latents = {}
    for device in ("cpu", parts.device):
        network = random_network(scale.network, dtype=torch.float32, device="cpu").to(device)
        model = random_model(network, scale.settings, device=device, pixels="tiny", dtype=torch.float32)
        config = config_for(device, "float32", 2, keep_gathered=True)
        engine = InlineEngine(model, replace_kv_policy(config))
        start(engine, "s")
        latents[device] = walk(engine, "s", 10).latents
    pages = engine.runner.pages_of("s")
    walk(engine, "s", 3)
    wrong = [] if engine.runner.pages_of("s") == pages else ["the window grew"]
    chunk = engine.next("s", outputs=PICTURES)
    if (chunk.chunk_index, chunk.first_frame, chunk.frames, chunk.artifacts["frames"].data.shape) != (
        13,
        13 * 12 - 3,
        12,
        (12, 3, 32, 48),
    ):
        wrong.append(f"metadata: {chunk.chunk_index} {chunk.first_frame} {chunk.artifacts['frames'].data.shape}")
    engine.reset("s")
    hold_w(engine, "s", event_id=1)
    again = walk(engine, "s", 2).latents
    for name in ("x", "y"):  # the second needs a place: the least recently used session goes
        start(engine, name)
        walk(engine, name, 1, PICTURES)
    evicted = "evicted" in engine.kinds("s")
    if not evicted:
        wrong.append("nobody was evicted")
    for name in ("x", "y"):
        engine.close(name)
    free = engine.free_pages
    sizes = []
    for cycle in range(parts.args.cycles):
        start(engine, f"c{cycle}")
        walk(engine, f"c{cycle}", 1, PICTURES)
        engine.close(f"c{cycle}")
        engine.answers().clear()
        sizes.append(torch.cuda.memory_allocated() if parts.device.startswith("cuda") else 0)
    if engine.free_pages != free or len(set(sizes[1:])) > 1:
        wrong.append(f"memory after the cycles: {sizes[1]} {sizes[-1]}")
    worst = max(float(np.abs(a - b).max()) for a, b in zip(latents["cpu"], latents[parts.device], strict=True))
    if not worst < 1e-2:
        wrong.append("latents are not those of the CPU")
    if not np.allclose(again[1], latents[parts.device][1], atol=1e-3):
        wrong.append("a reset session is not a new one")
    if wrong:
        raise AssertionError("; ".join(wrong))
    return {"largest difference to the CPU": worst, "allocated_bytes": sizes[-1]}


def replace_kv_policy(config: Any) -> Any:
    from msgspec.structs import replace as with_fields

    return with_fields(config, kv=with_fields(config.kv, policy="lru"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit-s", type=float, default=420.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", choices=("full", "small", "tiny"), default="full")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--cycles", type=int, default=100, help="sessions of the part contract")
    parser.add_argument("--skip", nargs="*", default=(), help="parts whose name has one of these in it")
    parser.add_argument("--parts", nargs="*", help="only these: rates vae full two small batch contract")
    args = parser.parse_args()
    settings = SCALES[args.scale].settings
    args.tokens = settings.height // 16 * (settings.width // 16) * settings.frames_per_block
    parts = Parts(args)
    parts.say(
        "conditions",
        torch=torch.__version__,
        **device_name(args.device),
        cudnn=torch.backends.cudnn.version(),
        diffusers=diffusers_fault() or "there",
    )
    for fp8 in ("off", "linear", "linear_attention"):
        parts.part(f"rates {fp8}", 5, lambda fp8=fp8: rates_of(parts, fp8))
    parts.part("rates error of attention", 5, lambda: attention_error(parts))
    full(parts)
    small(parts)
    if has_diffusers():
        parts.part("vae", 45, lambda: vae_ms(parts))
    batch(parts)
    parts.part("contract", 20, lambda: contract(parts))
    return int(parts.failed)


if __name__ == "__main__":
    sys.exit(main())
