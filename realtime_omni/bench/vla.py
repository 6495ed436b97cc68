"""``realtime-omni bench vla``: robots at a fixed rate against the policy endpoint, and beside openpi's own server.

Starts the real server in a process of its own and lets robots send three 224 x 224 pictures and a state (tiny-policy's two
of 96 x 96), as openpi's client does; ``--in-process`` leaves sockets out. Chunks are checked first: when anything was wrong,
``valid`` is false and says what. A robot waits for its answer, so a policy that is slower than ``--hz`` gets the newest
observation there is, and never a queue of old ones.

Definitions (milliseconds):

- ``latency_ms``: from when an observation was due to its chunk unpacked; an observation that waits for the one before is
  counted from when it was due.
- ``deadline_misses``: observations without a chunk within one period after they were due.
- ``skipped``: those of them that were not even sent, since a newer one was due when the answer before came.
- ``stages_ms``: p50 of each: ``client`` packs and unpacks; ``wire`` is what is left of the way there and back beside the
  server's own stages, which are as it reports them (``queue``, ``decode``, ``images``, ``prefix``, ``denoise``, ``encode``).
  ``send`` hands the reply to the socket, while the client begins to read: a part of the server's total, and of ``wire``.
- ``sum_of_stages``: the server's stages of a call over the total that it measured of the same call, p50; ``valid`` needs it
  within 5 %, or 0.2 ms where a call takes hardly longer. In process: the model's stages and the wait over the time of the call.
- ``ratio_to_stock``: one robot, the null policy without a pause: p50 of our round trip over that of openpi's server, both
  alive in one run and asked in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from realtime_omni.bench import stock
from realtime_omni.bench.arguments import count, number
from realtime_omni.bench.conditions import commit, hardware, percentile, software, summary
from realtime_omni.bench.robots import (
    PICTURES,
    PROMPT,
    SERVER_STAGES,
    TABLETOP,
    THREE_CAMERAS,
    Answer,
    Ask,
    Load,
    Robot,
    Sockets,
    drive,
    pictures,
    state_of,
)
from realtime_omni.config import Config, load
from realtime_omni.manager import Session, SessionManager
from realtime_omni.session.observation import Observation

MODELS = {
    "null": "null-policy",
    "tiny-policy": "tiny-policy",
    "pi0-geometry": "realtime_omni.bench.geometry:Pi0Geometry",
}
TOLERANCE, TOLERANCE_MS = 0.05, 0.2
START_LIMIT_S = 300.0


def overrides(args: argparse.Namespace, policy_ms: float) -> list[str]:
    """The recipe of the bench: all cameras there, room for every robot."""
    given = [f"session.max_sessions={max(args.robots, 8)}", f"kv.requested_sessions={max(args.robots, 8)}"]
    given += [f"engine.max_batch={max(args.robots, 8)}", f"device={args.device}", f"dtype={args.dtype}"]
    if args.policy == "tiny-policy":  # its recipe names its cameras
        given.append("options.cache_mib=0")  # the few pictures of the bench come again, a robot's do not
    else:
        given.append(f"deploy.cameras=[{', '.join(f'{{name: {name}}}' for name in THREE_CAMERAS.cameras)}]")
    if args.policy == "null":
        given += [f"options.policy_ms={policy_ms}"]
    return [*given, *args.set]


def robot_of(policy: str) -> Robot:
    return TABLETOP if policy == "tiny-policy" else THREE_CAMERAS


# -- over sockets ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process(command: Sequence[str], *, silent: bool = False) -> Iterator[subprocess.Popen[str]]:
    """``silent``: what it writes on its error stream is nobody's."""
    stderr = subprocess.DEVNULL if silent else None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as started:
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()


