"""The one transition table of the world protocol, used by both ends (world.md section 10 is printed from it).

Owns: which message is allowed in which state and where it leads.  Must not know: numbers, buffers, time.
Invariant: ``(state, message type)`` that is not in `TABLE` is forbidden; a value is the new state. Two entries depend on more
than the type and are resolved by the machines: `session.resumed` leads to the state it names, and an `error` leads back to
``open`` when it answers the start or the resume, and to ``closed`` when it is fatal.
"""

from __future__ import annotations

from enum import StrEnum

from .errors import WireCode
from .world_messages import (
    Chunk,
    ChunkAborted,
    ErrorMessage,
    EventAccepted,
    EventApplied,
    EventDiscarded,
    Hello,
    Message,
    Ping,
    Pong,
    SessionAbort,
    SessionAck,
    SessionClose,
    SessionClosed,
    SessionEvent,
    SessionFailed,
    SessionFork,
    SessionForked,
    SessionLog,
    SessionLogged,
    SessionNext,
    SessionPause,
    SessionPaused,
    SessionPlaying,
    SessionRecovered,
    SessionReplay,
    SessionReplayed,
    SessionReplaying,
    SessionReset,
    SessionResetDone,
    SessionResume,
    SessionResumed,
    SessionResumePlay,
    SessionRewind,
    SessionRewound,
    SessionRollback,
    SessionStart,
    SessionStarted,
)


class WireState(StrEnum):
    """State of one connection as both ends see it."""

    NEW = "new"
    OPEN = "open"
    STARTING = "starting"
    RESUMING = "resuming"
    PLAYING = "playing"
    PAUSED = "paused"
    FAILED = "failed"
    CLOSING = "closing"
    CLOSED = "closed"


LIVE = frozenset({WireState.PLAYING, WireState.PAUSED, WireState.FAILED})
"""States in which the connection owns a session that can go on."""
OWNING = LIVE | {WireState.CLOSING}
"""States in which the connection owes a terminal message."""

_S = WireState
_EVERYWHERE = (_S.OPEN, _S.STARTING, _S.RESUMING, _S.PLAYING, _S.PAUSED, _S.FAILED, _S.CLOSING)

Table = dict[tuple[WireState, type[Message]], WireState]


def _stay(states: tuple[WireState, ...], *types: type[Message]) -> Table:
    return {(state, message): state for state in states for message in types}


TABLE: Table = {
    (_S.NEW, Hello): _S.OPEN,
    (_S.NEW, ErrorMessage): _S.CLOSED,  # e.g. shutdown before the greeting
    **_stay(_EVERYWHERE, Ping, Pong, ErrorMessage),
    # client to server
    (_S.OPEN, SessionStart): _S.STARTING,
    (_S.OPEN, SessionResume): _S.RESUMING,
    **_stay((_S.PLAYING, _S.PAUSED), SessionEvent, SessionPause, SessionResumePlay, SessionReplay),
    **_stay((_S.PLAYING,), SessionNext),
    **_stay((_S.FAILED,), SessionRollback),
    **_stay((_S.PLAYING, _S.PAUSED, _S.FAILED), SessionReset, SessionFork, SessionRewind, SessionLog, SessionAbort),
    **_stay((_S.PLAYING, _S.PAUSED, _S.FAILED, _S.CLOSING), SessionAck),
    (_S.PLAYING, SessionClose): _S.CLOSING,
    (_S.PAUSED, SessionClose): _S.CLOSING,
    (_S.FAILED, SessionClose): _S.CLOSING,
    # server to client
    (_S.STARTING, SessionStarted): _S.PLAYING,
    (_S.RESUMING, SessionResumed): _S.PLAYING,
    **_stay((_S.PLAYING, _S.PAUSED, _S.FAILED, _S.CLOSING), EventAccepted, EventDiscarded, ChunkAborted),
    **_stay((_S.PLAYING, _S.PAUSED, _S.FAILED, _S.CLOSING), SessionForked, SessionLogged, SessionReplayed),
    **_stay((_S.PLAYING, _S.PAUSED, _S.CLOSING), SessionReplaying),
    # The block in flight when the pause came still arrives.
    **_stay((_S.PLAYING, _S.PAUSED, _S.CLOSING), EventApplied, Chunk),
    (_S.PLAYING, SessionPaused): _S.PAUSED,
    (_S.PAUSED, SessionPaused): _S.PAUSED,
    (_S.PLAYING, SessionPlaying): _S.PLAYING,
    (_S.PAUSED, SessionPlaying): _S.PLAYING,
    (_S.PLAYING, SessionResetDone): _S.PLAYING,
    (_S.PAUSED, SessionResetDone): _S.PAUSED,
    (_S.FAILED, SessionResetDone): _S.PLAYING,
    (_S.PLAYING, SessionRewound): _S.PLAYING,
    (_S.PAUSED, SessionRewound): _S.PAUSED,
    (_S.FAILED, SessionRewound): _S.PLAYING,
    (_S.PLAYING, SessionFailed): _S.FAILED,
    (_S.PAUSED, SessionFailed): _S.FAILED,
    (_S.FAILED, SessionRecovered): _S.PLAYING,
    # What the engine said before it saw the close.
    **_stay(
        (_S.CLOSING,), SessionPaused, SessionPlaying, SessionResetDone, SessionRewound, SessionFailed, SessionRecovered
    ),
    (_S.PLAYING, SessionClosed): _S.CLOSED,
    (_S.PAUSED, SessionClosed): _S.CLOSED,
    (_S.FAILED, SessionClosed): _S.CLOSED,
    (_S.CLOSING, SessionClosed): _S.CLOSED,
}


def refusal(state: WireState, message: type[Message]) -> WireCode:
    """The code for a client message that `TABLE` does not allow in this state."""
    if state in (_S.NEW, _S.OPEN):
        return WireCode.BAD_MESSAGE
    if state is _S.CLOSING:
        return WireCode.SESSION_GONE
    if state in LIVE and message in (SessionStart, SessionResume):
        return WireCode.SESSION_EXISTS
    if state is _S.FAILED:
        return WireCode.SESSION_FAILED
    return WireCode.SESSION_STATE
