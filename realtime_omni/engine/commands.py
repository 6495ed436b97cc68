"""What goes through the engine's two doors: commands in, answers and notices out. Only values.

A command names the ticket that its answer will carry. Control commands travel in a lane of their own, so that ticks and
events can never keep a close, an abort or a reset waiting (row G15).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from realtime_omni.session.frame import Frame
from realtime_omni.session.journal import EventLog
from realtime_omni.session.observation import Observation
from realtime_omni.session.values import EventId, Generation, SessionEvent, SessionId

if TYPE_CHECKING:
    from realtime_omni.snapshot.snapshot import Snapshot


class Command(Struct, frozen=True, kw_only=True):
    """``ticket`` is unique per engine; 0 asks for no answer."""

    ticket: int


class Create(Command, frozen=True, kw_only=True):
    session_id: str | None
    prompt: str | None
    seed: int
    image: Any = None
    start: str | None = None
    outputs: tuple[str, ...] | None = None


class Restore(Command, frozen=True, kw_only=True):
    """A session that goes on where a saved one was, under its own id or another."""

    snapshot: Snapshot
    session_id: str | None = None


class SessionCommand(Command, frozen=True, kw_only=True):
    """``generation`` fences: a command for an earlier life of the same id is answered ``session_gone``."""

    session_id: SessionId
    generation: Generation | None = None


class Accept(SessionCommand, frozen=True, kw_only=True):
    event: SessionEvent


class Next(SessionCommand, frozen=True, kw_only=True):
    """``asked_at_s`` (the engine's clock) says since when somebody waits; None: since the engine read it.

    ``observation``: what a policy computes from. It takes the place of one that still waits, whose caller gets
    SupersededError. A world takes none.

    ``frame``: what a duplex session takes in. Frames wait in order, and every one is computed."""

    outputs: tuple[str, ...] | None = None
    asked_at_s: float | None = None
    observation: Observation | None = None
    frame: Frame | None = None


class Log(SessionCommand, frozen=True, kw_only=True):
    """Answered with the session's :class:`~realtime_omni.session.journal.EventLog`."""


class Fork(SessionCommand, frozen=True, kw_only=True):
    """A second session that is what ``session_id`` is at its last committed chunk, under the id ``name`` (None: minted)."""

    name: str | None = None


class Save(SessionCommand, frozen=True, kw_only=True):
    """Answered with a :class:`~realtime_omni.snapshot.snapshot.Snapshot` of the last committed chunk."""


class ControlCommand(SessionCommand, frozen=True, kw_only=True):
    """Marks the control lane."""


class Cancel(ControlCommand, frozen=True, kw_only=True):
    """The caller of ``Next`` ticket ``target`` went away: drop the waiter, roll its tick back if it has not settled."""

    target: int


class Abort(ControlCommand, frozen=True, kw_only=True):
    pass


class Rollback(ControlCommand, frozen=True, kw_only=True):
    pass


class Rewind(ControlCommand, frozen=True, kw_only=True):
    chunk_index: int


class Reset(ControlCommand, frozen=True, kw_only=True):
    """``None`` keeps what the session was created with. ``observation``: what a policy will be asked next; one that it cannot
    use is refused here, before anything is forgotten."""

    prompt: str | None = None
    seed: int | None = None
    image: Any = None
    start: str | None = None
    observation: Observation | None = None


class Return(ControlCommand, frozen=True, kw_only=True):
    """Go to where ``log`` begins: stay when the session is there, else reset to the log's origin."""

    log: EventLog


class Close(ControlCommand, frozen=True, kw_only=True):
    reason: str = "client"


class Detach(ControlCommand, frozen=True, kw_only=True):
    grace_s: float


class Attach(ControlCommand, frozen=True, kw_only=True):
    pass


class Answer(Struct, frozen=True, kw_only=True):
    """The one answer of a ticket: a value or an error, and the session as it is at that moment."""

    ticket: int
    value: Any = None
    error: Exception | None = None
    view: SessionView | None = None


class Notice(Struct, frozen=True, kw_only=True):
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


class SessionView(Struct, frozen=True, kw_only=True):
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
