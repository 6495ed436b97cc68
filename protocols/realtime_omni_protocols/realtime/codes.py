"""The closed lists of codes and close codes of the Realtime protocol, and the one exception its readers raise.

Owns: the strings of realtime.md section 8.  Must not know: sessions, sockets, models.
Invariant: whatever a peer sends, what comes out is a value or a `RealtimeError`; its text holds no traceback, class name
or file. The spelling of a code is part of the protocol: clients decide by it whether a connection lives on.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class RealtimeCode(StrEnum):
    """What ``error.code`` can say. The hosted service's spelling where it has a code for the same thing."""

    # the message
    INVALID_JSON = "invalid_json"
    INVALID_VALUE = "invalid_value"
    MISSING_PARAMETER = "missing_required_parameter"
    TOO_LARGE = "message_too_large"
    # the session
    CANNOT_UPDATE_VOICE = "cannot_update_voice"
    # the input buffer
    COMMIT_EMPTY = "input_audio_buffer_commit_empty"
    # items
    DUPLICATE_ITEM = "item_create_duplicate_item_id"
    INVALID_PREVIOUS_ITEM = "item_create_invalid_previous_item_id"
    INVALID_CALL = "invalid_tool_call_id"
    RETRIEVE_INVALID_ITEM = "item_retrieve_invalid_item_id"
    DELETE_INVALID_ITEM = "item_delete_invalid_item_id"
    TRUNCATE_INVALID_ITEM = "item_truncate_invalid_item_id"
    # responses
    ACTIVE_RESPONSE = "conversation_already_has_active_response"
    CANCEL_NOT_ACTIVE = "response_cancel_not_active"
    TOO_MANY_RESPONSES = "too_many_responses"
    # the duplex dialect
    RESUME_REFUSED = "resume_refused"
    # the server
    INVALID_API_KEY = "invalid_api_key"
    RATE_LIMITED = "rate_limit_exceeded"
    OVERLOADED = "server_overloaded"
    EXPIRED = "session_expired"
    SHUTDOWN = "server_shutdown"
    CLOSED = "session_closed"
    MODEL_FAILED = "model_failed"
    INTERNAL = "internal_error"


_TYPES = {
    RealtimeCode.INVALID_API_KEY: "authentication_error",
    RealtimeCode.RATE_LIMITED: "rate_limit_error",
    RealtimeCode.OVERLOADED: "server_error",
    RealtimeCode.SHUTDOWN: "server_error",
    RealtimeCode.MODEL_FAILED: "server_error",
    RealtimeCode.INTERNAL: "server_error",
}


def error_type(code: RealtimeCode) -> str:
    """``error.type`` of a code."""
    return _TYPES.get(code, "invalid_request_error")


class RealtimeClose(IntEnum):
    """WebSocket close codes this protocol uses. A client may try again after 1001, 1011 and 1013, not after 1008."""

    NORMAL = 1000
    SHUTDOWN = 1001
    POLICY = 1008
    TOO_LARGE = 1009
    INTERNAL = 1011
    OVERLOADED = 1013


class RealtimeError(ValueError):
    """A client event was refused; nothing changed. ``param`` names the offending field (``session.audio.input.format``)."""

    def __init__(self, code: RealtimeCode, message: str, param: str | None = None) -> None:
        super().__init__(f"{code.value}: {message}")
        self.code = code
        self.message = message
        self.param = param