@contextlib.contextmanager
def our_server(args: argparse.Namespace, policy_ms: float) -> Iterator[str]:
    """Yields the address for openpi's clients."""
    command = [sys.executable, "-m", "realtime_omni.cli", "serve", MODELS[args.policy], "--log-level", "error"]
    command += ["--port", "0", "--openpi-port", "0"]
    for override in overrides(args, policy_ms):
        command += ["--set", override]
    with process(command) as server:
        assert server.stdout is not None
        found = re.search(r"ws://[^\s,]+", server.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        yield found[0]


@contextlib.contextmanager
def stock_server(policy_ms: float) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "realtime_omni.bench.stock", str(port), str(policy_ms)]
    with process(command, silent=True) as server:
        began_s = time.perf_counter()
        while not _is_healthy(port):
            if server.poll() is not None or time.perf_counter() - began_s > START_LIMIT_S:
                raise SystemExit("openpi's server did not start")
            time.sleep(0.05)
        yield f"ws://127.0.0.1:{port}"


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1):
            return True
    except (urllib.error.URLError, OSError):
        return False


async def over_sockets(args: argparse.Namespace, url: str) -> Load:
    async with Sockets(url, robot_of(args.policy)) as robots:
        return await measured(args, robots.ask)


async def measured(args: argparse.Namespace, ask: Ask) -> Load:
    kind = robot_of(args.policy)
    return await drive(kind, args.robots, args.chunks, args.hz, args.warm_up, ask, echoes=args.policy == "null")


