"""``realtime-omni policy shadow``: compare our policy server with the one a lab has, before it cuts over.

A proxy stands in front of the lab's server. Every frame passes through unchanged, in both directions, and is never
delayed for the comparison; the same observations go to our server, whose chunks are compared and dropped.

Owns: the proxy, the pairs, the report.  Must not know: policies. Invariant: whatever happens to our server (slow,
absent, wrong), the robot notices nothing; what could not be compared is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.http11 import Request, Response
from websockets.uri import parse_uri

from realtime_omni.bench.conditions import summary
from realtime_omni.errors import ConfigError
from realtime_omni_protocols.openpi import MAX_FRAME_BYTES, PolicyError, unpack
from realtime_omni_protocols.openpi.rows import RESET_TEXT

MAX_BEHIND = 4
"""Observations that may wait for our server; while it is further behind, observations are skipped and counted."""
MAX_LATENCIES = 100_000
"""Latencies kept for the percentiles; a robot at 15 Hz fills this in two hours, then the oldest half goes."""


@dataclass
class ShadowReport:
    """What the comparison found. Latencies in ms: the upstream's from an observation's arrival at the proxy to its
    answer, ours from sending the same bytes to their answer."""

    compared: int = 0
    skipped: int = 0
    max_delta: float = 0.0
    max_delta_by_dim: npt.NDArray[np.float64] | None = None
    not_comparable: Counter[str] = field(default_factory=Counter)
    upstream_ms: list[float] = field(default_factory=list)
    ours_ms: list[float] = field(default_factory=list)

    def add(self, theirs: str | bytes, ours: str | bytes, upstream_ms: float, ours_ms: float) -> None:
        """Compare two answers to one request. A reset is no observation."""
        if theirs == RESET_TEXT:
            return
        _keep(self.upstream_ms, upstream_ms)
        _keep(self.ours_ms, ours_ms)
        expected, why = actions_of(theirs)
        found, our_why = actions_of(ours)
        if expected is None:
            self.not_comparable[f"upstream: {why}"] += 1
        elif found is None:
            self.not_comparable[f"ours: {our_why}"] += 1
        elif expected.shape != found.shape:
            self.not_comparable[f"shapes: {list(expected.shape)} and {list(found.shape)}"] += 1
        else:
            self._measure(np.abs(expected - found))

    def _measure(self, delta: npt.NDArray[np.float64]) -> None:
        by_dim = delta.reshape(-1, delta.shape[-1]).max(axis=0) if delta.size else np.zeros(delta.shape[-1])
        before = self.max_delta_by_dim
        same_width = before is not None and before.shape == by_dim.shape
        self.max_delta_by_dim = np.maximum(before, by_dim) if before is not None and same_width else by_dim
        self.max_delta = max(self.max_delta, float(by_dim.max(initial=0.0)))
        self.compared += 1

    def as_dict(self) -> dict[str, object]:
        """The report as JSON has it."""
        by_dim = self.max_delta_by_dim
        return {
            "compared": self.compared,
            "skipped": self.skipped,
            "not_comparable": dict(self.not_comparable),
            "max_abs_delta": self.max_delta,
            "max_abs_delta_by_dim": [] if by_dim is None else [float(value) for value in by_dim],
            "latency_ms": {
                "upstream": summary(self.upstream_ms, 0.5, 0.99),
                "ours": summary(self.ours_ms, 0.5, 0.99),
            },
        }


def actions_of(frame: str | bytes) -> tuple[npt.NDArray[np.float64] | None, str]:
    """The actions of an answer in any row's form, or why there are none."""
    if isinstance(frame, str):
        return None, "a text frame"
    try:
        value = unpack(frame)
    except PolicyError as error:
        return None, error.code.value
    if isinstance(value, dict) and value.get("type") == "error":
        return None, str(value.get("code", "error"))[:64]
    actions = value.get("actions") if isinstance(value, dict) else value
    if not isinstance(actions, np.ndarray) or actions.dtype.kind not in "fiu" or actions.ndim < 1:
        return None, "no array of actions"
    if not np.isfinite(actions).all():
        return None, "actions that are not finite"
    return actions.astype(np.float64), ""


Connection: TypeAlias = ServerConnection | ClientConnection
Seen: TypeAlias = Callable[[str | bytes, float], None]
"""Told of each frame that passed, and when it had come (``time.perf_counter``)."""


class ShadowProxy:
    """One proxy. ``upstream`` and ``ours`` are ``ws://`` addresses; a robot's path goes to the upstream after its
    own."""

    def __init__(self, upstream: str, ours: str, *, api_key: str | None = None) -> None:
        self.report = ShadowReport()
        self._upstream = upstream.rstrip("/")
        self._ours = ours
        self._our_headers = {} if api_key is None else {"Authorization": f"Api-Key {api_key}"}

    @contextlib.asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[str]:
        """Listen while the block runs; yields the address."""
        async with serve(
            self._robot, host, port, compression=None, max_size=MAX_FRAME_BYTES, process_request=_health
        ) as server:
            bound = next(iter(server.sockets)).getsockname()
            yield f"ws://{bound[0]}:{bound[1]}"

    async def _robot(self, robot: ServerConnection) -> None:
        assert robot.request is not None
        path = robot.request.path if robot.request.path != "/" else ""
        key = robot.request.headers.get("Authorization")
        try:
            upstream = await _open(self._upstream + path, {} if key is None else {"Authorization": key})
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI):
            await robot.close(1011, "the upstream server cannot be reached")
            return
        mirror = _Mirror(self._ours, self._our_headers, self.report)
        async with upstream:
            tasks = [
                asyncio.create_task(_pass(robot, upstream, mirror.asked)),
                asyncio.create_task(_pass(upstream, robot, mirror.answered)),
            ]
            shadow = asyncio.create_task(mirror.run())
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (*tasks, shadow):
                    task.cancel()
                await asyncio.gather(*tasks, shadow, return_exceptions=True)


