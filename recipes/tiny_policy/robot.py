"""One robot of the simulator in real time, led by a served policy over a WebSocket: pictures out, chunks of actions in.

Owns: the robot's control steps, its episodes and their count. A step never waits for the policy: a chunk that is late
changes what comes after it, and a robot without a plan stands still. Must not know: the page, how a policy computes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch

from realtime_omni_client.policy_stream import PolicyStream
from realtime_omni_client.transport import Transport
from recipes.tiny_policy.pictures import CAMERAS
from recipes.tiny_policy.policy import look
from recipes.tiny_policy.shape import EXECUTED, SIZE
from recipes.tiny_policy.table import EPISODE_TICKS, INSTRUCTIONS, TICK_S, Scene, new_scenes, state_of, step, succeeded

PAST_TICKS = 24
REST_TICKS = 12
"""How long the result of an episode stands before the next one begins."""
MAX_DELAY = 7
"""The longest that a chunk of 16, of which 8 are executed, bridges; it was trained up to here."""
EARLY = 0.75
"""Of a control step: how long before the step that is meant a delayed chunk arrives."""


class Phase(StrEnum):
    RUNNING = "running"
    SOLVED = "solved"
    FAILED = "failed"


@dataclass(slots=True)
class Latency:
    """``s``: the least time from a message of the robot to the answer."""

    s: float = 0.0


class SlowTransport:
    """A connection on which nothing arrives sooner than the latency after the robot's last message."""

    def __init__(self, inner: Transport, latency: Latency) -> None:
        self._inner = inner
        self._latency = latency
        self._sent_s = 0.0

    async def send(self, data: str | bytes) -> None:
        self._sent_s = time.perf_counter()
        await self._inner.send(data)

    async def receive(self) -> str | bytes:
        frame = await self._inner.receive()
        await asyncio.sleep(max(0.0, self._sent_s + self._latency.s - time.perf_counter()))
        return frame

    async def close(self) -> None:
        await self._inner.close()


def slow(connector: Callable[[], Awaitable[Transport]], latency: Latency) -> Callable[[], Awaitable[Transport]]:
    """A connector of `PolicyStream` whose connections are slow."""

    async def connect() -> Transport:
        return SlowTransport(await connector(), latency)

    return connect


@dataclass(slots=True)
class Score:
    """Episodes under one way of joining and one delay. ``jumps_mps``: the sum over switches of chunks of how much the motion
    changed from the last action of the old chunk to the first of the new one."""

    joining: str
    delay: int
    episodes: int = 0
    solved: int = 0
    switches: int = 0
    jumps_mps: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """A control step that was taken. ``action``: None where the robot had no plan and stood still. ``switched``: the first
    action of a chunk."""

    tick: int
    action: tuple[float, ...] | None
    switched: bool


@dataclass(slots=True)
class Answer:
    """The latest chunk. ``delay``: control steps between its observation and its arrival; ``planned_delay``: those that the
    server planned for."""

    start_tick: int
    rows: int
    delay: int
    planned_delay: int
    policy_ms: float


