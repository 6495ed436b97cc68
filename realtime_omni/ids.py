"""Minting of ids. The engine gets these as arguments, so that tests inject their own."""

from __future__ import annotations

import secrets
from itertools import count

from realtime_omni.session.values import ChunkIndex, SessionId


def random_session_id() -> str:
    """128 random bits: an id that nobody guesses."""
    return f"s-{secrets.token_hex(16)}"


_executions = count(secrets.randbits(63))
"""Begins anywhere: two processes do not meet. Made for every tick, and no secret, so the system is asked once."""


def random_request_id(session_id: SessionId, chunk_index: ChunkIndex) -> str:
    """``ar-<session>-<chunk>-<hex>``: correlates one chunk execution with its metadata (row A27)."""
    return f"ar-{session_id}-{chunk_index}-{next(_executions):016x}"


def random_token() -> str:
    """256 random bits, for a URL: whoever has it may resume a session."""
    return secrets.token_urlsafe(32)


def random_seed() -> int:
    """A seed that a JSON number carries exactly."""
    return secrets.randbelow(2**53)


class CountingMint:
    """``name-0``, ``name-1``, …: the deterministic mint of tests."""

    def __init__(self, name: str = "session") -> None:
        self._name = name
        self._numbers = count()

    def __call__(self) -> str:
        return f"{self._name}-{next(self._numbers)}"
