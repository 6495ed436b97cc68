"""The robot endpoint: hub, routes, and one connection of the alternating rows. Frame ↔ command for a `PolicyBackend`,
nothing else.

Owns: the connections, and that every session they opened is released on every way out.  Must not know: models, the
engine. The rules of the wire are in ``realtime_omni_protocols.openpi``; streaming connections are in `openpi_stream`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from typing import Any, Protocol

from fastapi import FastAPI, Response, WebSocket
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from realtime_omni.server.auth import AccessMiddleware
from realtime_omni.server.clock import Clock, LoopClock
from realtime_omni.server.metrics import ROBOT_STAGES, Metrics
from realtime_omni.server.openpi_stream import StreamConnection, StreamSessions
from realtime_omni.server.outbox import ConnectionEnded
from realtime_omni.server.policy import (
    PolicyAnswer,
    PolicyBackend,
    PolicyRequest,
    add_stages,
    policy_error,
    read_observation,
)
from realtime_omni.server.settings import ServerSettings
from realtime_omni.server.transport import StarletteTransport, Transport, TransportLost
from realtime_omni_protocols.openpi import (
    MAX_FRAME_BYTES,
    PATH,
    ROOT_PATH,
    STREAM_PROTOCOL,
    Close,
    Infer,
    Observation,
    ObservationReader,
    PolicyClose,
    PolicyCode,
    PolicyError,
    PolicyServerSide,
    Reset,
    Row,
    Send,
    choose_row,
)
from realtime_omni_protocols.openpi.server_side import Output

_log = logging.getLogger(__name__)
MAX_AHEAD = 4
"""Requests that may wait while one is answered. The protocol alternates; who sends more than this never reads."""


class _Connection(Protocol):
    async def run(self) -> None: ...


class PolicyHub:
    """The robot endpoint of one server."""

    def __init__(
        self,
        backend: PolicyBackend,
        settings: ServerSettings,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.backend = backend
        self.settings = settings
        self.metrics = metrics if metrics is not None else Metrics()
        self.clock = clock if clock is not None else LoopClock()
        self.reader = ObservationReader(backend.contract)
        self.streams = StreamSessions(self.release, self.clock, settings.grace_s)
        self.max_bytes = min(settings.max_message_bytes, MAX_FRAME_BYTES)
        self.connections: set[_Connection] = set()
        self.live: set[str] = set()
        """Sessions of the backend that were opened here and are not released yet."""
        self.stopped = asyncio.Event()
        self._releases: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def stopping(self) -> bool:
        return self.stopped.is_set()

    @property
    def full(self) -> bool:
        return len(self.connections) >= self.settings.max_connections

    async def serve(self, transport: Transport, row: Row | None) -> None:
        """Serve one accepted connection to its end; ``row`` None is our own subprotocol."""
        connection = StreamConnection(self, transport) if row is None else PolicyConnection(self, transport, row)
        label = "stream" if row is None else row.value
        self.connections.add(connection)
        self._idle.clear()
        self.metrics.add("robot_connections", 1, row=label)
        try:
            await connection.run()
        finally:
            self.metrics.add("robot_connections", -1, row=label)
            self.connections.discard(connection)
            if not self.connections:
                self._idle.set()

    async def send(self, transport: Transport, outputs: Iterable[object]) -> None:
        """Send a machine's frames and closes, in order. Raises TransportLost, and ConnectionEnded after a close."""
        for output in outputs:
            match output:
                case Send(data, error):
                    await transport.send(data)
                    if error is not None:
                        self.metrics.count("robot_errors_total", code=error.value)
                case Close(code, reason):
                    await transport.close(code, reason)
                    raise ConnectionEnded

    def answered(self, row: str, timing: Mapping[str, float]) -> None:
        """Count a chunk and its stages (ms)."""
        self.metrics.count("robot_chunks_total", row=row)
        for stage in ROBOT_STAGES:
            self.metrics.observe("robot_stage_seconds", timing.get(stage, 0.0) / 1000, stage=stage)

    # -- sessions of the backend -----------------------------------------------------------------------------------

    async def open(self, label: str | None = None, control_hz: float | None = None) -> str:
        """A session of the backend. Whoever is cancelled in the middle leaves none behind. Raises PolicyError."""
        if self.stopping:
            raise PolicyError(PolicyCode.SHUTDOWN, "the server stops")
        opening = asyncio.create_task(self.backend.open(label=label, control_hz=control_hz))
        try:
            session_id = await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._keep(self._abandon(opening))
            raise
        except Exception as error:
            raise policy_error(error, doing="open") from None
        self.live.add(session_id)
        return session_id

    async def _abandon(self, opening: asyncio.Task[str]) -> None:
        """Nobody waits for this session any more."""
        with contextlib.suppress(Exception):
            session_id = await opening
            self.live.add(session_id)
            await self._close(session_id)

    async def release(self, session_id: str) -> None:
        """Close the session, to the end even when the caller is cancelled."""
        await asyncio.shield(self._keep(self._close(session_id)))

    async def _close(self, session_id: str) -> None:
        try:
            await self.backend.close(session_id)
        except Exception as error:  # the backend keeps a tombstone and tries again
            policy_error(error, doing="close", session=session_id)
        finally:
            self.live.discard(session_id)

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        return task

    # -- the end ---------------------------------------------------------------------------------------------------

    async def shutdown(self, timeout_s: float) -> None:
        """Say the last word on every connection and release every session, within a bound."""
        self.stopped.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                await self.streams.shutdown()
                while self._releases:
                    await asyncio.wait(self._releases)
        except TimeoutError:
            _log.warning("shutdown: %d connections, %d sessions are left", len(self.connections), len(self.live))

    def close(self) -> None:
        """Nothing is held beyond `shutdown`."""