class Robot:
    """``stream``: an open session on the policy, whose connection has ``latency``. ``joining``: one of the policy's
    ``rtc_modes``; "": it offers no choice. ``task``: an index of the instructions; None: another one each episode."""

    def __init__(
        self,
        stream: PolicyStream,
        latency: Latency,
        *,
        joining: str,
        task: int | None = None,
        delay: int = 0,
        seed: int = 0,
        tick_s: float = TICK_S,
    ) -> None:
        self._stream = stream
        self._latency = latency
        self._generator = torch.Generator().manual_seed(seed)
        self._tick_s = tick_s
        self.task, self.joining, self.delay = task, joining, delay
        self.scores: dict[tuple[str, int], Score] = {}
        self.tick = 0
        """The control step that comes next; it rises over all episodes."""
        self.past: deque[Done] = deque(maxlen=PAST_TICKS)
        self.answer: Answer | None = None
        self._latency.s = self._least_s(delay)
        self.phase = Phase.RUNNING
        self.scene = self._drawn_scene()
        self._begun = self._ended = 0
        self._new_episode = False
        self._asked: int | None = None
        self._switch: int | None = None

    @property
    def instruction(self) -> str:
        return INSTRUCTIONS[int(self.scene.task[0])]

    @property
    def episode_tick(self) -> int:
        return self.tick - self._begun

    @property
    def score(self) -> Score:
        key = (self.joining, self.delay)
        return self.scores.setdefault(key, Score(*key))

    def plan(self) -> list[tuple[float, ...]]:
        """The actions that come next, as far as they are planned."""
        return [tuple(action.tolist()) for action in self._stream.actions.planned(self.tick)]

    # ---- what a user changes; it acts from the next step on

    def set_task(self, task: int | None) -> None:
        """Other words in the same scene, or another instruction each episode. The episode begins anew, the motion goes on."""
        self.task = task
        if task is None or task == int(self.scene.task[0]):
            return
        if self.phase is not Phase.RUNNING:
            self.new_scene()
            return
        self.scene = replace(self.scene, task=torch.tensor([task]))
        self._begun = self.tick
        self._asked = None

    def set_delay(self, delay: int) -> None:
        """Chunks arrive this many control steps after their observation, or later where the policy needs longer."""
        if not 0 <= delay <= MAX_DELAY:
            raise ValueError(f"a delay of 0 to {MAX_DELAY} control steps, not {delay}")
        if delay != self.delay:
            self.delay = delay
            self._latency.s = self._least_s(delay)
            self.new_scene()

    def _least_s(self, delay: int) -> float:
        return max(0.0, (delay - EARLY) * self._tick_s)

    def set_joining(self, joining: str) -> None:
        if joining != self.joining:
            self.joining = joining
            self.new_scene()

    def new_scene(self) -> None:
        """Give this episode up, uncounted."""
        self._new_episode = True

    # ---- a control step

    async def step(self) -> None:
        """One control step, or the beginning of an episode. A step waits for its pictures, never for a chunk."""
        if self._new_episode or (self.phase is not Phase.RUNNING and self.tick - self._ended >= REST_TICKS):
            await self._begin()
            return
        running = self.phase is Phase.RUNNING
        if running and (self._asked is None or self.tick - self._asked >= EXECUTED):
            await self._observe()
        self._read_chunks()
        action = self._stream.actions.pop(self.tick) if running else None
        self._move(None if action is None else tuple(action.tolist()))
        if running and not self._new_episode:
            self._judge()

    async def _begin(self) -> None:
        self._new_episode = False
        await self._stream.reset()
        self.scene = self._drawn_scene()
        self.phase = Phase.RUNNING
        self._begun = self._ended = self.tick
        self._asked = self._switch = None

    def _drawn_scene(self) -> Scene:
        return new_scenes(1, self._generator, None if self.task is None else torch.tensor([self.task]))

    async def _observe(self) -> None:
        scene, tick, prompt = self.scene, self.tick, self.instruction
        frames = (await asyncio.to_thread(look, scene, SIZE))[0].permute(0, 2, 3, 1).numpy()
        observation: dict[str, Any] = dict(zip(CAMERAS, frames, strict=True))
        observation |= {"state": state_of(scene)[0].numpy(), "prompt": prompt}
        sent = await self._stream.observe(observation, tick, rtc=self.joining or None)
        if sent and scene is self.scene:  # otherwise the words are others by now
            self._asked = tick

    def _read_chunks(self) -> None:
        while (chunk := self._stream.poll_chunk()) is not None:
            self.answer = Answer(
                chunk.start_tick,
                len(chunk.actions),
                self.tick - chunk.start_tick,
                chunk.delay_used,
                chunk.timing.get("queue", 0.0) + chunk.timing.get("infer_ms", 0.0),
            )
            self._switch = max(self.tick, chunk.start_tick + chunk.valid_from)

    def _move(self, action: tuple[float, ...] | None) -> None:
        switched = action is not None and self.tick == self._switch
        before = self.past[-1].action if self.past and self.tick > self._begun else None
        if switched and before is not None and action is not None:
            self.score.switches += 1
            self.score.jumps_mps += ((action[0] - before[0]) ** 2 + (action[1] - before[1]) ** 2) ** 0.5
        self.past.append(Done(self.tick, action, switched))
        standing = (0.0, 0.0, float(self.scene.closed[0]))
        self.scene = step(self.scene, torch.tensor([standing if action is None else action]))
        self.tick += 1

    def _judge(self) -> None:
        solved = bool(succeeded(self.scene)[0])
        if not solved and self.episode_tick < EPISODE_TICKS:
            return
        self.phase = Phase.SOLVED if solved else Phase.FAILED
        self._ended = self.tick
        self.score.episodes += 1
        self.score.solved += solved


async def keep_time(robot: Robot, tick_s: float, stepped: Callable[[float], None]) -> None:
    """Step for ever, one step each ``tick_s``; what could not be kept up with is not caught up. ``stepped`` is told how many
    seconds late the step began."""
    due_s = time.perf_counter()
    while True:
        late_s = max(0.0, time.perf_counter() - due_s)
        await robot.step()
        stepped(late_s)
        due_s = max(due_s + tick_s, time.perf_counter())
        await asyncio.sleep(due_s - time.perf_counter())
