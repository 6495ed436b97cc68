"""One connection of our streaming subprotocol, and the sessions that outlive it.

Owns: `StreamSessions` (resume tokens, the grace after a lost connection), and the task that computes the newest
observation.  Must not know: how a policy computes. Invariants: a session has at most one connection and at most one
observation in work; it is released once, when its client closes it, the grace is over, it is evicted, or the server
stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from realtime_omni.server.clock import Clock
from realtime_omni.server.outbox import ConnectionEnded
from realtime_omni.server.policy import PolicyAnswer, PolicyRequest, add_stages, policy_error, read_observation
from realtime_omni.server.reading import ReadingPace
from realtime_omni.server.transport import Transport, TransportLost
from realtime_omni_protocols.openpi import (
    Attach,
    BeginReset,
    Close,
    End,
    Observation,
    Open,
    PolicyCode,
    PolicyError,
    Send,
    StreamServerSide,
    StreamState,
)
from realtime_omni_protocols.openpi.stream_messages import Observe
from realtime_omni_protocols.openpi.stream_server import StreamCommand, StreamOutput

if TYPE_CHECKING:
    from realtime_omni.server.openpi import PolicyHub

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class StreamSession:
    """What of a session outlives its connection. ``policy_id`` is the backend's, and never leaves the server."""

    id: str
    policy_id: str
    token_hash: bytes = b""
    epoch: int = 0
    last_seq: int = 0
    last_chunk: int | None = None
    """``seq`` of the latest chunk that was sent, received or not."""
    connection: StreamConnection | None = None
    touched: asyncio.Event = field(default_factory=asyncio.Event)
    """A new one for every detach; set when the session was attached again, or is over."""

    def new_token(self) -> str:
        token = secrets.token_urlsafe(24)
        self.token_hash = _hash(token)
        return token


class StreamSessions:
    """The streaming sessions of one hub, by id."""

    def __init__(self, release: Callable[[str], Awaitable[None]], clock: Clock, grace_s: float) -> None:
        self.grace_s = grace_s
        self._release = release
        self._clock = clock
        self._by_id: dict[str, StreamSession] = {}
        self._waiting: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, policy_id: str, connection: StreamConnection) -> StreamSession:
        session = StreamSession(secrets.token_hex(8), policy_id, connection=connection)
        self._by_id[session.id] = session
        return session

    def find(self, session_id: str, token: str) -> StreamSession:
        """Raises PolicyError ``session_not_found``, whatever is wrong."""
        session = self._by_id.get(session_id)
        expected = session.token_hash if session is not None else bytes(32)
        if not hmac.compare_digest(_hash(token), expected) or session is None:
            raise PolicyError(PolicyCode.SESSION_NOT_FOUND, "no such session, or it is over")
        return session

    async def end(self, session: StreamSession) -> None:
        """Release the session. Harmless when repeated."""
        if self._by_id.pop(session.id, None) is not None:
            session.connection = None
            session.touched.set()
            await self._release(session.policy_id)

    def detach(self, session: StreamSession) -> None:
        """The connection is gone; the session ends when the grace does."""
        session.connection = None
        session.touched = asyncio.Event()
        until = self._clock.now_s() + self.grace_s
        task = asyncio.create_task(self._expire(session, session.touched, until))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _expire(self, session: StreamSession, touched: asyncio.Event, until: float) -> None:
        await self._clock.wait(touched, until)
        if not touched.is_set():
            await self.end(session)

    async def shutdown(self) -> None:
        """End what is left: detached sessions."""
        for session in list(self._by_id.values()):
            await self.end(session)
        while self._waiting:
            await asyncio.wait(self._waiting)