async def against_stock(ours: str, theirs: str, rounds: int) -> tuple[list[float], list[float]]:
    """Round trips of one robot, in turns of ten, so that whatever else the machine does falls on both."""
    async with Sockets(ours, THREE_CAMERAS) as mine, Sockets(theirs, THREE_CAMERAS) as stocks:
        taken: tuple[list[float], list[float]] = ([], [])
        for turn in range(2 * rounds // 10):
            robots, kept = ((mine, taken[0]), (stocks, taken[1]))[turn % 2]
            for number in range(10):
                began_s = time.perf_counter()
                await robots.ask(0, number)
                if turn >= 4:
                    kept.append((time.perf_counter() - began_s) * 1000)
    return taken


# -- in process --------------------------------------------------------------------------------------------------------


async def in_process(args: argparse.Namespace, config: Config) -> Load:
    async with SessionManager(config=config) as manager, _sessions(manager, args.robots) as sessions:
        kind = robot_of(args.policy)
        seen = {number: pictures(kind, 0, number) for number in range(PICTURES)}

        async def ask(robot: int, number: int) -> Answer:
            observation = Observation(
                images=seen[number % PICTURES], state=state_of(kind, robot, number), prompt=PROMPT, seed=number
            )
            began_s = time.perf_counter()
            chunk = await sessions[robot].act(observation)
            total_ms = (time.perf_counter() - began_s) * 1000
            timings = chunk.timings
            begun = {"queue": total_ms - timings.tick_ms, "begin": 0.0}  # who joins a batch that runs does not begin it
            stages = {**begun, **timings.stages_ms, "total_ms": total_ms}
            return Answer(chunk.artifacts["actions"].data, stages)

        return await measured(args, ask)


@contextlib.asynccontextmanager
async def _sessions(manager: SessionManager, count: int) -> AsyncIterator[list[Session]]:
    opened = [await manager.create_session(seed=index) for index in range(count)]
    yield opened
    for session in opened:
        await session.close()


# -- the report --------------------------------------------------------------------------------------------------------


def stages(got: Load) -> tuple[dict[str, float | None], float | None, float]:
    """p50 of every stage; of a call, the sum of its stages over its total, and what they leave of it (ms)."""
    measured = got.stages_ms
    if "total_ms" in measured:
        names = [name for name in measured if name != "total_ms"]
        sums = [sum(parts) for parts in zip(*(measured[name] for name in names), strict=True)]
        shares = [inside / total for inside, total in zip(sums, measured["total_ms"], strict=True)]
        rests = [total - inside for inside, total in zip(sums, measured["total_ms"], strict=True)]
        return {name: percentile(measured[name], 0.5) for name in names}, percentile(shares, 0.5), median(rests)
    own = [sum(parts) for parts in zip(*(measured[name] for name in SERVER_STAGES), strict=True)]
    wire = [way - inside for way, inside in zip(measured["there_and_back"], own, strict=True)]
    shown = {"client": percentile(measured["client"], 0.5), "wire": percentile(wire, 0.5)}
    shown |= {name: percentile(measured[name], 0.5) for name in (*SERVER_STAGES, "send")}
    return shown, percentile(measured["share"], 0.5), median(measured["rest"] or [0.0])


def report(args: argparse.Namespace, got: Load, ratio: Mapping[str, Any]) -> dict[str, Any]:
    shown, share, rest_ms = stages(got)
    kind = robot_of(args.policy)
    wrong = list(got.wrong)
    if got.chunks + got.skipped != args.robots * args.chunks:
        wrong.append(f"{got.chunks} chunks came, {args.robots * args.chunks - got.skipped} were due")
    if share is None or (abs(share - 1) > TOLERANCE and abs(rest_ms) > TOLERANCE_MS):
        wrong.append(f"the stages add up to {share} of the total")
    return {
        "conditions": {
            "commit": commit(),
            "hardware": hardware(),
            "software": software(),
            "config": {
                "policy": args.policy,
                "policy_ms": args.policy_ms if args.policy == "null" else None,
                "device": args.device,
                "dtype": args.dtype,
                "set": args.set,
            },
            "workload": {
                "robots": args.robots,
                "hz": args.hz or None,
                "observations_per_robot": args.chunks,
                "observation": (
                    f"{len(kind.cameras)} pictures of {kind.side} x {kind.side}, raw; state of {kind.state_dim};"
                    " another picture every time"
                ),
                "transport": "in process" if args.in_process else "WebSocket over loopback, openpi's reply",
            },
            "warm_up_chunks_per_robot": args.warm_up,
            "population": len(got.latency_ms),
        },
        "valid": not wrong,
        "wrong": wrong[:10],
        "latency_ms": summary(got.latency_ms, 0.5, 0.99),
        "stages_ms": shown,
        "sum_of_stages": share,
        "deadline_misses": got.deadline_misses,
        "skipped": got.skipped,
        **ratio,
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Only the null policy can stand behind both."""
    if args.in_process or args.policy != "null":
        return {"ratio_to_stock": None}
    with our_server(args, 0.0) as ours, stock_server(0.0) as theirs:
        mine, stocks = asyncio.run(against_stock(ours, theirs, args.rounds))
    our_ms, their_ms = percentile(mine, 0.5), percentile(stocks, 0.5)
    assert our_ms is not None
    assert their_ms is not None
    round_trip = {"ours": summary(mine, 0.5, 0.99), "stock": summary(stocks, 0.5, 0.99)}
    return {"ratio_to_stock": round(our_ms / their_ms, 3), "round_trip_ms": round_trip}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="realtime-omni bench vla", description="Robots against the policy endpoint.")
    parser.add_argument("--policy", choices=tuple(MODELS), default="null")
    parser.add_argument("--policy-ms", type=number(zero=True), default=5.0, help="how long the null policy takes")
    parser.add_argument("--robots", type=count(), default=1)
    parser.add_argument(
        "--hz",
        type=number(zero=True),
        help=f"observations per second and robot; 0: no pause ({THREE_CAMERAS.hz:g}; tiny-policy's robot {TABLETOP.hz:g})",
    )
    parser.add_argument(
        "--chunks",
        type=count(),
        help=f"observations per robot ({THREE_CAMERAS.observations}; tiny-policy's {TABLETOP.observations})",
    )
    parser.add_argument("--warm-up", type=count(0), default=5, help="chunks per robot that are not counted")
    parser.add_argument("--rounds", type=count(0), default=400, help="round trips of each server for ratio_to_stock")
    parser.add_argument("--in-process", action="store_true", help="without sockets, and without openpi's server")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    args = parser.parse_args(argv)
    kind = robot_of(args.policy)
    args.hz = kind.hz if args.hz is None else args.hz
    args.chunks = args.chunks or kind.observations
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if args.policy == "null" and not args.in_process and not stock.is_installed():
        print("bench vla compares with openpi's server: pip install 'realtime-omni[bench]'", file=sys.stderr)
        return 2
    if args.in_process:
        got = asyncio.run(in_process(args, load(MODELS[args.policy], os.environ, overrides(args, args.policy_ms))))
    else:
        with our_server(args, args.policy_ms) as url:
            got = asyncio.run(over_sockets(args, url))
    result = report(args, got, compare(args))
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        for name, value in result.items():
            print(f"{name}: {json.dumps(value)}")
    return 0 if result["valid"] else 1


__all__ = ["main", "parse", "report"]
