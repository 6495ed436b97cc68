"""What the engine keeps per session beside the pure machine: who waits, how it began, whether somebody is attached.

Plain data with small methods; only :mod:`realtime_omni.engine.engine` changes it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from realtime_omni.engine.consumer import Release
from realtime_omni.models.base import SessionSetup
from realtime_omni.session.frame import Frame
from realtime_omni.session.lifecycle import SessionState
from realtime_omni.session.observation import Observation
from realtime_omni.session.session import Session

MAX_WAITERS = 64
"""Concurrent ``next_chunk`` calls per session; more is a bug of the caller and refused with ``capacity``."""

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0


@dataclass(slots=True)
class Waiter:
    """One ``next_chunk`` that has not been answered. ``order`` is the engine's arrival counter."""

    ticket: int
    outputs: tuple[str, ...]
    order: int
    asked_at_s: float
    prefill_s: float = 0.0
    """How much of the wait was the session's own prefill."""
    observation: Observation | None = None
    frame: Frame | None = None
    due_s: float = 0.0
    urgent: bool = False
    """See :class:`realtime_omni.engine.scheduler.Due`."""


@dataclass(slots=True)
class Entry:
    """One session in the engine."""

    session: Session
    setup: SessionSetup
    outputs: tuple[str, ...]
    created_at_s: float
    last_used_at_s: float
    waiters: deque[Waiter] = field(default_factory=deque)
    cancelled: set[int] = field(default_factory=set)
    """Tickets of ``next_chunk`` calls that were cancelled before the engine saw them; forgotten when a later one comes."""
    opening: list[int] = field(default_factory=list)
    """Tickets (create, or reset) to answer when the session is open: after the prefill, if there is one."""
    needs_prefill: bool = False
    """Its state carries a block that must be written before its next tick; False while it is FAILED or ends."""
    resetting: Release | None = None
    closing: Release | None = None
    close_reason: str = ""
    closers: list[int] = field(default_factory=list)
    retry_at_s: float | None = None
    retry_delay_s: float = FIRST_RETRY_S
    released: bool = False
    """The worker state of a FAILED session is gone: no rollback."""
    lease_until_s: float | None = None
    """While nobody is attached: when the session closes by itself."""

    flying: bool = False
    """In the batch that runs; ``flying_ticket`` is the ``next_chunk`` it answers (0: a prefill)."""
    flying_ticket: int = 0

    @property
    def is_idle(self) -> bool:
        """Nobody waits for it: it may be evicted."""
        busy = self.waiters or self.opening or self.flying or self.resetting is not None
        return not busy and self.session.state in (SessionState.ACTIVE, SessionState.FAILED)

    @property
    def is_restless(self) -> bool:
        """Something of it waits for time or for a release, so the engine has to look at it again and again."""
        releasing = self.closing is not None or self.resetting is not None
        return releasing or self.retry_at_s is not None or self.lease_until_s is not None

    @property
    def can_rollback(self) -> bool:
        return not self.released

    def back_off(self, now_s: float) -> None:
        """Schedule the next cleanup attempt of a tombstone: 1, 2, 4, … up to 60 seconds."""
        self.retry_at_s = now_s + self.retry_delay_s
        self.retry_delay_s = min(self.retry_delay_s * 2, LAST_RETRY_S)
