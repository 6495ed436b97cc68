"""The Realtime endpoint: one connection is one call. Text frame ↔ machine ↔ call, nothing else.

Owns the connection's tasks and its routes. The rules of the wire are in ``realtime_omni_protocols.realtime``; what commands and
outputs of the call mean to each other is in :mod:`realtime_omni.server.realtime_call`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import JSONResponse
from msgspec import Meta, Struct

from realtime_omni.duplex.intake import IntakeLimits
from realtime_omni.duplex.journal import Lost
from realtime_omni.duplex.outputs import DuplexOptions
from realtime_omni.errors import OmniError
from realtime_omni.server.auth import bearer_tokens
from realtime_omni.server.client_secrets import DEFAULT_S, MAX_S, MIN_S, ClientSecrets
from realtime_omni.server.codes import describe_error
from realtime_omni.server.outbox import ConnectionEnded
from realtime_omni.server.outgoing import Outgoing, PromptTransport
from realtime_omni.server.realtime_call import Out, RealtimeCall, profile_of
from realtime_omni.server.transport import StarletteTransport, TransportLost
from realtime_omni.server.voice import VoiceHub
from realtime_omni_protocols.realtime import (
    PATH,
    Close,
    RealtimeClose,
    RealtimeCode,
    RealtimeError,
    RealtimeServerSide,
    Send,
    encode,
)
from realtime_omni_protocols.realtime.server_events import ErrorBody
from realtime_omni_protocols.realtime.session import convert, initial, shown_session, updated

if TYPE_CHECKING:
    from realtime_omni.call import Call

_log = logging.getLogger(__name__)
SUBPROTOCOL = "realtime"
"""What browsers offer beside the one that carries their key."""
LAST_WORD_S = 5.0
# A client may send a recording at once: as much as one append carries (15 MiB of PCM).
OPTIONS: Final = DuplexOptions(pace="free", intake=IntakeLimits(max_ms=330_000.0))


def mint(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


class RealtimeConnection:
    """One connection, and its call."""

    def __init__(self, hub: VoiceHub, transport: PromptTransport, call: Call, session: dict[str, Any]) -> None:
        """``session``: a patch of the session that the client begins with."""
        self._hub = hub
        self._transport = transport
        self._call = call
        self._out = Outgoing(transport)
        profile = profile_of(hub.spec, call.id, hub.model, int(time.time() + hub.max_session_s))
        self.side = RealtimeServerSide(profile, mint, session)
        self._bridge = RealtimeCall(self.side, call, mint)

    async def run(self) -> None:
        """Serve to the end. Leaves no task; the call is the caller's to release."""
        writer = asyncio.create_task(self._out.run())
        try:
            self._put(self._bridge.carry(self.side.open()))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow(writer))
                group.create_task(self._stop_in_time())
                group.create_task(self._read())
                group.create_task(self._tell())
        except* (ConnectionEnded, TransportLost):
            pass
        except* Exception as faults:
            fault = describe_error(faults, session=self._call.id)
            self._end(RealtimeCode.INTERNAL, fault.message, RealtimeClose.INTERNAL)
        finally:
            self._out.close(RealtimeClose.NORMAL, "")
            with contextlib.suppress(TimeoutError, ConnectionEnded, TransportLost):
                async with asyncio.timeout(LAST_WORD_S):
                    await writer
            writer.cancel()
            _log.info("realtime connection gone session_id=%s %s", self._call.id, self.side.statistics())

    @staticmethod
    async def _follow(writer: asyncio.Task[None]) -> None:
        await asyncio.wait([writer])
        raise TransportLost

    async def _stop_in_time(self) -> None:
        """With the server, or when the session's time is over."""
        until = self._hub.clock.now_s() + self._hub.max_session_s
        await self._hub.clock.wait(self._hub.stopped, until)
        if self._hub.stopping:
            self._end(RealtimeCode.SHUTDOWN, "the server stops", RealtimeClose.SHUTDOWN)
        else:
            self._end(RealtimeCode.EXPIRED, "the session has come to its end", RealtimeClose.SHUTDOWN)
        raise ConnectionEnded

    async def _read(self) -> None:
        while True:
            frame = await self._transport.receive()
            outputs = self.side.receive(frame) if isinstance(frame, str) else self.side.receive_binary()
            self._put(self._bridge.carry(outputs))

    async def _tell(self) -> None:
        async for _, output in self._call.outputs():
            if isinstance(output, Lost):
                _log.info("a slow client missed outputs session_id=%s", self._call.id)
            else:
                self._put(self._bridge.tell(output))
            await self._out.room()
        raise ConnectionEnded

    def _end(self, code: RealtimeCode, message: str, close: RealtimeClose) -> None:
        self._put(self._bridge.carry(self.side.end(RealtimeError(code, message), close)))

    def _put(self, outputs: Iterable[Out]) -> None:
        for output in outputs:
            match output:
                case Send(event):
                    self._out.put(encode(event).decode())
                case Close(code, reason):
                    self._hub.metrics.count("voice_errors_total", protocol="realtime")
                    self._out.close(code, reason)


