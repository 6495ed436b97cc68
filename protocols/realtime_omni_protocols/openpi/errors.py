"""The closed list of codes of the policy protocol, and the one exception its decoders and machines let out.

Owns: the strings of openpi.md section 7.  Must not know: numpy, sessions, sockets.
Invariant: whatever a peer sends, what comes out is a value or a `PolicyError`; its text holds no traceback, class name
or file.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class PolicyCode(StrEnum):
    """What an error frame can say. Closed: a new code needs a new version of the protocol."""

    # the frame
    BAD_FRAME = "bad_frame"
    TOO_LARGE = "too_large"
    """The whole frame, in bytes; it ends the connection."""
    LIMIT_EXCEEDED = "limit_exceeded"
    """Values, levels, lengths of texts and keys inside a frame."""
    BAD_ARRAY = "bad_array"
    DTYPE_REFUSED = "dtype_refused"
    # the request
    BAD_MESSAGE = "bad_message"
    KEY_UNKNOWN = "key_unknown"
    KEY_DUPLICATE = "key_duplicate"
    SEED_INVALID = "seed_invalid"
    STEPS_INVALID = "steps_invalid"
    # the observation
    CAMERA_MISSING = "camera_missing"
    CAMERA_UNKNOWN = "camera_unknown"
    CAMERA_EMPTY = "camera_empty"
    IMAGE_INVALID = "image_invalid"
    IMAGE_SHAPE = "image_shape"
    IMAGE_LAYOUT = "image_layout"
    IMAGE_DTYPE = "image_dtype"
    IMAGE_VALUE = "image_value"
    STATE_MISSING = "state_missing"
    STATE_SHAPE = "state_shape"
    STATE_DTYPE = "state_dtype"
    STATE_VALUE = "state_value"
    PROMPT_MISSING = "prompt_missing"
    PROMPT_INVALID = "prompt_invalid"
    # the session
    SESSION_STATE = "session_state"
    SESSION_NOT_FOUND = "session_not_found"
    SESSION_BUSY = "session_busy"
    STALE = "stale"
    CAPACITY = "capacity"
    UNAUTHORIZED = "unauthorized"
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    # the server
    POLICY_FAILED = "policy_failed"
    BAD_ACTION = "bad_action"
    SHUTDOWN = "shutdown"
    INTERNAL = "internal"


class PolicyClose(IntEnum):
    """WebSocket close codes this protocol uses."""

    NORMAL = 1000
    SHUTDOWN = 1001
    TOO_LARGE = 1009
    ERROR = 1011
    BAD_MESSAGE = 4400
    TIMEOUT = 4408
    TAKEN_OVER = 4409


class PolicyError(ValueError):
    """A frame, request or observation was refused; nothing changed.

    ``path`` is a JSONPath of the offending value (``$["observation.images.top"]``; ``$`` is the whole message).
    """

    def __init__(self, code: PolicyCode, message: str, path: str = "$") -> None:
        super().__init__(f"{code.value}: {message} (at {path})")
        self.code = code
        self.message = message
        self.path = path

    @property
    def text(self) -> str:
        """Message and path, as the wire shows them."""
        return self.message if self.path == "$" else f"{self.path}: {self.message}"
