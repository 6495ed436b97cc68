"""Checks pi0's captured and compiled stages on a CUDA machine, and times them. Prints JSON lines.

    PYTHONPATH=. python recipes/gpu/pi0_speed.py [--limit-s 220]          (under four minutes on one H200)
    PYTHONPATH=. python recipes/gpu/pi0_speed.py --speeds compiled --repeats 40 --parts stages without engine --batches 16
    PYTHONPATH=. python recipes/gpu/pi0_speed.py --device cpu --scale tiny --repeats 2 --speeds graphs   (its own test)

Parts, each on its own so that one failure hides no other; ``--parts`` names some, in their order. A part in which a model's log
warned has failed, whatever its numbers: something fell back to a slower way.

``geglu``    what lies between the products of a language layer's MLP, alone, see ``pi0_geglu.py``.
``exact``    a tiny network in float64: graphs against the plain stages, rows of other lengths and absent cameras, a step under
             gradients: 1e-5 of the largest action, every size in a graph. In float32 (TF32 off) numbers are not judged.
``agrees``   pi0's dimensions in bfloat16: chunks of every speed against the same weights in float32, relative to the largest
             action. A faster way may not be farther from float32 than twice the plain one.
``stages``   new observations of three cameras (uint8 pictures in the CPU's memory, an own prompt of 8 words), ten steps, batch
             1, 4 and 16: p50, p99 of the whole, and of the same runs what each stage took on the device (by events, nothing
             waits): ``upload``, ``images``, ``prefix``, ``first`` (prefixes are loaded, and the step that brings the state),
             ``steps`` (the other nine), and ``rest``, the whole less these. ``sm_mhz``: the device's clock at their end.
             ``slowest``: the three longest with their stages, counted from the first run of all; ``WARM`` are not reported.
``without``  16 observations with the MLP's kernel (``models/common/vla/geglu_kernel.py``) left out.
``alone``    ten steps again and again over prefixes that are held, as ``pi0_variants.py`` has them: what nine tenths of it are
             less than ``steps`` is the clock's (``sm_mhz``), which the prefix's products lower.
``kernels``  the most expensive kernels of one chunk, with their counts.
``attention`` one layer's attention in several ways.
``engine``   ``bench vla --in-process``: sessions, engine and statistics included, 1 and 16 robots.

Exit status 0: everything that ran was within tolerance.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import json
import logging
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from pi0_geglu import measured
from torch import Tensor
from torch.nn import functional

from realtime_omni.bench import vla
from realtime_omni.bench.geometry import TINY
from realtime_omni.config import load
from realtime_omni.models.common.vla.decoder import DecoderLayer
from realtime_omni.models.common.vla.devices import placed_together
from realtime_omni.models.common.vla.flow import Velocity, time_of
from realtime_omni.models.common.vla.graphs import GraphStages, Speed, open_stages
from realtime_omni.models.common.vla.network import PolicyInputs
from realtime_omni.models.common.vla.stages import Stages
from realtime_omni.models.pi0.network import Pi0Config, Pi0Network

TOLERANCE = 1e-5
CAMERAS = 3
WARM = 8
"""Runs before those that count: libraries choose their kernels, memory is found, the clock settles."""
PARTS = ("geglu", "exact", "agrees", "stages", "without", "alone", "engine", "kernels", "plain", "attention")


def say(part: str, **what: Any) -> None:
    print(json.dumps({"part": part, **what}), flush=True)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def built(config: Pi0Config, device: torch.device, dtype: torch.dtype) -> Pi0Network:
    """Random weights by which every layer matters: logits of order one."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            network = Pi0Network(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    for parameter in network.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 25
        parameter.normal_(0.0, fan_in**-0.5)
    return network


def observed(
    config: Pi0Config, rows: int, words: int, seed: int, absent: Sequence[tuple[int, int]] = ()
) -> PolicyInputs:
    """Observations in the CPU's memory, as a server has them."""
    generator = torch.Generator().manual_seed(seed)
    side = config.vision.image_size
    mask = torch.ones(rows, CAMERAS, dtype=torch.bool)
    for row, camera in absent:
        mask[row, camera] = False
    return PolicyInputs(
        torch.randint(0, 256, (rows, CAMERAS, side, side, 3), dtype=torch.uint8, generator=generator),
        mask,
        torch.randint(1, config.vocabulary, (rows, words), generator=generator),
        torch.ones(rows, words, dtype=torch.bool),
        torch.randn(rows, config.state_dim, generator=generator),
    )


