"""`StreamServerSide`: the server's end of one connection of `realtime-omni.vla.v1`, sans I/O.

Owns: the connection's state, the newest observation, the one in work, the epoch fence, the handshake deadline.  Must
not know: sockets, policies, how a session is kept between two connections.
Invariants: at most one observation is in work and at most one waits (the newest); every observation of the current
epoch ends in exactly one `chunk`, `superseded` or `error`; nothing of an old epoch is sent after the `reset_done` that
ended it, or after the reset was received; after `closed` or a fatal error nothing is sent; `receive` never raises for
what a peer sent.

A shell does::

    for command in side.receive(frame, now): carry it out     (Open, Attach, BeginReset, End; Send and Close)
    while (work := side.take()) is not None:                  whenever something changed and no observation is in work
        frames = side.chunk(work, ...) or side.fail(work, error)
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeAlias

import msgspec
from msgspec import Struct

from ..errors import LocalError
from .codec import MAX_FRAME_BYTES
from .contract import PolicyContract
from .errors import PolicyClose, PolicyCode, PolicyError
from .rows import STREAM_PROTOCOL
from .server_side import Close, Send
from .stream_messages import (
    MAX_ERROR_CHARS,
    ActionChunk,
    AnyClientMessage,
    AnyServerMessage,
    Bye,
    Closed,
    ErrorMessage,
    Hello,
    Observe,
    Ping,
    Pong,
    ResetDone,
    ResetEpisode,
    Resume,
    Resumed,
    Start,
    Started,
    Superseded,
    encode,
    parse_client,
)


class StreamState(StrEnum):
    """State of one connection as both ends see it."""

    NEW = "new"
    OPEN = "open"
    STARTING = "starting"
    LIVE = "live"
    RESETTING = "resetting"
    CLOSING = "closing"
    CLOSED = "closed"


ALLOWED: dict[type[AnyClientMessage], frozenset[StreamState]] = {
    Start: frozenset({StreamState.OPEN}),
    Resume: frozenset({StreamState.OPEN}),
    Observe: frozenset({StreamState.LIVE, StreamState.RESETTING}),
    ResetEpisode: frozenset({StreamState.LIVE}),
    Bye: frozenset({StreamState.LIVE, StreamState.RESETTING}),
    Ping: frozenset(StreamState) - {StreamState.NEW, StreamState.CLOSED},
}
"""Which message a client may send in which state; the rest is refused with ``session_state``."""


class Open(Struct, frozen=True):
    """Open a session, then `started` (or `refuse_start`)."""

    message: Start


class Attach(Struct, frozen=True):
    """Find the session and attach it, then `resumed` (or `refuse_start`)."""

    message: Resume


class BeginReset(Struct, frozen=True):
    """Cancel the observation in work, reset the session, then `reset_done` (or `reset_failed`)."""

    epoch: int


class End(Struct, frozen=True):
    """Close the session, then `closed`."""


StreamOutput: TypeAlias = Send | Close
StreamCommand: TypeAlias = StreamOutput | Open | Attach | BeginReset | End


class StreamStatistics(Struct, frozen=True, kw_only=True):
    state: str
    epoch: int
    observations: int
    chunks: int
    superseded: int
    fenced: int
    errors: int


class StreamServerSide:
    """One connection."""

    def __init__(
        self,
        contract: PolicyContract,
        *,
        server: str,
        now: float,
        max_bytes: int = MAX_FRAME_BYTES,
        handshake_timeout_s: float = 10.0,
    ) -> None:
        self.state = StreamState.NEW
        self.epoch = 0
        self.last_seq = 0
        self._contract = contract
        self._server = server
        self._max_bytes = max_bytes
        self._timeout_s = handshake_timeout_s
        self._deadline = now + handshake_timeout_s
        self._waiting: Observe | None = None
        self._working: Observe | None = None
        self._observations = self._chunks = self._superseded = self._fenced = self._errors = 0

    # ---- receiving

    def receive(self, frame: str | bytes, now: float) -> list[StreamCommand]:
        """One frame of the client."""
        if self.state is StreamState.CLOSED:
            return []
        try:
            message = parse_client(frame, self._max_bytes)
        except PolicyError as error:
            if error.code is PolicyCode.TOO_LARGE:
                return [*self.fatal(error, PolicyClose.TOO_LARGE)]
            return [self._error(error)]
        if self.state not in ALLOWED[type(message)]:
            seq = message.seq if isinstance(message, Observe) else None
            text = f"{type(message).__struct_config__.tag} is not allowed in state {self.state.value}"
            return [self._error(PolicyError(PolicyCode.SESSION_STATE, text), seq)]
        return self._take_message(message, now)

    def _take_message(self, message: AnyClientMessage, now: float) -> list[StreamCommand]:
        match message:
            case Start():
                self.state = StreamState.STARTING
                return [Open(message)]
            case Resume():
                self.state = StreamState.STARTING
                return [Attach(message)]
            case Observe():
                return self._observe(message)
            case ResetEpisode():
                self.state = StreamState.RESETTING
                self.epoch += 1
                self._waiting = None
                return [BeginReset(self.epoch)]
            case Bye():
                self.state = StreamState.CLOSING
                self._waiting = None
                return [End()]
            case Ping(t=t):
                return [self._send(Pong(server_ms=now * 1000, t=t))]

    def _observe(self, message: Observe) -> list[StreamCommand]:
        if message.seq <= self.last_seq:
            error = PolicyError(PolicyCode.STALE, f"seq {message.seq} is not above {self.last_seq}", "$.seq")
            return [self._error(error, message.seq)]
        self.last_seq = message.seq
        self._observations += 1
        if message.epoch != self.epoch:
            text = f"the epoch is {self.epoch}, not {message.epoch}"
            return [self._error(PolicyError(PolicyCode.STALE, text, "$.epoch"), message.seq)]
        replaced, self._waiting = self._waiting, message
        if replaced is None:
            return []
        self._superseded += 1
        return [self._send(Superseded(seq=replaced.seq, by=message.seq))]

    def deadline(self) -> float | None:
        """When the handshake has to be over; None once it is."""
        return self._deadline if self.state in (StreamState.NEW, StreamState.OPEN) else None

    def handle_timeout(self, now: float) -> list[StreamCommand]:
        """The handshake timeout, when it is due."""
        deadline = self.deadline()
        if deadline is None or now < deadline:
            return []
        error = PolicyError(PolicyCode.HANDSHAKE_TIMEOUT, "start or resume did not come")
        return [*self.fatal(error, PolicyClose.TIMEOUT)]

    # ---- the session

    def hello(self) -> Send:
        """The first message of the connection."""
        self._expect(StreamState.NEW)
        self.state = StreamState.OPEN
        contract = msgspec.to_builtins(self._contract)
        metadata = contract.pop("handshake")
        return self._send(
            Hello(
                protocol=STREAM_PROTOCOL,
                server=self._server,
                policy=self._contract.policy,
                metadata=metadata,
                contract=contract,
                handshake_timeout_s=self._timeout_s,
            )
        )

    def started(self, session_id: str, resume_token: str, grace_s: float) -> Send:
        self._expect(StreamState.STARTING)
        self.state = StreamState.LIVE
        return self._send(Started(session_id=session_id, resume_token=resume_token, epoch=self.epoch, grace_s=grace_s))

    def resumed(self, resume_token: str, epoch: int, last_seq: int) -> Send:
        """The session's numbers go on where its last connection left them."""
        self._expect(StreamState.STARTING)
        self.state, self.epoch, self.last_seq = StreamState.LIVE, epoch, last_seq
        return self._send(Resumed(resume_token=resume_token, epoch=epoch, last_seq=last_seq))

    def refuse_start(self, error: PolicyError) -> Send:
        """The client may try again on the same connection."""
        self._expect(StreamState.STARTING)
        self.state = StreamState.OPEN
        return self._error(error)

    def reset_done(self) -> Send:
        self._expect(StreamState.RESETTING)
        self.state = StreamState.LIVE
        return self._send(ResetDone(epoch=self.epoch))

    def ending(self) -> None:
        """The session ends: nothing more is computed or begun, and `closed` follows."""
        if self.state is not StreamState.CLOSED:
            self.state, self._waiting = StreamState.CLOSING, None

    def closed(self, reason: str) -> list[StreamOutput]:
        """The last message and the close."""
        self.state = StreamState.CLOSED
        message = msgspec.convert({"type": "closed", "reason": reason}, Closed)
        code = {"shutdown": PolicyClose.SHUTDOWN, "taken_over": PolicyClose.TAKEN_OVER, "failed": PolicyClose.ERROR}
        return [self._send(message), Close(code.get(reason, PolicyClose.NORMAL), reason)]

    # ---- observations

    def take(self) -> Observe | None:
        """The newest observation, now in work; None when there is none, or one is in work, or a reset is under way."""
        if self.state is not StreamState.LIVE or self._working is not None:
            return None
        self._working, self._waiting = self._waiting, None
        return self._working

    def chunk(
        self,
        work: Observe,
        actions: object,
        timing: Mapping[str, float],
        *,
        valid_from: int = 0,
        delay_used: int = 0,
    ) -> list[StreamOutput]:
        """The answer to ``work``, unless its epoch is over. `PolicyError` ``bad_action`` leaves it in work: `fail`
        it."""
        if self._fence(work):
            return []
        checked = self._contract.check_actions(actions)
        self._working = None
        self._chunks += 1
        message = ActionChunk(
            seq=work.seq,
            epoch=work.epoch,
            start_tick=work.tick,
            valid_from=valid_from,
            delay_used=delay_used,
            actions=checked,
            timing=dict(timing),
        )
        return [self._send(message)]

    def fail(self, work: Observe, error: PolicyError) -> list[StreamOutput]:
        """No chunk for ``work``; nothing is said when its epoch is over."""
        if self._fence(work):
            return []
        self._working = None
        return [self._error(error, work.seq)]

    def drop(self, work: Observe) -> None:
        """``work`` was cancelled by a reset or a close."""
        if self._working is work:
            self._working = None
            self._fenced += 1

    def _fence(self, work: Observe) -> bool:
        if self._working is not work:
            raise LocalError("this observation is not in work")
        if work.epoch == self.epoch and self.state is StreamState.LIVE:
            return False
        self.drop(work)
        return True

    # ---- ending, looking

    @property
    def settled_epoch(self) -> int:
        """The epoch a resumed connection goes on with: a reset that was not finished does not count."""
        return self.epoch - (self.state is StreamState.RESETTING)

    def fatal(self, error: PolicyError, close: PolicyClose = PolicyClose.ERROR) -> list[StreamOutput]:
        """The last message, where no session ends in order, and the close."""
        if self.state is StreamState.CLOSED:
            return []
        self.state = StreamState.CLOSED
        return [self._error(error, fatal=True), Close(close, error.code.value)]

    def statistics(self) -> StreamStatistics:
        return StreamStatistics(
            state=self.state.value,
            epoch=self.epoch,
            observations=self._observations,
            chunks=self._chunks,
            superseded=self._superseded,
            fenced=self._fenced,
            errors=self._errors,
        )

    # ---- inside

    def _expect(self, state: StreamState) -> None:
        if self.state is not state:
            raise LocalError(f"state is {self.state.value}, not {state.value}")

    def _send(self, message: AnyServerMessage) -> Send:
        return Send(encode(message))

    def _error(self, error: PolicyError, seq: int | None = None, fatal: bool = False) -> Send:
        self._errors += 1
        message = error.message[:MAX_ERROR_CHARS]
        said = ErrorMessage(code=error.code.value, message=message, path=error.path, seq=seq, fatal=fatal)
        return Send(encode(said), error.code)
