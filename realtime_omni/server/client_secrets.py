"""Client secrets: keys of short life that a web page may hold, each with the session it may open.

Owns them, by the SHA-256 of what was handed out. Must not know sockets or what a session is. Bounded, in number and in
bytes: the oldest go.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

PREFIX = "ek_"
MIN_S, DEFAULT_S, MAX_S = 10, 600, 7200
MAX_SECRETS = 4_096
MAX_BYTES = 64 * 1024 * 1024
"""Of their sessions, as JSON."""


@dataclass(frozen=True, slots=True)
class Secret:
    """``text``: a patch of the session that it opens, as JSON: what is decoded may take fifty times as much."""

    until_s: float
    text: bytes

    @property
    def session(self) -> dict[str, Any]:
        return msgspec.json.decode(self.text, type=dict[str, Any])


class ClientSecrets:
    def __init__(self) -> None:
        self._secrets: OrderedDict[bytes, Secret] = OrderedDict()
        self._bytes = 0

    def mint(self, session: dict[str, Any], now_s: float, seconds: float) -> str:
        """A new one; its text is not kept."""
        value = PREFIX + secrets.token_urlsafe(32)
        secret = Secret(now_s + seconds, msgspec.json.encode(session))
        self._secrets[_digest(value)] = secret
        self._bytes += len(secret.text)
        while len(self._secrets) > MAX_SECRETS or self._bytes > MAX_BYTES:
            self._bytes -= len(self._secrets.popitem(last=False)[1].text)
        return value

    def find(self, value: str, now_s: float) -> Secret | None:
        """None for one that was never made, or whose time is over."""
        if not value.startswith(PREFIX):
            return None
        digest = _digest(value)  # a look-up by hash tells nothing of the others
        secret = self._secrets.get(digest)
        if secret is not None and secret.until_s <= now_s:
            self._bytes -= len(self._secrets.pop(digest).text)
            return None
        return secret


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode()).digest()
