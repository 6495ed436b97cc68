"""Time that moves when a test says so; the shape of ``realtime_omni.server.clock.Clock``."""

from __future__ import annotations

import asyncio
import heapq


class ManualClock:
    """Time that moves when a test says so."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._waiting: list[tuple[float, int, asyncio.Event]] = []
        self._count = 0

    def now_s(self) -> float:
        return self._now

    async def wait(self, changed: asyncio.Event, until: float | None) -> None:
        if changed.is_set() or (until is not None and until <= self._now):
            await asyncio.sleep(0)
            return
        wake = asyncio.Event()
        if until is not None:
            self._count += 1
            heapq.heappush(self._waiting, (until, self._count, wake))
        tasks = [asyncio.ensure_future(changed.wait()), asyncio.ensure_future(wake.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            self._waiting = [entry for entry in self._waiting if entry[2] is not wake]
            heapq.heapify(self._waiting)

    def advance(self, seconds: float) -> None:
        self._now += seconds
        while self._waiting and self._waiting[0][0] <= self._now:
            heapq.heappop(self._waiting)[2].set()

    @property
    def next_wake(self) -> float | None:
        return self._waiting[0][0] if self._waiting else None