async def _open(url: str, headers: dict[str, str]) -> ClientConnection:
    return await connect(url, additional_headers=headers, compression=None, max_size=MAX_FRAME_BYTES, ping_timeout=600)


async def _pass(source: Connection, target: Connection, seen: Seen) -> None:
    """Frames of one direction, unchanged, then the close."""
    try:
        async for frame in source:
            arrived_s = time.perf_counter()
            await target.send(frame)
            seen(frame, arrived_s)
    except ConnectionClosed:
        pass
    code, reason = source.close_code, source.close_reason or ""
    if code in (None, 1006, 1015):  # no frame can carry these: it died
        code, reason = 1011, "the other end is gone"
    with contextlib.suppress(ConnectionClosed):
        await target.close(1000 if code is None or code == 1005 else code, reason)


@dataclass(eq=False)
class _Pair:
    """One observation on its way through both servers; ``theirs`` is the upstream's answer and how long it took
    (ms)."""

    frame: bytes
    arrived_s: float
    theirs: asyncio.Future[tuple[str | bytes, float]]


class _Mirror:
    """Our server's side of one robot's connection."""

    def __init__(self, url: str, headers: dict[str, str], report: ShadowReport) -> None:
        self._url = url
        self._headers = headers
        self._report = report
        self._greeted = False
        self._unanswered: deque[_Pair] = deque()
        self._pairs: asyncio.Queue[_Pair] = asyncio.Queue(MAX_BEHIND)

    def asked(self, frame: str | bytes, arrived_s: float) -> None:
        """The robot's frame, on its way to the upstream."""
        if isinstance(frame, str):
            return
        pair = _Pair(frame, arrived_s, asyncio.get_running_loop().create_future())
        self._unanswered.append(pair)
        try:
            self._pairs.put_nowait(pair)
        except asyncio.QueueFull:
            self._report.skipped += 1
            pair.frame = b""  # nobody sends it, and the upstream may never answer

    def answered(self, frame: str | bytes, arrived_s: float) -> None:
        """The upstream's frame, on its way to the robot. The first one is the handshake."""
        if not self._greeted:
            self._greeted = True
        elif self._unanswered:
            pair = self._unanswered.popleft()
            pair.theirs.set_result((frame, (arrived_s - pair.arrived_s) * 1000))

    async def run(self) -> None:
        """Ask our server, for ever; a connection that breaks costs the observations until it is back."""
        while True:
            try:
                async with await _open(self._url, self._headers) as ours:
                    await ours.recv()
                    await self._compare(ours)
            except (OSError, TimeoutError, ConnectionClosed, InvalidHandshake, InvalidURI):
                self._report.not_comparable["ours: no connection"] += 1
            await self._pairs.get()  # the next observation begins a new attempt

    async def _compare(self, ours: ClientConnection) -> None:
        while True:
            pair = await self._pairs.get()
            sent_s = time.perf_counter()
            await ours.send(pair.frame)
            answer = await ours.recv()
            ours_ms = (time.perf_counter() - sent_s) * 1000
            theirs, upstream_ms = await pair.theirs
            self._report.add(theirs, answer, upstream_ms, ours_ms)


def _health(connection: ServerConnection, request: Request) -> Response | None:
    return connection.respond(HTTPStatus.OK, "OK\n") if request.path == "/healthz" else None


def _keep(values: list[float], value: float) -> None:
    if len(values) >= MAX_LATENCIES:
        del values[: MAX_LATENCIES // 2]
    values.append(value)


def run(upstream: str, ours: str, host: str, port: int, api_key: str | None, as_json: bool) -> None:
    """Serve until Ctrl-C, then print the report. Raises ConfigError for an address that is none, or that is taken."""
    if not host:
        raise ConfigError("--host is empty: robots would connect from every network")
    for flag, address in (("--upstream", upstream), ("--ours", ours)):
        try:
            parse_uri(address)
        except (InvalidURI, ValueError):
            raise ConfigError(f"{flag}: {address!r} is no ws:// address") from None
    proxy = ShadowProxy(upstream, ours, api_key=api_key)

    async def forever() -> None:
        async with contextlib.AsyncExitStack() as stack:
            try:
                url = await stack.enter_async_context(proxy.serving(host, port))
            except (OSError, OverflowError) as error:
                raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
            sys.stderr.write(
                f"robots connect to {url}; their server is {upstream}, ours {ours} (Ctrl-C for the report)\n"
            )
            await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(forever())
    sys.stdout.write(json.dumps(proxy.report.as_dict(), indent=None if as_json else 2) + "\n")
