"""The Realtime endpoint: routes, and one connection of a session. Text frame ↔ session, nothing else.

Owns the connection's tasks and who gets in. The rules of the wire are in ``realtime_omni_protocols.realtime``; the session is
:mod:`realtime_omni.server.realtime_session`'s.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import JSONResponse
from msgspec import Meta, Struct

from realtime_omni.duplex.journal import Lost
from realtime_omni.errors import OmniError
from realtime_omni.server.auth import bearer_tokens
from realtime_omni.server.client_secrets import DEFAULT_S, MAX_S, MIN_S, ClientSecrets
from realtime_omni.server.codes import describe_error
from realtime_omni.server.outbox import ConnectionEnded
from realtime_omni.server.outgoing import PromptTransport
from realtime_omni.server.realtime_session import RealtimeSession, RealtimeSessions, mint
from realtime_omni.server.realtime_words import profile_of
from realtime_omni.server.transport import StarletteTransport, TransportLost
from realtime_omni.server.voice import VoiceHub
from realtime_omni_protocols.envelope import check_depth
from realtime_omni_protocols.errors import WireError
from realtime_omni_protocols.realtime import DUPLEX_PATH, PATH, RealtimeClose, RealtimeCode, RealtimeError, encode
from realtime_omni_protocols.realtime.items import MAX_FRAME_BYTES
from realtime_omni_protocols.realtime.server_events import ErrorBody, SessionReplaced, SessionResumed
from realtime_omni_protocols.realtime.session import convert, initial, shown_session, updated

SUBPROTOCOL = "realtime"
"""What browsers offer beside the one that carries their key."""
BYTES_PER_MESSAGE = 256 * 1024
"""A frame counts as so many messages more."""
MAX_DIGITS = 18
"""Of an event's number."""


