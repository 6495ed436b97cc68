"""Which session ids are taken, by whom, and which are buried.

Owns the table of live entries (tombstones included), the generation counter and a bounded record of recent graves, so that
a late input for a closed id is answered ``session_gone`` with the reason and never creates a session.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from realtime_omni.errors import ArgumentError, ErrorCode, SessionGoneError, StateError
from realtime_omni.session.values import Generation, SessionId

ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_GRAVES = 1024
"""Enough that every client that reconnects within minutes hears ``gone``, small enough to forget."""

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Grave:
    """Why and when (seconds of the engine's clock) a session ended."""

    reason: str
    buried_at_s: float


class Registry(Generic[E]):
    """Live entries by session id. ``mint`` makes fresh ids; tests inject it."""

    def __init__(self, mint: Callable[[], str]) -> None:
        self._mint = mint
        self._live: dict[SessionId, E] = {}
        self._graves: OrderedDict[SessionId, Grave] = OrderedDict()
        self._generations = 0

    def claim(self, session_id: str | None) -> tuple[SessionId, Generation]:
        """An id that is free now, and a generation never used before. Raises ArgumentError or StateError."""
        if session_id is None:
            session_id = self._mint()
        if not isinstance(session_id, str) or ID_PATTERN.fullmatch(session_id) is None:
            raise ArgumentError("session_id must be 1-64 of A-Z a-z 0-9 . _ -", path="session_id")
        claimed = SessionId(session_id)
        if claimed in self._live:
            raise StateError(
                f"session {session_id!r} exists; close it or choose another id", code=ErrorCode.SESSION_EXISTS
            )
        self._generations += 1
        return claimed, Generation(self._generations)

    def add(self, session_id: SessionId, entry: E) -> None:
        assert session_id not in self._live
        self._graves.pop(session_id, None)
        self._live[session_id] = entry

    def get(self, session_id: str) -> E:
        """Raises SessionGoneError for a buried id (with the reason) and for one that was never known."""
        entry = self._live.get(SessionId(session_id))
        if entry is not None:
            return entry
        grave = self._graves.get(SessionId(session_id))
        if grave is not None:
            raise SessionGoneError(f"session {session_id!r} is closed: {grave.reason}")
        raise SessionGoneError(f"session {session_id!r} is not known", code=ErrorCode.SESSION_NOT_FOUND)

    def find(self, session_id: str) -> E | None:
        return self._live.get(SessionId(session_id))

    def bury(self, session_id: SessionId, reason: str, now_s: float) -> None:
        """The session is closed and released; its id is free again."""
        del self._live[session_id]
        self._graves[session_id] = Grave(reason, now_s)
        while len(self._graves) > MAX_GRAVES:
            self._graves.popitem(last=False)

    def grave(self, session_id: str) -> Grave | None:
        return self._graves.get(SessionId(session_id))

    def __iter__(self) -> Iterator[E]:
        return iter(tuple(self._live.values()))

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._live
