"""The Live endpoint: routes, the running sessions by id, and those that are kept for a fork.

Owns which id is what. One session is :mod:`realtime_omni.server.live_session`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI, Response, WebSocket
from fastapi.responses import JSONResponse

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
    from realtime_omni.snapshot.snapshot import Snapshot

_log = logging.getLogger(__name__)
MAX_STORED = 64
MAX_STORED_BYTES = 256 * 1024 * 1024
STORED_S = 3600.0
"""How long a session that is over is kept for a fork; the oldest go first when there are too many."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a fork goes on from: a session that runs, or one that is stored. By name, because a fork that held the session
    would hold that one's origin, too."""

    session_id: str
    config: SessionConfig


@dataclass(frozen=True, slots=True)
class Stored:
    """What was saved of a session that is over."""

    config: SessionConfig
    snapshot: Snapshot
    until_s: float


class LiveHub:
    """The Live sessions of one server."""

    def __init__(self, voice: VoiceHub) -> None:
        self.voice = voice
        self._running: dict[str, LiveSession] = {}
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    async def serve(self, transport: PromptTransport, origin: Origin | None = None) -> None:
        """A primary connection, to its end."""
        with self.voice.connection("live"):
            await LiveSession(self, transport, origin).run()

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

    async def open(self, session: LiveSession, origin: Origin | None) -> Call:
        """The call of a session that begins. Raises OmniError, LiveError."""
        calls = self.voice.calls
        if origin is None:
            return await calls.open(session_id=session.id)
        running = self._running.get(origin.session_id)
        if running is not None and running.call is not None:
            return await calls.fork(running.call, session.id)
        if running is not None:  # it is just ending, as when a client comes back that has lost its connection
            await running.over()
        self._drop_old()
        stored = self._stored.get(origin.session_id)
        if stored is None:
            raise LiveError(LiveCode.SESSION_NOT_FOUND, "the session has ended")
        return await calls.restore(stored.snapshot, session.id)

    # -- forks -----------------------------------------------------------------------------------------------------

    def find_origin(self, session_id: str) -> Origin:
        """Raises LiveError ``session_not_found``: never stored, or not any more."""
        self._drop_old()
        running, stored = self._running.get(session_id), self._stored.get(session_id)
        if running is not None and running.side.config is not None and running.side.config.store:
            return Origin(session_id, running.side.config)
        if stored is None:
            raise LiveError(LiveCode.SESSION_NOT_FOUND, "no such stored session")
        return Origin(session_id, stored.config)

    async def store(self, session_id: str, config: SessionConfig, call: Call) -> None:
        """Keep what the call remembers, before it is closed."""
        try:
            snapshot = await call.session.snapshot()
        except Exception as error:  # whatever it is, the call is closed all the same
            describe_error(error, doing="store", session=session_id)
            return
        self._stored[session_id] = Stored(config, snapshot, self.voice.clock.now_s() + STORED_S)
        self._drop_old()

    def _drop_old(self) -> None:
        now_s = self.voice.clock.now_s()
        while self._stored:
            oldest = next(iter(self._stored.values()))
            total = sum(stored.snapshot.nbytes for stored in self._stored.values())
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
                origin = hub.find_origin(session_id)
            except LiveError as error:
                await socket.send_denial_response(_denial(error))
                return
            await socket.accept()
            await hub.serve(_transport(hub, socket), origin)

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


__all__ = ["LiveHub", "Origin", "add_live_routes"]