class RealtimeConnection:
    """One connection of a session. What waits for the socket waits in the session's journal, so that what is cancelled
    meanwhile is not sent."""

    def __init__(self, hub: VoiceHub, transport: PromptTransport, session: RealtimeSession, after: int = 0) -> None:
        """``after``: number of the last event that the client has."""
        self._hub = hub
        self._transport = transport
        self._session = session
        self._after = after
        self._attachment = session.attach()

    async def run(self, greeting: str | None = None) -> None:
        """Serve to the end; ``greeting`` goes first. Leaves no task."""
        try:
            with self._hub.connection("realtime"):
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._write(greeting))
                    group.create_task(self._read())
        except* (ConnectionEnded, TransportLost):
            pass
        finally:
            self._session.detach(self._attachment)

    async def _read(self) -> None:
        pace = self._hub.reading_pace()  # a recording may come at once, in packets
        while True:
            frame = await self._transport.receive()
            await pace.admit(1 + len(frame) // BYTES_PER_MESSAGE)
            try:
                self._session.receive(frame, self._attachment)
            except Exception as fault:  # the session says so with its last event, and the writer closes
                self._session.fail(fault)

    async def _write(self, greeting: str | None) -> None:
        if greeting is not None:
            await self._transport.send(greeting)
        while entries := await self._session.read(self._after, self._attachment):
            for number, text in entries:
                if isinstance(text, Lost):  # what a client missed made the order of events
                    await self._transport.close(RealtimeClose.OVERLOADED, "events were lost")
                    raise ConnectionEnded
                at_once = self._transport.put((text,))
                if not at_once:
                    await self._transport.send(text)
                self._after = number
                if not at_once:
                    break  # it waited: what was read before may not be wanted any more
        if self._session.is_replaced(self._attachment):
            await self._transport.send(encode(SessionReplaced(event_id=mint("event"))).decode())
            await self._transport.close(RealtimeClose.NORMAL, "replaced")
        elif self._session.last is not None:
            await self._transport.close(self._session.last.code, self._session.last.reason)
        raise ConnectionEnded


# -- routes ----------------------------------------------------------------------------------------------------------


class _ExpiresAfter(Struct, frozen=True):
    seconds: Annotated[int, Meta(ge=MIN_S, le=MAX_S)] = DEFAULT_S


class _SecretRequest(Struct, frozen=True):
    expires_after: _ExpiresAfter = _ExpiresAfter()
    session: dict[str, Any] = {}


def add_realtime_routes(app: FastAPI, hub: VoiceHub, keys: ClientSecrets) -> None:
    sessions = RealtimeSessions(hub)

    @app.websocket(PATH)
    async def realtime(socket: WebSocket) -> None:
        await _serve(sessions, keys, socket, duplex=socket.query_params.get("duplex") == "1")

    @app.websocket(DUPLEX_PATH)
    async def duplex(socket: WebSocket) -> None:
        await _serve(sessions, keys, socket, duplex=True)

    @app.post(f"{PATH}/client_secrets")
    async def client_secrets(request: Request) -> Response:
        profile = profile_of(hub.spec, mint("sess"), hub.model, None)
        try:
            text = (await _body(request)).decode() or "{}"
            check_depth(text)
            asked = convert(msgspec.json.decode(text), _SecretRequest, "")
            config = updated(initial(profile), asked.session, profile, voice_fixed=False)
        except (msgspec.DecodeError, UnicodeDecodeError, WireError):
            return _refused(400, RealtimeError(RealtimeCode.INVALID_JSON, "the body is a JSON object"))
        except RealtimeError as error:
            return _refused(413 if error.code is RealtimeCode.TOO_LARGE else 400, error)
        seconds = asked.expires_after.seconds
        value = keys.mint(asked.session, hub.clock.now_s(), seconds)
        shown = msgspec.to_builtins(shown_session(config, profile))
        return JSONResponse({"value": value, "expires_at": int(time.time()) + seconds, "session": shown})


async def _body(request: Request) -> bytes:
    """What was posted. Raises RealtimeError ``message_too_large`` without reading the rest."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_FRAME_BYTES:
            raise RealtimeError(RealtimeCode.TOO_LARGE, f"the body has at most {MAX_FRAME_BYTES} bytes")
    return body


async def _serve(sessions: RealtimeSessions, keys: ClientSecrets, socket: WebSocket, *, duplex: bool) -> None:
    """Open the session or find it, admit the connection, serve it."""
    hub = sessions.hub
    if hub.full or hub.stopping:
        code = RealtimeCode.SHUTDOWN if hub.stopping else RealtimeCode.OVERLOADED
        await socket.send_denial_response(_refused(503, RealtimeError(code, "no more connections are accepted now")))
        return
    if duplex and "session_id" in socket.query_params:
        await _resume(sessions, socket)
        return
    try:
        session, life = await sessions.open(_session_of(hub, keys, socket), duplex=duplex)
    except OmniError as error:
        fault = describe_error(error, doing="open")
        await socket.send_denial_response(_refused(503, RealtimeError(RealtimeCode.OVERLOADED, fault.message)))
        return
    attachment = session.attach()
    try:
        transport = await _accept(hub, socket)
    except BaseException:
        session.detach(attachment)
        raise
    await RealtimeConnection(hub, transport, session).run()
    if not duplex:
        await asyncio.shield(life)


async def _resume(sessions: RealtimeSessions, socket: WebSocket) -> None:
    """Go on where a connection was lost, for who has the session's latest token."""
    query = socket.query_params
    session, last = sessions.get(query["session_id"]), query.get("last_server_event_seq", "0")
    counts = last.isdecimal() and len(last) <= MAX_DIGITS
    token = session.resume(query.get("resume_token", "")) if session is not None and counts else None
    if session is None or token is None:
        error = RealtimeError(RealtimeCode.RESUME_REFUSED, "no such session, or another token", "session_id")
        await socket.send_denial_response(_refused(404, error))
        return
    transport = await _accept(sessions.hub, socket)
    resumed = SessionResumed(event_id=mint("event"), session_id=session.id, resume_token=token)
    await RealtimeConnection(sessions.hub, transport, session, int(last)).run(encode(resumed).decode())


async def _accept(hub: VoiceHub, socket: WebSocket) -> StarletteTransport:
    offered = socket.scope.get("subprotocols", ())
    await socket.accept(subprotocol=SUBPROTOCOL if SUBPROTOCOL in offered else None)
    return StarletteTransport(socket, hub.settings.send_timeout_s)


def _session_of(hub: VoiceHub, keys: ClientSecrets, socket: WebSocket) -> dict[str, Any]:
    """What the client's secret says of the session that it opens."""
    for token in bearer_tokens(socket.headers.get("authorization"), socket.scope.get("subprotocols", ())):
        secret = keys.find(token, hub.clock.now_s())
        if secret is not None:
            return secret.session
    return {}


def _refused(status: int, error: RealtimeError) -> JSONResponse:
    return JSONResponse({"error": msgspec.to_builtins(ErrorBody.of(error))}, status)


__all__ = ["RealtimeConnection", "add_realtime_routes"]