# -- routes ----------------------------------------------------------------------------------------------------------


class _ExpiresAfter(Struct, frozen=True):
    seconds: Annotated[int, Meta(ge=MIN_S, le=MAX_S)] = DEFAULT_S


class _SecretRequest(Struct, frozen=True):
    expires_after: _ExpiresAfter = _ExpiresAfter()
    session: dict[str, Any] = {}


def add_realtime_routes(app: FastAPI, hub: VoiceHub, keys: ClientSecrets) -> None:
    @app.websocket(PATH)
    async def realtime(socket: WebSocket) -> None:
        await _serve(hub, keys, socket)

    @app.post(f"{PATH}/client_secrets")
    async def client_secrets(request: Request) -> Response:
        profile = profile_of(hub.spec, mint("sess"), hub.model, None)
        try:
            body = msgspec.json.decode(await request.body() or b"{}")
            asked = convert(body, _SecretRequest, "")
            config = updated(initial(profile), asked.session, profile, voice_fixed=False)
        except msgspec.DecodeError:
            return _refused(400, RealtimeError(RealtimeCode.INVALID_JSON, "the body is a JSON object"))
        except RealtimeError as error:
            return _refused(400, error)
        seconds = asked.expires_after.seconds
        value = keys.mint(asked.session, hub.clock.now_s(), seconds)
        shown = msgspec.to_builtins(shown_session(config, profile))
        return JSONResponse({"value": value, "expires_at": int(time.time()) + seconds, "session": shown})


async def _serve(hub: VoiceHub, keys: ClientSecrets, socket: WebSocket) -> None:
    """Open the call, admit the connection, serve it, release the call."""
    if hub.full or hub.stopping:
        code = RealtimeCode.SHUTDOWN if hub.stopping else RealtimeCode.OVERLOADED
        await socket.send_denial_response(_refused(503, RealtimeError(code, "no more connections are accepted now")))
        return
    session_id = mint("sess")
    try:
        call = await hub.opened(hub.calls.open(OPTIONS, session_id=session_id))
    except OmniError as error:
        fault = describe_error(error, doing="open", session=session_id)
        await socket.send_denial_response(_refused(503, RealtimeError(RealtimeCode.OVERLOADED, fault.message)))
        return
    try:
        offered = socket.scope.get("subprotocols", ())
        await socket.accept(subprotocol=SUBPROTOCOL if SUBPROTOCOL in offered else None)
        transport = StarletteTransport(socket, hub.settings.send_timeout_s)
        with hub.connection("realtime"):
            await RealtimeConnection(hub, transport, call, _session_of(hub, keys, socket)).run()
    finally:
        await hub.release(call)


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
