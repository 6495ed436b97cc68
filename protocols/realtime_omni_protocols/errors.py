"""The closed lists of wire codes and close codes, and the one exception every decoder raises.

Owns: the strings of world.md section 8.  Must not know: sessions, sockets, engines.
Invariant: whatever bytes a peer sends, the only exception a decoder or machine of this package lets out is `WireError`;
its text never holds a traceback, a class name or a file path.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class WireCode(StrEnum):
    """What an ``error`` message (or a refused frame) can say. Closed: a new code needs a new protocol version."""

    BAD_MESSAGE = "bad_message"
    UNSUPPORTED_VERSION = "unsupported_version"
    UNSUPPORTED_FORMAT = "unsupported_format"
    MODEL_UNKNOWN = "model_unknown"
    PROMPT_UNKNOWN = "prompt_unknown"
    CONTROL_INVALID = "control_invalid"
    SCHEMA_UNKNOWN = "schema_unknown"
    IMAGE_INVALID = "image_invalid"
    INVALID_ARGUMENT = "invalid_argument"
    EVENT_CONFLICT = "event_conflict"
    STALE = "stale"
    QUEUE_FULL = "queue_full"
    SESSION_EXISTS = "session_exists"
    SESSION_NOT_FOUND = "session_not_found"
    SESSION_GONE = "session_gone"
    SESSION_BUSY = "session_busy"
    SESSION_STATE = "session_state"
    SESSION_FAILED = "session_failed"
    TICK_FAILED = "tick_failed"
    ABORTED = "aborted"
    HORIZON = "horizon"
    NOT_RETAINED = "not_retained"
    UNSUPPORTED = "unsupported"
    CAPACITY = "capacity"
    UNAUTHORIZED = "unauthorized"
    ORIGIN_REFUSED = "origin_refused"
    RATE_LIMITED = "rate_limited"
    MESSAGE_TOO_LARGE = "message_too_large"
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    STALLED = "stalled"
    RESUME_REFUSED = "resume_refused"
    SHUTDOWN = "shutdown"
    INTERNAL = "internal"


class CloseCode(IntEnum):
    """WebSocket close codes this protocol uses."""

    NORMAL = 1000
    SHUTDOWN = 1001
    TOO_LARGE = 1009
    BAD_MESSAGE = 4400
    TIMEOUT = 4408
    TAKEN_OVER = 4409
    GONE = 4410
    RATE = 4429
    INTERNAL = 4500


class WireError(ValueError):
    """A peer's message was refused before anything changed.

    ``path`` is a JSONPath of the offending field (``$.controls[0].track``; ``$`` is the whole message), ``event_id`` and
    ``re`` tie the error to the message, ``close`` is set when the connection has to end.
    """

    def __init__(
        self,
        code: WireCode,
        message: str,
        *,
        path: str | None = None,
        event_id: int | None = None,
        re: str | None = None,
        close: CloseCode | None = None,
    ) -> None:
        super().__init__(f"{code.value}: {message}" + (f" (at {path})" if path else ""))
        self.code = code
        self.message = message
        self.path = path
        self.event_id = event_id
        self.re = re
        self.close = close


class LocalError(RuntimeError):
    """Our own side tried something the protocol forbids (a bug here, never the peer's fault); nothing was sent."""
