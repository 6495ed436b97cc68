"""The world protocol's endpoint: one connection, from its hello to its last word.

Owns one connection: its task group (reader, driver, sender), its wire state and, while attached, the right to drive a
session. It keeps no lifecycle policy: the manager decides what a session is, the stream decides what its numbers are, the
driver decides when a block starts, ``world_commands`` says what a message does to the session. Whatever a client sends,
other sessions do not notice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING

import msgspec

from realtime_omni.server.codes import describe_error
from realtime_omni.server.driver import Driver
from realtime_omni.server.images import decode_image
from realtime_omni.server.outbox import Batch, ConnectionEnded, Sender
from realtime_omni.server.sessions import WireSession
from realtime_omni.server.transport import Transport, TransportLost
from realtime_omni.server.world_commands import Commands
from realtime_omni_protocols.world import Close, Reply, WireCode, WireState
from realtime_omni_protocols.world_messages import (
    AnyClientMessage,
    AnyServerMessage,
    ErrorMessage,
    SessionAck,
    SessionEvent,
    SessionNext,
)

if TYPE_CHECKING:
    from realtime_omni.server.backend import ImageRGB
    from realtime_omni.server.hub import WorldHub

_log = logging.getLogger(__name__)


SMALL_CHARS = 8192
"""A longer message is the reader's, whatever it is."""
_AT_ONCE = frozenset(("session.event", "session.next", "session.ack"))
"""The messages that never wait: every block has three of them."""


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
        self._commands = Commands(self, hub)
        self._driver = Driver(hub, self.side, self.sender, self.changed)
        self._driving: asyncio.Task[None] | None = None
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
                    await self.tell_now(message)
                case Close():
                    pass  # the sender closes after the fatal error that came with it
                case _:
                    waited |= isinstance(command, SessionEvent | SessionNext)
                    await self._commands.run(command)
        if waited:
            self._driver.heard(at_s)
        self.changed.set()

    def _take(self, data: str | bytes) -> bool:
        """Act upon a message where it comes in, without the reader's turn: one of those that never wait, of which every
        block has three. False: it is the reader's, as is what follows it until the reader has nothing to do."""
        if self._reading or self._given_up or self._fault is not None or not isinstance(data, str):
            return False
        if len(data) > SMALL_CHARS or self._commands.full or not self.sender.outbox.has_room:
            return False
        try:
            if _name.decode(data).type not in _AT_ONCE:
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
                    self.tell(message)
                case SessionEvent() | SessionNext() | SessionAck():
                    waited |= not isinstance(command, SessionAck)
                    self._commands.run_at_once(command)
                case _:
                    pass  # Close: the sender closes after the fatal error that came with it
        if waited:
            self._driver.heard(at_s)
        if not could and self._driver.may_start:
            self.changed.set()

    # -- answering -------------------------------------------------------------------------------------------------

    def tell(self, message: AnyServerMessage) -> None:
        """Answer behind what was queued before."""
        self._count_error(message)
        self.sender.put(message)

    async def tell_now(self, message: AnyServerMessage) -> None:
        """Answer past the queue, and wait until it is written."""
        self._count_error(message)
        await self.sender.send_now(message)

    def _count_error(self, message: AnyServerMessage) -> None:
        if isinstance(message, ErrorMessage):
            self._hub.metrics.count("errors_total", code=message.code.value)

    async def picture(self, text: str | None) -> ImageRGB | None:
        """Decode a client's picture off the event loop."""
        return None if text is None else await self._hub.pool.run(lambda: decode_image(text))

    def shut_down(self) -> None:
        """Say goodbye to a client that has no session yet."""
        if self.record is None and self.side.state is not WireState.CLOSED:
            self.sender.put(ErrorMessage(code=WireCode.SHUTDOWN, message="the server is stopping", fatal=True))
