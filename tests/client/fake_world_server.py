"""A small world server with synthetic pictures: the mock the clients are developed and tested against.

    python tests/client/fake_world_server.py --port 8765 [--static DIR] [--api-key KEY] [--drop-every-s 5]

It speaks the whole protocol (paced and on demand, events, pause, reset, abort, resume, takeover) through the real machines, and
draws a moving gradient: held keys pan it, the prompt gives its colour. Three prompts do special things: ``fail`` makes the next
block fail, ``slow`` makes blocks take 0.5 s, ``drop`` cuts the connection after the next block (to watch a client resume).
Not a server for users: no model, no limits on the number of sessions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mimetypes
import secrets
import sys
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))  # run as a script or imported by a test: the picture is beside us
from fake_world_picture import make_encoder
from fake_world_session import CONTROLS, MODEL, PROMPTS, FakeSession
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from realtime_omni_protocols.errors import LocalError, WireCode, WireError
from realtime_omni_protocols.world import (
    Close,
    Entry,
    FrameEntry,
    Reply,
    ServerLimits,
    WorldServerSide,
    close_code,
)
from realtime_omni_protocols.world_messages import (
    KEY_SUBPROTOCOL_PREFIX,
    PATH,
    PROTOCOL,
    AnyClientMessage,
    AnyServerMessage,
    Format,
    SessionAbort,
    SessionAck,
    SessionClose,
    SessionClosed,
    SessionEvent,
    SessionFork,
    SessionNext,
    SessionPause,
    SessionReset,
    SessionResume,
    SessionResumePlay,
    SessionRewind,
    SessionRollback,
    SessionStart,
)


class FakeConnection:
    """One WebSocket: a reader that feeds the machine and a writer that drains the queue."""

    def __init__(self, server: FakeServer, ws: ServerConnection) -> None:
        self.server, self.ws = server, ws
        self.side = WorldServerSide(server="fake/1", models=(MODEL,), limits=server.limits, now=time.monotonic())
        self.queue: asyncio.Queue[Entry | AnyServerMessage | None] = asyncio.Queue()
        self.session: FakeSession | None = None
        self.replay_to = 0

    async def run(self) -> None:
        await self.ws.send(self.side.send(self.side.hello()))
        writer = asyncio.create_task(self._write())
        try:
            async with asyncio.timeout_at(
                asyncio.get_running_loop().time() + self.server.limits.handshake_timeout_s
            ) as timer:
                async for data in self.ws:
                    now = time.monotonic()
                    receive = (
                        self.side.receive_text(data, now)
                        if isinstance(data, str)
                        else self.side.receive_binary(data, now)
                    )
                    for command in receive:
                        await self._act(command)
                    timer.reschedule(None if self.side.deadline() is None else timer.when())
        except TimeoutError:
            for command in self.side.handle_timeout(time.monotonic() + 1):
                await self._act(command)
        except ConnectionClosed:
            pass
        finally:
            if self.session is not None and self.session.connection is self:
                self.session.connection = None
                self.session.stream.detach(time.monotonic())
                self.session.changed.set()
            with contextlib.suppress(asyncio.TimeoutError, ConnectionClosed):
                await asyncio.wait_for(asyncio.shield(writer), 1) if self.side.closed else None
            writer.cancel()

    async def _act(self, command: AnyClientMessage | Reply | Close) -> None:
        match command:
            case Reply(message):
                self.queue.put_nowait(message)
            case Close():
                pass  # the writer closes after the fatal error
            case SessionStart():
                self._start(command)
            case SessionResume():
                self._resume(command)
            case _ if self.session is not None:
                try:
                    self._session(self.session, command)
                except WireError as error:
                    self.queue.put_nowait(self.side.refuse(command, error.code, error.message, path=error.path))
                self.session.changed.set()
            case _:
                raise LocalError(f"unhandled {command}")

    def _start(self, start: SessionStart) -> None:
        code, path = None, ""
        session_id = start.session_id or secrets.token_hex(8)
        encoder = make_encoder(start.format, self.server.options.width, self.server.options.height, start.fps or 20.0)
        if start.model not in (None, MODEL):
            code, path = WireCode.MODEL_UNKNOWN, "$.model"
        elif encoder is None:
            code, path = WireCode.UNSUPPORTED_FORMAT, "$.format"
        elif session_id in self.server.sessions:
            code, path = WireCode.SESSION_EXISTS, "$.session_id"
        if code is not None or encoder is None:
            self.queue.put_nowait(self.side.refuse(start, code or WireCode.INTERNAL, "refused", path=path))
            return
        session = FakeSession(start, session_id, self.server.options)
        self.server.sessions[session_id] = session
        self.session, session.connection, self.encoder, self.format = session, self, encoder, start.format
        self.side.attach(session.stream)
        session.push(
            session.stream.started(
                resume_token=secrets.token_urlsafe(24),
                model=MODEL,
                prompt=session.prompt,
                seed=session.seed,
                format=start.format,
                codec=encoder.codec,
                width=self.server.options.width,
                height=self.server.options.height,
                limits=session.limits(self.server.limits),
                controls=CONTROLS,
                prompts=PROMPTS,
                starts=("courtyard",),
                oldest_rewind=session.oldest_rewind,
                re=start.id,
            )
        )
        self.server.tasks.append(asyncio.create_task(session.generate()))

    def _resume(self, resume: SessionResume) -> None:
        session = self.server.sessions.get(resume.session_id)
        fmt: Format = resume.format or (session.format if session is not None else "jpeg")
        code: WireCode | None = None
        if session is None or not session.stream.token_matches(resume.resume_token):
            code = WireCode.SESSION_NOT_FOUND
        elif session.stream.terminal is not None:
            code = WireCode.SESSION_GONE
        elif session.connection is not None and not resume.takeover:
            code = WireCode.SESSION_BUSY
        encoder = make_encoder(fmt, self.server.options.width, self.server.options.height, 20.0)
        if code is None and encoder is None:
            code = WireCode.UNSUPPORTED_FORMAT
        if code is not None or session is None or encoder is None:
            self.queue.put_nowait(self.side.refuse(resume, code or WireCode.INTERNAL, "refused"))
            return
        try:
            plan = session.stream.resume(
                resume.last_seq,
                resume_token=secrets.token_urlsafe(24),
                format=fmt,
                codec=encoder.codec,
                now=time.monotonic(),
                re=resume.id,
            )
        except WireError as error:
            self.queue.put_nowait(self.side.refuse(resume, error.code, error.message, path=error.path))
            return
        if session.connection is not None:
            session.connection.session = None
            session.connection.queue.put_nowait(session.connection.side.taken_over())
        self.session, session.connection, self.encoder, self.format = session, self, encoder, fmt
        session.format = fmt
        self.side.attach(session.stream)
        self.replay_to = session.stream.last_seq
        self.queue.put_nowait(plan.resumed)
        session.push(*plan.entries)
        session.changed.set()

    def _session(self, session: FakeSession, command: AnyClientMessage) -> None:
        stream = session.stream
        match command:
            case SessionEvent():
                session.event(command)
            case SessionPause():
                session.push(stream.paused(re=command.id))
            case SessionResumePlay():
                session.push(stream.playing(time.monotonic(), re=command.id))
            case SessionReset():
                session.reset(command)
            case SessionFork():
                if command.session_id in self.server.sessions:
                    raise WireError(WireCode.SESSION_EXISTS, "the id is in use", path="$.session_id")
                branch = session.fork(command)
                self.server.sessions[branch.stream.session_id] = branch
                self.server.tasks.append(asyncio.create_task(branch.generate()))
            case SessionRewind():
                session.rewind(command)
            case SessionAbort():
                session.abort = True
                session.push(stream.chunk_aborted(None, re=command.id))
            case SessionRollback():
                session.push(stream.recovered(time.monotonic(), chunk_index=stream.next_chunk, re=command.id))
            case SessionClose():
                session.push(*stream.closed("client", re=command.id))
            case SessionAck() | SessionNext():
                pass  # the machine did it; the generator is woken by the caller
            case _:
                raise LocalError(f"unhandled {command}")

    async def _write(self) -> None:
        fresh = True  # the next frame must be a key frame
        while True:
            item = await self.queue.get()
            if item is None:
                self.ws.transport.abort()
                return
            if isinstance(item, FrameEntry):
                payload, key = self.encoder.encode(item.media, fresh)
                fresh = False
                header = item.header(
                    format=self.format, key=key, payload_bytes=len(payload), replay=item.seq <= self.replay_to
                )
                await self.ws.send(self.side.send_frame(header, payload))
                continue
            message = item.message if not isinstance(item, msgspec.Struct) or hasattr(item, "after") else item
            fresh = fresh or type(message).__name__ in ("SessionResetDone", "SessionRewound")
            await self.ws.send(self.side.send(message))
            code = close_code(message)
            if code is not None:
                await self.ws.close(int(code), message.reason if isinstance(message, SessionClosed) else "")
                return


class FakeServer:
    """All sessions of one fake server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.limits = ServerLimits(handshake_timeout_s=options.handshake_timeout_s)
        self.sessions: dict[str, FakeSession] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.connections: set[FakeConnection] = set()

    async def handle(self, ws: ServerConnection) -> None:
        connection = FakeConnection(self, ws)
        self.connections.add(connection)
        try:
            with contextlib.suppress(ConnectionClosed):
                await connection.run()
        finally:
            self.connections.discard(connection)

    def drop_all(self) -> None:
        """Cut every connection, as a broken network would."""
        for connection in self.connections:
            connection.ws.transport.abort()

    def process_request(self, ws: ServerConnection, request: Request) -> Response | None:
        path = request.path.partition("?")[0]
        if path == PATH:
            key = self.options.api_key
            offered = request.headers.get("Sec-WebSocket-Protocol", "")
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if key and given != key and KEY_SUBPROTOCOL_PREFIX + key not in [p.strip() for p in offered.split(",")]:
                return ws.respond(HTTPStatus.UNAUTHORIZED, "unauthorized\n")
            return None
        return self._static(path)

    def _static(self, path: str) -> Response:
        root = Path(self.options.static).resolve() if self.options.static else None
        file = (root / path.lstrip("/")).resolve() if root else None
        if file is not None and file.is_dir():
            file = file / "index.html"
        if root is None or file is None or not file.is_relative_to(root) or not file.is_file():
            return Response(404, "Not Found", Headers({"Content-Length": "10"}), b"not found\n")
        body = file.read_bytes()
        kind = (
            "text/javascript"
            if file.suffix in (".js", ".mjs")
            else mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        )
        return Response(200, "OK", Headers({"Content-Type": kind, "Content-Length": str(len(body))}), body)


