"""``realtime-omni bench duplex``: many calls at the pace of speech. Over the Live protocol, or in process.

Starts the real server in a process of its own and the callers of :mod:`realtime_omni.bench.callers` in another; with
``--in-process`` the calls are driven inside this one, without sockets. A run in which a call got another amount of sound than
it sent, or an error, is not valid.

Definitions (milliseconds):

- ``tick_lateness_ms``: over sockets, how much later than its pace a piece of sound came, measured against the earliest of the
  last four seconds; in process, from the instant of the calls' clock to the tick being told.
- ``first_audio_ms``: from the last sample of the caller's turn to the first sound of the answer, the model's own wait for the
  end of the turn included (the puppet: 500 ms of silence). Only with ``--talk``.
- ``barge_in_stop_ms``: from the first sample of the caller's voice over the agent's to the last sound of the agent's.
- ``gaps``: pieces that came more than two frames after the one before.
- ``rtf``: processor time of the server (in process: of everything) per second and call.
- ``rss_mb_per_call``: what the server's resident memory grew by over the run, divided by the calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from realtime_omni.bench.arguments import count, number
from realtime_omni.bench.callers import recording
from realtime_omni.bench.conditions import commit, hardware, software, summary
from realtime_omni.bench.world import clients, server
from realtime_omni.call import Call, Calls
from realtime_omni.config import load
from realtime_omni.manager import SessionManager
from realtime_omni.session.frame import Configure, Turns

WARM_FRAMES = 25
"""Two seconds: every call has begun."""
FRAME_S = 0.08


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has used, from ``/proc``."""

    cpu_s: float
    rss_mb: float

    @classmethod
    def of(cls, pid: int) -> Usage:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return cls(ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20)

    def since(self, pid: int, calls: int, seconds: float) -> dict[str, float]:
        now = Usage.of(pid)
        return {
            "rtf": round((now.cpu_s - self.cpu_s) / (calls * seconds), 5),
            "rss_mb_per_call": round((now.rss_mb - self.rss_mb) / calls, 3),
        }


async def in_process(args: argparse.Namespace) -> dict[str, Any]:
    """Calls that listen, and a puppet that listens: what the calls' clock, the engine and the model cost."""
    config = load(args.model, os.environ, args.set)
    async with SessionManager(config=config) as manager, Calls(manager) as calls:
        opened = [await calls.open() for _ in range(args.calls)]
        for call in opened:
            call.direct(Configure(turns=Turns(mode="client")))
        frame_s = calls.spec.frame_ms / 1000
        used = Usage.of(os.getpid())
        async with asyncio.TaskGroup() as group:
            for number, call in enumerate(opened):
                group.create_task(_send(call, args.frames, frame_s * number / args.calls))
            await asyncio.sleep(WARM_FRAMES * frame_s)
            calls.lateness_ms = []
            before, began_s = manager.statistics(), time.perf_counter()
        after, spent_s = manager.statistics(), time.perf_counter() - began_s
        ticks = [call.duplex.settled_frames for call in opened]
        cost = used.since(os.getpid(), args.calls, args.frames * frame_s)
    wrong = [f"{args.frames} frames became {n} ticks" for n in ticks if abs(n - args.frames) > 3][:3]
    return {
        "valid": not wrong,
        "wrong": wrong,
        "calls": args.calls,
        "tick_lateness_ms": summary(calls.lateness_ms, 0.5, 0.99),
        "ticks_per_s": round((after.chunks_committed - before.chunks_committed) / spent_s, 1),
        "mean_batch": round(after.mean_batch, 2),
        **cost,
    }


async def _send(call: Call, frames: int, phase_s: float) -> None:
    silence = np.zeros(call.spec.input_samples, np.float32)
    due_s = time.perf_counter() + phase_s
    for _ in range(frames):
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        call.append(silence)
        due_s += call.spec.frame_ms / 1000


async def over_sockets(args: argparse.Namespace) -> dict[str, Any]:
    """The whole way: sockets, JSON, base64, resampling."""
    with server(args) as (url, pid, _):
        command = [sys.executable, "-m", "realtime_omni.bench.callers"]
        command += ["--url", f"ws://{url}/v1/live/sessions", "--calls", str(args.calls)]
        command += ["--frames", str(args.frames), "--warm", str(WARM_FRAMES), *(["--talk"] if args.talk else [])]
        command += ["--speech", *args.speech] if args.speech else []
        used = Usage.of(pid)
        record = json.loads(await clients(command))
        cost = used.since(pid, args.calls, args.frames * FRAME_S)
    wrong = record["wrong"][:3] + ([] if record["frames"] else ["nothing was measured"])
    return {
        "valid": not wrong,
        "wrong": wrong,
        "calls": args.calls,
        "tick_lateness_ms": summary(record["lateness_ms"], 0.5, 0.99),
        "first_audio_ms": summary(record["first_audio_ms"], 0.5, 0.95),
        "barge_in_stop_ms": summary(record["barge_in_stop_ms"], 0.5, 0.95),
        "turns": record["turns"],
        "gaps": record["gaps"],
        **cost,
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="realtime-omni bench duplex", description="Many calls at the pace of speech.")
    parser.add_argument("--model", default="puppet", help="a recipe or a duplex model")
    parser.add_argument("--calls", type=count(), default=10)
    parser.add_argument("--seconds", type=number(), default=20.0)
    parser.add_argument("--talk", action="store_true", help="callers speak and interrupt; else they only listen")
    parser.add_argument("--speech", nargs="*", default=[], metavar="WAV", help="what callers say, instead of a tone")
    parser.add_argument("--in-process", action="store_true", help="no sockets: the calls' clock and the engine alone")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    args = parser.parse_args(argv)
    if args.in_process and (args.talk or args.speech):
        parser.error("--talk and --speech are for calls over sockets; in process they only listen")
    for path in args.speech:
        recording(path)  # before a server is started
    args.sessions = args.calls
    args.frames = round(args.seconds * 12.5) + WARM_FRAMES
    return args


def main(argv: Sequence[str]) -> int:
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--model", default="")
    known, rest = model.parse_known_args(argv)
    if known.model == "moshi-geometry":  # no server: the networks alone, in buffers of fixed size
        from realtime_omni.bench import moshi_geometry

        return moshi_geometry.main(rest)
    args = parse(argv)
    result = asyncio.run(in_process(args) if args.in_process else over_sockets(args))
    conditions = {
        "commit": commit(),
        "hardware": hardware(),
        "software": software(),
        "config": {"model": args.model, "set": args.set},
        "workload": {
            "seconds": args.seconds,
            "talk": args.talk,
            "where": "in process" if args.in_process else "Live over loopback, callers in a process of their own",
        },
    }
    result = {"conditions": conditions, **result}
    print(json.dumps(result, indent=2) if args.json else "\n".join(f"{k}: {json.dumps(v)}" for k, v in result.items()))
    return 0 if result["valid"] else 1
