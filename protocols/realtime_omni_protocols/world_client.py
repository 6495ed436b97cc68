"""`WorldClientSide`: a client's end of the world protocol, sans I/O. One object for a session and all its connections.

Owns: the connection's state, the highest ``seq``, the chunk that is arriving, event ids, which events still wait for a receipt.
Must not know: sockets, codecs, clocks, how often to reconnect.
Invariants: what a server sends is checked against the table and the numbers (`WireError` when it breaks
them: give the connection up); every event sent ends in exactly one of refused, applied and discarded.

A shell: `connection_made`, then feed every message to `receive_text` / `receive_binary`, act on what comes back, send what the
``start`` … ``close`` methods return. After a drop: `connection_made` again, and `resume` once `hello` is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from .envelope import encode_text
from .errors import LocalError, WireCode, WireError
from .world_frames import FrameHeader, unpack_frame
from .world_messages import (
    AnyClientMessage,
    AnyServerMessage,
    Cadence,
    Chunk,
    ChunkAborted,
    Control,
    ErrorMessage,
    EventAccepted,
    EventApplied,
    EventDiscarded,
    Format,
    Ping,
    SessionAbort,
    SessionAck,
    SessionClose,
    SessionClosed,
    SessionEvent,
    SessionFailed,
    SessionFork,
    SessionForked,
    SessionLog,
    SessionNext,
    SessionPause,
    SessionReplay,
    SessionReplayed,
    SessionReset,
    SessionResetDone,
    SessionResume,
    SessionResumed,
    SessionResumePlay,
    SessionRewind,
    SessionRewound,
    SessionRollback,
    SessionStart,
    SessionStarted,
    message_type,
    parse_client,
    parse_server,
)
from .world_table import TABLE, WireState


class Frame(Struct, frozen=True):
    """A binary frame that arrived in its place. Decode frames in this order."""

    header: FrameHeader
    payload: memoryview


class ChunkDone(Struct, frozen=True):
    """All frames of the chunk are there."""

    chunk: Chunk


class Send(Struct, frozen=True):
    """The shell must send this text now (events that were lost with a connection)."""

    text: str


Arrival: TypeAlias = AnyServerMessage | Frame | ChunkDone | Send


class ClientStatistics(Struct, frozen=True, kw_only=True):
    state: str
    last_seq: int
    epoch: int
    frames: int
    chunks: int
    connections: int
    resumes: int
    replayed_frames: int
    bytes_received: int
    events_sent: int
    events_refused: int
    events_applied: int
    events_discarded: int
    events_waiting: int


class WorldClientSide:
    """See the module."""

    def __init__(self) -> None:
        self.state = WireState.CLOSED
        self.started: SessionStarted | None = None
        self.format: Format | None = None
        self.closed: SessionClosed | None = None
        self.last_seq = 0
        self.epoch = 0
        self.next_frame = 0
        self.next_chunk = 0
        self.next_event_id = 0
        self.oldest_rewind: int | None = None
        """The smallest chunk index that `rewind` can go back to, as of the last chunk; None: neither rewind nor fork."""
        self.asks = 0
        self._token: str | None = None
        self._handshake: str | None = None  # id of the start or resume without an answer
        self._ids = 0
        self._chunk: Chunk | None = None
        self._part = 0
        self._applied: tuple[int, ...] = ()  # of the event.applied right before a chunk
        self._unaccepted: dict[int, SessionEvent] = {}
        self._open: dict[int, None] = {}
        self._connections = self._resumes = self._replayed = self._bytes = 0
        self._frames = self._chunks = self._sent = self._refused = self._count_applied = self._discarded = 0

    # ---- connections -----------------------------------------------------------------------------------------------

    def connection_made(self) -> None:
        """A new socket: the next thing is the server's `hello`."""
        self.state = WireState.NEW
        self._handshake = None
        self._connections += 1

    def connection_lost(self) -> bool:
        """The socket is gone; true when the session can be resumed."""
        self.state = WireState.CLOSED
        return self.can_resume

    @property
    def can_resume(self) -> bool:
        return self._token is not None and self.closed is None

    def epoch_displayable(self, displayed: int) -> bool:
        """Whether that many frames of this epoch have arrived (an ack may not say more)."""
        return displayed <= self.next_frame

    @property
    def last_id(self) -> str:
        """The id of the request made last (its answer carries it as ``re``)."""
        return f"c{self._ids}"

    @property
    def waiting_events(self) -> int:
        """Events without a terminal receipt."""
        return len(self._unaccepted) + len(self._open)

    # ---- sending ---------------------------------------------------------------------------------------------------

    def start(
        self,
        *,
        format: Format,  # noqa: A002 (the wire's name)
        model: str | None = None,
        session_id: str | None = None,
        prompt: str | None = None,
        seed: int | None = None,
        image: str | None = None,
        start: str | None = None,
        fps: float | None = None,
        cadence: Cadence = "paced",
        lead_frames: int | None = None,
    ) -> str:
        self._handshake = self._mint()
        return self._send(
            SessionStart(
                id=self._handshake,
                format=format,
                model=model,
                session_id=session_id,
                prompt=prompt,
                seed=seed,
                image=image,
                start=start,
                fps=fps,
                cadence=cadence,
                lead_frames=lead_frames,
            )
        )

    def resume(self, *, takeover: bool = True, format: Format | None = None) -> str:  # noqa: A002 (the wire's name)
        """Attach again. ``takeover`` by default: the server may not have noticed yet that our old socket is dead."""
        if self.started is None or self._token is None or self.closed is not None:
            raise LocalError("there is no session to resume")
        self._handshake = self._mint()
        return self._send(
            SessionResume(
                id=self._handshake,
                session_id=self.started.session_id,
                resume_token=self._token,
                last_seq=self.last_seq,
                format=format or self.format,
                takeover=takeover,
            )
        )

    def event(self, *, prompt: str | None = None, controls: Sequence[Control] = ()) -> tuple[int, str | None]:
        """An event and its id. The text is None while there is no connection: the event is sent after the resume."""
        message = SessionEvent(event_id=self.next_event_id, prompt=prompt, controls=tuple(controls) or None)
        _validated(message)
        connected = (self.state, SessionEvent) in TABLE
        if not connected and not (self.can_resume and self.state not in (WireState.FAILED, WireState.CLOSING)):
            raise LocalError(f"an event is not possible in state {self.state.value}")
        text = self._send(message) if connected else None
        self.next_event_id += 1
        self._unaccepted[message.event_id] = message
        self._sent += 1
        return message.event_id, text

    def ask(self) -> str:
        """`session.next`."""
        text = self._send(SessionNext(id="n" + self._mint()))
        self.asks += 1
        return text

    def ack(self, displayed: int, epoch: int) -> str:
        """``displayed`` frames of ``epoch`` were shown; everything up to `last_seq` has arrived."""
        return self._send(SessionAck(seq=self.last_seq, displayed=displayed, epoch=epoch))

    def pause(self) -> str:
        return self._send(SessionPause(id=self._mint()))

    def resume_play(self) -> str:
        return self._send(SessionResumePlay(id=self._mint()))

    def reset(
        self, *, prompt: str | None = None, seed: int | None = None, image: str | None = None, start: str | None = None
    ) -> str:
        return self._send(SessionReset(id=self._mint(), prompt=prompt, seed=seed, image=image, start=start))

    def fork(self, session_id: str | None = None) -> str:
        """Ask for a branch; `branch` makes a client of the answer."""
        return self._send(SessionFork(id=self._mint(), session_id=session_id))

    def rewind(self, chunk_index: int) -> str:
        """Back to the moment when ``chunk_index`` was the next chunk."""
        return self._send(SessionRewind(id=self._mint(), chunk_index=chunk_index))

    def log(self) -> str:
        return self._send(SessionLog(id=self._mint()))

    def replay(self, log: str) -> str:
        """Play a log (of `session.logged`). No event may be sent until `session.replayed`."""
        return self._send(SessionReplay(id=self._mint(), log=log))

    def branch(self, forked: SessionForked) -> WorldClientSide:
        """The client of a branch: connect it, and resume."""
        if self.started is None:
            raise LocalError("there is no session yet")
        twin = WorldClientSide()
        # Ids that this client has used may be unknown to the server yet, and known there before the branch is.
        twin.next_event_id = max(forked.next_event_id, self.next_event_id)
        twin.started = replace(
            self.started,
            session_id=forked.session_id,
            resume_token=forked.resume_token,
            prompt=forked.prompt,
            seed=forked.seed,
            next_event_id=twin.next_event_id,
            oldest_rewind=forked.oldest_rewind,
        )
        twin.format, twin._token, twin.last_seq = self.format, forked.resume_token, 1
        twin.epoch, twin.next_chunk, twin.next_frame = forked.epoch, forked.chunk_index, forked.next_frame
        twin.oldest_rewind = forked.oldest_rewind
        return twin

    def abort(self) -> str:
        return self._send(SessionAbort(id=self._mint()))

    def rollback(self) -> str:
        return self._send(SessionRollback(id=self._mint()))

    def close(self) -> str:
        return self._send(SessionClose(id=self._mint()))

    def ping(self, t: float | None = None) -> str:
        return self._send(Ping(t=t))

    def _mint(self) -> str:
        self._ids += 1
        return f"c{self._ids}"

    def _send(self, message: AnyClientMessage) -> str:
        state = TABLE.get((self.state, type(message)))
        if state is None:
            raise LocalError(f"{message_type(message)} is not possible in state {self.state.value}")
        text = _validated(message)
        self.state = state
        return text

    # ---- receiving -------------------------------------------------------------------------------------------------

    def receive_text(self, data: str | bytes) -> list[Arrival]:
        """What one text message means, or `WireError` when the server broke the protocol."""
        self._bytes += len(data)
        message = parse_server(data)
        state = TABLE.get((self.state, type(message)))
        if state is None:
            raise _violation(f"{message_type(message)} came in state {self.state.value}", "$.type")
        seq = getattr(message, "seq", None)
        if seq is not None:
            self._check_seq(seq)
        arrivals: list[Arrival] = [message]
        match message:
            case SessionStarted():
                self._started(message)
            case SessionResumed():
                state = WireState(message.state)
                arrivals += self._resumed(message)
            case ErrorMessage():
                state = self._error(message, state)
            case SessionClosed():
                self._closed(message)
            case _:
                self._flow(message)
        if seq is not None:
            self.last_seq = seq
        self.state = state
        return arrivals

    def receive_binary(self, data: bytes | memoryview) -> list[Arrival]:
        """A frame (and the end of its chunk), or `WireError`."""
        self._bytes += len(data)
        header, payload = unpack_frame(data)
        if (self.state, Chunk) not in TABLE:
            raise _violation(f"a frame came in state {self.state.value}", "$")
        self._check_number(header.seq)
        chunk = self._chunk
        if chunk is None:
            raise _violation("a frame came without its chunk", "$.chunk_index")
        expected = (chunk.epoch, chunk.chunk_index, self._part, chunk.first_frame + self._part)
        if (header.epoch, header.chunk_index, header.index, header.frame) != expected:
            raise _violation("the frame is not the next one of its chunk", "$.index")
        if header.last != (self._part == chunk.parts - 1):
            raise _violation("the last flag is wrong", "$.flags")
        self.last_seq = header.seq
        self._part += 1
        self._frames += 1
        self._replayed += header.replay
        self.next_frame = chunk.first_frame + (self._part if chunk.latent_shape is None else chunk.frames)
        arrivals: list[Arrival] = [Frame(header, payload)]
        if header.last:
            self._chunk, self._part = None, 0
            self.next_chunk = chunk.chunk_index + 1
            self.asks = max(0, self.asks - 1)
            self._chunks += 1
            arrivals.append(ChunkDone(chunk))
        return arrivals

    def _check_number(self, seq: int) -> None:
        if seq != self.last_seq + 1:
            raise _violation(f"seq {seq} does not follow {self.last_seq}", "$.seq")

    def _check_seq(self, seq: int) -> None:
        self._check_number(seq)
        if self._chunk is not None:
            raise _violation("a session message came inside a chunk", "$.seq")

    def _started(self, message: SessionStarted) -> None:
        self.started, self.format, self._token, self._handshake = message, message.format, message.resume_token, None
        self.next_event_id, self.oldest_rewind = message.next_event_id, message.oldest_rewind

    def _resumed(self, message: SessionResumed) -> list[Arrival]:
        if message.replayed_from != self.last_seq + 1:
            raise _violation("the replay does not begin after last_seq", "$.replayed_from")
        if (message.epoch, message.next_frame) != (self.epoch, self.next_frame):
            raise _violation("the server counts other frames than arrived", "$.next_frame")
        self._token, self.format, self._handshake = message.resume_token, message.format, None
        self.next_event_id = max(self.next_event_id, message.next_event_id)
        self.asks = 0
        self._resumes += 1
        return [Send(encode_text(event)) for event in self._unaccepted.values()]

    def _error(self, message: ErrorMessage, state: WireState) -> WireState:
        if message.event_id is not None and self._unaccepted.pop(message.event_id, None) is not None:
            self._refused += 1
        if message.re is not None and message.re.startswith("n"):
            self.asks = max(0, self.asks - 1)  # the ids of asks begin with n
        if message.fatal:
            return WireState.CLOSED
        if self._handshake is not None and message.re == self._handshake:
            self._handshake = None
            return WireState.OPEN
        return state

    def _closed(self, message: SessionClosed) -> None:
        if message.reason == "taken_over":
            self._token = None  # somebody else drives the session now
        elif self._open:
            raise _violation("the session ended with events that have no receipt", "$.type")
        self.closed = message
        self._refused += len(self._unaccepted)
        self._unaccepted.clear()

    def _flow(self, message: AnyServerMessage) -> None:
        match message:
            case EventAccepted(event_id=event_id, status="accepted"):
                if self._unaccepted.pop(event_id, None) is None:
                    raise _violation(f"event {event_id} was not waiting", "$.event_id")
                self._open[event_id] = None
            case EventAccepted(event_id=event_id, status="discarded"):
                self._discarded += self._unaccepted.pop(event_id, None) is not None
            case EventAccepted(event_id=event_id):
                if self._unaccepted.pop(event_id, None) is not None:
                    raise _violation(f"event {event_id} is a duplicate whose first receipt never came", "$.status")
            case EventApplied(event_ids=ids):
                self._receipt(ids)
                self._applied = ids
                self._count_applied += len(ids)
            case EventDiscarded(event_ids=ids):
                self._receipt(ids)
                self._discarded += len(ids)
            case Chunk():
                if (message.epoch, message.chunk_index, message.first_frame) != (
                    self.epoch,
                    self.next_chunk,
                    self.next_frame,
                ):
                    raise _violation("the chunk is not the next one", "$.chunk_index")
                if message.applied_event_ids != self._applied:
                    raise _violation("the chunk and its event.applied disagree", "$.applied_event_ids")
                self._chunk, self._part, self._applied = message, 0, ()
                self.oldest_rewind = message.oldest_rewind
            case ChunkAborted(chunk_index=index):
                self.asks = max(0, self.asks - (index is not None))
            case SessionFailed():
                self.asks = 0
            case SessionResetDone(epoch=epoch):
                self._new_epoch(epoch, 0, 0)
                self.oldest_rewind = None if self.oldest_rewind is None else 0
            case SessionReplayed(next_event_id=next_event_id):
                self.next_event_id = max(self.next_event_id, next_event_id)
            case SessionRewound(epoch=epoch):
                self._new_epoch(epoch, message.chunk_index, message.next_frame)
                self.oldest_rewind = message.oldest_rewind
            case _:
                pass

    def _new_epoch(self, epoch: int, chunk_index: int, frame: int) -> None:
        if epoch != self.epoch + 1:
            raise _violation("an epoch was skipped", "$.epoch")
        self.epoch, self.next_chunk, self.next_frame, self.asks = epoch, chunk_index, frame, 0

    def _receipt(self, ids: tuple[int, ...]) -> None:
        for event_id in ids:
            if event_id not in self._open:
                raise _violation(f"event {event_id} has no open receipt", "$.event_ids")
            del self._open[event_id]

    # ---- looking ---------------------------------------------------------------------------------------------------

    def statistics(self) -> ClientStatistics:
        return ClientStatistics(
            state=self.state.value,
            last_seq=self.last_seq,
            epoch=self.epoch,
            frames=self._frames,
            chunks=self._chunks,
            connections=self._connections,
            resumes=self._resumes,
            replayed_frames=self._replayed,
            bytes_received=self._bytes,
            events_sent=self._sent,
            events_refused=self._refused,
            events_applied=self._count_applied,
            events_discarded=self._discarded,
            events_waiting=self.waiting_events,
        )

    def check(self) -> None:
        """Raise `LocalError` when an invariant is broken."""
        ended = self._refused + self._count_applied + self._discarded
        if self._sent != ended + self.waiting_events:
            raise LocalError("an event has not exactly one outcome")
        if self._chunk is not None and self._part >= self._chunk.parts:
            raise LocalError("a complete chunk is still open")


def _validated(message: AnyClientMessage) -> str:
    """The wire text, after the same check the server will make: a caller's mistake is told before it leaves the machine."""
    text = encode_text(message)
    parse_client(text)
    return text


def _violation(text: str, path: str) -> WireError:
    return WireError(WireCode.BAD_MESSAGE, text, path=path)
