"""``realtime-omni bench world``: the server as users meet it, measured from outside.

Starts the real server in a process of its own (or uses ``--connect``), runs the clients of
:mod:`realtime_omni.bench.load` in another, and prints what they measured with the conditions it holds under. Outputs
are validated first: when anything was wrong, ``valid`` is false and says what.

Definitions (all times in milliseconds):

- ``time_to_first_chunk_ms``: ``session.start`` sent to the first chunk's last frame (paced: first frame) received.
- ``chunk_latency_ms``: paced: waiting for the batch + tick + encode, as the server reports them; on demand: event and
  next sent to the chunk's last frame received.
- ``control_plane_ms``: the server's own histogram ``realtime_omni_control_plane_seconds``: per block, from the event or
  ``session.next`` received at the socket (or the block's earliest allowed start, if later) to the chunk's last frame
  handed to the socket, less the time inside the model and inside the encoder. Waiting for a thread, a lock, a processor
  or another session's block is in it. The difference of two readings, after the warm-up and at the end;
  percentiles are interpolated within a bucket.
- ``client_control_plane_ms``: on demand only: the client's turnaround less the server's tick (model included) and
  encode; it therefore holds the wire and the client's own work as well.
- ``key_to_chunk_ms``: event sent to the first frame of the chunk that names it received.
- ``continuous_play_ratio``: share of chunks that came before they were due; the first chunk and one block of buffer
  set the clock.
- ``resume_ms``: socket cut to the next frame on a new connection.
- ``rss_mb``: resident memory of the server; ``start`` after 500 chunks of all sessions together, ``end`` when the
  load ends; null without psutil (extra ``test``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from realtime_omni.bench.arguments import count, number
from realtime_omni.bench.conditions import commit, hardware, histogram_percentile, software, summary

START_LIMIT_S = 120.0
READY = re.compile(rb"^realtime-omni serves .* on http://(\S+:\d+)", re.MULTILINE)
RSS_AFTER_CHUNKS = 500
CONTROL_PLANE = (
    "measured by the server, per block: event or next received at the socket (or the earliest allowed start, if later) "
    "to the last frame handed to the socket, less the time inside the model and inside the encoder"
)


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[tuple[str, int, float]]:
    """A server process; yields its address, its process id and how long it took to answer."""
    command = [sys.executable, "-m", "realtime_omni.cli", "serve", args.model, "--port", "0"]
    command += ["--set", f"session.max_sessions={max(args.sessions, 8)}"]
    command += ["--set", f"kv.requested_sessions={max(args.sessions, 8)}"]
    for override in args.set:
        command += ["--set", override]
    began = time.perf_counter()
    # Files, not pipes that nobody reads: a full one would stop the server in the middle of a log line.
    with (
        tempfile.TemporaryFile() as said,
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=said, stderr=log) as process,
    ):
        try:
            while time.perf_counter() - began < START_LIMIT_S:
                if process.poll() is not None:
                    raise SystemExit(f"the server ended: {_tail(log)}")
                # By position: the server writes on where this file stands.
                if ready := READY.search(os.pread(said.fileno(), 65_536, 0)):
                    break
                time.sleep(0.1)
            else:
                raise SystemExit("the server did not answer in time")
            yield ready[1].decode(), process.pid, time.perf_counter() - began
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read()[-500:].decode(errors="replace").strip()


@dataclass(slots=True)
class Seen:
    """What the server said of itself during the load."""

    rss_mb: dict[str, float | None]
    control_s: dict[float, float]
    """The control plane's histogram between warm-up and end: upper bound -> blocks at or below it."""


