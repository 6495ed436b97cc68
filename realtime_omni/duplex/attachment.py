"""Who drives a session: one holder at a time, by a token that changes with every resume.

Owns the digests (never a token) and the number of the present holder. Must not know sockets, or how tokens are made: a fresh
one is an argument. Until the new token is used, or its holder confirms that it arrived, the one before opens the session as
well, so that an answer that was lost on its way does not lock its client out.
"""

from __future__ import annotations

import hashlib
import hmac

from realtime_omni.errors import ErrorCode, SessionGoneError, StateError


class Attachment:
    """Of one session. ``generation`` counts holders; the first is 1."""

    def __init__(self, token: str) -> None:
        self.generation = 1
        self._digest = _digest(token)
        self._before: bytes | None = None

    def resume(self, token: str, fresh: str) -> int:
        """Take the session over with its token; from now on ``fresh`` is the token. Returns the generation of the new holder.

        Raises SessionGoneError (``session_not_found``): a wrong token looks like an unknown session."""
        presented = _digest(token)
        if hmac.compare_digest(presented, self._digest):
            self._before = self._digest
        elif self._before is None or not hmac.compare_digest(presented, self._before):
            raise SessionGoneError("no session has this id and token", code=ErrorCode.SESSION_NOT_FOUND)
        self._digest = _digest(fresh)
        self.generation += 1
        return self.generation

    def confirm(self, generation: int) -> None:
        """The holder has its token: the one before opens nothing any more. Raises StateError as :meth:`require` does."""
        self.require(generation)
        self._before = None

    def require(self, generation: int) -> None:
        """Raises StateError for a holder that was replaced."""
        if generation != self.generation:
            raise StateError("somebody else has taken the session over")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
