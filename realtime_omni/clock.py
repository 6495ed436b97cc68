"""The one place that reads the wall clock. Everything else gets a clock and calls ``now_s``."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds of a clock that never goes back; only differences mean something."""
        ...


class MonotonicClock:
    """The clock of a running server."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that tests move. Starts at 0."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now_s += seconds
