"""The world protocol's endpoint: message ↔ command for one connection, nothing else.

Owns one connection: its task group (reader, driver, sender), its wire state and, while attached, the right to drive a
session. It keeps no lifecycle policy: the manager decides what a session is, the stream decides what its numbers are, the
driver decides when a block starts. Whatever a client sends, other sessions do not notice.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, assert_never

import msgspec

from realtime_omni.errors import ArgumentError
from realtime_omni.server.codes import describe_error
from realtime_omni.server.driver import Driver
from realtime_omni.server.images import decode_image
from realtime_omni.server.outbox import Batch, ConnectionEnded, Sender
from realtime_omni.server.sessions import WireSession
from realtime_omni.server.transport import Transport, TransportLost
from realtime_omni.session.journal import EventLog
from realtime_omni.session.values import ControlInput, EventAcceptance, EventId
from realtime_omni.session.values import SessionEvent as Event
from realtime_omni_protocols.world import Close, LocalError, Reply, WireCode, WireError, WireState
from realtime_omni_protocols.world_messages import (
    MAX_LOG_CHARS,
    AcceptStatus,
    AnyClientMessage,
    ErrorMessage,
    Ping,
    SessionAbort,
    SessionAck,
    SessionClose,
    SessionEvent,
    SessionFork,
    SessionLog,
    SessionLogged,
    SessionNext,
    SessionPause,
    SessionReplay,
    SessionReset,
    SessionResume,
    SessionResumePlay,
    SessionRewind,
    SessionRollback,
    SessionStart,
)

if TYPE_CHECKING:
    from realtime_omni.server.backend import ImageRGB
    from realtime_omni.server.hub import WorldHub

_log = logging.getLogger(__name__)


_NOT_WHILE_PLAYING = (SessionReset, SessionRewind, SessionRollback, SessionReplay)
"""What would change the world under a log that is being played."""
_GO_ON = (SessionEvent, SessionNext, SessionAck)
"""What need not wait for the receipts of the events before it: the engine takes them in order."""
_GO_ON_NAMES = frozenset(("session.event", "session.next", "session.ack"))
SMALL_CHARS = 8192
"""A longer message is the reader's, whatever it is."""
MAX_RECEIPTS = 16
"""Events of one connection that the engine has not answered; past it the reader waits. Others need the engine's inbox, too."""


class _Named(msgspec.Struct):
    """As much of a message as says which it is."""

    type: str = ""


_name = msgspec.json.Decoder(_Named)