class StreamConnection:
    """One WebSocket connection."""

    def __init__(self, hub: PolicyHub, transport: Transport) -> None:
        self.id = secrets.token_hex(4)
        self._hub = hub
        self._transport = transport
        self._session: StreamSession | None = None
        self._group: asyncio.TaskGroup | None = None
        self._computing: asyncio.Task[None] | None = None
        self._work: Observe | None = None
        self._taken_over = asyncio.Event()
        self._over = asyncio.Event()
        self._started = asyncio.Event()
        self.side = StreamServerSide(
            hub.backend.contract,
            server="realtime-omni",
            now=hub.clock.now_s(),
            max_bytes=hub.max_bytes,
            handshake_timeout_s=hub.settings.handshake_timeout_s,
        )

    # -- life ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve to the end. Leaves no task; the session is detached or released."""
        try:
            async with asyncio.TaskGroup() as self._group:
                self._group.create_task(self._end_when(self._hub.stopped))
                self._group.create_task(self._end_when(self._taken_over))
                self._group.create_task(self._watch_handshake())
                self._group.create_task(self._read())
        except* (ConnectionEnded, TransportLost):
            pass
        except* Exception as faults:
            fault = policy_error(faults, connection=self.id)
            await self._last_word(self.side.fatal(PolicyError(PolicyCode.INTERNAL, fault.message)))
        finally:
            try:
                await self._leave()
            finally:
                self._over.set()
                _log.info("robot gone connection=%s %s", self.id, self.side.statistics())

    async def _end_when(self, event: asyncio.Event) -> None:
        await event.wait()
        raise ConnectionEnded

    async def _watch_handshake(self) -> None:
        await self._hub.clock.wait(self._started, self.side.deadline())
        await self._send(self.side.handle_timeout(self._hub.clock.now_s()))

    async def _leave(self) -> None:
        """Detach or release, then say why, where there is somebody to hear it."""
        session, self._session = self._session, None
        owned = session is not None and session.connection is self
        if session is not None and owned:
            session.epoch, session.last_seq = self.side.settled_epoch, self.side.last_seq
            if self._hub.stopping or self.side.state is StreamState.CLOSING:
                await self._hub.streams.end(session)
            else:
                self._hub.streams.detach(session)
        if self._hub.stopping:
            await self._last_word(self._parting("shutdown", session))
        elif self._taken_over.is_set():
            await self._last_word(self._parting("taken_over", session))

    def _parting(self, reason: str, session: StreamSession | None) -> list[StreamOutput]:
        if self.side.state is StreamState.CLOSED:
            return []
        if session is None:
            return self.side.fatal(PolicyError(PolicyCode.SHUTDOWN, "the server stops"))
        return self.side.closed(reason)

    async def _last_word(self, outputs: Iterable[StreamOutput]) -> None:
        with contextlib.suppress(TransportLost, ConnectionEnded):
            await self._send(outputs)

    async def give_up(self) -> None:
        """Another connection takes the session over; returns when nothing of this one is in work."""
        self._taken_over.set()
        await self._over.wait()

    # -- reading ---------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        await self._send([self.side.hello()])
        pace = ReadingPace(self._hub.clock, self._hub.settings.max_messages_per_s)
        while True:
            frame = await self._transport.receive()
            await pace.admit()
            for command in self.side.receive(frame, self._hub.clock.now_s()):
                await self._carry_out(command)
            self._compute_next()

    async def _carry_out(self, command: StreamCommand) -> None:
        match command:
            case Send() | Close():
                await self._send([command])
            case Open():
                await self._start(command)
            case Attach():
                await self._resume(command)
            case BeginReset():
                await self._reset()
            case End():
                await self._cancel_work()
                await self._close("client")
            case _:
                assert_never(command)

    async def _start(self, command: Open) -> None:
        try:
            policy_id = await self._hub.open(command.message.session_id, command.message.control_hz)
        except PolicyError as error:
            await self._refuse(error)
            return
        self._session = self._hub.streams.add(policy_id, self)
        self._started.set()
        await self._send([self.side.started(self._session.id, self._session.new_token(), self._hub.streams.grace_s)])

    async def _resume(self, command: Attach) -> None:
        sessions, message = self._hub.streams, command.message
        try:
            session = sessions.find(message.session_id, message.resume_token)
            if session.connection is not None:
                await session.connection.give_up()
                session = sessions.find(message.session_id, message.resume_token)  # it may be over by now
            if session.connection is not None:
                raise PolicyError(PolicyCode.SESSION_BUSY, "another connection was faster")
        except PolicyError as error:
            await self._refuse(error)
            return
        if message.last_chunk != session.last_chunk:
            self._hub.backend.leave_chunk(session.policy_id)
        session.connection, self._session = self, session
        session.touched.set()
        self._started.set()
        await self._send([self.side.resumed(session.new_token(), session.epoch, session.last_seq)])

    async def _refuse(self, error: PolicyError) -> None:
        """The client may try again, within the time that it had from the beginning."""
        await self._send([self.side.refuse_start(error)])
        await self._send(self.side.handle_timeout(self._hub.clock.now_s()))

    async def _reset(self) -> None:
        assert self._session is not None
        await self._cancel_work()
        try:
            await self._hub.backend.reset(self._session.policy_id)
        except Exception as error:  # what a half reset left behind must not act
            policy_error(error, connection=self.id)
            await self._close("failed")
        else:
            await self._send([self.side.reset_done()])

    async def _close(self, reason: str) -> None:
        assert self._session is not None
        session, self._session = self._session, None
        self.side.ending()
        await self._hub.streams.end(session)
        await self._send(self.side.closed(reason))

    # -- computing -------------------------------------------------------------------------------------------------

    def _compute_next(self) -> None:
        """Begin the newest observation, when none is in work."""
        work = self.side.take()
        if work is not None:
            assert self._group is not None
            self._computing = self._group.create_task(self._compute(work, time.perf_counter()))
            self._work = work

    async def _cancel_work(self) -> None:
        if self._computing is not None and not self._computing.done():
            self._computing.cancel()
            await asyncio.wait([self._computing])
            if (
                self._work is not None
            ):  # a task that is cancelled before its first step never runs, not even its handlers
                self.side.drop(self._work)

    async def _compute(self, work: Observe, begun_s: float) -> None:
        assert self._session is not None
        timing = {"queue": 0.0}
        try:
            observation = await self._judge(work)
            timing["decode"] = (time.perf_counter() - begun_s) * 1000
            request = PolicyRequest(
                observation,
                work.seed,
                work.steps,
                tick=work.tick,
                consumed=work.consumed,
                captured_ms=work.captured_ms,
                rtc=work.rtc,
            )
            asked_s = time.perf_counter()
            answer = await self._hub.backend.infer(self._session.policy_id, request)
            add_stages(timing, answer, (time.perf_counter() - asked_s) * 1000)
            encoding_s = time.perf_counter()
            outputs = self._answer(work, answer, timing)
            timing["encode"] = (time.perf_counter() - encoding_s) * 1000
            if outputs:
                self._session.last_chunk = work.seq
            await self._send(outputs)
            if outputs:
                self._hub.answered("stream", timing)
        except asyncio.CancelledError:
            self.side.drop(work)
            raise
        except (ConnectionEnded, TransportLost):
            raise
        except Exception as error:
            await self._fail(work, policy_error(error, connection=self.id))
        self._computing = None
        self._compute_next()

    async def _judge(self, work: Observe) -> Observation:
        """The observation; what is wrong with it has its path in the whole message."""
        try:
            return await read_observation(self._hub.reader, work.observation)
        except PolicyError as error:
            path = error.path.replace("$", "$.observation", 1)
            raise PolicyError(error.code, error.message, path) from None

    def _answer(self, work: Observe, answer: PolicyAnswer, timing: dict[str, float]) -> list[StreamOutput]:
        return self.side.chunk(work, answer.actions, timing, valid_from=answer.valid_from, delay_used=answer.delay_used)

    async def _fail(self, work: Observe, fault: PolicyError) -> None:
        if fault.code is PolicyCode.SESSION_NOT_FOUND:
            self.side.drop(work)
            await self._close("evicted")
            return
        await self._send(self.side.fail(work, fault))

    async def _send(self, outputs: Iterable[StreamCommand]) -> None:
        await self._hub.send(self._transport, outputs)


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
