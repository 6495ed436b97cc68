"""The states of a Live session and which event each of them takes.

Owns: the table of live.md section 2.  Must not know: what an event does.
"""

from __future__ import annotations

from enum import StrEnum

from .client_events import (
    ClientEvent,
    CommentaryAppend,
    FixturePlay,
    ForkStart,
    InputAudioAppend,
    InputAudioMute,
    InputAudioUnmute,
    InstructionsAppend,
    PlainAppend,
    ResponseCreate,
    ResponseItemCreate,
    SessionClose,
    SessionStart,
    SessionUpdate,
    ThinkingAppend,
)
from .errors import LiveCode


class LiveState(StrEnum):
    """State of the session, on every connection."""

    NEW = "new"
    STARTING = "starting"
    ACTIVE = "active"
    CLOSING = "closing"
    CLOSED = "closed"


_ACTIVE = frozenset({LiveState.ACTIVE})
ALLOWED: dict[type[ClientEvent], frozenset[LiveState]] = {
    SessionStart: frozenset({LiveState.NEW}),
    ForkStart: frozenset({LiveState.NEW}),
    SessionUpdate: _ACTIVE,
    InputAudioAppend: _ACTIVE,
    PlainAppend: _ACTIVE,
    InputAudioMute: _ACTIVE,
    InputAudioUnmute: _ACTIVE,
    FixturePlay: _ACTIVE,
    InstructionsAppend: _ACTIVE,
    ThinkingAppend: _ACTIVE,
    CommentaryAppend: _ACTIVE,
    ResponseItemCreate: _ACTIVE,
    ResponseCreate: _ACTIVE,
    SessionClose: frozenset({LiveState.STARTING, LiveState.ACTIVE, LiveState.CLOSING}),
}
"""Which event is taken in which state; `refusal` says what the others are answered."""
PRIMARY_ONLY = (SessionStart, ForkStart, InputAudioAppend, PlainAppend)
"""What a sideband cannot send."""


def refusal(state: LiveState, event: type[ClientEvent]) -> LiveCode | None:
    """The code that an event of this type gets in this state; None when it is taken."""
    if state in ALLOWED.get(event, _ACTIVE):
        return None
    if state in (LiveState.CLOSING, LiveState.CLOSED):
        return LiveCode.SESSION_CLOSED
    if event in (SessionStart, ForkStart):
        return LiveCode.SESSION_ALREADY_STARTED
    return LiveCode.SESSION_NOT_STARTED
