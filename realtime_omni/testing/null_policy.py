"""A policy without a network: it answers with numbers that show whose observation, which step and which episode they
come from.

Owns: a pool of sessions with a hard bound. For tests of the robot endpoint and for measuring everything that is not the
policy.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from realtime_omni.errors import CapacityError, SessionGoneError
from realtime_omni.server.policy import PolicyAnswer, PolicyRequest
from realtime_omni_protocols.openpi import ActionContract, Camera, PolicyContract, StateField

SOURCE_CONTRACT = PolicyContract(
    policy="null",
    cameras=(
        Camera(name="base_0_rgb"),
        Camera(name="left_wrist_0_rgb"),
        Camera(name="right_wrist_0_rgb", rule="empty"),
    ),
    state=(StateField(dim=32, min_dim=1),),
    state_dim=32,
    action=ActionContract(horizon=50, dim=32),
    default_prompt="do nothing",
    max_steps=100,
    handshake={
        "image_resolution": [224, 224],
        "n_external_cameras": 1,
        "needs_wrist_camera": True,
        "needs_stereo_camera": False,
        "needs_session_id": False,
        "action_space": "joint_position",
        "action_horizon": 50,
        "action_dim": 32,
        "max_cameras": 3,
    },
)
"""The shape of a generic pi0 deployment: three slots (one empty), state and actions of 32, horizon 50."""


@dataclass(frozen=True, slots=True)
class _Health:
    ok: bool = True
    reason: str = ""


@dataclass(slots=True)
class _Session:
    epoch: int = 0
    inferring: bool = False


@dataclass
class NullPolicy:
    """``actions[i] = state[:dim] + i``; ``think`` (a pause, a gate, a fault) runs before each answer.

    Args:
        capacity: sessions at a time; one more is refused.
    """

    contract: PolicyContract = SOURCE_CONTRACT
    capacity: int = 64
    think: Callable[[str, PolicyRequest], Awaitable[None]] | None = None
    resets: int = 0
    closes: int = 0
    _sessions: dict[str, _Session] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def sessions(self) -> int:
        """How many are open."""
        return len(self._sessions)

    async def open(self, *, label: str | None = None, control_hz: float | None = None) -> str:
        await asyncio.sleep(0)
        if len(self._sessions) >= self.capacity:
            raise CapacityError(f"all {self.capacity} sessions are in use")
        session_id = f"null-{next(self._ids)}"
        self._sessions[session_id] = _Session()
        return session_id

    async def infer(self, session_id: str, request: PolicyRequest) -> PolicyAnswer:
        session = self._get(session_id)
        assert not session.inferring, "one call per session at a time"
        session.inferring = True
        try:
            if self.think is not None:
                await self.think(session_id, request)
        finally:
            session.inferring = False
        self._get(session_id)
        shape = (self.contract.action.horizon, self.contract.action.dim)
        actions = np.zeros(shape, np.float32)
        width = min(shape[1], request.observation.state.size)
        actions[:, :width] = request.observation.state[:width]
        actions += np.arange(shape[0], dtype=np.float32)[:, None]
        return PolicyAnswer(actions)

    def leave_chunk(self, session_id: str) -> None:
        """No chunk continues another."""

    async def reset(self, session_id: str) -> None:
        await asyncio.sleep(0)
        self._get(session_id).epoch += 1
        self.resets += 1

    async def close(self, session_id: str) -> None:
        await asyncio.sleep(0)
        self.closes += self._sessions.pop(session_id, None) is not None

    def evict(self, session_id: str) -> None:
        """As a full pool with policy ``lru`` would."""
        self._sessions.pop(session_id, None)

    def health(self) -> _Health:
        return _Health()

    def _get(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionGoneError("the session is gone")
        return session
