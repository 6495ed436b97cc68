"""Times Moshi's real dimensions with random weights on a CUDA machine, each part in a process of its own. Prints JSON lines.

    PYTHONPATH=. python recipes/gpu/moshi_speed.py [--limit-s 260]                          (under five minutes on one H200)
    PYTHONPATH=. python recipes/gpu/moshi_speed.py --device cpu --scale tiny --ticks 4      (its own test)

``attention``  one layer of one step over full windows, in several ways: microseconds, share of the memory's speed, error.
``geometry``   ``bench.moshi_geometry``: a tick in CUDA graphs, for numbers of calls and depths.
``paged``      one layer of one step over pages where they lie: the kernel of ``kv.attention.decode``.
``agrees``     captured stages say what plain ones say, greedy, with calls that join, leave and go back.
``prompted``   calls that begin with a voice's prompt, graphs and plain: milliseconds of a step of all of them; and, greedy in
               float32 with two layers, whether what they say then is the same.
``served``     the served model as an engine runs it, through its runner: windows full of keys, codec's pasts too.

Exit status 0: every part ran and was valid. A part whose memory or time is not enough is one line, and the next part runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from realtime_omni.bench import moshi_geometry, moshi_static
from realtime_omni.bench.conditions import summary
from realtime_omni.bench.moshi_geometry import SCALES, draw_weights
from realtime_omni.engine.batch import BatchRun
from realtime_omni.engine.consumer import PlannedRow
from realtime_omni.engine.runner import ModelRunner
from realtime_omni.kv.attention import decode, open_backend
from realtime_omni.kv.manager import KVBook
from realtime_omni.kv.storage import KVStorage
from realtime_omni.models.base import RowOutput, SessionSetup
from realtime_omni.models.common.capture import Capture
from realtime_omni.models.moshi.codec import SEGMENT, CodecState
from realtime_omni.models.moshi.config import LMConfig
from realtime_omni.models.moshi.mimi import Mimi
from realtime_omni.models.moshi.model import Moshi, Settings
from realtime_omni.models.moshi.network import MoshiLM
from realtime_omni.models.moshi.prompts import PromptCodes, Voice
from realtime_omni.models.moshi.sampling import Chance
from realtime_omni.models.moshi.state import Facts
from realtime_omni.session.frame import Frame
from realtime_omni.session.values import ChunkIndex, SessionId, TickRequest

PARTS = (
    "geometry 64 8",
    "geometry 64 16",
    "attention 64",
    "geometry 76 8",
    "geometry 32 8",
    "geometry 64 8 default",
    "paged 64",
    "agrees",
    "served 8 graphs",
    "served 64 graphs",
    "served 32 graphs",
    "served 8 plain",
    "prompted 16",
)
H200_BYTES_PER_S = 4.8e12
START_S = 25.0
"""Of a part: importing torch, drawing weights, capturing."""


def say(part: str, **what: Any) -> None:
    print(json.dumps({"part": part, **what}), flush=True)


# -- attention ---------------------------------------------------------------------------------------------------------


def by(backend: SDPBackend, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, keys, values)


def default(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    return scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def flexible() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)  # type: ignore[no-any-return]


def attention(args: argparse.Namespace, calls: int) -> bool:
    """One query per call and head, as a tick has it."""
    config, _ = SCALES[args.scale]
    shape = (calls, config.num_heads, config.context, config.head_dim)
    kind = getattr(torch, args.dtype)
    generator = torch.Generator(args.device).manual_seed(1)
    q = torch.randn(*shape[:2], 1, shape[3], device=args.device, generator=generator).to(kind)
    keys, values = (torch.empty(shape, dtype=kind, device=args.device).normal_(generator=generator) for _ in range(2))
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "static": partial(moshi_static.attention, mask=None),
        "default": default,
        "flash": partial(by, SDPBackend.FLASH_ATTENTION),
        "efficient": partial(by, SDPBackend.EFFICIENT_ATTENTION),
        "cudnn": partial(by, SDPBackend.CUDNN_ATTENTION),
        "math": partial(by, SDPBackend.MATH),
        "flex": flexible(),
    }
    some = slice(0, 2)  # calls; the whole in float32 would not fit
    expected = scaled_dot_product_attention(q[some].float(), keys[some].float(), values[some].float())
    read_s = 2 * keys.nbytes / H200_BYTES_PER_S
    for name, way in ways.items():
        try:
            if name == "flex" and args.device == "cpu":
                continue
            gap = float((way(q, keys, values)[some].float() - expected).abs().max() / expected.abs().max())
            taken_s = timed(partial(way, q, keys, values), args.device)
            told = {"us": round(taken_s * 1e6, 1), "of_memory": round(read_s / taken_s, 2), "error": gap}
            say(f"attention {name}", **told, **repeatable(partial(way, q, keys, values), args.device))
        except Exception as error:
            say(f"attention {name}", error=str(error)[:200])
    return True


def repeatable(work: Callable[[], Tensor], device: str) -> dict[str, bool]:
    """Whether a second run gives the same bits, and one in a graph."""
    first = work()
    found = {"same_again": torch.equal(first, work())}
    if device.startswith("cuda"):
        into = torch.empty_like(first)
        Capture(first.device)(lambda: into.copy_(work()))()  # type: ignore[arg-type,func-returns-value]
        found["same_in_a_graph"] = torch.equal(first, into)
    return found


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds of one run, the least of five."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else int
    taken: list[float] = []
    for _ in range(6):
        wait()
        began_s = time.perf_counter()
        for _ in range(5):
            work()
        wait()
        taken.append((time.perf_counter() - began_s) / 5)
    return min(taken[1:])


# -- geometry ----------------------------------------------------------------------------------------------------------


def geometry(args: argparse.Namespace, calls: int, depth: int, way: str) -> bool:
    if way == "default":
        moshi_static.attention = default
    depth = min(depth, SCALES[args.scale][0].n_q)
    argv = ["--scale", args.scale, "--calls", str(calls), "--depth", str(depth), "--device", args.device]
    settings = moshi_geometry.parse([*argv, "--dtype", args.dtype, "--ticks", str(args.ticks)])
    result = moshi_geometry.measure(settings)
    conditions = result.pop("conditions")
    say("geometry", depth=depth, way=way, **result, device=conditions["hardware"]["device"], torch=torch.__version__)
    return bool(result["valid"])


# -- the served model --------------------------------------------------------------------------------------------------


class Words:
    """Stands in for a vocabulary: random weights mean nothing."""

    def text(self, token: int) -> str:
        return f" {token}"

    def tokens(self, text: str) -> list[int]:
        return [1]


def in_the_middle(side: CodecState, frames: int, codec: Any, generator: torch.Generator) -> CodecState:
    """A codec that has seen so many frames."""
    segments, recent = CodecState.parts(frames, codec)

    def drawn(count: int) -> Tensor:
        shape = (codec.layers, 2, count * codec.per_frame, codec.heads, codec.head_dim)
        return torch.randn(shape, generator=generator, device=generator.device)

    parts = tuple(drawn(SEGMENT) for _ in range(segments)), tuple(drawn(1) for _ in range(recent))
    return CodecState(frames, side.memory, *parts)


def served(args: argparse.Namespace, calls: int, speed: str) -> bool:
    """Ticks of :class:`Moshi` as an engine runs them: its runner, books, pages and accounts; windows full, rewinds kept."""
    config, codec = SCALES[args.scale]
    kind = getattr(torch, args.dtype)
    model = random_model(args, config, Settings(), calls if speed == "graphs" else None, kind)
    runner = random_runner(args, model, calls, kind)
    generator = torch.Generator(args.device).manual_seed(3)
    for pool in (*runner.storage.k, *runner.storage.v):
        pool.normal_(generator=generator)
    frames = config.context + 5
    for call in range(calls):
        session = SessionId(str(call))
        runner.open(SessionSetup(session, None, call))
        runner.book.end(session)
        runner.book.restore(session, frames, [range(frames - config.context, frames)])
        resident = runner.resident(session)
        ears, mouth = (
            in_the_middle(side, frames, codec, generator) for side in (resident.state.ears, resident.state.mouth)
        )
        resident.state = replace(resident.state, ring=torch.zeros_like(resident.state.ring), ears=ears, mouth=mouth)
        resident.own = runner.measured(resident.state)
        runner.count(resident)
    gc.collect()  # and what follows, as `serve` does (realtime_omni/server/run.py, which needs a web framework)
    gc.freeze()
    gc.set_threshold(10_000, *gc.get_threshold()[1:])
    sound = (0.1 * np.random.default_rng(4).standard_normal(codec.frame_samples)).astype(np.float32)
    wait: Callable[[], object] = torch.cuda.synchronize if args.device.startswith("cuda") else int
    times_ms: list[float] = []
    stages: dict[str, list[float]] = {}
    good = True
    ended_s = time.perf_counter() + args.serving_s
    for number in range(WARM + args.ticks):
        if number > WARM + 5 and time.perf_counter() > ended_s:
            break
        wait()
        began_s = time.perf_counter()
        spent = tick(runner, range(calls), frames + number, lambda call, n=number: np.roll(sound, n + call), wait)
        if number >= WARM:
            times_ms.append((time.perf_counter() - began_s) * 1000)
            for stage, spent_s in spent.items():
                stages.setdefault(stage, []).append(spent_s * 1000)
        good &= all(bool(np.isfinite(heard(runner, call)).all()) for call in range(calls))
        if number < WARM:
            ended_s = time.perf_counter() + args.serving_s
    say(
        "served",
        speed=speed,
        calls=calls,
        valid=good,
        tick_ms={**summary(times_ms, 0.5, 0.99), "max": round(max(times_ms), 2), "ticks": len(times_ms)},
        stages_ms={stage: summary(times, 0.5)["p50"] for stage, times in stages.items()},
        memory_gib=round(torch.cuda.max_memory_allocated() / 2**30, 1) if args.device.startswith("cuda") else None,
    )
    return good


WARM = 6


def random_model(
    args: argparse.Namespace, config: LMConfig, settings: Settings, captured: int | None, kind: torch.dtype
) -> Moshi:
    codec = SCALES[args.scale][1]
    with torch.device("meta"):
        lm, mimi = MoshiLM(config), Mimi(codec, config.own_streams)
    draw_weights(lm, kind, args.device, 1)
    draw_weights(mimi, torch.float32, args.device, 2)
    return Moshi(lm, mimi, Words(), settings, device=args.device, captured_rows=captured)


def random_runner(args: argparse.Namespace, model: Moshi, calls: int, kind: torch.dtype) -> ModelRunner:
    rewinds = 25 if args.scale == "full" else 3
    kv = model.spec.kv
    owned = kv.model_owned_bytes_per_session + rewinds * (model.spec.past_state_bytes or 0)
    spec = replace(
        kv, max_in_flight=calls, dtype_bytes=kind.itemsize, rewind_blocks=rewinds, model_owned_bytes_per_session=owned
    )
    storage = KVStorage(spec, spec.managed_pages(calls) + spec.scratch_pages, device=args.device, dtype=kind)
    backend = open_backend("sdpa", device=args.device)
    synchronize = torch.cuda.synchronize if args.device.startswith("cuda") else None
    began_s = time.perf_counter()
    model.warm_up(storage)
    if synchronize is not None:
        synchronize()
        print(f"captured in {time.perf_counter() - began_s:.1f} s", file=sys.stderr, flush=True)
    return ModelRunner(model, KVBook(spec, sessions=calls), storage, backend, synchronize=synchronize)


def tick(
    runner: ModelRunner,
    calls: Iterable[int],
    index: int,
    sound: Callable[[int], np.ndarray],
    wait: Callable[[], object] = int,
) -> dict[str, float]:
    """One committed tick of these calls; seconds of every stage."""
    rows = []
    for call in calls:
        request = TickRequest(
            SessionId(str(call)), "", ChunkIndex(index), (), None, (), frame=Frame(np.ascontiguousarray(sound(call)))
        )
        rows.append(PlannedRow(request, ("speech",)))
    spent, began_s = dict[str, float](), time.perf_counter()

    def stage(name: str) -> None:
        nonlocal began_s
        wait()
        spent[name] = time.perf_counter() - began_s
        began_s = time.perf_counter()

    run, last = runner.plan(rows), ""
    stage("plan")
    while True:
        going, name = run.advance(), run.stage
        if not going:
            stage(last)
            break
        if name != "listen":
            stage(last)
        last = name  # what runs from here to the next checkpoint
    for row in range(len(rows)):
        outcome = run.outcome(row)
        if isinstance(outcome, Exception):
            raise outcome
        SAID[rows[row].tick.session_id] = outcome
        run.precommit(row)
        run.commit(row)
    stage("settle")
    return spent


SAID: dict[SessionId, RowOutput] = {}


def heard(runner: ModelRunner, call: int) -> np.ndarray:
    return np.asarray(SAID[SessionId(str(call))].artifacts[0].data)


# -- do graphs say what plain stages say? ------------------------------------------------------------------------------


def agrees(args: argparse.Namespace) -> bool:
    """Greedy, in float32, at the real widths with two layers and a short window: calls that join, leave and go back say the
    same tokens with captured stages as with plain ones."""
    torch.backends.cudnn.allow_tf32 = False  # codes of batches of other sizes would differ
    full, _ = SCALES[args.scale]
    config = msgspec.structs.replace(full, num_layers=2, context=min(full.context, 12))
    greedy = Settings(Chance(0.0, 0), Chance(0.0, 0))
    rings: dict[str, list[list[int]]] = {}
    for speed in ("plain", "graphs"):
        model = random_model(args, config, greedy, 4 if speed == "graphs" else None, torch.float32)
        runner = random_runner(args, model, 4, torch.float32)
        for call in range(4):
            runner.open(SessionSetup(SessionId(str(call)), None, call))
        made: list[list[int]] = []
        counts = [0] * 4
        for number in range(30):
            due = [call for call in range(4) if number >= 3 * call and (number + call) % 5]
            if number == 17:
                runner.rewind(SessionId("0"), counts[0] - 2)
                counts[0] -= 2
            for group in (due[:1], due[1:]) if number % 2 else (due,):
                for call in group:  # calls stand at different frames: each is a tick of its own number
                    counts[call] += 1
                if group:
                    numbers = {call: counts[call] - 1 for call in group}
                    ticks(runner, numbers, number)
            made.append(
                [int(t) for call in range(4) for t in runner.resident(SessionId(str(call))).state.ring.flatten()]
            )
        rings[speed] = made
        del model, runner
    same = [a == b for a, b in zip(rings["plain"], rings["graphs"], strict=True)]
    first = same.index(False) if False in same else None
    each = len(rings["plain"][0]) // 4
    by_call = [
        [
            a[call * each :][:each] == b[call * each :][:each]
            for a, b in zip(rings["plain"], rings["graphs"], strict=True)
        ]
        for call in range(4)
    ]
    say("agrees", ticks=len(same), equal=sum(same), first_other=first, equal_of_call=[sum(ticks) for ticks in by_call])
    return all(same)


def ticks(runner: ModelRunner, numbers: Mapping[int, int], seed: int) -> None:
    """One tick of calls at frames of their own."""
    samples = runner.model.spec.duplex.output_samples  # type: ignore[union-attr]
    rows = []
    for call, index in numbers.items():
        sound = (0.1 * np.random.default_rng((call, index)).standard_normal(samples)).astype(np.float32)
        request = TickRequest(SessionId(str(call)), "", ChunkIndex(index), (), None, (), frame=Frame(sound))
        rows.append(PlannedRow(request, ("speech",)))
    settled(runner.plan(rows), len(rows))


def settled(run: BatchRun, rows: int) -> None:
    while run.advance():
        pass
    for row in range(rows):
        outcome = run.outcome(row)
        if isinstance(outcome, Exception):
            raise outcome
        run.precommit(row)
        run.commit(row)


def prompted(args: argparse.Namespace, calls: int) -> bool:
    torch.backends.cudnn.allow_tf32 = False
    full = SCALES[args.scale][0]
    config = msgspec.structs.replace(full, dep_q=2 * full.own_streams)  # a PersonaPlex
    shallow = msgspec.structs.replace(config, num_layers=2, context=min(full.context, 64))
    greedy = Settings(
        Chance(0.0, 0), Chance(0.0, 0), codes=PromptCodes((1,) * full.own_streams, (2,) * full.own_streams)
    )
    told: dict[str, Any] = {}
    rings: list[list[int]] = []
    for size, kind in ((shallow, torch.float32), (config, getattr(torch, args.dtype))):
        for speed in ("plain", "graphs"):
            model = random_model(args, size, greedy, calls if speed == "graphs" else None, kind)
            step_ms, ring = begun(args, model, calls, kind)
            if size is config:
                told[f"{speed}_step_ms"] = step_ms
            else:
                rings.append(ring)
            del model
    say("prompted", calls=calls, **told, equal=rings[0] == rings[1])
    return rings[0] == rings[1]


def begun(args: argparse.Namespace, model: Moshi, calls: int, kind: torch.dtype) -> tuple[float, list[int]]:
    """Milliseconds of a prompt's step, and what the calls' streams hold after three frames more."""
    steps = 40
    codes = torch.arange(steps * model.lm.config.own_streams) % model.lm.config.card
    model._voices["one"] = Voice(None, codes.view(steps, -1))
    runner = random_runner(args, model, calls, kind)
    for call in range(calls):
        runner.open(SessionSetup(SessionId(str(call)), None, call))
        resident = runner.resident(SessionId(str(call)))
        resident.state = replace(resident.state, facts=Facts(voice="one", begun=True))
        resident.needs_prefill = True
        resident.own = runner.measured(resident.state)
        runner.count(resident)
    took: list[float] = []
    for _ in range(steps):
        began_s = time.perf_counter()
        prefilled(runner, calls)
        took.append((time.perf_counter() - began_s) * 1000)
    for frame in range(3):
        while runner.resident(SessionId("0")).needs_prefill:
            prefilled(runner, calls)
        ticks(runner, dict.fromkeys(range(calls), frame), frame)
    states = [runner.resident(SessionId(str(call))).state.ring for call in range(calls)]
    return round(statistics.median(took[5:]), 2), torch.stack(states).flatten().tolist()


def prefilled(runner: ModelRunner, calls: int) -> None:
    """One step of every call's prompt."""
    requests = [TickRequest(SessionId(str(call)), "", ChunkIndex(0), (), None, ()) for call in range(calls)]
    settled(runner.prefill([PlannedRow(request, ()) for request in requests]), calls)