async def watch(address: str, pid: int | None, warm_up: int, done: asyncio.Event) -> Seen:
    """Resident memory once 500 chunks were made and at the end; the histogram without its first ``warm_up`` blocks.

    Scraping costs the server some milliseconds, so it ends with the warm-up."""
    began = await asyncio.to_thread(_scrape, address)
    before: dict[float, float] | None = None
    start, started = None, pid is None
    while not done.is_set():
        if before is None or not started:
            seen = await asyncio.to_thread(_scrape, address)
            made = seen.blocks - began.blocks
            if before is None and made >= warm_up:
                before = seen.control_s
            if not started and made >= RSS_AFTER_CHUNKS:
                start, started = _rss_mb(pid), True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), 0.5)
    after = (await asyncio.to_thread(_scrape, address)).control_s
    between = {bound: count - (before or began.control_s).get(bound, 0.0) for bound, count in after.items()}
    return Seen({"start": start, "end": _rss_mb(pid)}, between)


def _rss_mb(pid: int | None) -> float | None:
    """None where it cannot be told: the process is gone, or psutil is not installed (extra ``test``)."""
    try:
        import psutil
    except ModuleNotFoundError:
        return None
    try:
        return None if pid is None else round(psutil.Process(pid).memory_info().rss / 2**20, 1)
    except psutil.Error:
        return None


class _Scraped(NamedTuple):
    blocks: float
    control_s: dict[float, float]


