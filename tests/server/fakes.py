"""A session manager without an engine: ticks that a test holds, fails or lets run, and a manual clock.

It has the shape of ``realtime_omni.manager.SessionManager``. Nothing here sleeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from realtime_omni.config import Config, EngineSection
from realtime_omni.errors import (
    AbortedError,
    ArgumentError,
    CapacityError,
    ErrorCode,
    OmniError,
    SessionGoneError,
    StateError,
)
from server.fake_session import FakeSession, moments
from server.fake_values import FakeHealth, FakeModelInfo, FakeStatistics, FakeView
from server.manual_clock import ManualClock


class FakeManager:
    """Sessions in a dict. ``hold()`` makes ticks wait for ``release()``; ``failures`` are raised by the next ticks."""

    def __init__(self, info: FakeModelInfo | None = None, clock: ManualClock | None = None) -> None:
        self.info = info or FakeModelInfo()
        self.config = Config(engine=EngineSection(max_pending_events=4))
        self.max_sessions = 8
        self.clock = clock or ManualClock()
        self.live: dict[str, FakeSession] = {}
        self.gone: dict[str, str] = {}
        self.tombstones: dict[str, FakeSession] = {}
        self.failures: list[OmniError | Exception] = []
        self.images: list[Any] = []
        self.health_report = FakeHealth()
        self.branches = True
        self.release_fails = False
        self.release_takes = 3
        self.answer_takes = 3
        self.held: asyncio.Event | None = None  # answers wait until it is set, instead of for `answer_takes`
        self.chunk_takes = 0
        self.commits_although_cancelled = False
        self.ticks_started = 0
        self.ticks_settled = 0
        self.ticks_failed = 0
        self.tick_started = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._permits = 0

    # -- what a test does ------------------------------------------------------------------------------------------

    async def answered(self) -> None:
        if self.held is not None:
            await self.held.wait()
        else:
            await moments(self.answer_takes)

    def hold(self) -> None:
        """From now on ticks wait."""
        self._open.clear()

    def release(self, ticks: int | None = None) -> None:
        """Let all ticks (or the next few) run."""
        if ticks is None:
            self._permits = 0
            self._open.set()
        else:
            self._permits += ticks
            self._open.set()

    async def gate(self, session: FakeSession) -> None:
        """Where a tick waits. A closing session's tick ends as gone, an aborted one as aborted."""
        await asyncio.sleep(0)
        if not self._open.is_set():
            waits = [asyncio.ensure_future(self._open.wait()), asyncio.ensure_future(session.aborted.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waits:
                    task.cancel()
        if session.aborted.is_set() and session.state == "active":
            raise AbortedError("aborted")
        if self._permits:
            self._permits -= 1
            if not self._permits:
                self._open.clear()

    # -- the manager's own shape -----------------------------------------------------------------------------------

    async def create_session(
        self,
        session_id: str | None = None,
        *,
        prompt: str | None = None,
        seed: int | None = None,
        image: Any = None,
        start: str | None = None,
        outputs: Sequence[str] | None = None,
    ) -> FakeSession:
        session_id = session_id or f"s{len(self.live) + len(self.gone)}"
        if session_id in self.live or session_id in self.tombstones:
            raise StateError("the id is in use", code=ErrorCode.SESSION_EXISTS, path="session_id")
        if prompt == "nonsense":
            raise ArgumentError("no such prompt", code=ErrorCode.PROMPT_UNKNOWN, path="prompt")
        if len(self.live) >= self.max_sessions:
            raise CapacityError("no slot is free")
        self.images.append(image)
        session = FakeSession(self, session_id, prompt or self.info.default_prompt, 7 if seed is None else seed)
        self.live[session_id] = session
        return session

    def get_session(self, session_id: str) -> FakeSession:
        if session_id not in self.live:
            raise SessionGoneError("not found", code=ErrorCode.SESSION_NOT_FOUND)
        return self.live[session_id]

    async def close_session(self, session_id: str, reason: str = "client") -> None:
        await self.get_session(session_id).close(reason)

    def sessions(self) -> tuple[FakeView, ...]:
        return tuple(session.view for session in (*self.live.values(), *self.tombstones.values()))

    def statistics(self) -> FakeStatistics:
        return FakeStatistics(
            ticks_settled=self.ticks_settled,
            chunks_committed=self.ticks_settled,
            chunks_failed=self.ticks_failed,
            sessions=len(self.live),
            tombstones=len(self.tombstones),
            pages_used=3 * len(self.live),
        )

    def describe(self) -> FakeModelInfo:
        return self.info

    def start_image(self, name: str) -> bytes:
        if name not in self.info.starts:
            raise KeyError(name)
        return b"\x89PNG\r\n\x1a\nfake"

    def health(self) -> FakeHealth:
        return self.health_report
