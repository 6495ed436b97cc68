"""From our errors to what the wire may say: the closed list of codes, JSON paths, and nothing internal.

Pure, but for the log line of what is our own fault: it carries an id, and the client sees only that id.
"""

from __future__ import annotations

import logging
import secrets
from typing import NamedTuple

from realtime_omni.errors import ErrorCode, OmniError
from realtime_omni_protocols.world import WireCode

_log = logging.getLogger(__name__)

_OTHER_NAME = {
    ErrorCode.METADATA_MISMATCH: WireCode.TICK_FAILED,
    ErrorCode.ARTIFACT: WireCode.TICK_FAILED,
    ErrorCode.CLEANUP_FAILED: WireCode.SESSION_GONE,
}
_WIRE = {code.value for code in WireCode}
_FAILED = "the model failed; the server's log says why"
"""What the engine says of a failed tick names request ids, artifacts and the model's own words: for the log and for callers
in this process."""


class WireFault(NamedTuple):
    """What a client is told about an error."""

    code: WireCode
    message: str
    path: str | None = None


def describe_error(error: BaseException, **context: str) -> WireFault:
    """A client-safe description. Anything that is not the caller's fault is logged in full and shown as ``internal``."""
    if isinstance(error, OmniError):
        code = wire_code(error.code, error.path)
        if code is WireCode.TICK_FAILED:
            return WireFault(code, _FAILED)
        if code is not WireCode.INTERNAL:
            return WireFault(code, error.message, json_path(error.path))
    error_id = secrets.token_hex(6)
    where = " ".join(f"{key}={value}" for key, value in context.items())
    _log.error("internal error error_id=%s %s", error_id, where, exc_info=error)
    return WireFault(WireCode.INTERNAL, f"internal error {error_id}")


def failure(code: str | None, message: str | None) -> WireFault:
    """The same for a session that the engine reports as failed."""
    shown = wire_code(code) if code else WireCode.SESSION_FAILED
    return WireFault(
        shown, _FAILED if shown in (WireCode.TICK_FAILED, WireCode.INTERNAL) else message or "the session failed"
    )


def wire_code(code: str | None, path: str | None = None) -> WireCode:
    """The wire's name of one of our codes."""
    if code is None:
        return WireCode.INTERNAL
    if code == ErrorCode.UNSUPPORTED and path == "format":
        return WireCode.UNSUPPORTED_FORMAT
    if code in _WIRE:
        return WireCode(code)
    return _OTHER_NAME.get(ErrorCode(code), WireCode.INTERNAL) if code in set(ErrorCode) else WireCode.INTERNAL


def json_path(path: str | None) -> str | None:
    """``controls[0].data`` → ``$.controls[0].data``."""
    if path is None:
        return None
    return path if path.startswith("$") else f"$.{path}"
