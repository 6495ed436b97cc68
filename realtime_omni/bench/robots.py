"""Simulated robots: observations at a fixed rate, chunks checked, every latency kept.

Owns the schedule and the checks. Must not know what is measured against what.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect

from realtime_omni_protocols.openpi import pack, unpack

SERVER_STAGES = ("queue", "decode", "images", "prefix", "denoise", "encode")
PROMPT = "put the red block in the left tray"
PICTURES = 4
"""Different ones in turn, so that nothing is reused from one observation to the next."""


@dataclass(frozen=True, slots=True)
class Robot:
    """What a robot sends and gets: pictures [``side``, ``side``, 3] of ``cameras``, a state of ``state_dim`` values; chunks of
    ``chunk`` (horizon, action channels). ``hz`` and ``observations``: how often it asks, and how many times, unless told."""

    cameras: tuple[str, ...]
    side: int
    state_dim: int
    chunk: tuple[int, int]
    hz: float
    observations: int


THREE_CAMERAS = Robot(("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"), 224, 32, (50, 32), 15.0, 150)
TABLETOP = Robot(("top", "wrist"), 96, 5, (16, 3), 1.25, 40)
"""tiny-policy's, which executes eight actions of a chunk, ten in a second, before it asks again."""


@dataclass(slots=True)
class Answer:
    """``actions`` [H, A]; ``stages``: ms by name."""

    actions: Any
    stages: Mapping[str, float]


Ask = Callable[[int, int], Awaitable[Answer]]
"""``ask(robot, number)``: the answer to a robot's observation ``number``."""


@dataclass(slots=True)
class Load:
    """What robots saw. ``latency_ms`` counts from when an observation was due, also when it had to wait for the one before.
    ``skipped``: observations that were old before they could be sent."""

    latency_ms: list[float] = field(default_factory=list)
    stages_ms: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    deadline_misses: int = 0
    chunks: int = 0
    skipped: int = 0
    wrong: list[str] = field(default_factory=list)


def state_of(robot: Robot, index: int, number: int) -> Any:
    return np.full(robot.state_dim, index + number / 1024, np.float32)


def pictures(robot: Robot, index: int, number: int) -> dict[str, Any]:
    """Noise per camera, another one for each of ``PICTURES`` numbers in turn."""
    shape = (len(robot.cameras), robot.side, robot.side, 3)
    made = np.random.default_rng((index, number % PICTURES)).integers(0, 256, shape, np.uint8)
    return dict(zip(robot.cameras, made, strict=True))


async def drive(kind: Robot, robots: int, chunks: int, hz: float, warm_up: int, ask: Ask, *, echoes: bool) -> Load:
    """Run ``robots`` robots of a kind, ``chunks`` observations each. ``hz`` 0: each asks again as soon as it was answered;
    ``echoes``: action 0 must be the state. Who is answered so late that several observations were due meanwhile sends the
    newest of them, as a robot does; the others are missed deadlines. The warm-up has no clock."""
    load = Load()
    period_s = 1 / hz if hz else 0.0

    async def asked(index: int, number: int) -> Answer:
        answer = await ask(index, number)
        _check(load, kind, answer.actions, state_of(kind, index, number), echoes)
        load.chunks += 1
        return answer

    async def warmed(index: int) -> None:
        for number in range(min(warm_up, chunks)):
            await asked(index, number)

    async def robot(index: int, began_s: float) -> None:
        number = warm_up
        while number < chunks:
            due_s = began_s + (number - warm_up) * period_s if hz else time.perf_counter()
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            answer = await asked(index, number)
            spent_s = time.perf_counter() - due_s
            load.latency_ms.append(spent_s * 1000)
            for stage, ms in answer.stages.items():
                load.stages_ms[stage].append(ms)
            skipped = min(overdue(spent_s, period_s), max(0, chunks - 2 - number))
            load.skipped += skipped
            load.deadline_misses += skipped + (bool(hz) and spent_s > period_s)
            number += 1 + skipped

    async with asyncio.TaskGroup() as group:
        for index in range(robots):
            group.create_task(warmed(index))
    began_s = time.perf_counter() + 0.05
    async with asyncio.TaskGroup() as group:
        for index in range(robots):
            group.create_task(robot(index, began_s + index / robots * period_s))
    return load


def overdue(spent_s: float, period_s: float) -> int:
    """Observations after one that was due ``spent_s`` ago which have a newer one that is due, too."""
    return max(0, int(spent_s / period_s) - 1) if period_s else 0


def _check(load: Load, kind: Robot, actions: Any, state: Any, echoes: bool) -> None:
    if not isinstance(actions, np.ndarray) or actions.shape != kind.chunk or actions.dtype != np.float32:
        load.wrong.append(f"an answer is no float32 chunk {list(kind.chunk)}")
    elif not np.isfinite(actions).all():
        load.wrong.append("an action is not finite")
    elif echoes and not np.array_equal(actions[0], state):
        load.wrong.append("a chunk answers another observation")


class Sockets:
    """Robots over sockets, as openpi's client sends: one connection each."""

    def __init__(self, url: str, kind: Robot) -> None:
        self._url = url
        self._kind = kind
        self._connections = contextlib.AsyncExitStack()
        self._open: dict[int, ClientConnection] = {}
        self._inside: dict[int, float] = {}
        self._seen = {number: pictures(kind, 0, number) for number in range(PICTURES)}

    async def __aenter__(self) -> Sockets:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connections.aclose()

    async def ask(self, robot: int, number: int) -> Answer:
        if robot not in self._open:
            self._open[robot] = await self._connections.enter_async_context(
                connect(self._url, compression=None, max_size=None)
            )
            await self._open[robot].recv()
        socket = self._open[robot]
        observation = {**self._seen[number % PICTURES], "state": state_of(self._kind, robot, number), "prompt": PROMPT}
        began_s = time.perf_counter()
        frame = pack(observation)
        packed_s = time.perf_counter()
        await socket.send(frame)
        reply = await socket.recv()
        received_s = time.perf_counter()
        if isinstance(reply, str):
            raise SystemExit(f"the server failed: {reply[-300:]}")
        answer = unpack(reply)
        assert isinstance(answer, dict)
        stages = {
            "client": (packed_s - began_s + time.perf_counter() - received_s) * 1000,
            "there_and_back": (received_s - packed_s) * 1000,
            **self._server_stages(robot, answer["server_timing"]),
        }
        return Answer(answer["actions"], stages)

    def _server_stages(self, robot: int, timing: Mapping[str, float]) -> dict[str, float]:
        """What the server says of this call. ``send``, ``share`` and ``rest`` are of the call before, which it knows only now:
        the last stage, the stages' sum over the total, and what they leave of it. openpi's server says no stages."""
        stages = {name: timing[name] for name in SERVER_STAGES if name in timing}
        if "prev_total_ms" in timing and self._inside.get(robot):
            inside = self._inside[robot] + timing["prev_send_ms"]
            stages["send"] = timing["prev_send_ms"]
            stages["share"] = inside / timing["prev_total_ms"]
            stages["rest"] = timing["prev_total_ms"] - inside
        self._inside[robot] = sum(timing.get(name, 0.0) for name in SERVER_STAGES)
        return stages