def noise_of(config: Pi0Config, rows: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, config.horizon, config.action_dim, generator=generator).to(device)


def clock_mhz(device: torch.device) -> int | None:
    """Of the processors; None where nobody tells."""
    try:
        return torch.cuda.clock_rate(device) if device.type == "cuda" else None
    except Exception:  # pynvml is not there, or may not ask
        return None


@torch.no_grad()
def chunk(
    stages: Stages, inputs: PolicyInputs, noise: Tensor, steps: int, mark: Callable[[str], None] = lambda stage: None
) -> Tensor:
    """What a server does of an observation; ``mark`` is called after each stage."""
    pictures = [inputs.images[row, slot] for row, slot in inputs.image_mask.nonzero().tolist()]
    images = placed_together(pictures, stages.device)
    mark("upload")
    encoded = stages.features(images)
    features = encoded.new_zeros(*inputs.image_mask.shape, *encoded.shape[1:])
    if bool(inputs.image_mask.all()):
        features = encoded.view_as(features)
    else:
        features[inputs.image_mask.to(stages.device)] = encoded
    mark("images")
    inputs = inputs.to(stages.device)
    prefixes = stages.prefixes(features, inputs)
    mark("prefix")
    return denoised(stages.velocity(prefixes, list(inputs.state)), noise, steps, mark).cpu()


def denoised(velocity: Velocity, x: Tensor, steps: int, mark: Callable[[str], None]) -> Tensor:
    for step in range(steps):
        t = torch.full((len(x),), time_of(step, steps), device=x.device)
        x = x - velocity(x, t) / steps
        if step in (0, steps - 1):
            mark("steps" if step else "first")
    return x


# -- the parts ---------------------------------------------------------------------------------------------------------


