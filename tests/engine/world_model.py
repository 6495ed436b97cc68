"""What an engine ought to do, told independently: plain records, no engine code.

One :class:`Expected` per session id says which state, index, prompt, events and pages it must have. The pictures come from
:class:`Replay`: an engine of its own that sees committed history alone, so that no failure, abort, reset or neighbour of the
engine under test can have left a trace in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import FRAMES, TinyKVWorld, move

RETAINED = 6
"""Frames that TinyKVWorld keeps: two of sink and four of window, one page each."""

Event = tuple[int, str | None, int | None]
"""Id, prompt, dx."""


@dataclass
class Expected:
    """One live session."""

    life: int
    seed: int
    first_prompt: str
    prompt: str
    state: str = "active"
    epoch: int = 0
    index: int = 0
    floor: int = -1
    kept: bool = True
    """Worker state is there."""
    pending: list[Event] = field(default_factory=list)
    applied: dict[int, Event] = field(default_factory=dict)
    discarded: dict[int, Event] = field(default_factory=dict)
    lease_until: float | None = None
    retry_at: float | None = None
    pause: float = 1.0
    dx: int | None = None
    """The control that stays until it is replaced."""

    def pages(self, *, unwritten: bool) -> int:
        return min(FRAMES * (self.index - unwritten), RETAINED) if self.kept else 0

    def fate(self, event: Event) -> str:
        """What accepting this event must answer."""
        if self.state != "active":
            return "refused"
        for known, answer in ((self.applied, "duplicate"), (self.discarded, "discarded")):
            if event[0] in known:
                return answer if known[event[0]] == event else "conflict"
        for waiting in self.pending:
            if waiting[0] == event[0]:
                return "duplicate" if waiting == event else "conflict"
        if event[0] <= self.floor:
            return "stale"
        return "full" if len(self.pending) >= 4 else "accepted"

    def accept(self, event: Event) -> None:
        if self.fate(event) == "accepted":
            self.pending.append(event)
            self.floor = event[0]

    def commit(self) -> None:
        for event in self.pending:
            self.applied[event[0]] = event
            self.prompt = event[1] or self.prompt
            self.dx = self.dx if event[2] is None else event[2]
        self.pending.clear()
        self.index += 1

    def fail(self, *, keep: bool) -> None:
        self.state, self.kept = "failed", keep

    def reset(self, seed: int | None) -> None:
        self.discarded.update({event[0]: event for event in self.pending})
        self.pending.clear()
        self.prompt, self.index, self.state, self.kept, self.dx = self.first_prompt, 0, "active", True, None
        self.epoch += 1
        self.seed = self.seed if seed is None else seed

    def bury_failed(self, now: float) -> None:
        """Its release has failed: a tombstone, tried again later and later. Its pages stay."""
        self.state, self.lease_until = "cleanup_failed", None
        self.retry_at, self.pause = now + self.pause, min(self.pause * 2, 60.0)


class Replay:
    """The pictures of committed history."""

    def __init__(self) -> None:
        self._engine = InlineEngine(TinyKVWorld(), sessions=64, max_batch=1)
        self._events: dict[str, int] = {}

    def chunk(self, session_id: str, expected: Expected) -> bytes:
        """The next picture of this life and epoch of a session; ``expected`` is as before the commit."""
        name = f"{session_id}.{expected.life}.{expected.epoch}"
        if name not in self._events:
            if len(self._events) == 60:
                self._forget()
            self._engine.create(name, seed=expected.seed, prompt=expected.first_prompt)
            self._events[name] = 0
        for _, prompt, dx in expected.pending:
            controls = [] if dx is None else [move(dx)]
            self._engine.accept(name, self._events[name], prompt=prompt, controls=controls)
            self._events[name] += 1
        return picture(self._engine.next(name))

    def _forget(self) -> None:
        raise AssertionError("more lives than one run of the machine should have")


def picture(chunk: Any) -> bytes:
    data: bytes = chunk.artifacts["frames"].data.tobytes()
    return data