class PolicyConnection:
    """One connection of an alternating row: a reader that is one request ahead, and the turn."""

    def __init__(self, hub: PolicyHub, transport: Transport, row: Row) -> None:
        self.id = secrets.token_hex(4)
        self.side = PolicyServerSide(row, hub.backend.contract, max_bytes=hub.max_bytes)
        self._hub = hub
        self._transport = transport
        self._session: str | None = None
        self._requests: asyncio.Queue[tuple[str | bytes, float]] = asyncio.Queue(MAX_AHEAD)
        self._last: tuple[PolicyError, PolicyClose] | None = None
        self._before: dict[str, float] = {}
        """What only the next reply can tell of one: ``prev_send_ms``, ``prev_total_ms``."""

    async def run(self) -> None:
        """Serve to the end. Leaves no task and no session."""
        _log.info("robot connected connection=%s row=%s", self.id, self.side.row.value)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._stop_with_server())
                group.create_task(self._read())
                group.create_task(self._serve())
        except* (ConnectionEnded, TransportLost):
            pass
        except* Exception as faults:
            fault = policy_error(faults, connection=self.id)
            self._last = (PolicyError(PolicyCode.INTERNAL, fault.message), PolicyClose.ERROR)
        finally:
            try:
                await self._last_word()
            finally:
                await self._leave()
                _log.info("robot gone connection=%s %s", self.id, self.side.statistics())

    async def _stop_with_server(self) -> None:
        await self._hub.stopped.wait()
        self._last = (PolicyError(PolicyCode.SHUTDOWN, "the server stops"), PolicyClose.SHUTDOWN)
        raise ConnectionEnded

    async def _read(self) -> None:
        """Read ahead, so that a peer that goes away is noticed while the policy computes."""
        self._transport.listen(self._take)  # straight into the queue: one task's turn less in every round trip
        while True:
            frame = await self._transport.receive()
            if self._requests.full():
                busy = PolicyError(PolicyCode.SESSION_BUSY, f"more than {MAX_AHEAD} requests wait for their turn")
                self._last = (busy, PolicyClose.ERROR)
                raise ConnectionEnded
            self._requests.put_nowait((frame, self._transport.received_s))

    def _take(self, frame: str | bytes) -> bool:
        if self._requests.full():
            return False
        self._requests.put_nowait((frame, time.perf_counter()))
        return True

    async def _serve(self) -> None:
        await self._send([self.side.hello()])
        while True:
            frame, received_s = await self._requests.get()
            begun_s = time.perf_counter()
            for command in self.side.receive(frame):
                match command:
                    case Infer():
                        await self._infer(command, received_s, begun_s)
                    case Reset():
                        await self._reset()
                    case Send() | Close():
                        await self._send([command])

    async def _infer(self, command: Infer, received_s: float, begun_s: float) -> None:
        timing = {"queue": (begun_s - received_s) * 1000}
        try:
            observation = await read_observation(self._hub.reader, command.observation)
            timing["decode"] = (time.perf_counter() - begun_s) * 1000
            session = await self._enter(command.switched)
            answer = await self._compute(session, command, observation, timing)
            encoded_s = time.perf_counter()
            encoded = self.side.encode(answer.actions)
        except Exception as error:
            fault = policy_error(error, connection=self.id)
            if fault.code is PolicyCode.SESSION_NOT_FOUND:  # evicted: the next observation opens another one
                await self._leave()
            await self._send(self.side.fail(fault))
            return
        ready_s = time.perf_counter()
        timing["encode"] = (ready_s - encoded_s) * 1000
        timing |= self._before
        await self._send(self.side.answer(encoded, timing))
        sent_s = time.perf_counter()
        self._before = {"prev_send_ms": (sent_s - ready_s) * 1000, "prev_total_ms": (sent_s - received_s) * 1000}
        self._hub.answered(self.side.row.value, timing)

    async def _compute(
        self, session: str, command: Infer, observation: Observation, timing: dict[str, float]
    ) -> PolicyAnswer:
        begun_s = time.perf_counter()
        request = PolicyRequest(observation, seed=command.seed, steps=command.steps)
        answer = await self._hub.backend.infer(session, request)
        add_stages(timing, answer, (time.perf_counter() - begun_s) * 1000)
        return answer

    async def _enter(self, switched: bool) -> str:
        """The session of this request; another label ends the one before."""
        if switched:
            await self._leave()
        if self._session is None:
            self._session = await self._hub.open(self.side.label)
        return self._session

    async def _reset(self) -> None:
        try:
            if self._session is not None:
                await self._hub.backend.reset(self._session)
        except Exception as error:
            await self._leave()  # what a half reset left behind must not act
            await self._send(self.side.fail(policy_error(error, connection=self.id)))
        else:
            await self._send(self.side.reset_done())

    async def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await self._hub.release(session)

    async def _last_word(self) -> None:
        if self._last is not None:
            with contextlib.suppress(TransportLost, ConnectionEnded):
                await self._send(self.side.end(*self._last))

    async def _send(self, outputs: Iterable[Output]) -> None:
        await self._hub.send(self._transport, outputs)


