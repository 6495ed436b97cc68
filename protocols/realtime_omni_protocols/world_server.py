"""`WorldServerSide`: the server's end of one connection, sans I/O.

Owns: the connection's state, envelope checks, rate limits, the handshake deadline, the rule of one terminal message.
Must not know: sockets, the engine, codecs, any clock.  The session's numbers live in `WorldSessionStream`.
Invariants: nothing is sent that the table forbids; ``seq`` leaves this connection contiguous; after `session.closed` or a fatal
error nothing is sent; whatever the peer sends, `receive_text` and `receive_binary` return commands and never raise.

A shell does, in a loop::

    for command in side.receive_text(text, now):
        match command:
            case Reply(message): await ws.send(side.send(message))
            case Close(code, reason): await ws.close(code, reason)
            case _: hand it to the session (answers: stream emitters, or side.refuse)
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from .envelope import encode_text
from .errors import CloseCode, LocalError, WireCode, WireError
from .world_frames import FrameHeader, pack_frame
from .world_messages import (
    MAX_ERROR_CHARS,
    MAX_MESSAGE_BYTES,
    MAX_START_BYTES,
    PROTOCOL,
    AnyClientMessage,
    AnyServerMessage,
    Chunk,
    CloseReason,
    ErrorMessage,
    Hello,
    Ping,
    Pong,
    SessionAck,
    SessionClosed,
    SessionEvent,
    SessionNext,
    SessionResume,
    SessionResumed,
    SessionStart,
    message_type,
    parse_client,
)
from .world_stream import WorldSessionStream
from .world_table import OWNING, TABLE, WireState, refusal


class ServerLimits(Struct, frozen=True, kw_only=True):
    """Bounds of one connection. Events are limited on their own: acks at 60 Hz must not eat a player's key presses.

    Over ``max_events_per_s`` an event is refused; over ``max_messages_per_s`` (any message, 64 KiB count as one) the connection
    ends with 4429. The burst is one second's worth.
    """

    handshake_timeout_s: float = 10.0
    max_start_bytes: int = MAX_START_BYTES
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_events_per_s: float = 60.0
    max_messages_per_s: float = 500.0


class Reply(Struct, frozen=True):
    """Send this message (through `WorldServerSide.send`)."""

    message: AnyServerMessage


class Close(Struct, frozen=True):
    """End the connection. A session it owned detaches, unless `session.closed` was sent."""

    code: CloseCode
    reason: str


Command: TypeAlias = AnyClientMessage | Reply | Close


class TokenBucket:
    """``rate`` per second with a burst of one second; starts full."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self.level = self.burst = max(rate, 1.0)
        self._at = now

    def take(self, cost: float, now: float) -> bool:
        self.level = min(self.burst, self.level + max(0.0, now - self._at) * self.rate)
        self._at = max(self._at, now)
        if self.level < cost:
            return False
        self.level -= cost
        return True


class ServerStatistics(Struct, frozen=True, kw_only=True):
    state: str
    received: int
    refused: int
    rate_limited: int
    sent: int
    frames_sent: int
    bytes_sent: int


_FATAL_CLOSE: dict[WireCode, CloseCode] = {
    WireCode.BAD_MESSAGE: CloseCode.BAD_MESSAGE,
    WireCode.UNSUPPORTED_VERSION: CloseCode.BAD_MESSAGE,
    WireCode.MESSAGE_TOO_LARGE: CloseCode.TOO_LARGE,
    WireCode.HANDSHAKE_TIMEOUT: CloseCode.TIMEOUT,
    WireCode.STALLED: CloseCode.TIMEOUT,
    WireCode.RATE_LIMITED: CloseCode.RATE,
    WireCode.SHUTDOWN: CloseCode.SHUTDOWN,
    WireCode.SESSION_GONE: CloseCode.GONE,
    WireCode.INTERNAL: CloseCode.INTERNAL,
}
_CLOSE_AFTER: dict[CloseReason, CloseCode] = {
    "client": CloseCode.NORMAL,
    "operator": CloseCode.NORMAL,
    "failed": CloseCode.NORMAL,
    "evicted": CloseCode.GONE,
    "detached_expired": CloseCode.GONE,
    "shutdown": CloseCode.SHUTDOWN,
    "stalled": CloseCode.TIMEOUT,
    "taken_over": CloseCode.TAKEN_OVER,
}


