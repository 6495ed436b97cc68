"""What the commands of one connection of the world protocol do, in the client's order.

Owns the receipts that the engine still owes for events. It knows a session's door and its stream; of the connection only
whose session it drives, and its two ways to answer: ``tell``, and ``tell_now`` for who can wait until it is written.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from functools import partial
from typing import TYPE_CHECKING, assert_never

from realtime_omni.errors import ArgumentError
from realtime_omni.server.codes import describe_error
from realtime_omni.server.outbox import ConnectionEnded
from realtime_omni.server.sessions import WireSession
from realtime_omni.server.transport import TransportLost
from realtime_omni.session.journal import EventLog
from realtime_omni.session.values import ControlInput, EventAcceptance, EventId
from realtime_omni.session.values import SessionEvent as Event
from realtime_omni_protocols.world import LocalError, WireCode, WireError
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
    from realtime_omni.server.hub import WorldHub
    from realtime_omni.server.world import WorldConnection

_log = logging.getLogger(__name__)

MAX_RECEIPTS = 16
"""Events of one connection that the engine has not answered; past it the reader waits. Others need the engine's inbox, too."""
_NOT_WHILE_PLAYING = (SessionReset, SessionRewind, SessionRollback, SessionReplay)
"""What would change the world under a log that is being played."""
_AT_ONCE = (SessionEvent, SessionNext, SessionAck)
"""What need not wait for the receipts of the events before it: the engine takes them in order."""


class Commands:
    """The commands of one client; what goes wrong with one is its own answer and harms nothing else."""

    def __init__(self, connection: WorldConnection, hub: WorldHub) -> None:
        self._connection = connection
        self._hub = hub
        self._receipts: set[asyncio.Future[EventAcceptance]] = set()

    @property
    def full(self) -> bool:
        """The engine owes as many receipts as one connection may wait for."""
        return len(self._receipts) >= MAX_RECEIPTS

    async def run(self, command: AnyClientMessage) -> None:
        """Do it, and answer it."""
        if self.full or not isinstance(command, _AT_ONCE):
            await self._receipted()
        try:
            await self._dispatch(command)
        except (ConnectionEnded, TransportLost):
            raise
        except Exception as error:
            await self._connection.tell_now(self._refusal(command, error))

    def run_at_once(self, command: SessionEvent | SessionNext | SessionAck) -> None:
        """The same for one that never waits."""
        try:
            self._at_once(command)
        except Exception as error:
            self._connection.tell(self._refusal(command, error))

    def _refusal(self, command: AnyClientMessage, error: Exception) -> ErrorMessage:
        connection = self._connection
        if isinstance(command, SessionEvent):
            self._hub.metrics.count("events_total", status="refused")
        if isinstance(error, WireError):
            return connection.side.refuse(command, error.code, error.message, path=error.path)
        if isinstance(error, LocalError):  # the session moved on while this command was under way
            _log.warning("command came too late connection=%s detail=%s", connection.id, error)
            text = "the session's state does not allow this now"
            return connection.side.refuse(command, WireCode.SESSION_STATE, text)
        session = connection.record.id if connection.record else "-"
        fault = describe_error(error, connection=connection.id, session=session)
        return connection.side.refuse(command, fault.code, fault.message, path=fault.path)

    async def _receipted(self) -> None:
        """Every event that was read is answered: a client's commands act, and are answered, in its order."""
        if self._receipts:
            await asyncio.wait(self._receipts)

    async def _dispatch(self, command: AnyClientMessage) -> None:
        if isinstance(command, SessionStart):
            await self._hub.start(self._connection, command)
            return
        if isinstance(command, SessionResume):
            await self._hub.resume(self._connection, command)
            return
        if isinstance(command, _AT_ONCE):
            self._at_once(command)
            return
        record = self._connection.record
        if isinstance(command, Ping) or record is None:
            return  # answered by the wire machine; or the session has ended, and the last word is on its way
        now = record.last_input_s = self._hub.clock.now_s()
        if record.replay is not None and isinstance(command, _NOT_WHILE_PLAYING):
            raise WireError(WireCode.SESSION_STATE, "a log is being played")
        match command:
            case SessionReset():
                await self._reset(record, command)
            case SessionFork():
                await self._hub.fork(self._connection, record, command)
            case SessionRewind():
                await self._rewind(record, command)
            case SessionLog():
                log = await record.door.log()  # a long one takes longer to write than a block may wait
                written = await self._hub.pool.run(lambda: _written(log))
                await self._connection.tell_now(SessionLogged(log=written, re=command.id))
            case SessionReplay():
                await self._replay(record, command)
            case SessionPause():
                record.emit(record.stream.paused(re=command.id))
            case SessionResumePlay():
                record.pacer.restart()
                record.emit(record.stream.playing(now, re=command.id))
            case SessionAbort():
                index = await record.door.abort()
                record.emit(record.stream.chunk_aborted(index, re=self._connection.re(record, command)))
                await self._stop_replay(record)
            case SessionRollback():
                if record.door.state == "failed" or not record.rollback_offered:
                    await record.door.rollback()
                # else: an earlier request did it, but its connection was lost before it could say so
                record.pacer.restart()
                re = self._connection.re(record, command)
                record.emit(record.stream.recovered(now, chunk_index=record.door.chunk_index, re=re))
            case SessionClose():
                record.answer_to = command.id
                await self._hub.close_session(record, "client")
            case _:
                assert_never(command)

    def _at_once(self, command: SessionEvent | SessionNext | SessionAck) -> None:
        record = self._connection.record
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
            self._connection.tell(self._refusal(command, error))

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
                re=self._connection.re(record, command),
            )
        )

    async def _reset(self, record: WireSession, command: SessionReset) -> None:
        image = await self._connection.picture(command.image)
        if self._connection.record is not record:
            return  # another connection has taken the session over, or it has ended
        record.resetting, record.answer_to = True, command.id
        try:
            await record.door.reset(prompt=command.prompt, seed=command.seed, image=image, start=command.start)
            if record.stream.epoch < record.door.epoch:
                record.emit_reset_done()
        finally:
            if self._connection.record is record:
                record.resetting, record.answer_to = False, None

    async def _rewind(self, record: WireSession, command: SessionRewind) -> None:
        record.resetting, record.answer_to = True, command.id
        try:
            await record.door.rewind(command.chunk_index)
            async with record.block:  # a block that was committed before goes before
                if record.stream.epoch < record.door.epoch:
                    record.emit_rewound(command.chunk_index)
        finally:
            if self._connection.record is record:
                record.resetting, record.answer_to = False, None

    async def _replay(self, record: WireSession, command: SessionReplay) -> None:
        log = await self._hub.pool.run(lambda: _read(command.log))
        if self._connection.record is not record:
            return
        record.resetting = True
        try:
            await record.door.return_to(log)
            async with record.block:
                if record.stream.epoch < record.door.epoch:
                    record.emit_reset_done()
            if self._connection.record is record:
                record.begin_replay(log, command.id)
        finally:
            if self._connection.record is record:
                record.resetting = False

    async def _stop_replay(self, record: WireSession) -> None:
        """End it behind the block that is under way, if one is."""
        if record.replay is None or self._connection.record is not record:
            return
        record.resetting = True
        try:
            async with record.block:
                record.end_replay(complete=False)
        finally:
            if self._connection.record is record:
                record.resetting = False


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
