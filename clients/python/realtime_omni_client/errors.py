"""What a client of a realtime_omni server can raise.

The tree::

    WorldError                     ``code`` is the wire's code when there is one, ``path`` the offending field
      ConnectError                 no connection, or the server refused it (wrong key, wrong address)
      ConnectionLostError          the connection broke and the session could not be resumed
      ProtocolViolation            the server broke the protocol; a bug of the server
      RefusedError                 the server refused one message; the session is as it was
        StartRefusedError          ... the start of the session
        EventRefusedError          ... an event; it will not act
      SessionFailedError           a block failed: ``rollback()``, ``reset()`` or ``close()`` (see ``can``)
      SessionClosedError           the session is over (``reason``)
      MediaUnavailableError        a format needs a library that is not installed

Robots: `PolicyServerError` (a RuntimeError, as stock openpi clients raise) is a policy server's refusal of one observation.
"""

from __future__ import annotations

from realtime_omni_protocols.errors import WireCode


class WorldError(Exception):
    """Base of everything this package raises on purpose."""

    def __init__(self, message: str, *, code: WireCode | None = None, path: str | None = None) -> None:
        super().__init__(message if code is None else f"{code.value}: {message}" + (f" (at {path})" if path else ""))
        self.code = code
        self.path = path


class ConnectError(WorldError):
    """No connection was made. ``status`` is the HTTP status when a server answered."""

    def __init__(self, message: str, *, status: int | None = None, code: WireCode | None = None) -> None:
        super().__init__(message, code=code)
        self.status = status


class ConnectionLostError(WorldError):
    """The connection broke, and every attempt to resume failed."""


class ProtocolViolation(WorldError):
    """The server sent something the protocol forbids; the connection was given up."""


class RefusedError(WorldError):
    """The server refused one message."""


class StartRefusedError(RefusedError):
    """The server refused to start the session."""


class EventRefusedError(RefusedError):
    """The server refused the event ``event_id``; it will not act."""

    def __init__(self, message: str, *, event_id: int, code: WireCode | None, path: str | None = None) -> None:
        super().__init__(message, code=code, path=path)
        self.event_id = event_id


class SessionFailedError(WorldError):
    """A block failed. ``can`` names the ways on; what was committed before is untouched."""

    def __init__(self, message: str, *, code: WireCode, chunk_index: int, can: tuple[str, ...]) -> None:
        super().__init__(message, code=code)
        self.chunk_index = chunk_index
        self.can = can


class SessionClosedError(WorldError):
    """The session is over."""

    def __init__(self, reason: str, *, code: WireCode | None = None, message: str | None = None) -> None:
        super().__init__(message or f"the session was closed ({reason})", code=code)
        self.reason = reason


class MediaUnavailableError(WorldError, ImportError):
    """A format needs a library that is not installed; the message names it."""


def answered(status: int) -> str:
    """What a status in place of a connection says to whoever connects."""
    hint = {401: ": it wants a key (api_key=), or another one", 404: ": there is no such path"}.get(status, "")
    return f"the server answered HTTP {status}{hint}"
