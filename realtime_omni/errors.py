"""Every error a caller can see, and its code.

The tree::

    OmniError(RuntimeError)            carries a code from the closed list
      ConfigError                      the configuration was refused (path, line, hint)
      SessionError                     something about one session
        ArgumentError(ValueError)      the caller's value was refused; ``path`` names the field
        StateError                     the session is in a state that does not allow this
          SessionGoneError             the id is closed, buried or unknown
        StaleEventError                event id at or below the highest accepted one
        EventConflictError             same event id, other payload
        EventQueueFullError            back pressure: apply some events first
        CapacityError                  no pages or no session slots
        TickError                      the tick failed; nothing was committed
          ChunkMetadataError(ValueError)   the output names another tick than the one submitted
          ArtifactError(ValueError)    missing, undeclared, duplicate or absent artifact
          AbortedError                 the running chunk was aborted on request
          SupersededError              a newer observation came before this one was begun
        CleanupError                   release failed; the session is a tombstone
      SnapshotError                    a saved session was refused, or could not be written or read
      EngineError                      the engine is unusable for everybody (fatal)
      BackendUnavailable               a back-end cannot run here (names what is missing)

The caller's fault carries a code from :class:`ErrorCode`; our own fault is logged with an id and shown as ``internal``.
Nothing internal (traceback, path, class name) is part of a message.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """The closed list of codes; the world protocol uses the same strings."""

    INVALID_CONFIG = "invalid_config"
    INVALID_ARGUMENT = "invalid_argument"
    MODEL_UNKNOWN = "model_unknown"
    PROMPT_UNKNOWN = "prompt_unknown"
    CONTROL_INVALID = "control_invalid"
    SCHEMA_UNKNOWN = "schema_unknown"
    IMAGE_INVALID = "image_invalid"
    EVENT_CONFLICT = "event_conflict"
    STALE = "stale"
    QUEUE_FULL = "queue_full"
    SESSION_EXISTS = "session_exists"
    SESSION_NOT_FOUND = "session_not_found"
    SESSION_GONE = "session_gone"
    SESSION_STATE = "session_state"
    SESSION_FAILED = "session_failed"
    TICK_FAILED = "tick_failed"
    METADATA_MISMATCH = "metadata_mismatch"
    ARTIFACT = "artifact"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"
    HORIZON = "horizon"
    NOT_RETAINED = "not_retained"
    STATE_TOO_LARGE = "state_too_large"
    SNAPSHOT_CORRUPT = "snapshot_corrupt"
    SNAPSHOT_TOO_LARGE = "snapshot_too_large"
    SNAPSHOT_VERSION = "snapshot_version"
    SNAPSHOT_FOREIGN = "snapshot_foreign"
    SNAPSHOT_READ_FAILED = "snapshot_read_failed"
    SNAPSHOT_WRITE_FAILED = "snapshot_write_failed"
    CAPACITY = "capacity"
    CLEANUP_FAILED = "cleanup_failed"
    UNSUPPORTED = "unsupported"
    BACKEND_UNAVAILABLE = "backend_unavailable"
    SHUTDOWN = "shutdown"
    INTERNAL = "internal"


class OmniError(RuntimeError):
    """Base of all errors of this package. ``code`` is stable, the message is for people."""

    default_code: ErrorCode = ErrorCode.INTERNAL

    def __init__(self, message: str, *, code: ErrorCode | None = None, path: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code: ErrorCode = code if code is not None else self.default_code
        self.path = path


class ConfigError(OmniError):
    """A recipe, flag or environment value was refused."""

    default_code = ErrorCode.INVALID_CONFIG


class EngineError(OmniError):
    """The engine cannot serve anybody any more."""


class BackendUnavailable(OmniError):
    """A device back-end cannot run here; the message names what is missing."""

    default_code = ErrorCode.BACKEND_UNAVAILABLE


class SessionError(OmniError):
    """Something about one session; other sessions are unharmed."""


class ArgumentError(SessionError, ValueError):
    """A caller's value was refused before anything changed; ``path`` names the field."""

    default_code = ErrorCode.INVALID_ARGUMENT


class StateError(SessionError):
    """The session's state does not allow this call."""

    default_code = ErrorCode.SESSION_STATE


class SessionGoneError(StateError):
    """The id is closed, buried or was never known."""

    default_code = ErrorCode.SESSION_GONE


class StaleEventError(SessionError, ValueError):
    """The event id is not above the highest accepted one."""

    default_code = ErrorCode.STALE


class EventConflictError(SessionError, ValueError):
    """The event id was used before with another payload."""

    default_code = ErrorCode.EVENT_CONFLICT


class EventQueueFullError(SessionError):
    """``max_pending_events`` unapplied events are waiting."""

    default_code = ErrorCode.QUEUE_FULL


class CapacityError(SessionError):
    """No KV pages, session slots or queue places are left."""

    default_code = ErrorCode.CAPACITY


class TickError(SessionError):
    """A tick failed; index, prompt, controls and queue are as before."""

    default_code = ErrorCode.TICK_FAILED


class ChunkMetadataError(TickError, ValueError):
    """The output's metadata does not equal the submitted tick."""

    default_code = ErrorCode.METADATA_MISMATCH


class ArtifactError(TickError, ValueError):
    """An artifact is missing, undeclared, duplicate or was requested and is absent."""

    default_code = ErrorCode.ARTIFACT


class AbortedError(TickError):
    """The running chunk was aborted on request; the session lives on."""

    default_code = ErrorCode.ABORTED


class SupersededError(TickError):
    """A newer observation of the same session came before this one was begun; nothing was computed for it."""

    default_code = ErrorCode.SUPERSEDED


class CleanupError(SessionError):
    """Releasing worker state failed; the session is a tombstone and the release is retried."""

    default_code = ErrorCode.CLEANUP_FAILED


class SnapshotError(OmniError):
    """A saved session was refused (damaged, too large, newer, of another model), or could not be written or read.

    Nothing has changed: no session, no page, and no file that existed before."""

    default_code = ErrorCode.SNAPSHOT_CORRUPT