# -- keys and values on pages ------------------------------------------------------------------------------------------


def paged(args: argparse.Namespace, calls: int) -> bool:
    """One layer's attention of one step over pages in any order: error, microseconds, share of the memory's speed."""
    config, _ = SCALES[args.scale]
    kind, window = getattr(torch, args.dtype), config.context
    generator = torch.Generator(args.device).manual_seed(1)
    shape = (calls * window + 1, config.num_heads, config.head_dim)
    keys, values = (torch.empty(shape, dtype=kind, device=args.device).normal_(generator=generator) for _ in range(2))
    q = torch.randn(calls, *shape[1:], device=args.device, generator=generator).to(kind)
    table = (1 + torch.randperm(calls * window, device=args.device, generator=generator)).int().view(calls, window)
    lengths = torch.full((calls,), window, dtype=torch.int32, device=args.device)
    lengths[0] = min(7, window)
    some = slice(0, 2)
    expected = decode.gathered(q[some].float(), keys.float(), values.float(), table[some], lengths[some])
    work = partial(decode.attention, q, keys, values, table, lengths)
    gap = float((work()[some].float() - expected).abs().max() / expected.abs().max())
    taken_s = timed(work, args.device)
    read = 2 * int(lengths.sum()) * keys[0].nbytes / H200_BYTES_PER_S
    told = {"us": round(taken_s * 1e6, 1), "of_memory": round(read / taken_s, 2), "error": gap}
    in_order = partial(decode.attention, q, keys, values, table.flatten().sort().values.view(calls, window), lengths)
    told["us_in_order"] = round(timed(in_order, args.device) * 1e6, 1)
    say("paged", calls=calls, **told, **repeatable(work, args.device))
    if args.device.startswith("cuda"):
        from realtime_omni.kv.attention import decode_kernel

        for tile, warps in ((16, 2), (16, 4), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8)):
            decode_kernel.TILE, decode_kernel.WARPS = tile, warps
            taken_s = timed(work, args.device)
            say("paged size", tile=tile, warps=warps, us=round(taken_s * 1e6, 1), of_memory=round(read / taken_s, 2))
    return gap < 0.02