def _scrape(address: str) -> _Scraped:
    """The server's counter of committed blocks, and the control plane's histogram."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, OSError):
        return _Scraped(0.0, {})
    blocks, control_s = 0.0, {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name == "realtime_omni_blocks_total":
            blocks = float(value)
        elif name.startswith("realtime_omni_control_plane_seconds_bucket"):
            control_s[float(name.split('"')[1])] = float(value)
    return _Scraped(blocks, control_s)


async def run_load(args: argparse.Namespace, address: str, pid: int | None) -> tuple[dict[str, Any], Seen]:
    command = [sys.executable, "-m", "realtime_omni.bench.load", "--url", f"ws://{address}/v1/realtime/world"]
    command += ["--sessions", str(args.sessions), "--chunks", str(args.chunks), "--hz", str(args.hz)]
    command += [
        "--format",
        args.format,
        "--cadence",
        args.cadence,
        "--churn",
        str(args.churn),
        "--seed",
        str(args.seed),
    ]
    if args.fps:
        command += ["--fps", str(args.fps)]
    if args.resume:
        command.append("--resume")
    done = asyncio.Event()
    watching = asyncio.create_task(watch(address, pid, args.sessions * args.warm_up, done))
    out = await clients(command)
    done.set()
    return json.loads(out), await watching


async def clients(command: Sequence[str]) -> bytes:
    """What a benchmark's clients, in their own process, print; they end with this call. Raises SystemExit: what they said
    instead."""
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise SystemExit(f"the clients failed: {err[-800:].decode(errors='replace').strip()}")
    return out


def report(args: argparse.Namespace, got: dict[str, Any], seen: Seen, start_s: float | None) -> dict[str, Any]:
    seconds = got["ended_s"] - got["started_s"]
    paced = args.cadence == "paced"
    expected = args.sessions * args.chunks
    wrong = list(got["wrong"])
    if got["chunks"] != expected:
        wrong.append(f"{got['chunks']} chunks came, {expected} were due")
    latency = got["chunk_ms"] if paced else got["turnaround_ms"]
    warm = latency[min(len(latency), args.sessions * args.warm_up) :]
    control = got["control_ms"][min(len(got["control_ms"]), args.sessions * args.warm_up) :]
    return {
        "conditions": {
            "commit": commit(),
            "hardware": hardware(),
            "software": software(),
            "config": {"model": args.model, "set": args.set, "omp_threads": os.environ.get("OMP_NUM_THREADS")},
            "workload": {
                "sessions": args.sessions,
                "chunks_per_session": args.chunks,
                "cadence": args.cadence,
                "hz": None if paced else args.hz,
                "fps": args.fps,
                "format": args.format,
                "churn": args.churn,
                "seed": args.seed,
                "transport": "WebSocket over loopback, clients in a process of their own",
            },
            "warm_up_chunks_per_session": args.warm_up,
            "seconds": round(seconds, 1),
            "population": {"chunks": got["chunks"], "sessions": got["sessions"]},
            "control_plane": CONTROL_PLANE,
        },
        "valid": not wrong,
        "wrong": wrong[:10],
        "server_start_s": None if start_s is None else round(start_s, 2),
        "time_to_first_chunk_ms": summary(got["first_chunk_ms"], 0.5, 0.95),
        "chunk_latency_ms": summary(warm, 0.5, 0.95, 0.99),
        "fps": round(got["frames"] / seconds, 2) if seconds else None,
        "continuous_play_ratio": round(got["met"] / got["deadlines"], 4) if got["deadlines"] else None,
        "control_plane_ms": {f"p{share * 100:g}": _milliseconds(seen.control_s, share) for share in (0.5, 0.9, 0.99)},
        "client_control_plane_ms": summary(control, 0.5, 0.99),
        "key_to_chunk_ms": summary(got["key_to_chunk_ms"], 0.5, 0.95),
        "resume_ms": summary(got["resume_ms"], 0.5, 0.95),
        "rss_mb": seen.rss_mb,
        "bytes_per_s": round(got["bytes"] / seconds) if seconds else None,
    }


def _milliseconds(counts: dict[float, float], share: float) -> float | None:
    seconds = histogram_percentile(counts, share)
    return None if seconds is None else round(seconds * 1000, 3)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="realtime-omni bench world", description="Sessions over real sockets against a server."
    )
    parser.add_argument("--model", default="null", help="a recipe or model: null, tiny-world, ...")
    parser.add_argument("--sessions", type=count(), default=1)
    parser.add_argument("--chunks", type=count(), default=200, help="per session")
    parser.add_argument("--hz", type=number(), help="blocks per second and session, on demand (default: 12)")
    parser.add_argument("--fps", type=number(), help="frames per second of a paced session (default: the model's)")
    parser.add_argument("--cadence", choices=("paced", "on_demand"), help="default: on_demand for null, else paced")
    parser.add_argument(
        "--format", choices=("jpeg", "h264", "rgb24", "latent"), help="default: jpeg for null, else h264"
    )
    parser.add_argument("--churn", type=count(0), default=0, help="a new session after so many chunks")
    parser.add_argument("--resume", action="store_true", help="paced: cut the socket half-way and resume")
    parser.add_argument("--warm-up", type=count(0), default=5, help="chunks per session that percentiles leave out")
    parser.add_argument("--seed", type=count(0), default=1)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--connect", metavar="HOST:PORT", help="measure a server that runs already")
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    args = parser.parse_args(argv)
    args.cadence = args.cadence or ("on_demand" if args.model == "null" else "paced")
    if args.cadence == "paced" and args.hz is not None:
        parser.error("--hz is for --cadence on_demand; a paced session has --fps")
    if args.cadence == "on_demand" and args.fps is not None:
        parser.error("--fps is for --cadence paced; on demand there is --hz")
    args.hz = 12.0 if args.hz is None else args.hz
    args.format = args.format or ("jpeg" if args.model == "null" else "h264")
    if args.model != "null" and args.cadence == "paced":
        args.resume = args.resume or args.chunks >= 20
    return args


def main(argv: Sequence[str]) -> int:
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument("--model")
    model, others = chosen.parse_known_args(argv)
    if model.model == "lingbot-geometry":  # no server: a bare GPU host has none of what one needs
        from realtime_omni.bench import lingbot, lingbot_ranks

        given = [argument for argument in others if argument != "--in-process"]
        if any(argument.startswith("--parallel") for argument in given):
            return lingbot_ranks.main(given)
        return lingbot.main(given)
    args = parse(argv)
    if args.connect:
        got, seen = asyncio.run(run_load(args, args.connect, None))
        result = report(args, got, seen, None)
    else:
        with server(args) as (address, pid, start_s):
            got, seen = asyncio.run(run_load(args, address, pid))
        result = report(args, got, seen, start_s)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        for name, value in result.items():
            print(f"{name}: {json.dumps(value)}")
    return 0 if result["valid"] else 1


__all__ = ["main", "parse", "report"]