@contextlib.asynccontextmanager
async def fake_world(port: int = 0, **settings: object) -> AsyncIterator[tuple[FakeServer, str]]:
    """A running server and its ``ws://`` URL, for tests."""
    options = parse_options([])
    for name, value in settings.items():
        setattr(options, name, value)
    server = FakeServer(options)
    async with serve(
        server.handle,
        options.host,
        port,
        subprotocols=[Subprotocol(PROTOCOL)],
        process_request=server.process_request,
        max_size=2**23,
    ) as listening:
        number = next(iter(listening.sockets)).getsockname()[1]
        try:
            yield server, f"ws://{options.host}:{number}{PATH}"
        finally:
            for task in server.tasks:
                task.cancel()


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--static", default=None, help="folder with a page to serve at /")
    parser.add_argument("--api-key", default=None)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--height", type=int, default=64)
    parser.add_argument("--grace-s", type=float, default=30.0)
    parser.add_argument("--stall-timeout-s", type=float, default=60.0)
    parser.add_argument("--handshake-timeout-s", type=float, default=10.0)
    parser.add_argument("--drop-every-s", type=float, default=None, help="cut all connections this often")
    parser.add_argument("--no-branches", action="store_true", help="sessions can be neither forked nor rewound")
    return parser.parse_args(arguments)


async def main() -> None:
    options = parse_options()
    async with fake_world(**vars(options)) as (server, url):
        print(f"fake world server at {url}  page at {url.removesuffix(PATH).replace('ws', 'http', 1)}", flush=True)
        while True:
            await asyncio.sleep(options.drop_every_s or 3600)
            if options.drop_every_s:
                server.drop_all()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
