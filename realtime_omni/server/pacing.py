"""When the next block of a paced session starts. Pure: ``now`` is an argument, no clock, no asyncio.

Frame n of an epoch is due at ``origin + n / fps``. A block starts as late as it still meets its due time, so that the
controls it reads are fresh: at ``due - estimate``, where the estimate follows tick plus encode time (mean plus twice the
mean deviation, as TCP estimates round trips). A delivery late by more than one block moves the origin: a slow model
or a hold is never followed by a burst.
"""

from __future__ import annotations

import math

_MEAN_GAIN = 1 / 8
_DEVIATION_GAIN = 1 / 4
_DEVIATIONS = 2.0
MARGIN_S = 0.002
"""Timer resolution and the socket write."""


class Pacer:
    """The media clock of one session."""

    def __init__(self, fps: float, frames_per_block: int) -> None:
        self._fps = fps
        self._block_s = frames_per_block / fps
        self._origin: float | None = None
        self._first_under_way = False
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    @property
    def estimate_s(self) -> float:
        """How long tick plus encode will probably take; at most one block, so that credit stays in charge."""
        if self._mean_s is None:
            return self._block_s
        return min(self._block_s, self._mean_s + _DEVIATIONS * self._deviation_s + MARGIN_S)

    def start_at(self, frame: int) -> float | None:
        """When the block that begins with ``frame`` should start; None: at once; infinity: when the first is delivered."""
        if self._origin is None:
            return math.inf if self._first_under_way else None
        return self._origin + frame / self._fps - self.estimate_s

    def started(self) -> None:
        """A block was started. The first one defines the clock, so the second waits for its delivery."""
        self._first_under_way = self._origin is None

    def restart(self) -> None:
        """A new epoch, a pause or a reconnect: the next delivery defines the clock anew."""
        self._origin = None
        self._first_under_way = False

    def delivered(self, frame: int, now: float, took_s: float) -> None:
        """The block that begins with ``frame`` is on its way to the client, ``took_s`` after it was started."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = took_s, took_s / 2
        else:
            error = took_s - self._mean_s
            self._mean_s += _MEAN_GAIN * error
            self._deviation_s += _DEVIATION_GAIN * (abs(error) - self._deviation_s)
        due = None if self._origin is None else self._origin + frame / self._fps
        if due is None or now - due > self._block_s:
            self._origin = now - frame / self._fps
        self._first_under_way = False
