"""Times Moshi's real dimensions with random weights on a CUDA machine, each part in a process of its own. Prints JSON lines.

    PYTHONPATH=. python recipes/gpu/moshi_speed.py [--limit-s 260]                          (under five minutes on one H200)
    PYTHONPATH=. python recipes/gpu/moshi_speed.py --device cpu --scale tiny --ticks 4      (its own test)

``attention``  one layer of one step over full windows, in several ways: microseconds, share of the memory's speed, error.
``geometry``   ``bench.moshi_geometry``: a tick in CUDA graphs, for numbers of calls and depths.
``serving``    the served model on pages, as an engine's batch runs it: windows full of keys, codec's pasts too.

Exit status 0: every part ran and was valid. A part whose memory or time is not enough is one line, and the next part runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from realtime_omni.bench import moshi_geometry, moshi_static
from realtime_omni.bench.conditions import summary
from realtime_omni.bench.moshi_geometry import SCALES, draw_weights
from realtime_omni.kv.attention import AttentionPlan, RowPlan, open_backend
from realtime_omni.kv.manager import KVBook
from realtime_omni.kv.storage import KVStorage
from realtime_omni.models.base import RowOutput, SessionSetup, StepRow
from realtime_omni.models.moshi.codec import SEGMENT, CodecState
from realtime_omni.models.moshi.mimi import Mimi
from realtime_omni.models.moshi.model import Moshi, Settings
from realtime_omni.models.moshi.network import MoshiLM
from realtime_omni.session.frame import Frame
from realtime_omni.session.values import ChunkIndex, SessionId, TickRequest

PARTS = (
    "geometry 64 8",
    "geometry 64 16",
    "attention 64",
    "geometry 76 8",
    "geometry 32 8",
    "geometry 64 8 default",
    "serving 1 sdpa",
    "serving 8 sdpa",
    "serving 32 sdpa",
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
        moshi_static.captured(lambda: into.copy_(work()))()  # type: ignore[arg-type,func-returns-value]
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


class Batch:
    """What the engine's batch is to a model: rows, their attention, and who is active (all)."""

    def __init__(self, rows: Sequence[StepRow], plan: AttentionPlan) -> None:
        self.rows = rows
        self._plan = plan
        self.active = tuple(range(len(rows)))

    def row(self, number: int) -> StepRow:
        return self.rows[number]

    def attention(self, branch: str | None = None) -> AttentionPlan:
        return self._plan


def in_the_middle(side: CodecState, frames: int, codec: Any, generator: torch.Generator) -> CodecState:
    """A codec that has seen so many frames."""
    segments, recent = CodecState.parts(frames, codec)

    def drawn(count: int) -> Tensor:
        shape = (codec.layers, 2, count * codec.per_frame, codec.heads, codec.head_dim)
        return torch.randn(shape, generator=generator, device=generator.device)

    parts = tuple(drawn(SEGMENT) for _ in range(segments)), tuple(drawn(1) for _ in range(recent))
    return CodecState(frames, side.memory, *parts)


def serving(args: argparse.Namespace, calls: int, backend: str) -> bool:
    """Ticks of :class:`Moshi` on pages, with the books of an engine's batch around them."""
    config, codec = SCALES[args.scale]
    with torch.device("meta"):
        lm, mimi = MoshiLM(config), Mimi(codec, config.own_streams)
    kind = getattr(torch, args.dtype)
    draw_weights(lm, kind, args.device, 1)
    draw_weights(mimi, torch.float32, args.device, 2)
    model = Moshi(lm, mimi, Words(), Settings(), device=args.device)
    spec = replace(model.spec.kv, max_in_flight=calls, dtype_bytes=kind.itemsize)
    book = KVBook(spec, sessions=calls)
    storage = KVStorage(spec, spec.managed_pages(calls) + spec.scratch_pages, device=args.device, dtype=kind)
    generator = torch.Generator(args.device).manual_seed(3)
    for pool in (*storage.k, *storage.v):
        pool.normal_(generator=generator)
    attend = open_backend(backend, device=args.device)
    states, frames = [], config.context + 5
    for call in range(calls):
        session = SessionId(str(call))
        book.restore(session, frames, [range(frames - config.context, frames)])
        state = model.open(SessionSetup(session, None, call))
        ears, mouth = (in_the_middle(side, frames, codec, generator) for side in (state.ears, state.mouth))
        ring = torch.zeros_like(state.ring)
        states.append(replace(state, ring=ring, ears=ears, mouth=mouth))
    sound = (0.1 * np.random.default_rng(4).standard_normal(codec.frame_samples)).astype(np.float32)
    wait: Callable[[], object] = torch.cuda.synchronize if args.device.startswith("cuda") else int
    times_ms: list[float] = []
    stages: dict[str, list[float]] = {}
    ended_s = time.perf_counter() + args.serving_s
    for number in range(3 + args.ticks):
        if number > 5 and time.perf_counter() > ended_s:
            break
        wait()
        began_s = stage_s = time.perf_counter()
        reservations = [book.plan_block(SessionId(str(call))) for call in range(calls)]
        rows = []
        for call, reservation in enumerate(reservations):
            index = ChunkIndex(frames + number)
            tick = TickRequest(
                SessionId(str(call)), "", index, (), None, (), frame=Frame(np.roll(sound, number + call))
            )
            rows.append(StepRow(tick, states[call], call, reservation.first_frame, ("speech",)))
        paged = attend.plan([RowPlan.of(reservation.branches[0]) for reservation in reservations], storage)
        step, name = model.step(Batch(rows, paged)), "plan"  # type: ignore[arg-type]
        outputs: dict[int, RowOutput | Exception] = {}
        while True:
            try:
                checkpoint = next(step)
            except StopIteration as stop:
                outputs = stop.value
                wait()
                stages.setdefault(name, []).append((time.perf_counter() - stage_s) * 1000)
                break
            wait()
            stages.setdefault(name, []).append((time.perf_counter() - stage_s) * 1000)
            name, stage_s = checkpoint.stage, time.perf_counter()
        paged.close()
        for call, reservation in enumerate(reservations):
            output = outputs[call]
            assert isinstance(output, RowOutput)
            book.commit(reservation)
            states[call] = output.next_state
        if number >= 3:
            times_ms.append((time.perf_counter() - began_s) * 1000)
    good = all(bool(np.isfinite(output.artifacts[0].data).all()) for output in outputs.values())  # type: ignore[union-attr]
    say(
        "serving",
        backend=backend,
        calls=calls,
        valid=good,
        tick_ms={**summary(times_ms, 0.5, 0.99), "max": round(max(times_ms), 2), "ticks": len(times_ms)},
        stages_ms={stage: summary(times[3:], 0.5)["p50"] for stage, times in stages.items()},
        memory_gib=round(torch.cuda.max_memory_allocated() / 2**30, 1) if args.device.startswith("cuda") else None,
    )
    return good


def one(args: argparse.Namespace) -> int:
    """One part, in this process."""
    kind, *rest = args.part.split()
    try:
        if kind == "attention":
            return int(not attention(args, int(rest[0])))
        if kind == "geometry":
            return int(not geometry(args, int(rest[0]), int(rest[1]), (*rest, "static")[2]))
        return int(not serving(args, int(rest[0]), rest[1]))
    except Exception:
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
