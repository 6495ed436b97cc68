"""Robots on the engine: a `PolicyBackend` whose sessions are sessions of the session manager.

Owns, per session, what only the serving side can know: which chunk the robot executes, and the measured delay between an
observation and its chunk. Must not know: sockets, models.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from realtime_omni.errors import SessionGoneError, StateError
from realtime_omni.rtc.delay import DelayEstimate
from realtime_omni.server.backend import HealthReport, PolicyFacts
from realtime_omni.server.policy import PolicyAnswer, PolicyRequest
from realtime_omni.session.observation import Join, Observation
from realtime_omni.session.values import Chunk
from realtime_omni_protocols.openpi import PolicyCode, PolicyContract, PolicyError

STAGES = ("images", "prefix")
"""Of the stages that a policy reports; what remains of a tick is ``denoise``."""


PLAIN = "none"
"""The mode in which a chunk continues nothing; all of its rows are its own."""


class PolicySession(Protocol):
    """A session of the manager, as far as it is needed here."""

    @property
    def id(self) -> str: ...
    @property
    def state(self) -> str: ...
    async def act(self, observation: Observation) -> Chunk: ...
    async def reset(self, *, observation: Observation | None = None) -> None: ...
    async def rollback(self) -> None: ...
    async def close(self, reason: str = "client") -> None: ...


class PolicySessions(Protocol):
    """The session manager, as far as it is needed here."""

    async def create_session(self) -> Any: ...
    def health(self) -> HealthReport: ...


@dataclass(slots=True)
class _Robot:
    """``chunk`` and ``tick``: index and start of the chunk that was delivered last. ``instruction``: of the latest observation,
    without the space around it, if there was one since the last reset (``begun``)."""

    session: PolicySession
    control_hz: float | None
    delay: DelayEstimate = field(default_factory=DelayEstimate)
    chunk: int | None = None
    tick: int | None = None
    instruction: str | None = None
    begun: bool = False

    def leave_chunk(self) -> None:
        """Nothing is executed any more that a chunk could continue."""
        self.chunk = self.tick = None
        self.delay.reset()


class EnginePolicy:
    """See the module docstring."""

    def __init__(self, manager: PolicySessions, contract: PolicyContract, policy: PolicyFacts) -> None:
        self.contract = contract
        self._manager = manager
        self._joins = policy.joins
        self._rtc_modes = policy.rtc_modes
        self._restarts = policy.restarts_on_prompt
        self._robots: dict[str, _Robot] = {}

    @property
    def sessions(self) -> int:
        """How many are open."""
        return len(self._robots)

    async def open(self, *, label: str | None = None, control_hz: float | None = None) -> str:
        session: PolicySession = await self._manager.create_session()
        self._robots[session.id] = _Robot(session, control_hz or self.contract.action.control_hz)
        return session.id

    async def infer(self, session_id: str, request: PolicyRequest) -> PolicyAnswer:
        robot = self._robot(session_id)
        began_s = time.perf_counter()
        self._check_mode(request)
        await self._mend(robot)
        await self._restart(robot, request)
        join = self._join(robot, request)
        try:
            chunk = await robot.session.act(_observation(request, join))
        except SessionGoneError:
            self._robots.pop(session_id, None)
            raise
        inside_s = time.perf_counter() - began_s
        answer = self._answer(robot, chunk, join, inside_s * 1000)
        if join is not None:
            if request.consumed is None and robot.control_hz is not None:
                robot.delay.observe(math.ceil(inside_s * robot.control_hz), join.tick)
            robot.chunk, robot.tick = chunk.chunk_index, join.tick
        return answer

    def leave_chunk(self, session_id: str) -> None:
        robot = self._robots.get(session_id)
        if robot is not None:
            robot.leave_chunk()

    async def reset(self, session_id: str) -> None:
        robot = self._robot(session_id)
        robot.leave_chunk()
        await robot.session.reset()
        robot.begun = False

    async def close(self, session_id: str) -> None:
        robot = self._robots.pop(session_id, None)
        if robot is not None:
            await robot.session.close()

    def health(self) -> HealthReport:
        return self._manager.health()

    def _robot(self, session_id: str) -> _Robot:
        robot = self._robots.get(session_id)
        if robot is None:
            raise SessionGoneError("the session is gone")
        return robot

    async def _mend(self, robot: _Robot) -> None:
        """A tick that failed is that observation's misfortune: the session goes on as it was before it."""
        if robot.session.state != "failed":
            return
        try:
            await robot.session.rollback()
        except StateError as error:
            if isinstance(error, SessionGoneError):
                raise
            await self.reset(robot.session.id)  # its state was given up with the tick

    async def _restart(self, robot: _Robot, request: PolicyRequest) -> None:
        """Another instruction begins another episode, where history belongs to one; unless it is refused."""
        prompt = request.observation.prompt
        instruction = None if prompt is None else prompt.strip()
        if self._restarts and robot.begun and robot.instruction != instruction:
            await robot.session.reset(observation=_observation(request, None))
            robot.leave_chunk()
        robot.instruction, robot.begun = instruction, True

    def _check_mode(self, request: PolicyRequest) -> None:
        if request.rtc is not None and request.rtc not in self._rtc_modes:
            offered = ", ".join(self._rtc_modes) or "no choice"
            raise PolicyError(PolicyCode.BAD_MESSAGE, f"this deployment offers {offered}", "$.rtc")

    def _join(self, robot: _Robot, request: PolicyRequest) -> Join | None:
        """How the chunk continues the one before; None for robots that say no tick, and policies that do not join."""
        mode = request.rtc or next(iter(self._rtc_modes), None)
        if request.tick is None or not self._joins:
            return None
        if request.consumed is not None and robot.tick is not None:
            measured = request.tick - robot.tick - request.consumed
            if measured >= 0:  # otherwise the observation was taken before the chunk before had arrived
                robot.delay.observe(measured, request.tick)
        delay = robot.delay.ticks(request.tick, self.contract.action.horizon)
        return Join(request.tick, delay, robot.chunk, mode)

    def _answer(self, robot: _Robot, chunk: Chunk, join: Join | None, inside_ms: float) -> PolicyAnswer:
        artifact = chunk.primary_artifact
        assert artifact is not None
        timing = {stage: chunk.timings.stages_ms[stage] for stage in STAGES if stage in chunk.timings.stages_ms}
        timing["queue"] = max(0.0, inside_ms - chunk.timings.tick_ms)
        if join is None or join.mode == PLAIN:
            return PolicyAnswer(artifact.data, timing)
        left = 0 if robot.tick is None else max(0, robot.tick + self.contract.action.horizon - join.tick)
        return PolicyAnswer(artifact.data, timing, valid_from=min(join.delay, left), delay_used=join.delay)


def _observation(request: PolicyRequest, join: Join | None) -> Observation:
    seen = request.observation
    return Observation(
        images={name: image for name, image in seen.images.items() if image is not None},
        state=seen.state,
        prompt=seen.prompt,
        seed=request.seed,
        steps=request.steps,
        join=join,
    )