class Warnings(logging.Handler):
    """What models warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        why = record.exc_info[1] if record.exc_info else None
        self._told.append(record.getMessage() + (f": {why}" if why else ""))

    def taken(self) -> list[str]:
        told, self._told = self._told, []
        return told


def one_pass(way: Stages) -> list[DecoderLayer]:
    """Layers whose MLP has the kernel."""
    return [m for m in way.network.modules() if isinstance(m, DecoderLayer) and m.one_pass]  # type: ignore[attr-defined]


@contextmanager
def layers_without_kernel(way: Stages) -> Iterator[None]:
    """For what runs without a graph, as the prefixes of 16."""
    layers = one_pass(way)
    for layer in layers:
        layer.one_pass = False
    try:
        yield
    finally:
        for layer in layers:
            layer.one_pass = True


def geglu(device: torch.device, scale: str) -> None:
    for way in measured(device, tokens=13056 if scale == "full" else 48, width=16384 if scale == "full" else 256):
        say("geglu", **way)


def exact(device: torch.device, dtype: torch.dtype) -> bool:
    network = built(TINY, device, dtype)
    plain, graphs = Stages(network, device), GraphStages(network, device, cameras=CAMERAS)
    worst = 0.0
    for rows, words, absent in (
        (1, 5, ()),
        (3, 20, ((1, 0), (2, 1))),
        (1, 40, ((0, 2),)),
        (4, 17, ()),
        (2, 5, ()),
        (9, 9, ()),
    ):
        inputs = observed(TINY, rows, words, seed=rows, absent=absent)
        inputs.token_mask[-1, words // 2 :] = False
        noise = noise_of(TINY, rows, device)
        gaps = [chunk(way, inputs, noise, 3) for way in (graphs, plain)]
        worst = max(worst, float((gaps[0] - gaps[1]).abs().max() / gaps[1].abs().max()))
    x = noise_of(TINY, 1, device).requires_grad_()
    inputs = observed(TINY, 1, 5, seed=1).to(device)
    with torch.no_grad():
        features = graphs.features(inputs.images[0]).unsqueeze(0)
        step = graphs.velocity(graphs.prefixes(features, inputs), list(inputs.state))
        without = step(x.detach(), torch.full((1,), 0.5, device=device)).clone()
    v = step(x, torch.full((1,), 0.5, device=device))
    (gradient,) = torch.autograd.grad(v.sum(), x)
    worst = max(worst, float((v.detach() - without).abs().max()))
    close = worst <= TOLERANCE and float(gradient.abs().max()) > 0
    lost = [str(size) for size in graphs.without_graph]
    say(
        "exact",
        dtype=str(dtype),
        worst=worst,
        gradient=float(gradient.abs().max()),
        without_graph=lost,
        good=close and not lost,
    )
    return not lost and (close or dtype != torch.float64)


def agrees(config: Pi0Config, ways: Ways, speed: Speed) -> bool:
    plain, way = ways["plain"], ways[speed]
    reference = Stages(copy.deepcopy(plain.network).float(), plain.device)  # type: ignore[attr-defined]
    good = True
    for rows in (1, 3, 16):  # 16 rows take other kernels than few
        inputs, noise = observed(config, rows, 8, seed=3), noise_of(config, rows, reference.device)
        expected = chunk(reference, inputs, noise, config.steps)
        gaps = {
            name: float((chunk(one, inputs, noise, config.steps) - expected).abs().max() / expected.abs().max())
            for name, one in (("plain", plain), (speed, way))
        }
        lost = [str(size) for size in way.without_graph] if isinstance(way, GraphStages) else []
        fine = gaps[speed] <= max(2 * gaps["plain"], 1e-5) and not lost
        say("agrees", batch=rows, relative_to_float32=gaps, without_graph=lost, good=fine)
        good = good and fine
    return good


def stages_of(config: Pi0Config, name: str, way: Stages, rows: int, repeats: int) -> None:
    noise = noise_of(config, rows, way.device)
    spent: dict[str, list[float]] = {}
    runs: list[tuple[float, int, dict[str, float]]] = []
    clocks: list[int] = []
    gc.collect()  # and what follows, as `serve` does (realtime_omni/server/run.py)
    gc.freeze()
    gc.set_threshold(10_000, *gc.get_threshold()[1:])
    for number in range(repeats + WARM):
        inputs = observed(config, rows, 8, seed=number % 4)
        wait(way.device)
        marks = Marks(way.device)
        began_s = time.perf_counter()
        chunk(way, inputs, noise, config.steps, marks)
        took_ms = (time.perf_counter() - began_s) * 1000
        mhz = clock_mhz(way.device)
        if number < WARM:
            continue
        clocks += [] if mhz is None else [mhz]
        stages = marks.milliseconds()
        stages["rest"] = took_ms - sum(stages.values())
        runs.append((took_ms, number, stages))
        for stage, ms in stages.items():
            spent.setdefault(stage, []).append(ms)
    runs.sort(key=lambda run: run[0])
    whole = [took_ms for took_ms, _, _ in runs]
    say(
        "stages",
        speed=name,
        batch=rows,
        p50_ms=round(median(whole), 2),
        p99_ms=round(whole[min(len(whole) - 1, int(0.99 * len(whole)))], 2),
        repeats=len(whole),
        stages_ms={stage: round(median(times), 2) for stage, times in spent.items()},
        sm_mhz=median(clocks) if clocks else None,
        slowest=[
            {"run": number, "ms": round(took_ms, 1), **{stage: round(ms, 1) for stage, ms in stages.items()}}
            for took_ms, number, stages in reversed(runs[-3:])
        ],
    )


@torch.no_grad()
def alone(config: Pi0Config, way: Stages, rows: int, repeats: int) -> None:
    inputs, noise = observed(config, rows, 8, seed=3).to(way.device), noise_of(config, rows, way.device)
    features = way.features(inputs.images.flatten(0, 1))
    prefixes = way.prefixes(features.view(*inputs.image_mask.shape, *features.shape[1:]), inputs)
    states, took = list(inputs.state), list[float]()
    for _ in range(repeats + 3):
        wait(way.device)
        began_s = time.perf_counter()
        denoised(way.velocity(prefixes, states), noise, config.steps, lambda stage: None)
        wait(way.device)
        took.append((time.perf_counter() - began_s) * 1000)
    say("alone", batch=rows, ten_steps_ms=round(median(took[3:]), 2), sm_mhz=clock_mhz(way.device))


class Marks:
    """Called at each stage's end; nothing waits for the device until the times are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []
        self("")

    def __call__(self, stage: str) -> None:
        if self._device.type != "cuda":
            self._marks.append((stage, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((stage, event))

    def milliseconds(self) -> dict[str, float]:
        wait(self._device)
        pairs = pairwise(self._marks)
        if self._device.type != "cuda":
            return {stage: (end - begin) * 1000 for (_, begin), (stage, end) in pairs}
        return {stage: begin.elapsed_time(end) for (_, begin), (stage, end) in pairs}


def kernels(config: Pi0Config, way: Stages, rows: int) -> None:
    if way.device.type != "cuda":
        return
    inputs, noise = observed(config, rows, 8, seed=1), noise_of(config, rows, way.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        chunk(way, inputs, noise, config.steps)
        wait(way.device)
    found = sorted(profile.key_averages(), key=lambda e: -e.device_time_total)
    rows_of = [f"{e.device_time_total / 1000:.2f} ms {e.count} x {e.key[:90]}" for e in found[:22]]
    total_ms = sum(e.device_time_total for e in found) / 1000
    say("kernels", batch=rows, total_ms=round(total_ms, 2), launches=sum(e.count for e in found), most=rows_of)


def attention(device: torch.device, rows: int) -> None:
    """Microseconds of one layer in a graph: a step's 50 queries over 880 keys, a prefix's 784 over themselves."""
    if device.type != "cuda":
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def timed(work: Callable[[], Any]) -> float:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                work()
        graph.replay()
        wait(device)
        began_s = time.perf_counter()
        for _ in range(5):
            graph.replay()
        wait(device)
        return round((time.perf_counter() - began_s) * 1e6 / 100, 1)

    def products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = torch.bmm(q, k.transpose(1, 2), out_dtype=torch.float32)
        return torch.bmm(torch.softmax(scores * 0.0625 + bias, dim=-1).to(v.dtype), v)

    def by(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    taken: dict[str, float | str] = {}
    for name, queries, keys in (("step", 400, 880), ("prefix", 784 * 8, 784)):
        q = torch.randn(rows, 1, queries, 256, device=device, dtype=torch.bfloat16)
        k, v = (torch.randn(rows, 1, keys, 256, device=device, dtype=torch.bfloat16) for _ in range(2))
        bias = torch.zeros(rows, 1, 1, keys, device=device, dtype=torch.bfloat16)
        fused = functional.scaled_dot_product_attention
        ways: dict[str, Callable[[], Any]] = {
            "flash": partial(fused, q, k, v),
            "masked": partial(fused, q, k, v, attn_mask=bias),
            "products": partial(products, q[:, 0], k[:, 0], v[:, 0], bias[:, 0]),
            "cudnn": partial(by, SDPBackend.CUDNN_ATTENTION, q, k, v, bias),
            "efficient": partial(by, SDPBackend.EFFICIENT_ATTENTION, q, k, v, bias),
        }
        for way, work in ways.items():
            try:
                taken[f"{name} {way}"] = timed(work)
            except Exception as error:
                taken[f"{name} {way}"] = str(error)[:80]
    say("attention", batch=rows, microseconds=taken)


def engine(device: torch.device, scale: str, speed: str, robots: int, chunks: int) -> None:
    settings = [f"options.scale={scale}", f"options.speed={speed}"]
    argv = ["--in-process", "--policy", "pi0-geometry", "--device", device.type, "--hz", "0", "--robots", str(robots)]
    argv += ["--chunks", str(chunks), "--dtype", "bfloat16" if device.type == "cuda" else "float32"]
    args = vla.parse([*argv, *(part for setting in settings for part in ("--set", setting))])
    began_s = time.perf_counter()
    got = asyncio.run(vla.in_process(args, load(vla.MODELS[args.policy], {}, vla.overrides(args, 0.0))))
    report = vla.report(args, got, {"ratio_to_stock": None})
    kept = {key: report[key] for key in ("valid", "wrong", "latency_ms", "stages_ms", "sum_of_stages")}
    say("engine", speed=speed, robots=robots, took_s=round(time.perf_counter() - began_s, 1), **kept)


class Ways(dict[str, Stages]):
    """The stages by speed, started when they are first asked for."""

    def __init__(self, config: Pi0Config, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(plain=Stages(built(config, device, dtype), device))

    def __missing__(self, speed: Speed) -> Stages:
        began_s, plain = time.perf_counter(), self["plain"]
        way = open_stages(copy.deepcopy(plain.network), plain.device, CAMERAS, speed)
        way.warm_up(16)
        wait(plain.device)
        say("start", speed=speed, seconds=round(time.perf_counter() - began_s, 1), one_pass=len(one_pass(way)))
        self[speed] = way
        return way


Part = tuple[str, Callable[[], Any], float]
"""Its name, what it does, and what must be left of the limit for it to begin (s)."""


def parts_of(args: argparse.Namespace) -> dict[str, list[Part]]:
    device = torch.device(args.device)
    config = Pi0Config() if args.scale == "full" else TINY
    ways = Ways(config, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    first, few = args.speeds[0], max(2, args.repeats // 10)
    chunks = {1: max(8, args.repeats)}  # of which the bench leaves five out

    def timed(speed: str, rows: int, repeats: int) -> None:
        stages_of(config, speed, ways[speed], rows, repeats)

    def without() -> None:
        with layers_without_kernel(ways[first]):
            stages_of(config, f"{first} without the kernel", ways[first], 16, args.repeats)

    return {
        "geglu": [("geglu", partial(geglu, device, args.scale), 0)],
        "exact": [(f"exact {kind}", partial(exact, device, kind), 0) for kind in (torch.float64, torch.float32)],
        "agrees": [(f"agrees {speed}", partial(agrees, config, ways, speed), 0) for speed in args.speeds],
        "stages": [
            (f"stages {speed} {rows}", partial(timed, speed, rows, args.repeats), 0)
            for speed in args.speeds
            for rows in args.batches
        ],
        "without": [("without", without, 0)],
        "alone": [(f"alone {s}", lambda s=s: alone(config, ways[s], 16, args.repeats), 0) for s in args.speeds],
        "engine": [
            (f"engine {n}", partial(engine, device, args.scale, first, n, chunks.get(n, max(8, 2 * few))), 15)
            for n in args.robots
        ],
        "kernels": [(f"kernels {n}", lambda n=n: kernels(config, ways[first], n), 10) for n in (1, 16)],
        "plain": [(f"stages plain {rows}", partial(timed, "plain", rows, few), 10) for rows in args.batches],
        "attention": [(f"attention {rows}", partial(attention, device, rows), 10) for rows in (1, 16)],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks and times pi0's captured and compiled stages.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--speeds", nargs="*", choices=("graphs", "compiled"), default=("compiled", "graphs"))
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="in this order")
    parser.add_argument("--batches", nargs="*", type=int, default=(16, 1, 4), help="of stages and plain")
    parser.add_argument("--robots", nargs="*", type=int, default=(1, 16), help="of engine")
    parser.add_argument("--limit-s", type=float, default=220.0)
    args = parser.parse_args(argv)
    began_s = time.perf_counter()
    device = torch.device(args.device)
    failed: list[str] = []
    warnings = Warnings()
    logging.getLogger("realtime_omni.models").addHandler(warnings)

    def part(name: str, work: Callable[[], Any], reserve_s: float) -> None:
        if time.perf_counter() - began_s > args.limit_s - reserve_s:
            say("skipped", name=name)
            return
        try:
            good = work() is not False
        except Exception:
            good = False
            say("failed", name=name, error=traceback.format_exc()[-1500:])
        if told := warnings.taken():
            good = False
            say("fell back", name=name, warnings=told)
        if not good:
            failed.append(name)

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    say("conditions", torch=torch.__version__, python=platform.python_version(), device=name, scale=args.scale)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    parts = parts_of(args)
    for wanted in args.parts:
        for one in parts[wanted]:
            part(*one)
    say("end", failed=failed, seconds=round(time.perf_counter() - began_s, 1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