class WorldConnection:
    """One WebSocket connection of the world protocol."""

    def __init__(self, hub: WorldHub, transport: Transport) -> None:
        self.id = secrets.token_hex(4)
        self.changed = asyncio.Event()
        self.record: WireSession | None = None
        self._hub = hub
        self._transport = transport
        self.side = hub.new_side()
        self.sender = Sender(transport, self.side, hub.metrics)
        self._driver = Driver(hub, self.side, self.sender, self.changed)
        self._driving: asyncio.Task[None] | None = None
        self._receipts: set[asyncio.Future[EventAcceptance]] = set()
        self._given_up = False
        self._reading = True
        """The reader is in the middle of a message, or is not there: what comes has to wait for its turn."""
        self._fault: Exception | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the connection until its last word. Leaves no task, and the session detached or closed."""
        _log.info("connection opened connection=%s", self.id)
        try:
            async with asyncio.TaskGroup() as group:
                self.sender.put(self.side.hello())
                self._driving = group.create_task(self._driver.run(), name=f"driver-{self.id}")
                group.create_task(self.sender.run(), name=f"sender-{self.id}")
                group.create_task(self._read(), name=f"reader-{self.id}")
        except* (ConnectionEnded, TransportLost):
            pass
        except* Exception as group_error:
            await self._fail(group_error)
        finally:
            try:
                await self._leave()
            finally:
                self.sender.close()
                _log.info("connection closed connection=%s state=%s", self.id, self.side.state.value)

    async def _fail(self, error: BaseException) -> None:
        """Our own bug. The client gets an id, the log gets everything, the session can be resumed."""
        fault = describe_error(error, connection=self.id, session=self.record.id if self.record else "-")
        try:
            await self.sender.send_now(ErrorMessage(code=fault.code, message=fault.message, fatal=True))
        except (ConnectionEnded, TransportLost):
            pass
        except Exception:
            _log.exception("the last word failed connection=%s", self.id)

    async def _leave(self) -> None:
        """Let go of the session. A detach must happen even when this connection's task is being cancelled."""
        record, self.record = self.record, None
        if record is None or record.connection is not self:
            return
        record.connection = None
        await self._hub.detach(record)

    async def give_up(self) -> None:
        """Another connection takes the session over. Returns when no tick of this one is in flight."""
        self._given_up = True
        record, self.record = self.record, None
        if record is not None and record.connection is self:
            record.connection = None
        try:
            if self._driving is not None and not self._driving.done():
                self._driving.cancel()
                await asyncio.wait([self._driving])
        finally:  # also when the one who takes over is gone in the middle of it
            self.sender.outbox.seal([self.side.taken_over()])

    def attach(self, record: WireSession) -> None:
        """From now on this connection drives the session."""
        assert record.connection is None
        self.record = record
        record.resetting, record.answer_to = False, None  # what the connection before us waits for is not ours
        record.last_input_s = self._hub.clock.now_s()
        record.connection = self
        self.side.attach(record.stream)
        self._driver.attach(record)
        self._hub.sessions.changed()
        self.changed.set()

    def re(self, record: WireSession, command: AnyClientMessage) -> str | None:
        """What the answer to a command carries: nothing when another connection, whose ids are its own, will read it."""
        return command.id if record.connection is self else None

    def emit(self, batch: Batch) -> None:
        self.sender.put(batch)

    # -- reading ---------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        self._transport.listen(self._take)
        try:
            while True:
                await self.sender.outbox.room()
                self._reading = False
                data = await self._transport.receive()
                self._reading = True
                if self._fault is not None:
                    raise self._fault
                if self._given_up:
                    continue  # the session's numbers are another connection's business now
                await self._act(data)
        finally:
            self._reading = True

    async def _act(self, data: str | bytes) -> None:
        now, at_s = self._hub.clock.now_s(), self._transport.received_s
        waited = not self._driver.may_start
        receive = self.side.receive_text if isinstance(data, str) else self.side.receive_binary
        for command in receive(data, now):  # type: ignore[arg-type]
            match command:
                case Reply(message=message):
                    await self._reply(message)
                case Close():
                    pass  # the sender closes after the fatal error that came with it
                case _:
                    waited |= isinstance(command, SessionEvent | SessionNext)
                    await self._execute(command)
        if waited:
            self._driver.heard(at_s)
        self.changed.set()

    def _take(self, data: str | bytes) -> bool:
        """Act upon a message where it comes in, without the reader's turn: one of those that never wait, of which every
        block has three. False: it is the reader's, as is what follows it until the reader has nothing to do."""
        if self._reading or self._given_up or self._fault is not None or not isinstance(data, str):
            return False
        if len(data) > SMALL_CHARS or len(self._receipts) >= MAX_RECEIPTS or not self.sender.outbox.has_room:
            return False
        try:
            if _name.decode(data).type not in _GO_ON_NAMES:
                return False
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return False
        try:
            self._act_now(data, time.perf_counter())
        except Exception as fault:  # no task of ours is here: the reader raises it
            self._fault = fault
            return False
        return True

    def _act_now(self, data: str, at_s: float) -> None:
        could = self._driver.may_start
        waited = not could
        for command in self.side.receive_text(data, self._hub.clock.now_s()):
            match command:
                case Reply(message=message):
                    self._count_error(message)
                    self.sender.put(message)
                case SessionEvent() | SessionNext() | SessionAck():
                    waited |= not isinstance(command, SessionAck)
                    try:
                        self._go_on(command)
                    except Exception as error:
                        refusal = self._refusal(command, error)
                        self._count_error(refusal)
                        self.sender.put(refusal)
                case _:
                    pass  # Close: the sender closes after the fatal error that came with it
        if waited:
            self._driver.heard(at_s)
        if not could and self._driver.may_start:
            self.changed.set()

    async def _reply(self, message: object) -> None:
        self._count_error(message)
        await self.sender.send_now(message)  # type: ignore[arg-type]

    def _count_error(self, message: object) -> None:
        if isinstance(message, ErrorMessage):
            self._hub.metrics.count("errors_total", code=message.code.value)

    async def _execute(self, command: AnyClientMessage) -> None:
        """Run one command; what goes wrong with it is its own answer and harms nothing else."""
        if len(self._receipts) >= MAX_RECEIPTS or not isinstance(command, _GO_ON):
            await self._receipted()
        try:
            await self._dispatch(command)
        except (ConnectionEnded, TransportLost):
            raise
        except Exception as error:
            await self._reply(self._refusal(command, error))

    def _refusal(self, command: AnyClientMessage, error: Exception) -> ErrorMessage:
        if isinstance(command, SessionEvent):
            self._hub.metrics.count("events_total", status="refused")
        if isinstance(error, WireError):
            return self.side.refuse(command, error.code, error.message, path=error.path)
        if isinstance(error, LocalError):  # the session moved on while this command was under way
            _log.warning("command came too late connection=%s detail=%s", self.id, error)
            return self.side.refuse(command, WireCode.SESSION_STATE, "the session's state does not allow this now")
        fault = describe_error(error, connection=self.id, session=self.record.id if self.record else "-")
        return self.side.refuse(command, fault.code, fault.message, path=fault.path)

    async def _receipted(self) -> None:
        """Every event that was read is answered: a client's commands act, and are answered, in its order."""
        if self._receipts:
            await asyncio.wait(self._receipts)

    async def _dispatch(self, command: AnyClientMessage) -> None:
        if isinstance(command, SessionStart):
            await self._hub.start(self, command)
            return
        if isinstance(command, SessionResume):
            await self._hub.resume(self, command)
            return
        if isinstance(command, _GO_ON):
            self._go_on(command)
            return
        record = self.record
        if isinstance(command, Ping) or record is None:
            return  # answered by the wire machine; or the session has ended, and the last word is on its way
        now = record.last_input_s = self._hub.clock.now_s()
        if record.replay is not None and isinstance(command, _NOT_WHILE_PLAYING):
            raise WireError(WireCode.SESSION_STATE, "a log is being played")
        match command:
            case SessionReset():
                await self._reset(record, command)
            case SessionFork():
                await self._hub.fork(self, record, command)
            case SessionRewind():
                await self._rewind(record, command)
            case SessionLog():
                log = await record.door.log()  # a long one takes longer to write than a block may wait
                await self._reply(SessionLogged(log=await self._hub.pool.run(lambda: _written(log)), re=command.id))
            case SessionReplay():
                await self._replay(record, command)
            case SessionPause():
                record.emit(record.stream.paused(re=command.id))
            case SessionResumePlay():
                record.pacer.restart()
                record.emit(record.stream.playing(now, re=command.id))
            case SessionAbort():
                index = await record.door.abort()
                record.emit(record.stream.chunk_aborted(index, re=self.re(record, command)))
                await self._stop_replay(record)
            case SessionRollback():
                if record.door.state == "failed" or not record.rollback_offered:
                    await record.door.rollback()
                # else: an earlier request did it, but its connection was lost before it could say so
                record.pacer.restart()
                re = self.re(record, command)
                record.emit(record.stream.recovered(now, chunk_index=record.door.chunk_index, re=re))
            case SessionClose():
                record.answer_to = command.id
                await self._hub.close_session(record, "client")
            case _:
                assert_never(command)

    def _go_on(self, command: SessionEvent | SessionNext | SessionAck) -> None:
        record = self.record
        if record is None:
            return  # the session has ended, and the last word is on its way
        record.last_input_s = self._hub.clock.now_s()
        if not isinstance(command, SessionEvent):
            return  # the wire machine has done it; the driver looks again
        if record.replay is not None:
            raise WireError(WireCode.SESSION_STATE, "a log is being played")
        self._event(record, command)

    def _event(self, record: WireSession, command: SessionEvent) -> None:
        """Post it, ahead of the block that the client asks for next; the receipt follows when the engine has it."""
        controls = tuple(ControlInput(item.track, item.schema, item.data) for item in command.controls or ())
        event = Event(EventId(command.event_id), command.prompt, controls)
        answer = record.door.post_event(event)
        self._receipts.add(answer)
        answer.add_done_callback(partial(self._answered, record, command))

    def _answered(self, record: WireSession, command: SessionEvent, answer: asyncio.Future[EventAcceptance]) -> None:
        """Also when this connection is over: what the session accepted is told to whoever resumes it."""
        self._receipts.discard(answer)
        try:
            self._receipt(record, command, answer.result())
        except Exception as error:
            refusal = self._refusal(command, error)
            self._count_error(refusal)
            self.sender.put(refusal)

    def _receipt(self, record: WireSession, command: SessionEvent, receipt: EventAcceptance) -> None:
        status: AcceptStatus = receipt.status.value
        self._hub.metrics.count("events_total", status=status)
        if status != "discarded":  # what counts is whether the client could hear of it before
            status = "duplicate" if command.event_id < record.stream.next_event_id else "accepted"
        record.emit(
            record.stream.event_accepted(
                command.event_id,
                status=status,
                pending=receipt.pending_event_count,
                prompt=receipt.understood_prompt,
                re=self.re(record, command),
            )
        )

    async def _reset(self, record: WireSession, command: SessionReset) -> None:
        image = await self.picture(command.image)
        if self.record is not record:
            return  # another connection has taken the session over, or it has ended
        record.resetting, record.answer_to = True, command.id
        try:
            await record.door.reset(prompt=command.prompt, seed=command.seed, image=image, start=command.start)
            if record.stream.epoch < record.door.epoch:
                record.emit_reset_done()
        finally:
            if self.record is record:
                record.resetting, record.answer_to = False, None

    async def _rewind(self, record: WireSession, command: SessionRewind) -> None:
        record.resetting, record.answer_to = True, command.id
        try:
            await record.door.rewind(command.chunk_index)
            async with record.block:  # a block that was committed before goes before
                if record.stream.epoch < record.door.epoch:
                    record.emit_rewound(command.chunk_index)
        finally:
            if self.record is record:
                record.resetting, record.answer_to = False, None

    async def _replay(self, record: WireSession, command: SessionReplay) -> None:
        log = await self._hub.pool.run(lambda: _read(command.log))
        if self.record is not record:
            return
        record.resetting = True
        try:
            await record.door.return_to(log)
            async with record.block:
                if record.stream.epoch < record.door.epoch:
                    record.emit_reset_done()
            if self.record is record:
                record.begin_replay(log, command.id)
        finally:
            if self.record is record:
                record.resetting = False

    async def _stop_replay(self, record: WireSession) -> None:
        """End it behind the block that is under way, if one is."""
        if record.replay is None or self.record is not record:
            return
        record.resetting = True
        try:
            async with record.block:
                record.end_replay(complete=False)
        finally:
            if self.record is record:
                record.resetting = False

    async def picture(self, text: str | None) -> ImageRGB | None:
        """Decode a client's picture off the event loop."""
        return None if text is None else await self._hub.pool.run(lambda: decode_image(text))

    def shut_down(self) -> None:
        """Say goodbye to a client that has no session yet."""
        if self.record is None and self.side.state is not WireState.CLOSED:
            self.sender.put(ErrorMessage(code=WireCode.SHUTDOWN, message="the server is stopping", fatal=True))


def _written(log: EventLog) -> str:
    text = base64.b64encode(log.to_json().encode()).decode("ascii")
    if len(text) > MAX_LOG_CHARS:
        raise WireError(WireCode.MESSAGE_TOO_LARGE, "the log is too large for a message")
    return text


def _read(text: str) -> EventLog:
    """Raises ArgumentError."""
    try:
        log = EventLog.from_json(base64.b64decode(text, validate=True))
    except ValueError as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError("the log is not base64", path="log") from None
    if log.next_chunk == log.first_chunk:
        raise ArgumentError("the log has no chunks", path="log")
    return log
