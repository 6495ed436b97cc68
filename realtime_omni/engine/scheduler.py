"""Who ticks next. Pure: no clock, no thread, no session, only values.

Sessions are served in the order in which they asked. Since a session that was served asks again later than everybody who is
still waiting, no session starves, and with ``max_batch`` places every waiting session is served within
``ceil(waiting / max_batch)`` ticks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Due:
    """A session that wants a tick; ``asked`` orders requests (a counter or a time)."""

    session_id: str
    asked: float


def choose(due: Iterable[Due], max_batch: int) -> tuple[str, ...]:
    """The sessions of the next batch, longest waiting first; ties keep the given order."""
    return tuple(d.session_id for d in sorted(due, key=lambda d: d.asked)[:max_batch])
