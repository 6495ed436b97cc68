"""The door into the engine: two bounded lanes, control before work.

Any thread may ``put``; only the engine takes. Full is a decision: a command that finds no place is refused with ``capacity``
and counted, so nobody waits without knowing. The control lane has its own bound and is always emptied first. Letting a session
go (close, detach) is never refused for want of a place: whoever does it may be gone, and then nobody could try again.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from realtime_omni.engine.commands import Close, Command, ControlCommand, Detach
from realtime_omni.errors import CapacityError, ErrorCode

CONTROL_FACTOR = 4
"""Control places per work place: every session may want to be closed while the work lane is full."""


@dataclass(frozen=True, slots=True)
class InboxStatistics:
    depth: int
    control_depth: int
    capacity: int
    accepted: int
    refused: int
    high_water: int


class Inbox:
    """Commands on their way to the engine."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._work: deque[Command] = deque()
        self._control: deque[Command] = deque()
        self._lock = threading.Lock()
        self._alarm = threading.Lock()
        """Held, except from when the sleeping engine is woken until it is awake: half the price of a Condition."""
        self._alarm.acquire()
        self._asleep = self._closed = self._woken = False
        self._accepted = self._refused = self._high_water = 0

    def put(self, command: Command, *, quiet: bool = False) -> None:
        """``quiet``: a sleeping engine is not woken; the caller does that soon (:meth:`nudge`), for this and what follows.

        Raises CapacityError: the lane is full, or (code ``shutdown``) the engine has stopped."""
        with self._lock:
            if self._closed:
                raise CapacityError("the engine has stopped", code=ErrorCode.SHUTDOWN)
            control = isinstance(command, ControlCommand)
            lane, bound = (self._control, self.capacity * CONTROL_FACTOR) if control else (self._work, self.capacity)
            if len(lane) >= bound and not isinstance(command, (Close, Detach)):
                self._refused += 1
                raise CapacityError(f"the engine's inbox is full ({bound} commands wait)")
            lane.append(command)
            self._accepted += 1
            self._high_water = max(self._high_water, len(self._work) + len(self._control))
            if not quiet:
                self._ring()

    def nudge(self) -> None:
        """Wake a sleeping engine if something waits for it."""
        with self._lock:
            if self._control or self._work:
                self._ring()

    def take(self) -> list[Command]:
        """Everything that waits, control first; never blocks."""
        if not self._control and not self._work:
            return []  # a look between two passes costs no lock; what is put at this moment is seen by the next
        with self._lock:
            taken = [*self._control, *self._work]
            self._control.clear()
            self._work.clear()
            return taken

    def wait(self, timeout_s: float | None) -> None:
        """Until something arrives, ``wake`` is called, or the time is up. For the engine's thread alone."""
        with self._lock:
            self._asleep = not (self._control or self._work or self._closed or self._woken)
            self._woken = False
            if not self._asleep:
                return
        rung = self._alarm.acquire(timeout=-1 if timeout_s is None else timeout_s)
        with self._lock:
            if not rung and not self._asleep:  # it rang just when the time was up
                self._alarm.acquire()
            self._asleep = self._woken = False

    def wake(self) -> None:
        with self._lock:
            self._woken = True  # kept for a waiter that is on its way: a stop must not cost it the whole wait
            self._ring()

    def _ring(self) -> None:
        """Under the lock."""
        if self._asleep:
            self._asleep = False
            self._alarm.release()

    def close(self) -> list[Command]:
        """Refuse everything from now on; returns what was still waiting."""
        with self._lock:
            self._closed = True
            self._ring()
        return self.take()

    def statistics(self) -> InboxStatistics:
        with self._lock:
            return InboxStatistics(
                len(self._work), len(self._control), self.capacity, self._accepted, self._refused, self._high_water
            )
