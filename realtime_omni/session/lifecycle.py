"""The states of a session and the one table that moves them.

Owns the table; the documentation is rendered from it (``render_markdown``). Knows no clock and no thread.

CLEANUP_FAILED is a tombstone: the id stays taken, nothing but a close retry is allowed, and a retry that succeeds ends it.
"""

from __future__ import annotations

from enum import StrEnum

from realtime_omni.errors import ErrorCode, SessionGoneError, StateError


class SessionState(StrEnum):
    ACTIVE = "active"
    RESETTING = "resetting"
    FAILED = "failed"
    CLOSING = "closing"
    CLOSED = "closed"
    CLEANUP_FAILED = "cleanup_failed"


class Trigger(StrEnum):
    TICK_FAILED = "tick failed"
    ROLLBACK = "rollback"
    REWIND = "rewind"
    RESET = "reset"
    RESET_DONE = "reset done"
    RESET_FAILED = "reset failed"
    CLOSE = "close"
    RELEASED = "released"
    RELEASE_FAILED = "release failed"


S, T = SessionState, Trigger
TABLE: dict[tuple[SessionState, Trigger], SessionState] = {
    (S.ACTIVE, T.TICK_FAILED): S.FAILED,
    (S.ACTIVE, T.REWIND): S.ACTIVE,
    (S.ACTIVE, T.RESET): S.RESETTING,
    (S.ACTIVE, T.CLOSE): S.CLOSING,
    (S.RESETTING, T.RESET_DONE): S.ACTIVE,
    (S.RESETTING, T.RESET_FAILED): S.FAILED,
    (S.RESETTING, T.CLOSE): S.CLOSING,
    (S.FAILED, T.ROLLBACK): S.ACTIVE,
    (S.FAILED, T.REWIND): S.ACTIVE,
    (S.FAILED, T.RESET): S.RESETTING,
    (S.FAILED, T.CLOSE): S.CLOSING,
    (S.FAILED, T.RELEASE_FAILED): S.CLEANUP_FAILED,
    (S.CLOSING, T.RELEASED): S.CLOSED,
    (S.CLOSING, T.RELEASE_FAILED): S.CLEANUP_FAILED,
    (S.CLEANUP_FAILED, T.CLOSE): S.CLOSING,
}

ALLOWED: dict[str, frozenset[SessionState]] = {
    "accept_event": frozenset({S.ACTIVE}),
    "next_chunk": frozenset({S.ACTIVE}),
    "attach": frozenset({S.ACTIVE, S.RESETTING, S.FAILED}),
    "abort": frozenset({S.ACTIVE, S.FAILED}),
    "rollback": frozenset({S.FAILED}),
    "fork": frozenset({S.ACTIVE, S.FAILED}),
    "rewind": frozenset({S.ACTIVE, S.FAILED}),
    "reset": frozenset({S.ACTIVE, S.FAILED}),
    "snapshot": frozenset({S.ACTIVE, S.FAILED}),
    "close": frozenset({S.ACTIVE, S.RESETTING, S.FAILED, S.CLOSING, S.CLOSED, S.CLEANUP_FAILED}),
}
"""Which calls a state admits; everything else is refused before anything changes."""


class Lifecycle:
    """One session's state. ``move`` follows the table or raises; ``require`` refuses a call that the state forbids."""

    def __init__(self) -> None:
        self.state = SessionState.ACTIVE

    def can(self, trigger: Trigger) -> bool:
        return (self.state, trigger) in TABLE

    def move(self, trigger: Trigger) -> SessionState:
        """Raises StateError when the table has no such edge."""
        try:
            self.state = TABLE[self.state, trigger]
        except KeyError:
            raise StateError(f"a session that is {self.state} cannot take '{trigger}'") from None
        return self.state

    def require(self, call: str) -> None:
        """Raises SessionGoneError once closing has begun, StateError otherwise, when ``call`` is not allowed now."""
        if self.state in ALLOWED[call]:
            return
        if self.state in (SessionState.CLOSING, SessionState.CLOSED):
            raise SessionGoneError(f"{call}: the session is {self.state}")
        if self.state is SessionState.CLEANUP_FAILED:
            raise StateError(f"{call}: cleanup failed; only close is possible", code=ErrorCode.CLEANUP_FAILED)
        if self.state is SessionState.FAILED:
            raise StateError(f"{call}: the session failed; reset, roll back or close it", code=ErrorCode.SESSION_FAILED)
        raise StateError(f"{call}: the session is {self.state}")


def render_markdown() -> str:
    """The table as documentation."""
    lines = ["| state | trigger | next state |", "| --- | --- | --- |"]
    lines += [f"| {state} | {trigger} | {target} |" for (state, trigger), target in TABLE.items()]
    lines += ["", "| call | allowed in |", "| --- | --- |"]
    order = list(SessionState)
    lines += [f"| {call} | {', '.join(s for s in order if s in states)} |" for call, states in ALLOWED.items()]
    return "\n".join(lines) + "\n"
