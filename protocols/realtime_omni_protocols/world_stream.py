"""`WorldSessionStream`: the numbered stream of one session, which outlives its connections.

Owns: ``seq``, the replay buffer, epoch, frame counters and credit, open events, outstanding asks, the resume token's digest.
Must not know: sockets, codecs, the engine, any clock (``now`` is an argument, seconds on any monotonic scale).
Invariants (`check`): entries are contiguous in ``seq``; displayed <= generated; every accepted event gets exactly one of
applied and discarded; nothing follows the terminal message; the buffer never holds more than ``max_entries``.
Methods that emit return `Entry` values in the order in which they must be sent. Media in an entry is opaque: the server
keeps raw frames there, so that it can encode them again from a key frame.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from .errors import LocalError, WireCode, WireError
from .world_entries import ControlEntry, Entry, FrameEntry, ResumePlan, Standing, StreamLimits, StreamStatistics
from .world_frames import pts_ms
from .world_messages import (
    MAX_OUTSTANDING_NEXT,
    AcceptStatus,
    AnySessionMessage,
    Cadence,
    Chunk,
    ChunkAborted,
    CloseReason,
    ControlInfo,
    DiscardReason,
    EventAccepted,
    EventApplied,
    EventDiscarded,
    Format,
    KvUse,
    Limits,
    LiveState,
    Remedy,
    SessionAck,
    SessionClosed,
    SessionFailed,
    SessionPaused,
    SessionPlaying,
    SessionRecovered,
    SessionResetDone,
    SessionResumed,
    SessionStarted,
    Timings,
)
from .world_table import LIVE, TABLE, WireState

__all__ = ["ControlEntry", "Entry", "FrameEntry", "ResumePlan", "StreamLimits", "WorldSessionStream"]


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8")).digest()


class WorldSessionStream:
    """See the module. Life: construct, `started`, any emitters, `closed`."""

    def __init__(
        self,
        *,
        session_id: str,
        fps: float,
        frames_per_block: int,
        lead_frames: int | None = None,
        cadence: Cadence = "paced",
        limits: StreamLimits = StreamLimits(),  # noqa: B008 (frozen)
        next_event_id: int = 0,
        now: float,
    ) -> None:
        self.session_id = session_id
        self.fps = fps
        self.frames_per_block = frames_per_block
        self.lead_frames = frames_per_block if lead_frames is None else lead_frames
        self.cadence: Cadence = cadence
        self.limits = limits
        self.state = WireState.STARTING
        self.epoch = 0
        self.generated = 0
        self.displayed = 0
        self.asks = 0
        self.next_chunk = 0
        self.next_event_id = next_event_id
        self.last_seq = 0
        self.acked_seq = 0
        self.terminal: SessionClosed | None = None
        self.applied_event_id: int | None = None
        self._entries: deque[Entry] = deque()
        self._base = Standing(self.state, 0, 0)  # standing before the oldest entry
        self._open: dict[int, None] = {}  # accepted events without a terminal receipt, in order
        self._token: bytes | None = None
        self._detached_at: float | None = None
        self._progress_at = now
        self._peak = self._forgotten = self._chunks = self._resumes = 0
        self._accepted = self._applied = self._discarded = 0

    # ---- emitting --------------------------------------------------------------------------------------------------

    def started(
        self,
        *,
        resume_token: str,
        model: str,
        prompt: str | None,
        seed: int,
        format: Format,  # noqa: A002 (the wire's name)
        codec: str | None,
        width: int,
        height: int,
        limits: Limits,
        controls: Sequence[ControlInfo] = (),
        prompts: Sequence[str] = (),
        starts: Sequence[str] = (),
        re: str | None = None,
    ) -> ControlEntry:
        """`session.started`, always ``seq`` 1."""
        self._token = _digest(resume_token)
        return self._control(
            SessionStarted(
                seq=self.last_seq + 1,
                session_id=self.session_id,
                resume_token=resume_token,
                model=model,
                prompt=prompt,
                seed=seed,
                format=format,
                codec=codec,
                width=width,
                height=height,
                fps=self.fps,
                frames_per_block=self.frames_per_block,
                cadence=self.cadence,
                lead_frames=self.lead_frames,
                limits=limits,
                controls=tuple(controls),
                prompts=tuple(prompts),
                starts=tuple(starts),
                next_event_id=self.next_event_id,
                re=re,
            )
        )

    def event_accepted(
        self,
        event_id: int,
        *,
        status: AcceptStatus = "accepted",
        pending: int,
        prompt: str | None = None,
        re: str | None = None,
    ) -> ControlEntry:
        """First receipt. Only ``accepted`` opens the event; the other two say that its terminal receipt exists or will."""
        fresh = status == "accepted"
        if fresh and event_id < self.next_event_id:
            raise LocalError(f"event {event_id} is accepted again")
        entry = self._control(
            EventAccepted(
                seq=self.last_seq + 1, event_id=event_id, status=status, pending=pending, prompt=prompt, re=re
            )
        )
        if fresh:
            self._open[event_id] = None
            self.next_event_id = event_id + 1
            self._accepted += 1
        return entry

    def event_discarded(self, event_ids: Iterable[int], *, reason: DiscardReason = "reset") -> ControlEntry:
        """Terminal receipt of events that will never act."""
        ids = self._require_open(event_ids)
        entry = self._control(EventDiscarded(seq=self.last_seq + 1, event_ids=ids, reason=reason))
        self._settle_events(ids)
        self._discarded += len(ids)
        return entry

    def chunk(
        self,
        now: float,
        *,
        chunk_index: int,
        media: Sequence[object],
        applied_event_ids: Iterable[int] = (),
        prompt: str | None,
        timings_ms: Timings,
        kv: KvUse,
        latent_shape: tuple[int, ...] | None = None,
        latent_frames: int | None = None,
    ) -> list[Entry]:
        """A committed block: `event.applied` when it reflects events, `chunk`, then one frame per item of ``media``.

        For latents ``media`` has one item and ``latent_frames`` says how many video frames it decodes to.
        """
        frames = len(media) if latent_frames is None else latent_frames
        if (latent_shape is None) != (latent_frames is None) or (latent_shape is not None and len(media) != 1):
            raise LocalError("a latent chunk is one item of media with its shape and its number of frames")
        if not 1 <= frames <= 255:
            raise LocalError(f"a chunk has 1 to 255 frames, not {frames}")
        if chunk_index != self.next_chunk:
            raise LocalError(f"chunk {chunk_index} does not follow chunk {self.next_chunk - 1}")
        ids = self._require_open(applied_event_ids) if applied_event_ids else ()
        first = self.generated
        entries: list[Entry] = []
        if ids:
            entries.append(
                self._control(
                    EventApplied(seq=self.last_seq + 1, event_ids=ids, chunk_index=chunk_index, first_frame=first)
                )
            )
            self._settle_events(ids)
            self._applied += len(ids)
            self.applied_event_id = ids[-1]
        entries.append(
            self._control(
                Chunk(
                    seq=self.last_seq + 1,
                    epoch=self.epoch,
                    chunk_index=chunk_index,
                    first_frame=first,
                    frames=frames,
                    applied_event_ids=ids,
                    prompt=prompt,
                    timings_ms=timings_ms,
                    kv=kv,
                    latent_shape=latent_shape,
                )
            )
        )
        if self.generated == self.displayed:
            self._progress_at = now  # the first outstanding frame starts the stall clock
        self.next_chunk += 1
        self.asks = max(0, self.asks - 1)
        self._chunks += 1
        for index, item in enumerate(media):
            step = frames if latent_frames is not None else 1
            entries.append(self._frame(index, index == len(media) - 1, chunk_index, step, item))
        return entries

    def chunk_aborted(self, chunk_index: int | None, *, re: str | None = None) -> ControlEntry:
        entry = self._control(ChunkAborted(seq=self.last_seq + 1, chunk_index=chunk_index, re=re))
        if chunk_index is not None:
            self.asks = max(0, self.asks - 1)
        return entry

    def paused(self, *, re: str | None = None) -> ControlEntry:
        return self._control(SessionPaused(seq=self.last_seq + 1, re=re))

    def playing(self, now: float, *, re: str | None = None) -> ControlEntry:
        self._progress_at = now
        return self._control(SessionPlaying(seq=self.last_seq + 1, re=re))

    def reset_done(self, *, prompt: str | None, seed: int, re: str | None = None) -> ControlEntry:
        """A new epoch: frames, chunks and credit count from 0. Discard the open events first (`event_discarded`)."""
        old = (self.epoch, self.generated, self.next_chunk)
        self.epoch, self.generated, self.next_chunk = self.epoch + 1, 0, 0
        try:
            entry = self._control(
                SessionResetDone(seq=self.last_seq + 1, epoch=self.epoch, prompt=prompt, seed=seed, re=re)
            )
        except LocalError:
            self.epoch, self.generated, self.next_chunk = old
            raise
        self.displayed = self.asks = 0
        return entry

    def failed(self, *, code: WireCode, message: str, chunk_index: int, can: Sequence[Remedy]) -> ControlEntry:
        entry = self._control(
            SessionFailed(seq=self.last_seq + 1, code=code, message=message, chunk_index=chunk_index, can=tuple(can))
        )
        self.asks = 0
        return entry

    def recovered(self, now: float, *, chunk_index: int, re: str | None = None) -> ControlEntry:
        self._progress_at = now
        return self._control(SessionRecovered(seq=self.last_seq + 1, chunk_index=chunk_index, re=re))

    def closed(
        self, reason: CloseReason, *, code: WireCode | None = None, message: str | None = None, re: str | None = None
    ) -> list[Entry]:
        """The terminal message; events still open get their discarded receipt first. A second call is refused."""
        if reason == "taken_over":
            raise LocalError("taken_over ends a connection, not the session: use WorldServerSide.taken_over")
        entries: list[Entry] = []
        if self._open and self.state is not WireState.CLOSED:
            entries.append(self.event_discarded(tuple(self._open), reason="closed"))
        final = SessionClosed(seq=self.last_seq + 1, reason=reason, code=code, message=message, re=re)
        entries.append(self._control(final))
        self.terminal = final
        return entries

    # ---- the client's side of the flow -----------------------------------------------------------------------------

    def acknowledge(self, ack: SessionAck, now: float) -> bool:
        """Take an ack; true when it made progress (new credit). An old or repeated ack changes nothing."""
        if ack.seq > self.last_seq:
            raise WireError(WireCode.INVALID_ARGUMENT, "seq was not sent yet", path="$.seq", re=ack.id)
        if ack.epoch > self.epoch:
            raise WireError(WireCode.INVALID_ARGUMENT, "this epoch has not begun", path="$.epoch", re=ack.id)
        current = ack.epoch == self.epoch
        if current and ack.displayed > self.generated:
            raise WireError(WireCode.INVALID_ARGUMENT, "more frames than were sent", path="$.displayed", re=ack.id)
        arrived = ack.seq
        # A chunk that was shown to its end has arrived, whatever seq says. Not a frame alone: a page that is reloaded goes
        # on from the last complete chunk it knows.
        for entry in self._entries:
            if isinstance(entry, FrameEntry) and entry.last and (entry.epoch, entry.frame) < (ack.epoch, ack.displayed):
                arrived = max(arrived, entry.seq)
        self._forget_to(arrived)
        progress = current and ack.displayed > self.displayed
        if progress:
            self.displayed = ack.displayed
            self._progress_at = now
        return progress

    def ask(self, *, re: str | None = None) -> None:
        """Count a `session.next`; refused past four outstanding ones and in a paced session."""
        if self.cadence != "on_demand":
            raise WireError(WireCode.SESSION_STATE, "session.next needs cadence on_demand", path="$.type", re=re)
        if self.asks >= MAX_OUTSTANDING_NEXT:
            raise WireError(WireCode.QUEUE_FULL, f"{MAX_OUTSTANDING_NEXT} blocks are already asked for", re=re)
        self.asks += 1

    def credit_open(self) -> bool:
        """Whether one more block could be shown soon."""
        return self.generated - self.displayed <= self.lead_frames

    def may_start_block(self) -> bool:
        """Credit, cadence, state and an attached client together; the media clock of paced sessions is the server's."""
        asked = self.cadence == "paced" or self.asks > 0
        return self.state is WireState.PLAYING and asked and self._detached_at is None and self.credit_open()

    def stall_deadline(self) -> float | None:
        """When the session is stalled, unless an ack makes progress before. None: nothing outstanding, or nobody there."""
        if self._detached_at is not None or self.state is not WireState.PLAYING or self.generated == self.displayed:
            return None
        return self._progress_at + self.limits.stall_timeout_s

    # ---- connections come and go -----------------------------------------------------------------------------------

    def detach(self, now: float) -> None:
        """The connection is gone: asks that were not started are forgotten, the grace begins. Harmless when repeated."""
        if self._detached_at is None:
            self._detached_at = now
        self.asks = 0

    @property
    def attached(self) -> bool:
        return self._detached_at is None

    def grace_deadline(self) -> float | None:
        """When a detached session ends; None while attached or after the end."""
        if self._detached_at is None or self.state is WireState.CLOSED:
            return None
        return self._detached_at + self.limits.grace_s

    def token_matches(self, token: str) -> bool:
        return self._token is not None and hmac.compare_digest(self._token, _digest(token))

    def replay_after(self, last_seq: int) -> tuple[Entry, ...]:
        """What a client that has everything up to ``last_seq`` lacks, or `WireError` resume_refused."""
        if last_seq < 1 or last_seq > self.last_seq:
            raise WireError(WireCode.RESUME_REFUSED, "last_seq was never sent", path="$.last_seq")
        if last_seq < self.acked_seq:
            raise WireError(WireCode.RESUME_REFUSED, "last_seq is already forgotten", path="$.last_seq")
        return tuple(entry for entry in self._entries if entry.seq > last_seq)

    def resume(
        self,
        last_seq: int,
        *,
        resume_token: str,
        format: Format,  # noqa: A002 (the wire's name)
        codec: str | None,
        now: float,
        re: str | None = None,
    ) -> ResumePlan:
        """Attach again: rotate the token, forget what arrived, and say what to send. Checks before it changes."""
        if self.state not in LIVE:
            raise WireError(WireCode.SESSION_GONE, "the session is closed", re=re)
        try:
            entries = self.replay_after(last_seq)
        except WireError as error:
            error.re = re
            raise
        self._forget_to(last_seq)
        standing = self._base
        self._token = _digest(resume_token)
        self._detached_at = None
        self._progress_at = now
        self.asks = 0
        self._resumes += 1
        return ResumePlan(
            SessionResumed(
                session_id=self.session_id,
                resume_token=resume_token,
                replayed_from=last_seq + 1,
                state=_live(standing.state),
                epoch=standing.epoch,
                next_frame=standing.next_frame,
                next_event_id=self.next_event_id,
                format=format,
                codec=codec,
                re=re,
            ),
            entries,
        )

    # ---- looking ---------------------------------------------------------------------------------------------------

    def statistics(self) -> StreamStatistics:
        return StreamStatistics(
            state=self.state.value,
            last_seq=self.last_seq,
            acked_seq=self.acked_seq,
            entries=len(self._entries),
            entries_peak=self._peak,
            forgotten=self._forgotten,
            epoch=self.epoch,
            generated=self.generated,
            displayed=self.displayed,
            asks=self.asks,
            open_events=len(self._open),
            events_accepted=self._accepted,
            events_applied=self._applied,
            events_discarded=self._discarded,
            chunks=self._chunks,
            resumes=self._resumes,
        )

    def check(self) -> None:
        """Raise `LocalError` when an invariant is broken; cheap enough for tests after every step."""
        seqs = [entry.seq for entry in self._entries]
        expected = list(range(self.acked_seq + 1, self.last_seq + 1))
        for broken, what in (
            (seqs != expected, "the replay buffer has a gap"),
            (len(seqs) > self.limits.max_entries, "the replay buffer is over its bound"),
            (not 0 <= self.displayed <= self.generated, "displayed is outside 0..generated"),
            (
                self._accepted != self._applied + self._discarded + len(self._open),
                "an event has not exactly one receipt",
            ),
            ((self.terminal is not None) != (self.state is WireState.CLOSED), "terminal message and state disagree"),
            (
                self.terminal is not None and self.terminal.seq != self.last_seq,
                "something follows the terminal message",
            ),
            (self.terminal is not None and bool(self._open), "the session ended with open events"),
        ):
            if broken:
                raise LocalError(what)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _control(self, message: AnySessionMessage) -> ControlEntry:
        state = TABLE.get((self.state, type(message)))
        if state is None:
            raise LocalError(f"{type(message).__name__} is not allowed in state {self.state.value}")
        self.state = state
        self.last_seq += 1
        entry = ControlEntry(seq=self.last_seq, message=message, after=Standing(state, self.epoch, self.generated))
        self._keep(entry)
        return entry

    def _frame(self, index: int, last: bool, chunk_index: int, frames: int, media: object) -> FrameEntry:
        frame = self.generated
        self.generated += frames
        self.last_seq += 1
        entry = FrameEntry(
            seq=self.last_seq,
            epoch=self.epoch,
            chunk_index=chunk_index,
            index=index,
            last=last,
            frame=frame,
            applied_event_id=self.applied_event_id,
            pts_ms=pts_ms(frame, self.fps),
            media=media,
            after=Standing(self.state, self.epoch, self.generated),
        )
        self._keep(entry)
        return entry

    def _keep(self, entry: Entry) -> None:
        self._entries.append(entry)
        while len(self._entries) > self.limits.max_entries:
            self._forgotten += 1
            self._forget_to(self._entries[0].seq)
        self._peak = max(self._peak, len(self._entries))

    def _forget_to(self, seq: int) -> None:
        while self._entries and self._entries[0].seq <= seq:
            entry = self._entries.popleft()
            self._base, self.acked_seq = entry.after, entry.seq

    def _require_open(self, event_ids: Iterable[int]) -> tuple[int, ...]:
        ids = tuple(event_ids)
        if any(later <= earlier for earlier, later in itertools.pairwise(ids)):
            raise LocalError("event ids are not strictly increasing")
        unknown = [event_id for event_id in ids if event_id not in self._open]
        if unknown:
            raise LocalError(f"events {unknown} are not open: never accepted, or their receipt was sent")
        return ids

    def _settle_events(self, ids: tuple[int, ...]) -> None:
        for event_id in ids:
            del self._open[event_id]


def _live(state: WireState) -> LiveState:
    if state is WireState.PAUSED:
        return "paused"
    if state is WireState.FAILED:
        return "failed"
    return "playing"