def one(args: argparse.Namespace) -> int:
    """One part, in this process."""
    kind, *rest = args.part.split()
    try:
        if kind == "attention":
            return int(not attention(args, int(rest[0])))
        if kind == "geometry":
            return int(not geometry(args, int(rest[0]), int(rest[1]), (*rest, "static")[2]))
        if kind == "paged":
            return int(not paged(args, int(rest[0])))
        if kind == "prompted":
            return int(not prompted(args, int(rest[0])))
        if kind == "agrees":
            return int(not agrees(args))
        return int(not served(args, int(rest[0]), rest[1]))
    except Exception:
        traceback.print_exc()
        say(args.part, failed=traceback.format_exc()[-1200:])
        return 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Times Moshi's real dimensions on a GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", choices=sorted(SCALES), default="full")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--ticks", type=int, default=300)
    parser.add_argument("--serving-s", type=float, default=8.0, help="of ticks in a serving part, at most")
    parser.add_argument("--parts", nargs="*", default=PARTS)
    parser.add_argument("--part", help="run this one here")
    parser.add_argument("--limit-s", type=float, default=260.0)
    args = parser.parse_args(argv)
    if args.part:
        return one(args)
    began_s, failed = time.perf_counter(), list[str]()
    given = sys.argv[1:] if argv is None else list(argv)
    for part in args.parts:
        left_s = args.limit_s - (time.perf_counter() - began_s)
        if left_s < START_S:
            say("skipped", name=part)
            continue
        try:
            run = subprocess.run([sys.executable, __file__, *given, "--part", part], timeout=left_s, check=False)
            if run.returncode:
                failed.append(part)
        except subprocess.TimeoutExpired:
            failed.append(part)
            say("failed", name=part, error="no time left")
    say("end", failed=failed, seconds=round(time.perf_counter() - began_s, 1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