# -- routes ----------------------------------------------------------------------------------------------------------


def add_policy_routes(app: FastAPI, hub: PolicyHub, *paths: str) -> None:
    """The endpoint at each of ``paths`` (`PATH`, or `ROOT_PATH` on a port of its own)."""

    async def robot(socket: WebSocket) -> None:
        await _admit(hub, socket)

    for path in paths:
        app.add_api_websocket_route(path, robot)


def create_policy_app(hub: PolicyHub) -> FastAPI:
    """The application of ``--openpi-port``: both paths, and openpi's health check. ``app.state.hubs`` has the hub."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await hub.shutdown(hub.settings.shutdown_timeout_s)

    app = FastAPI(title="realtime-omni robots", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.hubs = (hub,)
    app.add_middleware(
        AccessMiddleware,
        settings=hub.settings,
        refused=lambda refusal: hub.metrics.count("refusals_total", code=refusal.code),
    )
    add_policy_routes(app, hub, PATH, ROOT_PATH)

    @app.get("/healthz")
    async def healthz() -> Response:
        report = hub.backend.health()
        return PlainTextResponse("OK\n" if report.ok else f"{report.reason}\n", 200 if report.ok else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(await hub.metrics.scrape(), media_type=CONTENT_TYPE_LATEST)

    return app


async def _admit(hub: PolicyHub, socket: WebSocket) -> None:
    if hub.full or hub.stopping:
        code = PolicyCode.SHUTDOWN if hub.stopping else PolicyCode.CAPACITY
        await socket.send_denial_response(_denial(503, code, "no more connections are accepted now"))
        return
    row = choose_row(_path_of(socket), socket.query_params.get("reply"))
    if row is None:
        known = ", ".join(row.value for row in Row)
        await socket.send_denial_response(_denial(400, PolicyCode.BAD_MESSAGE, f"reply is one of {known}"))
        return
    streaming = STREAM_PROTOCOL in socket.scope.get("subprotocols", ())
    await socket.accept(subprotocol=STREAM_PROTOCOL if streaming else None)
    await hub.serve(StarletteTransport(socket, hub.settings.send_timeout_s), None if streaming else row)


def _path_of(socket: WebSocket) -> str:
    path: str = socket.scope["path"].removeprefix(socket.scope.get("root_path", ""))
    return path or ROOT_PATH


def _denial(status: int, code: PolicyCode, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code.value, "message": message}}, status)
