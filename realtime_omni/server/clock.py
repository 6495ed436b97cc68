"""Time for the shells of the server: the monotonic clock of the event loop, replaceable by a manual one in tests.

Owns nothing. Everything that waits for a moment or for a change goes through :meth:`Clock.wait`, so tests never sleep.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Clock(Protocol):
    """Seconds on a monotonic scale."""

    def now_s(self) -> float: ...

    async def wait(self, changed: asyncio.Event, until: float | None) -> None:
        """Return when ``changed`` is set or ``until`` has come, whichever is first; None waits for the event only."""
        ...


class LoopClock:
    """The event loop's own clock."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def wait(self, changed: asyncio.Event, until: float | None) -> None:
        try:
            # Half a millisecond more: a loop that counts whole ones (uvloop) would wake too early, and spin until it is time.
            async with asyncio.timeout_at(None if until is None else until + 0.0005):
                await changed.wait()
        except TimeoutError:
            pass
