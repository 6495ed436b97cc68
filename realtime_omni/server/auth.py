"""Who may talk to the server: key, origin and host, checked before any handler and before a WebSocket upgrade.

Owns the pure decision (:func:`refusal`) and the ASGI middleware that applies it. Keys are compared in constant time and
never logged. The three checks answer three attacks: a stranger (key), a foreign web page in the user's browser (origin),
and a foreign name that was rebound to this machine (host).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from realtime_omni.server.settings import ServerSettings, strip_port

_log = logging.getLogger(__name__)
KEY_SUBPROTOCOL = "realtime-omni.key."
"""Browsers cannot set headers on a WebSocket; the key travels as an extra subprotocol, base64url without padding."""
OPENAI_KEY_SUBPROTOCOL = "openai-insecure-api-key."
"""The same for pages written for OpenAI's Realtime: the key as it is."""
_OPEN_PATHS = frozenset({"/healthz"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request goes no further."""

    status: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What the decision looks at."""

    websocket: bool
    method: str
    path: str
    host: str
    origin: str | None
    authorization: str | None
    subprotocols: tuple[str, ...]

    @classmethod
    def from_scope(cls, scope: Scope) -> RequestFacts:
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
        return cls(
            websocket=scope["type"] == "websocket",
            method=scope.get("method", "GET"),
            path=scope["path"].removeprefix(scope.get("root_path", "")) or "/",
            host=headers.get("host", ""),
            origin=headers.get("origin"),
            authorization=headers.get("authorization"),
            subprotocols=tuple(scope.get("subprotocols", ())),
        )


def refusal(
    facts: RequestFacts, settings: ServerSettings, admits: Callable[[RequestFacts], bool] = lambda _: False
) -> Refusal | None:
    """None when the request may proceed. ``admits``: knows credentials other than the key."""
    if settings.allowed_hosts is not None and strip_port(facts.host.lower()) not in settings.allowed_hosts:
        return Refusal(403, "origin_refused", "this server does not answer to that host name")
    # Reading a public route from another origin is stopped by the browser itself; acting on one is stopped here.
    if (facts.websocket or facts.method not in _SAFE_METHODS) and not _origin_allowed(facts, settings):
        return Refusal(403, "origin_refused", "pages of this origin may not use this server")
    if not _needs_key(facts) or settings.api_key is None:
        return None
    if not _key_matches(facts, settings.api_key) and not admits(facts):
        return Refusal(401, "unauthorized", "a valid API key is needed")
    return None


def _needs_key(facts: RequestFacts) -> bool:
    """The page itself is public (it asks for the key); what it can reach is not."""
    return facts.path not in _OPEN_PATHS and (facts.websocket or facts.path.startswith(("/v1/", "/metrics")))


def _origin_allowed(facts: RequestFacts, settings: ServerSettings) -> bool:
    if facts.origin is None:
        return True  # not a browser
    origin = facts.origin.lower()
    scheme, _, authority = origin.partition("://")
    if scheme in ("http", "https") and authority == facts.host.lower() and authority:
        return True
    return origin in settings.origins


def _key_matches(facts: RequestFacts, key: str) -> bool:
    """Compares every credential presented, without an early exit."""
    expected = key.encode()
    matched = False
    for token in bearer_tokens(facts.authorization, facts.subprotocols):
        matched |= hmac.compare_digest(token.encode("latin-1", "replace"), expected)  # the bytes that came
    for name in facts.subprotocols:
        if name.startswith(KEY_SUBPROTOCOL):
            text = name.removeprefix(KEY_SUBPROTOCOL)
            matched |= hmac.compare_digest(_from_base64url(text), expected)
    return matched


def bearer_tokens(authorization: str | None, subprotocols: Iterable[str]) -> list[str]:
    """The credentials that a request carries as they are."""
    scheme, _, bearer = (authorization or "").partition(" ")
    tokens = (
        [bearer.strip()] if scheme.lower() in ("bearer", "api-key") else []
    )  # the second is what openpi clients send
    names = [name for name in subprotocols if name.startswith(OPENAI_KEY_SUBPROTOCOL)]
    return tokens + [name.removeprefix(OPENAI_KEY_SUBPROTOCOL) for name in names]


def _from_base64url(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""


class AccessMiddleware:
    """Refuses before the application sees the request. A refused upgrade is an HTTP answer, never a closed socket."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        refused: Callable[[Refusal], None],
        admits: Callable[[RequestFacts], bool] = lambda _: False,
    ) -> None:
        self._app = app
        self._settings = settings
        self._refused = refused
        self._admits = admits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refused = refusal(RequestFacts.from_scope(scope), self._settings, self._admits)
        if refused is None:
            await self._app(scope, receive, send)
        else:
            self._refused(refused)
            _log.info("refused status=%d code=%s path=%.80r", refused.status, refused.code, scope["path"])
            await deny(scope, send, refused)


async def deny(scope: Scope, send: Send, refused: Refusal) -> None:
    """Answer with the refusal's status and a small JSON body."""
    body = json.dumps({"error": {"code": refused.code, "message": refused.message}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": refused.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
    elif "websocket.http.response" in scope.get("extensions", {}):
        await send({"type": "websocket.http.response.start", "status": refused.status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": body})
    else:
        await send({"type": "websocket.close", "code": 1008})
