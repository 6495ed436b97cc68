"""Which cross-attention caches are complete, and for which prompt.

Owns: one entry per (session, branch, cache name), and the row of the store that each may use. Must not know: tensors,
prompts' text.

An entry is *published* under a fingerprint (prompt, length, dtype: whatever the model derives its keys from) only
once every layer is written; a rebuild invalidates first, so a failed rebuild can never be read as the old prompt or
as the new one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from realtime_omni.errors import CapacityError


class CrossKey(NamedTuple):
    """The name of one entry."""

    session: str
    branch: str
    cache: str


@dataclass(frozen=True, slots=True)
class CrossEntry:
    """A published entry: ``row`` of the store's tensors, valid for ``fingerprint``."""

    row: int
    fingerprint: Hashable


class CrossIndex:
    """The table of entries; rows are given to whole sessions, ``branch_count`` adjacent ones each."""

    def __init__(self, sessions: int, branches: Iterable[str], caches: Iterable[str]) -> None:
        self._branches = {name: index for index, name in enumerate(branches)}
        self._caches = frozenset(caches)
        self._free = list(range(sessions - 1, -1, -1))
        self._slots: dict[str, int] = {}
        self._entries: dict[CrossKey, CrossEntry] = {}

    def open(self, session: str) -> None:
        """Give the session its rows. Raises CapacityError when all are taken, ValueError when it has them."""
        if session in self._slots:
            raise ValueError(f"session {session!r} has cross-attention rows already")
        if not self._free:
            raise CapacityError("all cross-attention rows are taken")
        self._slots[session] = self._free.pop()

    def close(self, session: str) -> None:
        """Forget the session's entries and free its rows."""
        slot = self._slots.pop(session)
        for key in [key for key in self._entries if key.session == session]:
            del self._entries[key]
        self._free.append(slot)

    def row(self, key: CrossKey) -> int:
        """The row of the store that this entry writes. Raises KeyError on an unknown session, branch or cache."""
        if key.cache not in self._caches:
            raise KeyError(f"unknown cross-attention cache {key.cache!r}")
        return self._slots[key.session] * len(self._branches) + self._branches[key.branch]

    def publish(self, key: CrossKey, fingerprint: Hashable) -> None:
        """Declare the entry complete for this fingerprint."""
        self._entries[key] = CrossEntry(self.row(key), fingerprint)

    def invalidate(self, key: CrossKey) -> None:
        """Declare the entry unusable; no error when it was."""
        self._entries.pop(key, None)

    def find(self, key: CrossKey, fingerprint: Hashable) -> CrossEntry | None:
        """The entry if it is published for exactly this fingerprint."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.fingerprint == fingerprint else None

    def entries_of(self, session: str) -> tuple[CrossKey, ...]:
        """The published entries of one session, in order of publication."""
        return tuple(key for key in self._entries if key.session == session)

    def check(self, sessions: int) -> None:
        """Rows are free or taken once, and every entry has its own row. Raises AssertionError if not."""
        if sorted([*self._free, *self._slots.values()]) != list(range(sessions)):
            raise AssertionError("cross-attention rows are lost or shared")
        for key, entry in self._entries.items():
            if key.session not in self._slots or entry.row != self.row(key):
                raise AssertionError(f"entry {key} does not own row {entry.row}")
