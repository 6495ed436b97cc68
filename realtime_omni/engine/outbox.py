"""The door out of the engine: answers and notices, in order.

The engine puts; whoever was given to ``bind`` is woken and takes. Every command has at most one answer and every session a
few notices, so the number of entries is bounded by the inbox's bound and the session count; the outbox counts and checks it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from realtime_omni.engine.commands import Answer, Notice


@dataclass(frozen=True, slots=True)
class OutboxStatistics:
    depth: int
    put: int
    high_water: int


class Outbox:
    """Answers and notices on their way out."""

    def __init__(self) -> None:
        self._entries: deque[Answer | Notice] = deque()
        self._lock = threading.Lock()
        self._wake: Callable[[], None] | None = None
        self._put = self._high_water = 0
        self._held = 0
        self._owed = False

    def bind(self, wake: Callable[[], None] | None) -> None:
        """``wake`` is called from the engine's thread whenever the outbox stops being empty."""
        self._wake = wake

    def put(self, entry: Answer | Notice) -> None:
        with self._lock:
            was_empty = not self._entries
            self._entries.append(entry)
            self._put += 1
            self._high_water = max(self._high_water, len(self._entries))
        if was_empty and self._held:
            self._owed = True
        elif was_empty and self._wake is not None:
            self._wake()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Whoever takes is woken once, at the end, for all that is put inside. Only the engine's thread does this: a wake per
        answer costs both threads more than most answers do."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if not self._held:
                self.speak()

    def speak(self) -> None:
        """Wake whoever takes, if anything waits that he was not told of."""
        owed, self._owed = self._owed, False
        if owed and self._wake is not None:
            self._wake()

    def take(self) -> list[Answer | Notice]:
        with self._lock:
            taken = list(self._entries)
            self._entries.clear()
            return taken

    def statistics(self) -> OutboxStatistics:
        with self._lock:
            return OutboxStatistics(len(self._entries), self._put, self._high_water)
