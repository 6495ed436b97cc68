"""The closed list of codes of the Live protocol, and the one exception its decoders and machine let out.

Owns: the strings of live.md section 7.  Must not know: events, sessions, sockets.
Invariant: whatever a peer sends, what comes out is a value or a `LiveError`; its text holds no traceback, class name or
file.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class LiveCode(StrEnum):
    """What ``error.code`` can say."""

    # the event
    INVALID_JSON = "invalid_json"
    EVENT_TOO_LARGE = "event_too_large"
    UNKNOWN_EVENT = "unknown_event"
    UNSUPPORTED_EVENT = "unsupported_event"
    """A real event of the protocol that needs a backend this server does not have."""
    UNKNOWN_PARAMETER = "unknown_parameter"
    MISSING_PARAMETER = "missing_required_parameter"
    INVALID_TYPE = "invalid_type"
    INVALID_VALUE = "invalid_value"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    IMMUTABLE_PARAMETER = "immutable_parameter"
    INVALID_AUDIO = "invalid_audio"
    # the session
    SESSION_NOT_STARTED = "session_not_started"
    SESSION_ALREADY_STARTED = "session_already_started"
    SESSION_CLOSED = "session_closed"
    PRIMARY_ONLY = "primary_connection_only"
    FIXTURE_ACTIVE = "fixture_active"
    DELEGATION_NOT_FOUND = "delegation_not_found"
    TOO_MANY_PENDING = "too_many_pending"
    INPUT_OVERRUN = "input_audio_overrun"
    MODEL_NOT_FOUND = "model_not_found"
    VOICE_NOT_FOUND = "voice_not_found"
    SESSION_NOT_FOUND = "session_not_found"
    CAPACITY = "capacity_exceeded"
    START_TIMEOUT = "start_timeout"
    # the server
    SHUTDOWN = "server_shutdown"
    SERVER_ERROR = "server_error"


_SERVER_CODES = frozenset({LiveCode.SHUTDOWN, LiveCode.SERVER_ERROR})


class LiveClose(IntEnum):
    """WebSocket close codes this protocol uses."""

    NORMAL = 1000
    SHUTDOWN = 1001
    POLICY = 1008
    TOO_LARGE = 1009
    SERVER_ERROR = 1011


class LiveError(ValueError):
    """An event was refused; nothing changed.

    ``param`` names the offending field from the event's root (``session.audio.format``), ``client_event_id`` is the
    refused event's ``event_id`` where it could be read.
    """

    def __init__(
        self, code: LiveCode, message: str, param: str | None = None, client_event_id: str | None = None
    ) -> None:
        super().__init__(f"{code.value}: {message}" + (f" (at {param})" if param else ""))
        self.code = code
        self.message = message
        self.param = param
        self.client_event_id = client_event_id

    @property
    def kind(self) -> str:
        """``error.type``: whose fault it is."""
        if self.code is LiveCode.CAPACITY:
            return "rate_limit_error"
        return "server_error" if self.code in _SERVER_CODES else "invalid_request_error"
