"""What goes through the engine's two doors: commands in, answers and notices out. Only values.

A command names the ticket that its answer will carry. Control commands travel in a lane of their own, so that ticks and
events can never keep a close, an abort or a reset waiting (row G15).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from realtime_omni.session.frame import Frame
from realtime_omni.session.journal import EventLog
from realtime_omni.session.observation import Observation
from realtime_omni.session.values import EventId, Generation, SessionEvent, SessionId

if TYPE_CHECKING:
    from realtime_omni.snapshot.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """``ticket`` is unique per engine; 0 asks for no answer."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Create(Command):
    session_id: str | None
    prompt: str | None
    seed: int
    image: Any = None
    start: str | None = None
    outputs: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore(Command):
    """A session that goes on where a saved one was, under its own id or another."""

    snapshot: Snapshot
    session_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCommand(Command):
    """``generation`` fences: a command for an earlier life of the same id is answered ``session_gone``."""

    session_id: SessionId
    generation: Generation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept(SessionCommand):
    event: SessionEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Next(SessionCommand):
    """``asked_at_s`` (the engine's clock) says since when somebody waits; None: since the engine read it.

    ``observation``: what a policy computes from. It takes the place of one that still waits, whose caller gets
    SupersededError. A world takes none.

    ``frame``: what a duplex session takes in. Frames wait in order, and every one is computed."""

    outputs: tuple[str, ...] | None = None
    asked_at_s: float | None = None
    observation: Observation | None = None
    frame: Frame | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Log(SessionCommand):
    """Answered with the session's :class:`~realtime_omni.session.journal.EventLog`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork(SessionCommand):
    """A second session that is what ``session_id`` is at its last committed chunk, under the id ``name`` (None: minted)."""

    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(SessionCommand):
    """Answered with a :class:`~realtime_omni.snapshot.snapshot.Snapshot` of the last committed chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlCommand(SessionCommand):
    """Marks the control lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(ControlCommand):
    """The caller of ``Next`` ticket ``target`` went away: drop the waiter, roll its tick back if it has not settled."""

    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(ControlCommand):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback(ControlCommand):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind(ControlCommand):
    chunk_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset(ControlCommand):
    """``None`` keeps what the session was created with."""

    prompt: str | None = None
    seed: int | None = None
    image: Any = None
    start: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Return(ControlCommand):
    """Go to where ``log`` begins: stay when the session is there, else reset to the log's origin."""

    log: EventLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Close(ControlCommand):
    reason: str = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach(ControlCommand):
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach(ControlCommand):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The one answer of a ticket: a value or an error, and the session as it is at that moment."""

    ticket: int
    value: Any = None
    error: Exception | None = None
    view: SessionView | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that happened to a session without being asked for.

    ``kind``: ``progress`` (the public view changed), ``events_discarded``, ``failed``, ``evicted``, ``closed``,
    ``cleanup_failed``. ``closed`` and ``evicted`` end the session.
    """

    kind: str
    session_id: SessionId
    generation: Generation
    view: SessionView
    reason: str = ""
    code: str | None = None
    message: str = ""
    event_ids: tuple[EventId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """What the outside may know of a session; a copy, never the session.

    ``oldest_rewind`` is the smallest chunk index that a rewind can go back to (at most ``chunk_index``), or None where the
    session can be neither rewound nor forked: a model or foreign engine whose state is no value, or state that is gone."""

    session_id: SessionId
    generation: Generation
    state: str
    epoch: int
    chunk_index: int
    prompt: str | None
    seed: int
    pending_event_count: int
    event_floor: int
    pages_used: int
    kv_bytes: int
    state_bytes: int
    attached: bool
    can_rollback: bool
    oldest_rewind: int | None
    created_at_s: float
    last_used_at_s: float
