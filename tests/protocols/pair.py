"""Both machines of the world protocol in one process: the wire is two queues that a test delivers, cuts and loses as it likes.

The server's half is the smallest engine that keeps the contract: events wait in a queue of three, a block applies all of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from realtime_omni_protocols.errors import WireCode, WireError
from realtime_omni_protocols.world import (
    Arrival,
    ChunkDone,
    Close,
    ControlEntry,
    Entry,
    Frame,
    FrameEntry,
    Reply,
    Send,
    WireState,
    WorldClientSide,
    WorldServerSide,
    WorldSessionStream,
    close_code,
)
from realtime_omni_protocols.world_messages import (
    AnyClientMessage,
    AnyServerMessage,
    Cadence,
    DiscardReason,
    EventApplied,
    EventDiscarded,
    Hello,
    KvUse,
    Limits,
    SessionAbort,
    SessionAck,
    SessionClose,
    SessionEvent,
    SessionFork,
    SessionForked,
    SessionNext,
    SessionPause,
    SessionReset,
    SessionResume,
    SessionResumePlay,
    SessionRewind,
    SessionRollback,
    SessionStart,
    Timings,
)

FRAMES = 3
MAX_PENDING = 3
REWIND_BLOCKS = 2
LIMITS = Limits(
    max_pending_events=MAX_PENDING,
    max_message_bytes=65_536,
    max_events_per_s=1_000,
    grace_s=30,
    stall_timeout_s=60,
    horizon_frames=None,
)
FrameKey = tuple[int, int, int, bytes]


@dataclass
class Pair:
    """``now`` only moves when a test moves it."""

    cadence: Cadence = "paced"
    now: float = 0.0
    client: WorldClientSide = field(default_factory=WorldClientSide)
    side: WorldServerSide | None = None
    stream: WorldSessionStream | None = None
    to_server: deque[str] = field(default_factory=deque)
    to_client: deque[str | bytes] = field(default_factory=deque)
    pending: dict[int, SessionEvent] = field(default_factory=dict)
    seen: dict[int, str | None] = field(default_factory=dict)
    session_id: str = "s"
    tokens: int = 0
    generated: list[FrameKey] = field(default_factory=list)  # what the server made, in order
    received: list[FrameKey] = field(default_factory=list)  # what the client got, in order
    chunks: list[tuple[int, int]] = field(default_factory=list)
    applied: list[int] = field(default_factory=list)  # as the engine applied
    discarded: list[int] = field(default_factory=list)
    receipts: list[int] = field(default_factory=list)  # terminal receipts as the client saw them
    messages: list[AnyServerMessage] = field(default_factory=list)
    terminals: int = 0
    orphan: WorldServerSide | None = None  # a connection the server still believes in
    rewound: list[int] = field(default_factory=list)  # where the engine went back to
    forks: list[SessionForked] = field(default_factory=list)  # that the client knows of and has not opened yet
    branches: dict[str, WorldSessionStream] = field(default_factory=dict)  # that nobody has opened yet

    # ---- the wire -----------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        self.client.connection_made()
        self.side = WorldServerSide(server="pair/1", models=("m",), now=self.now)
        self.to_client.append(self.side.send(self.side.hello()))

    def cut(self, lost_to_client: int = 10**9) -> None:
        """The socket breaks: the last ``lost_to_client`` messages never arrive, nor what is still on its way to the server."""
        for _ in range(min(lost_to_client, len(self.to_client))):
            self.to_client.pop()
        self.deliver_to_client()
        self.to_server.clear()
        self.client.connection_lost()
        if self.stream is not None:
            self.stream.detach(self.now)
        self.side = None

    def deliver_to_server(self, count: int = 10**9) -> None:
        for _ in range(min(count, len(self.to_server))):
            if self.side is not None:
                for command in self.side.receive_text(self.to_server.popleft(), self.now):
                    self.serve(command)

    def deliver_to_client(self, count: int = 10**9) -> None:
        for _ in range(min(count, len(self.to_client))):
            data = self.to_client.popleft()
            arrivals = self.client.receive_text(data) if isinstance(data, str) else self.client.receive_binary(data)
            for arrival in arrivals:
                self.arrive(arrival)

    def settle(self) -> None:
        """Deliver until both queues are empty."""
        while self.to_server or self.to_client:
            self.deliver_to_server()
            self.deliver_to_client()

    def start(self) -> None:
        self.connect()
        self.settle()
        self.to_server.append(self.client.start(format="rgb24", cadence=self.cadence))
        self.settle()

    def reconnect(self) -> None:
        self.connect()
        self.settle()
        self.to_server.append(self.client.resume())
        self.settle()

    def reconnect_unnoticed(self, lost_to_client: int, processed: int) -> None:
        """The client's socket breaks and the server does not notice: the client takes its own session over.

        Of what was on its way to the server, ``processed`` messages arrive before the takeover and the rest after it.
        """
        orphan = self.side
        assert orphan is not None
        late = list(self.to_server)
        self.to_server.clear()
        for _ in range(min(lost_to_client, len(self.to_client))):
            self.to_client.pop()
        self.deliver_to_client()
        self.client.connection_lost()
        self.to_server.clear()
        for text in late[:processed]:
            for command in orphan.receive_text(text, self.now):
                self.serve(command)
        self.to_client.clear()  # what the server answers goes to the dead socket
        self.orphan = orphan
        self.reconnect()
        for text in late[processed:]:
            assert orphan.receive_text(text, self.now) == []

    # ---- the client's user --------------------------------------------------------------------------------------------

    def arrive(self, arrival: Arrival) -> None:
        match arrival:
            case Send(text):
                self.to_server.append(text)
            case Frame(header, payload):
                self.received.append((header.epoch, header.chunk_index, header.frame, bytes(payload)))
            case ChunkDone(chunk):
                self.chunks.append((chunk.epoch, chunk.chunk_index))
            case Hello():
                pass
            case _:
                self.messages.append(arrival)
                if isinstance(arrival, SessionForked):
                    self.forks.append(arrival)
                if isinstance(arrival, EventApplied | EventDiscarded):
                    self.receipts += arrival.event_ids

    def event(self, prompt: str) -> int:
        event_id, text = self.client.event(prompt=prompt)
        if text is not None:
            self.to_server.append(text)
        return event_id

    def branch(self) -> Pair:
        """The pair of the oldest branch that the client knows of, not connected yet."""
        forked = self.forks.pop(0)
        twin = Pair(self.cadence, self.now, self.client.branch(forked))
        twin.stream = self.branches.pop(forked.session_id)
        twin.session_id = forked.session_id
        return twin

    # ---- the server's engine ------------------------------------------------------------------------------------------

    def send(self, *entries: Entry | AnyServerMessage, replay: bool = False) -> None:
        for entry in entries:
            if self.side is None:
                return
            if isinstance(entry, FrameEntry):
                payload = entry.media
                assert isinstance(payload, bytes)
                header = entry.header(format="rgb24", key=True, payload_bytes=len(payload), replay=replay)
                self.to_client.append(self.side.send_frame(header, payload))
                continue
            message = entry.message if isinstance(entry, ControlEntry) else entry
            self.to_client.append(self.side.send(message))
            self.terminals += close_code(message) is not None

    def serve(self, command: AnyClientMessage | Reply | Close) -> None:
        match command:
            case Reply(message):
                self.send(message)
            case Close() | SessionAck() | SessionNext():
                pass
            case SessionStart():
                self.serve_start(command)
            case SessionResume():
                self.serve_resume(command)
            case _:
                self.serve_session(command)

    def token(self) -> str:
        self.tokens += 1
        return f"token-{self.session_id}-{self.tokens}"

    def serve_start(self, start: SessionStart) -> None:
        assert self.side is not None
        self.stream = WorldSessionStream(
            session_id="s", fps=20, frames_per_block=FRAMES, cadence=start.cadence, now=self.now
        )
        self.side.attach(self.stream)
        self.send(
            self.stream.started(
                resume_token=self.token(),
                model="m",
                prompt=start.prompt,
                seed=1,
                format=start.format,
                codec=None,
                width=1,
                height=1,
                limits=LIMITS,
                oldest_rewind=0,
                re=start.id,
            )
        )

    def serve_resume(self, resume: SessionResume) -> None:
        assert self.side is not None
        assert self.stream is not None
        if not self.stream.token_matches(resume.resume_token):
            self.send(self.side.refuse(resume, WireCode.SESSION_NOT_FOUND, "no"))
            return
        try:
            plan = self.stream.resume(
                resume.last_seq, resume_token=self.token(), format="rgb24", codec=None, now=self.now, re=resume.id
            )
        except WireError as error:
            self.send(self.side.refuse(resume, error.code, error.message, path=error.path))
            return
        if self.orphan is not None:
            self.orphan.send(self.orphan.taken_over())
            self.orphan = None
        self.side.attach(self.stream)
        self.send(plan.resumed)
        self.send(*plan.entries, replay=True)

    def serve_session(self, command: AnyClientMessage) -> None:
        assert self.side is not None
        assert self.stream is not None
        stream = self.stream
        match command:
            case SessionEvent():
                self.serve_event(command)
            case SessionPause() if stream.state in (WireState.PLAYING, WireState.PAUSED):
                self.send(stream.paused(re=command.id))
            case SessionResumePlay() if stream.state in (WireState.PLAYING, WireState.PAUSED):
                self.send(stream.playing(self.now, re=command.id))
            case SessionFork():
                self.serve_fork(command)
            case SessionRewind():
                self.serve_rewind(command)
            case SessionReset():
                self.discard("reset")
                self.send(stream.reset_done(prompt=command.prompt, seed=1, re=command.id))
            case SessionAbort():
                self.send(stream.chunk_aborted(None, re=command.id))
            case SessionRollback() if stream.state is WireState.FAILED:
                self.send(stream.recovered(self.now, chunk_index=stream.next_chunk, re=command.id))
            case SessionClose():
                self.close("client")
            case _:
                self.send(self.side.refuse(command, WireCode.SESSION_STATE, "not now"))

    @property
    def oldest_rewind(self) -> int:
        assert self.stream is not None
        return max(0, self.stream.next_chunk - REWIND_BLOCKS)

    def discard(self, reason: DiscardReason) -> None:
        assert self.stream is not None
        if self.pending:
            ids = tuple(self.pending)
            self.discarded += ids
            self.pending.clear()
            self.send(self.stream.event_discarded(ids, reason=reason))

    def serve_fork(self, fork: SessionFork) -> None:
        stream = self.stream
        assert stream is not None
        name = f"{self.session_id}-{stream.last_seq}"
        twin = stream.branch(
            name,
            epoch=stream.epoch,
            chunk_index=stream.next_chunk,
            next_frame=stream.generated,
            next_event_id=stream.next_event_id,
            now=self.now,
        )
        self.branches[name] = twin
        self.send(
            stream.forked(
                twin,
                resume_token=f"branch-{name}",
                prompt=None,
                seed=1,
                oldest_rewind=self.oldest_rewind,
                grace_s=30,
                re=fork.id,
            )
        )

    def serve_rewind(self, rewind: SessionRewind) -> None:
        assert self.side is not None
        stream = self.stream
        assert stream is not None
        index = rewind.chunk_index
        if not self.oldest_rewind <= index <= stream.next_chunk:
            self.send(self.side.refuse(rewind, WireCode.NOT_RETAINED, "too long ago"))
            return
        self.discard("rewind")
        self.rewound.append(index)
        self.send(
            stream.rewound(
                chunk_index=index,
                next_frame=index * FRAMES,
                prompt=None,
                oldest_rewind=max(0, index - 1),
                re=rewind.id,
            )
        )

    def serve_event(self, event: SessionEvent) -> None:
        assert self.side is not None
        assert self.stream is not None
        code: WireCode | None = None
        if self.stream.state is WireState.FAILED:
            code = WireCode.SESSION_FAILED
        elif event.event_id in self.seen:
            code = None if self.seen[event.event_id] == event.prompt else WireCode.EVENT_CONFLICT
            if code is None:
                entry = self.stream.event_accepted(event.event_id, status="duplicate", pending=len(self.pending))
                self.send(entry)
                return
        elif event.event_id < self.stream.next_event_id:
            code = WireCode.STALE
        elif len(self.pending) >= MAX_PENDING:
            code = WireCode.QUEUE_FULL
        if code is not None:
            self.send(self.side.refuse(event, code, "refused"))
            return
        self.pending[event.event_id] = event
        self.seen[event.event_id] = event.prompt
        self.send(self.stream.event_accepted(event.event_id, pending=len(self.pending)))

    def tick(self) -> bool:
        """One block, when credit and state allow it. A detached session finishes the block in flight, so it may too."""
        stream = self.stream
        if stream is None or stream.state is not WireState.PLAYING or not stream.credit_open():
            return False
        ids = tuple(self.pending)
        self.pending.clear()
        self.applied += ids
        base = (stream.epoch, stream.next_chunk, stream.generated)
        media = [bytes([base[0] % 256, base[1] % 256, (base[2] + i) % 256]) for i in range(FRAMES)]
        self.generated += [(base[0], base[1], base[2] + i, media[i]) for i in range(FRAMES)]
        self.send(
            *stream.chunk(
                self.now,
                chunk_index=stream.next_chunk,
                media=media,
                applied_event_ids=ids,
                prompt=None,
                timings_ms=Timings(tick=1, encode=0, wait=0),
                kv=KvUse(pages_used=0, pages_total=0),
                oldest_rewind=max(0, stream.next_chunk + 1 - REWIND_BLOCKS),
            )
        )
        return True

    def fail(self) -> None:
        stream = self.stream
        if stream is not None and stream.state in (WireState.PLAYING, WireState.PAUSED):
            self.send(
                stream.failed(code=WireCode.TICK_FAILED, message="x", chunk_index=stream.next_chunk, can=("rollback",))
            )

    def close(self, reason: str) -> None:
        stream = self.stream
        if stream is not None and stream.terminal is None:
            self.discarded += tuple(self.pending)
            self.pending.clear()
            self.send(*stream.closed(reason))  # type: ignore[arg-type]

    def check(self) -> None:
        self.client.check()
        if self.stream is not None:
            self.stream.check()
        if self.side is not None:
            self.side.check()
