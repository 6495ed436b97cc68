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
import hashlib
import mimetypes
import secrets
import sys
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))  # run as a script or imported by a test: the picture is beside us
from fake_world_picture import Picture, make_encoder
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
    StreamLimits,
    WorldServerSide,
    WorldSessionStream,
    close_code,
)
from realtime_omni_protocols.world_messages import (
    KEY_SUBPROTOCOL_PREFIX,
    PATH,
    PROTOCOL,
    AnyClientMessage,
    AnyServerMessage,
    Control,
    ControlInfo,
    Format,
    KvUse,
    Limits,
    SessionAbort,
    SessionAck,
    SessionClose,
    SessionClosed,
    SessionEvent,
    SessionNext,
    SessionPause,
    SessionReset,
    SessionResume,
    SessionResumePlay,
    SessionRollback,
    SessionStart,
    Timings,
)

MODEL = "tiny-world"
FRAMES_PER_BLOCK = 3
MAX_PENDING = 16
KEYS = ["w", "a", "s", "d", "i", "j", "k", "l"]
HELD_KEYS, SCRIPT = "realtime_omni.held_keys.v1", "lingbot.camera_actions.v1"
CONTROLS = (
    ControlInfo(
        track="camera",
        schema=HELD_KEYS,
        json_schema={
            "type": "object",
            "required": ["keys"],
            "additionalProperties": False,
            "properties": {
                "keys": {"type": "array", "items": {"enum": KEYS}, "maxItems": 8},
                "t_ms": {"type": "number", "minimum": 0},
            },
        },
        description="The set of keys held from now on, until replaced.",
    ),
    ControlInfo(
        track="camera",
        schema=SCRIPT,
        json_schema={
            "type": "object",
            "required": ["mode", "frames"],
            "properties": {
                "mode": {"const": "script"},
                "frames": {
                    "type": "array",
                    "items": {"type": "array", "items": {"enum": KEYS}},
                    "minItems": 3,
                    "maxItems": 3,
                },
            },
        },
        description="One list of keys per frame of the block, used for one block.",
    ),
)
PROMPTS = ("a lantern maze at night", "a green garden", "slow", "fail", "drop")