def close_code(message: AnyServerMessage) -> CloseCode | None:
    """The close code that follows this message; None when the connection goes on."""
    if isinstance(message, SessionClosed):
        return _CLOSE_AFTER[message.reason]
    if isinstance(message, ErrorMessage) and message.fatal:
        return _FATAL_CLOSE.get(message.code, CloseCode.INTERNAL)
    return None


class WorldServerSide:
    """One connection. ``now`` is in seconds on any monotonic scale, the same one as the stream's."""

    def __init__(
        self,
        *,
        server: str,
        models: tuple[str, ...],
        limits: ServerLimits = ServerLimits(),  # noqa: B008 (frozen)
        now: float,
    ) -> None:
        self.limits = limits
        self.state = WireState.NEW
        self.stream: WorldSessionStream | None = None
        self._server = server
        self._models = models
        self._created = now
        self._events = TokenBucket(limits.max_events_per_s, now)
        self._messages = TokenBucket(limits.max_messages_per_s, now)
        self._doomed = False  # a fatal error was handed out; what the peer still says is ignored
        self._next_seq: int | None = None
        self._parts_left: int | None = 0  # None: resumed inside a chunk, its `last` flag will tell
        self._received = self._refused = self._limited = self._sent = self._frames = self._bytes = 0

    # ---- receiving -------------------------------------------------------------------------------------------------

    def receive_text(self, data: str | bytes, now: float) -> list[Command]:
        """Commands of one text message: the message itself when it is for the session, else replies."""
        if self._over():
            return []
        self._received += 1
        if not self._messages.take(max(1.0, len(data) / 65_536), now):
            return self._refuse(WireError(WireCode.RATE_LIMITED, "too many messages", close=CloseCode.RATE))
        try:
            message = parse_client(
                data, max_start_bytes=self.limits.max_start_bytes, max_message_bytes=self.limits.max_message_bytes
            )
            return self._accept(message, now)
        except WireError as error:
            return self._refuse(error)

    def receive_binary(self, data: bytes, now: float) -> list[Command]:
        """Clients have no binary messages in version 1."""
        if self._over():
            return []
        self._received += 1
        if not self._messages.take(max(1.0, len(data) / 65_536), now):
            return self._refuse(WireError(WireCode.RATE_LIMITED, "too many messages", close=CloseCode.RATE))
        return self._refuse(WireError(WireCode.BAD_MESSAGE, "a client sends text messages only", path="$"))

    def _accept(self, message: AnyClientMessage, now: float) -> list[Command]:
        event_id = message.event_id if isinstance(message, SessionEvent) else None
        new_state = TABLE.get((self.state, type(message)))
        if new_state is None:
            code = refusal(self.state, type(message))
            text = f"{message_type(message)} is not allowed in state {self.state.value}"
            raise WireError(code, text, path="$.type", event_id=event_id, re=message.id)
        if isinstance(message, Ping):
            return [Reply(Pong(t=message.t, server_ms=max(0.0, now * 1000), re=message.id))]
        if isinstance(message, SessionEvent) and not self._events.take(1, now):
            self._limited += 1
            raise WireError(WireCode.RATE_LIMITED, "too many events; not accepted", event_id=event_id, re=message.id)
        if self.stream is not None:
            if isinstance(message, SessionAck):
                self.stream.acknowledge(message, now)
            elif isinstance(message, SessionNext):
                self.stream.ask(re=message.id)
        self.state = new_state
        return [message]

    def _refuse(self, error: WireError) -> list[Command]:
        self._refused += 1
        close = error.close
        if close is None and error.code is WireCode.BAD_MESSAGE and self.state in (WireState.NEW, WireState.OPEN):
            close = CloseCode.BAD_MESSAGE  # before a session exists there is nothing worth keeping the connection for
        reply = Reply(
            ErrorMessage(
                code=error.code,
                message=error.message,
                fatal=close is not None,
                path=error.path,
                event_id=error.event_id,
                re=error.re,
            )
        )
        if close is None:
            return [reply]
        self._doomed = True
        return [reply, Close(close, error.code.value)]

    def _over(self) -> bool:
        return self._doomed or self.state is WireState.CLOSED

    # ---- time ------------------------------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """When `handle_timeout` has to be called; None once a start or resume is under way."""
        if self.state in (WireState.NEW, WireState.OPEN) and not self._doomed:
            return self._created + self.limits.handshake_timeout_s
        return None

    def handle_timeout(self, now: float) -> list[Command]:
        """The handshake timeout, when it is due."""
        deadline = self.deadline()
        if deadline is None or now < deadline:
            return []
        return self._refuse(
            WireError(
                WireCode.HANDSHAKE_TIMEOUT, "session.start or session.resume did not come", close=CloseCode.TIMEOUT
            )
        )

    # ---- sending ---------------------------------------------------------------------------------------------------

    def hello(self) -> Hello:
        """The first message of every connection."""
        return Hello(
            protocol=PROTOCOL,
            server=self._server,
            models=self._models,
            handshake_timeout_s=self.limits.handshake_timeout_s,
        )

    def attach(self, stream: WorldSessionStream) -> None:
        """Bind the session before its `session.started` or `session.resumed` is sent."""
        if self.state not in (WireState.STARTING, WireState.RESUMING):
            raise LocalError(f"no session can be attached in state {self.state.value}")
        self.stream = stream
        if self.state is WireState.STARTING:
            self._next_seq = 1

    def refuse(
        self,
        command: AnyClientMessage,
        code: WireCode,
        message: str,
        *,
        path: str | None = None,
        fatal: bool = False,
    ) -> ErrorMessage:
        """The server's refusal of a command it was handed. A refused start or resume leaves the connection open for another."""
        handshake = isinstance(command, SessionStart | SessionResume)
        if handshake and self.state in (WireState.STARTING, WireState.RESUMING) and not fatal:
            self.state, self.stream, self._next_seq = WireState.OPEN, None, None
        self._refused += 1
        event_id = command.event_id if isinstance(command, SessionEvent) else None
        return ErrorMessage(
            code=code, message=message[:MAX_ERROR_CHARS], fatal=fatal, path=path, event_id=event_id, re=command.id
        )

    def taken_over(self) -> SessionClosed:
        """The terminal message of a connection whose session moved to another one (it has no number)."""
        return SessionClosed(reason="taken_over")

    def send(self, message: AnyServerMessage) -> str:
        """The message as wire text; the state follows. `LocalError` when it is not allowed here."""
        new_state = TABLE.get((self.state, type(message)))
        if new_state is None:
            raise LocalError(f"{message_type(message)} is not allowed in state {self.state.value}")
        seq = getattr(message, "seq", None)
        if seq is not None:
            self._expect(seq)
        if isinstance(message, SessionResumed):
            self._next_seq, new_state = message.replayed_from, WireState(message.state)
            self._parts_left = None
        elif isinstance(message, Chunk):
            self._parts_left = message.parts
        elif isinstance(message, ErrorMessage) and message.fatal:
            new_state = WireState.CLOSED
        if seq is not None:
            self._next_seq = seq + 1
        self.state = new_state
        text = encode_text(message)
        self._sent += 1
        self._bytes += len(text)
        return text

    def send_frame(self, header: FrameHeader, payload: bytes | memoryview) -> bytes:
        """One binary frame as wire bytes."""
        if (self.state, Chunk) not in TABLE:
            raise LocalError(f"a frame is not allowed in state {self.state.value}")
        if self._next_seq != header.seq:
            raise LocalError(f"seq {header.seq} does not follow, {self._next_seq} is next")
        if self._parts_left is not None:
            if self._parts_left == 0 or header.last != (self._parts_left == 1):
                raise LocalError("a frame without its chunk, or a wrong last flag")
            self._parts_left -= 1
        elif header.last:
            self._parts_left = 0
        data = pack_frame(header, payload)
        self._next_seq = header.seq + 1
        self._frames += 1
        self._bytes += len(data)
        return data

    def _expect(self, seq: int) -> None:
        if self._next_seq != seq:
            raise LocalError(f"seq {seq} does not follow, {self._next_seq} is next")
        if self._parts_left:
            raise LocalError(f"{self._parts_left} frames of the chunk are missing")
        if self._parts_left is None:
            self._parts_left = 0

    # ---- looking ---------------------------------------------------------------------------------------------------

    @property
    def owes_terminal(self) -> bool:
        """Whether this connection owns a session and has not said its last word."""
        return self.state in OWNING and self.stream is not None

    @property
    def closed(self) -> bool:
        return self._over()

    def statistics(self) -> ServerStatistics:
        return ServerStatistics(
            state=self.state.value,
            received=self._received,
            refused=self._refused,
            rate_limited=self._limited,
            sent=self._sent,
            frames_sent=self._frames,
            bytes_sent=self._bytes,
        )

    def check(self) -> None:
        """Raise `LocalError` when an invariant is broken."""
        if self.state in OWNING and self.stream is None:
            raise LocalError("a connection in a session state has no stream")
        if self._next_seq is not None and self.stream is not None and self._next_seq > self.stream.last_seq + 1:
            raise LocalError("more was sent than the session emitted")
