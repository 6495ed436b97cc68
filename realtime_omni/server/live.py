"""The Live endpoint: routes, the running sessions by id, and those that are kept for a fork.

Owns which id is what. One session is :mod:`realtime_omni.server.live_session`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Response, WebSocket
from fastapi.responses import JSONResponse

from realtime_omni.errors import OmniError
from realtime_omni.server.codes import describe_error
from realtime_omni.server.incoming import Incoming
from realtime_omni.server.live_session import LiveSession
from realtime_omni.server.outbox import ConnectionEnded
from realtime_omni.server.outgoing import Outgoing, PromptTransport
from realtime_omni.server.transport import StarletteTransport, TransportLost
from realtime_omni.server.voice import VoiceHub
from realtime_omni_protocols.live import PATH, LiveCode, LiveError, SessionConfig

if TYPE_CHECKING:
    from realtime_omni.call import Call

_log = logging.getLogger(__name__)
MAX_STORED = 64
MAX_STORED_BYTES = 256 * 1024 * 1024
STORED_S = 3600.0
"""How long a session that is over is kept for a fork; the oldest go first when there are too many."""


@dataclass(slots=True)
class Stored:
    """A session that can be forked: one that runs (``session``), or what was saved of it (``snapshot``)."""

    config: SessionConfig
    session: LiveSession | None = None
    snapshot: Any = None
    until_s: float = 0.0

    @property
    def nbytes(self) -> int:
        return 0 if self.snapshot is None else int(self.snapshot.nbytes)


class LiveHub:
    """The Live sessions of one server."""

    def __init__(self, voice: VoiceHub) -> None:
        self.voice = voice
        self._running: dict[str, LiveSession] = {}
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    async def serve(self, transport: PromptTransport, stored: Stored | None = None) -> None:
        """A primary connection, to its end."""
        with self.voice.connection("live"):
            await LiveSession(self, transport, stored).run()

    async def serve_sideband(self, transport: PromptTransport, session: LiveSession, peer: int, out: Outgoing) -> None:
        """A sideband, to its end or the session's."""
        with self.voice.connection("live"):
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(out.run())
                    act = partial(session.receive, peer)
                    group.create_task(Incoming(transport, self.voice.reading_pace(), act).run())
            except* (ConnectionEnded, TransportLost):
                pass
            finally:
                session.detach(peer)

    # -- sessions --------------------------------------------------------------------------------------------------

    def add(self, session: LiveSession) -> None:
        self._running[session.id] = session

    def forget(self, session: LiveSession) -> None:
        self._running.pop(session.id, None)

    def find(self, session_id: str) -> LiveSession:
        """Raises LiveError ``session_not_found``."""
        session = self._running.get(session_id)
        if session is None:
            raise LiveError(LiveCode.SESSION_NOT_FOUND, "no such session, or it is over")
        return session

    async def open(self, session: LiveSession, config: SessionConfig, stored: Stored | None) -> Call:
        """The call of a session that begins. Raises OmniError, LiveError."""
        calls = self.voice.calls
        if stored is None:
            return await calls.open(session_id=session.id)
        origin = stored.session
        if origin is not None and origin.call is not None:
            return await calls.fork(origin.call, session.id)
        if origin is not None:  # it is just ending, as when a client comes back that has lost its connection
            await origin.over()
            stored = self.find_stored(origin.id)
        if stored.snapshot is None:
            raise LiveError(LiveCode.SESSION_NOT_FOUND, "the session has ended")
        return await calls.restore(stored.snapshot, session.id)

    # -- forks -----------------------------------------------------------------------------------------------------

    def find_stored(self, session_id: str) -> Stored:
        """Raises LiveError ``session_not_found``: never stored, or not any more."""
        self._drop_old()
        running = self._running.get(session_id)
        if running is not None and running.side.config is not None and running.side.config.store:
            return Stored(running.side.config, session=running)
        stored = self._stored.get(session_id)
        if stored is None:
            raise LiveError(LiveCode.SESSION_NOT_FOUND, "no such stored session")
        return stored

    async def store(self, session_id: str, config: SessionConfig, call: Call) -> None:
        """Keep what the call remembers, before it is closed."""
        try:
            snapshot = await call.session.snapshot()
        except OmniError as error:
            describe_error(error, doing="store", session=session_id)
            return
        until_s = self.voice.clock.now_s() + STORED_S
        self._stored[session_id] = Stored(config, snapshot=snapshot, until_s=until_s)
        self._drop_old()

    def _drop_old(self) -> None:
        now_s = self.voice.clock.now_s()
        while self._stored:
            oldest = next(iter(self._stored.values()))
            total = sum(stored.nbytes for stored in self._stored.values())
            if oldest.until_s > now_s and len(self._stored) <= MAX_STORED and total <= MAX_STORED_BYTES:
                return
            self._stored.popitem(last=False)


# -- routes ----------------------------------------------------------------------------------------------------------


def add_live_routes(app: FastAPI, hub: LiveHub) -> None:
    @app.websocket(PATH)
    async def start(socket: WebSocket) -> None:
        if await _admitted(hub, socket):
            await socket.accept()
            await hub.serve(_transport(hub, socket))

    @app.websocket(PATH + "/{session_id}/fork")
    async def fork(socket: WebSocket, session_id: str) -> None:
        if await _admitted(hub, socket):
            try:
                stored = hub.find_stored(session_id)
            except LiveError as error:
                await socket.send_denial_response(_denial(error))
                return
            await socket.accept()
            await hub.serve(_transport(hub, socket), stored)

    @app.websocket(PATH + "/{session_id}/attach")
    async def attach(socket: WebSocket, session_id: str) -> None:
        if await _admitted(hub, socket):
            transport = _transport(hub, socket)
            try:
                session = hub.find(session_id)
                peer, out = session.attach(transport)
            except LiveError as error:
                await socket.send_denial_response(_denial(error))
                return
            try:
                await socket.accept()
            except BaseException:
                session.detach(peer)
                raise
            await hub.serve_sideband(transport, session, peer, out)

    @app.post(PATH + "/{session_id}/hangup")
    async def hangup(session_id: str) -> Response:
        try:
            hub.find(session_id).hang_up()
        except LiveError as error:
            return _denial(error)
        return Response(status_code=200)


async def _admitted(hub: LiveHub, socket: WebSocket) -> bool:
    if not hub.voice.full and not hub.voice.stopping:
        return True
    code = LiveCode.SHUTDOWN if hub.voice.stopping else LiveCode.CAPACITY
    await socket.send_denial_response(_denial(LiveError(code, "no more connections are accepted now")))
    return False


def _transport(hub: LiveHub, socket: WebSocket) -> StarletteTransport:
    return StarletteTransport(socket, hub.voice.settings.send_timeout_s)


def _denial(error: LiveError) -> JSONResponse:
    status = 404 if error.code is LiveCode.SESSION_NOT_FOUND else 503
    body = {"type": error.kind, "code": error.code.value, "message": error.message}
    return JSONResponse({"error": body}, status)


__all__ = ["LiveHub", "Stored", "add_live_routes"]