class FakeSession:
    """One session: its stream, its picture, and the connection it is attached to now."""

    def __init__(self, start: SessionStart, session_id: str, options: argparse.Namespace) -> None:
        self.options = options
        self.fps = start.fps or 20.0
        self.format: Format = start.format
        self.stream = WorldSessionStream(
            session_id=session_id,
            fps=self.fps,
            frames_per_block=FRAMES_PER_BLOCK,
            lead_frames=start.lead_frames,
            cadence=start.cadence,
            limits=StreamLimits(grace_s=options.grace_s, stall_timeout_s=options.stall_timeout_s),
            now=time.monotonic(),
        )
        self.picture = Picture(options.width, options.height)
        self.prompt: str | None = start.prompt
        self.seed = start.seed if start.seed is not None else secrets.randbelow(2**31)
        self.pending: dict[int, SessionEvent] = {}
        self.seen: dict[int, bytes] = {}  # payload digests by event id, the last 256
        self.connection: FakeConnection | None = None
        self.changed = asyncio.Event()
        self.abort = False
        self.due = 0.0

    def limits(self, side: ServerLimits) -> Limits:
        return Limits(
            max_pending_events=MAX_PENDING,
            max_message_bytes=side.max_message_bytes,
            max_events_per_s=side.max_events_per_s,
            grace_s=self.stream.limits.grace_s,
            stall_timeout_s=self.stream.limits.stall_timeout_s,
            horizon_frames=None,
        )

    def push(self, *entries: Entry) -> None:
        if self.connection is not None:
            for entry in entries:
                self.connection.queue.put_nowait(entry)

    def event(self, event: SessionEvent) -> None:
        """Accept one event, or raise `WireError`."""
        digest = hashlib.sha256(msgspec.json.encode([event.prompt, event.controls], order="sorted")).digest()
        if event.event_id in self.seen:
            if self.seen[event.event_id] != digest:
                raise WireError(WireCode.EVENT_CONFLICT, "this id was used with another payload")
            self.push(
                self.stream.event_accepted(event.event_id, status="duplicate", pending=len(self.pending), re=event.id)
            )
            return
        if event.event_id < self.stream.next_event_id:
            raise WireError(WireCode.STALE, "the id is below the highest accepted one")
        for index, control in enumerate(event.controls or ()):
            check_control(control, f"$.controls[{index}]")
        if len(self.pending) >= MAX_PENDING:
            raise WireError(WireCode.QUEUE_FULL, "too many pending events")
        self.pending[event.event_id] = event
        self.seen[event.event_id] = digest
        while len(self.seen) > 256:
            del self.seen[next(iter(self.seen))]
        self.push(
            self.stream.event_accepted(event.event_id, pending=len(self.pending), prompt=event.prompt, re=event.id)
        )

    def reset(self, message: SessionReset) -> None:
        if self.pending:
            self.push(self.stream.event_discarded(tuple(self.pending)))
            self.pending.clear()
        self.prompt = message.prompt if message.prompt is not None else self.prompt
        self.seed = message.seed if message.seed is not None else self.seed
        self.picture = Picture(self.options.width, self.options.height)
        self.due = time.monotonic()
        self.push(self.stream.reset_done(prompt=self.prompt, seed=self.seed, re=message.id))

    async def generate(self) -> None:
        """Blocks for as long as the session lives."""
        while self.stream.terminal is None:
            now = time.monotonic()
            if not self.stream.may_start_block():
                await self._wait(self._next_deadline())
                self._expire(time.monotonic())
            elif self.stream.cadence == "paced" and now < self.due:
                await self._wait(self.due)
            else:
                await self._block(now)

    async def _block(self, started: float) -> None:
        snapshot = dict(self.pending)
        prompt = next((e.prompt for e in reversed(list(snapshot.values())) if e.prompt is not None), self.prompt)
        epoch, self.abort = self.stream.epoch, False
        await asyncio.sleep(0.5 if prompt == "slow" else 0.002)
        if self.stream.terminal is not None or self.stream.epoch != epoch:
            return  # fenced: what was computed for a dead epoch is dropped
        if self.abort:
            self.push(self.stream.chunk_aborted(self.stream.next_chunk))
            return
        if prompt == "fail":
            self.prompt = "recovered"
            self.push(self.stream.event_discarded(tuple(snapshot))) if snapshot else None
            self.pending = {k: v for k, v in self.pending.items() if k not in snapshot}
            self.push(
                self.stream.failed(
                    code=WireCode.TICK_FAILED,
                    message="the model failed (on request)",
                    chunk_index=self.stream.next_chunk,
                    can=("rollback", "reset", "close"),
                )
            )
            return
        self.prompt = prompt
        media: list[object] = list(
            self.picture.block([c for e in snapshot.values() for c in e.controls or ()], prompt, self.seed)
        )
        self.pending = {k: v for k, v in self.pending.items() if k not in snapshot}
        now = time.monotonic()
        entries = self.stream.chunk(
            now,
            chunk_index=self.stream.next_chunk,
            media=media,
            applied_event_ids=tuple(snapshot),
            prompt=prompt,
            timings_ms=Timings(tick=(now - started) * 1000, encode=0, wait=max(0.0, started - self.due) * 1000),
            kv=KvUse(pages_used=min(12, self.stream.next_chunk + 1), pages_total=64),
        )
        self.due = max(self.due, now - FRAMES_PER_BLOCK / self.fps) + FRAMES_PER_BLOCK / self.fps
        self.push(*entries)
        if prompt == "drop":
            self.prompt = "a green garden"
            if self.connection is not None:
                self.connection.queue.put_nowait(None)

    def _next_deadline(self) -> float | None:
        deadlines = [d for d in (self.stream.grace_deadline(), self.stream.stall_deadline()) if d is not None]
        return min(deadlines, default=None)

    def _expire(self, now: float) -> None:
        grace, stall = self.stream.grace_deadline(), self.stream.stall_deadline()
        if grace is not None and now >= grace:
            self.stream.closed("detached_expired")
        elif stall is not None and now >= stall:
            self.push(*self.stream.closed("stalled", code=WireCode.STALLED))

    async def _wait(self, until: float | None) -> None:
        self.changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.changed.wait(), None if until is None else max(0.0, until - time.monotonic()))


def check_control(control: Control, where: str) -> None:
    if control.track != "camera":
        raise WireError(WireCode.CONTROL_INVALID, "the tracks are: camera", path=f"{where}.track")
    if control.schema not in (HELD_KEYS, SCRIPT):
        raise WireError(WireCode.SCHEMA_UNKNOWN, f"the schemas are: {HELD_KEYS}, {SCRIPT}", path=f"{where}.schema")
    keys = control.data.get("keys") if control.schema == HELD_KEYS else control.data.get("frames")
    if not isinstance(keys, list):
        raise WireError(WireCode.CONTROL_INVALID, "data does not fulfil the schema", path=f"{where}.data")
    flat = [key for item in keys for key in (item if isinstance(item, list) else [item])]
    if any(key not in KEYS for key in flat):
        raise WireError(WireCode.CONTROL_INVALID, f"the keys are {' '.join(KEYS)}", path=f"{where}.data")


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
            fresh = fresh or type(message).__name__ == "SessionResetDone"
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
    return parser.parse_args(arguments)


async def main() -> None:
    options = parse_options()
    async with fake_world(**vars(options)) as (server, url):
        print(f"fake world server at {url}  page at http://{options.host}:{options.port}/", flush=True)
        while True:
            await asyncio.sleep(options.drop_every_s or 3600)
            if options.drop_every_s:
                server.drop_all()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
