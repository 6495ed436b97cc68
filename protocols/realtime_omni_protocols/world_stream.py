"""`WorldSessionStream`: the numbered stream of one session, which outlives its connections.

Owns: ``seq``, the replay buffer, epoch, frame counters and credit, open events, outstanding asks, the resume token's digest.
Must not know: sockets, codecs, the engine, any clock (``now`` is an argument, seconds on any monotonic scale).
Invariants (`check`): entries are contiguous in ``seq``; displayed <= generated; every accepted event gets exactly one of
applied and discarded; nothing follows the terminal message; the buffer keeps to ``max_entries`` and ``max_bytes``.
Methods that emit return `Entry` values in the order in which they must be sent. Media in an entry is opaque: the server
keeps raw frames there, so that it can encode them again from a key frame.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from . import world_messages as wire
from .errors import LocalError, WireCode, WireError
from .world_entries import ControlEntry, Entry, FrameEntry, ResumePlan, Standing, StreamLimits, StreamStatistics
from .world_frames import pts_ms
from .world_replay import EventLedger, ReplayBuffer, check_ack, token_digest
from .world_table import LIVE, TABLE, WireState

__all__ = ["ControlEntry", "Entry", "FrameEntry", "ResumePlan", "StreamLimits", "WorldSessionStream"]


_LIVE_NAMES: dict[WireState, wire.LiveState] = {
    WireState.PLAYING: "playing",
    WireState.PAUSED: "paused",
    WireState.FAILED: "failed",
}


class WorldSessionStream:
    """See the module. Life: construct, `started`, any emitters, `closed`."""

    def __init__(
        self,
        *,
        session_id: str,
        fps: float,
        frames_per_block: int,
        lead_frames: int | None = None,
        cadence: wire.Cadence = "paced",
        limits: StreamLimits = StreamLimits(),  # noqa: B008 (frozen)
        next_event_id: int = 0,
        now: float,
    ) -> None:
        self.session_id = session_id
        self.fps = fps
        self.frames_per_block = frames_per_block
        self.lead_frames = frames_per_block if lead_frames is None else lead_frames
        self.cadence: wire.Cadence = cadence
        self.limits = limits
        self.state = WireState.STARTING
        self.epoch = 0
        self.generated = 0
        self.displayed = 0
        self.asks = 0
        self.next_chunk = 0
        self.last_seq = 0
        self.terminal: wire.SessionClosed | None = None
        self.applied_event_id: int | None = None
        self._replay = ReplayBuffer(limits.max_entries, limits.max_bytes)
        self._events = EventLedger(next_event_id)
        self._token: bytes | None = None
        self._detached_at: float | None = None
        self._progress_at = now
        self._chunks = self._resumes = 0

    def branch(
        self, session_id: str, *, epoch: int, chunk_index: int, next_frame: int, next_event_id: int, now: float
    ) -> WorldSessionStream:
        """The stream of a fork of this session: detached, at the chunk that the fork goes on with. Its ``seq`` 1 stands for
        `forked`, so a resume with ``last_seq`` 1 opens it as it would any detached session."""
        twin = WorldSessionStream(
            session_id=session_id,
            fps=self.fps,
            frames_per_block=self.frames_per_block,
            lead_frames=self.lead_frames,
            cadence=self.cadence,
            limits=self.limits,
            next_event_id=next_event_id,
            now=now,
        )
        twin.state, twin.last_seq, twin.applied_event_id = WireState.PLAYING, 1, self.applied_event_id
        twin.epoch, twin.next_chunk = epoch, chunk_index
        twin.generated = twin.displayed = next_frame
        twin._replay.begin_after(1, Standing(WireState.PLAYING, epoch, next_frame))
        twin.detach(now)
        return twin

    # ---- emitting --------------------------------------------------------------------------------------------------

    def started(
        self,
        *,
        resume_token: str,
        model: str,
        prompt: str | None,
        seed: int,
        format: wire.Format,  # noqa: A002 (the wire's name)
        codec: str | None,
        width: int,
        height: int,
        limits: wire.Limits,
        controls: Sequence[wire.ControlInfo] = (),
        prompts: Sequence[str] = (),
        starts: Sequence[str] = (),
        oldest_rewind: int | None = None,
        re: str | None = None,
    ) -> ControlEntry:
        """`session.started`, always ``seq`` 1. ``oldest_rewind`` None: the session can be neither rewound nor forked."""
        self._token = token_digest(resume_token)
        return self._control(
            wire.SessionStarted(
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
                can_fork=oldest_rewind is not None,
                oldest_rewind=oldest_rewind,
                re=re,
            )
        )

    def event_accepted(
        self,
        event_id: int,
        *,
        status: wire.AcceptStatus = "accepted",
        pending: int,
        prompt: str | None = None,
        re: str | None = None,
    ) -> ControlEntry:
        """First receipt. Only ``accepted`` opens the event; the other two say that its terminal receipt exists or will."""
        fresh = status == "accepted"
        if fresh:
            self._events.require_new(event_id)
        entry = self._control(
            wire.EventAccepted(
                seq=self.last_seq + 1, event_id=event_id, status=status, pending=pending, prompt=prompt, re=re
            )
        )
        if fresh:
            self._events.accept(event_id)
        return entry

    def event_discarded(self, event_ids: Iterable[int], *, reason: wire.DiscardReason = "reset") -> ControlEntry:
        """Terminal receipt of events that will never act."""
        ids = self._events.require_open(event_ids)
        if not ids:
            raise LocalError("a receipt of no events")
        entry = self._control(wire.EventDiscarded(seq=self.last_seq + 1, event_ids=ids, reason=reason))
        self._events.settle(ids, applied=False)
        return entry

    def chunk(
        self,
        now: float,
        *,
        chunk_index: int,
        media: Sequence[object],
        applied_event_ids: Iterable[int] = (),
        prompt: str | None,
        timings_ms: wire.Timings,
        kv: wire.KvUse,
        oldest_rewind: int | None = None,
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
        ids = self._events.require_open(applied_event_ids)
        first = self.generated
        entries: list[Entry] = []
        if ids:
            entries.append(
                self._control(
                    wire.EventApplied(seq=self.last_seq + 1, event_ids=ids, chunk_index=chunk_index, first_frame=first)
                )
            )
            self._events.settle(ids, applied=True)
            self.applied_event_id = ids[-1]
        entries.append(
            self._control(
                wire.Chunk(
                    seq=self.last_seq + 1,
                    epoch=self.epoch,
                    chunk_index=chunk_index,
                    first_frame=first,
                    frames=frames,
                    applied_event_ids=ids,
                    prompt=prompt,
                    timings_ms=timings_ms,
                    kv=kv,
                    oldest_rewind=oldest_rewind,
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
        entry = self._control(wire.ChunkAborted(seq=self.last_seq + 1, chunk_index=chunk_index, re=re))
        if chunk_index is not None:
            self.asks = max(0, self.asks - 1)
        return entry

    def paused(self, *, re: str | None = None) -> ControlEntry:
        return self._control(wire.SessionPaused(seq=self.last_seq + 1, re=re))

    def playing(self, now: float, *, re: str | None = None) -> ControlEntry:
        self._progress_at = now
        return self._control(wire.SessionPlaying(seq=self.last_seq + 1, re=re))

    def reset_done(self, *, prompt: str | None, seed: int, re: str | None = None) -> ControlEntry:
        """A new epoch: frames, chunks and credit count from 0. Discard the open events first (`event_discarded`)."""
        return self._new_epoch(
            wire.SessionResetDone(seq=self.last_seq + 1, epoch=self.epoch + 1, prompt=prompt, seed=seed, re=re), 0, 0
        )

    def rewound(
        self,
        *,
        chunk_index: int,
        next_frame: int,
        prompt: str | None,
        oldest_rewind: int | None,
        re: str | None = None,
    ) -> ControlEntry:
        """A new epoch that goes on at an earlier chunk; nothing is outstanding. Discard the open events first."""
        message = wire.SessionRewound(
            seq=self.last_seq + 1,
            epoch=self.epoch + 1,
            chunk_index=chunk_index,
            next_frame=next_frame,
            prompt=prompt,
            oldest_rewind=oldest_rewind,
            re=re,
        )
        return self._new_epoch(message, chunk_index, next_frame)

    def _new_epoch(
        self, message: wire.SessionResetDone | wire.SessionRewound, chunk_index: int, next_frame: int
    ) -> ControlEntry:
        old = (self.epoch, self.generated, self.next_chunk)
        self.epoch, self.generated, self.next_chunk = message.epoch, next_frame, chunk_index
        try:
            entry = self._control(message)
        except LocalError:
            self.epoch, self.generated, self.next_chunk = old
            raise
        self.displayed, self.asks = next_frame, 0
        return entry

    def forked(
        self,
        branch: WorldSessionStream,
        *,
        resume_token: str,
        prompt: str | None,
        seed: int,
        oldest_rewind: int | None,
        grace_s: float,
        re: str | None = None,
    ) -> ControlEntry:
        """Tell of a `branch`, and how to open it. Sent again on resume like everything numbered, so no branch gets lost."""
        branch._token = token_digest(resume_token)
        return self._control(
            wire.SessionForked(
                seq=self.last_seq + 1,
                session_id=branch.session_id,
                resume_token=resume_token,
                grace_s=grace_s,
                epoch=branch.epoch,
                chunk_index=branch.next_chunk,
                next_frame=branch.generated,
                prompt=prompt,
                seed=seed,
                next_event_id=branch.next_event_id,
                oldest_rewind=oldest_rewind,
                re=re,
            )
        )

    def replaying(self, *, chunk_index: int, chunks: int, re: str | None = None) -> ControlEntry:
        """The chunks that come next are those of a log."""
        return self._control(
            wire.SessionReplaying(seq=self.last_seq + 1, chunk_index=chunk_index, chunks=chunks, re=re)
        )

    def replayed(self, *, complete: bool, next_event_id: int) -> ControlEntry:
        """The end of a played log, whose events used the ids below ``next_event_id``."""
        self._events.skip_to(next_event_id)
        return self._control(
            wire.SessionReplayed(seq=self.last_seq + 1, complete=complete, next_event_id=self._events.next_event_id)
        )

    def failed(self, *, code: WireCode, message: str, chunk_index: int, can: Sequence[wire.Remedy]) -> ControlEntry:
        entry = self._control(
            wire.SessionFailed(
                seq=self.last_seq + 1,
                code=code,
                message=message[: wire.MAX_ERROR_CHARS],
                chunk_index=chunk_index,
                can=tuple(can),
            )
        )
        self.asks = 0
        return entry

    def recovered(self, now: float, *, chunk_index: int, re: str | None = None) -> ControlEntry:
        self._progress_at = now
        return self._control(wire.SessionRecovered(seq=self.last_seq + 1, chunk_index=chunk_index, re=re))

    def closed(
        self,
        reason: wire.CloseReason,
        *,
        code: WireCode | None = None,
        message: str | None = None,
        re: str | None = None,
    ) -> list[Entry]:
        """The terminal message; events still open get their discarded receipt first. A second call is refused."""
        if reason == "taken_over":
            raise LocalError("taken_over ends a connection, not the session: use WorldServerSide.taken_over")
        entries: list[Entry] = []
        if len(self._events) and self.state is not WireState.CLOSED:
            entries.append(self.event_discarded(self._events.open_ids, reason="closed"))
        final = wire.SessionClosed(seq=self.last_seq + 1, reason=reason, code=code, message=message, re=re)
        entries.append(self._control(final))
        self.terminal = final
        return entries

    # ---- the client's side of the flow -----------------------------------------------------------------------------

    def acknowledge(self, ack: wire.SessionAck, now: float) -> bool:
        """Take an ack; true when it made progress (new credit). An old or repeated ack changes nothing."""
        check_ack(ack, last_seq=self.last_seq, epoch=self.epoch, generated=self.generated)
        # A chunk that was shown to its end has arrived, whatever seq says.
        self._replay.forget_to(max(ack.seq, self._replay.shown_to(ack.epoch, ack.displayed)))
        progress = ack.epoch == self.epoch and ack.displayed > self.displayed
        if progress:
            self.displayed = ack.displayed
            self._progress_at = now
        return progress

    def ask(self, *, re: str | None = None) -> None:
        """Count a `session.next`; refused past four outstanding ones and in a paced session."""
        if self.cadence != "on_demand":
            raise WireError(WireCode.SESSION_STATE, "session.next needs cadence on_demand", path="$.type", re=re)
        if self.asks >= wire.MAX_OUTSTANDING_NEXT:
            raise WireError(WireCode.QUEUE_FULL, f"{wire.MAX_OUTSTANDING_NEXT} blocks are already asked for", re=re)
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
    def acked_seq(self) -> int:
        return self._replay.acked_seq

    @property
    def next_event_id(self) -> int:
        return self._events.next_event_id

    @property
    def attached(self) -> bool:
        return self._detached_at is None

    def grace_deadline(self) -> float | None:
        """When a detached session ends; None while attached or after the end."""
        if self._detached_at is None or self.state is WireState.CLOSED:
            return None
        return self._detached_at + self.limits.grace_s

    def token_matches(self, token: str) -> bool:
        return self._token is not None and hmac.compare_digest(self._token, token_digest(token))

    def replay_after(self, last_seq: int) -> tuple[Entry, ...]:
        """What a client that has everything up to ``last_seq`` lacks, or `WireError` resume_refused."""
        return self._replay.after(last_seq, self.last_seq)

    def resume(
        self,
        last_seq: int,
        *,
        resume_token: str,
        format: wire.Format,  # noqa: A002 (the wire's name)
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
        self._replay.forget_to(last_seq)
        standing = self._replay.standing
        self._token = token_digest(resume_token)
        self._detached_at = None
        self._progress_at = now
        self.asks = 0
        self._resumes += 1
        return ResumePlan(
            wire.SessionResumed(
                session_id=self.session_id,
                resume_token=resume_token,
                replayed_from=last_seq + 1,
                state=_LIVE_NAMES[standing.state],
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
            entries=len(self._replay),
            entries_peak=self._replay.peak,
            media_bytes=self._replay.media_bytes,
            forgotten=self._replay.forgotten,
            epoch=self.epoch,
            generated=self.generated,
            displayed=self.displayed,
            asks=self.asks,
            open_events=len(self._events),
            events_accepted=self._events.accepted,
            events_applied=self._events.applied,
            events_discarded=self._events.discarded,
            chunks=self._chunks,
            resumes=self._resumes,
        )

    def check(self) -> None:
        """Raise `LocalError` when an invariant is broken; cheap enough for tests after every step."""
        self._replay.check(self.last_seq)
        self._events.check()
        if not 0 <= self.displayed <= self.generated:
            raise LocalError("displayed is outside 0..generated")
        if (self.terminal is not None) != (self.state is WireState.CLOSED):
            raise LocalError("terminal message and state disagree")
        if self.terminal is not None and (self.terminal.seq != self.last_seq or len(self._events)):
            raise LocalError("something follows the terminal message, or an event is still open")

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _control(self, message: wire.AnySessionMessage) -> ControlEntry:
        state = TABLE.get((self.state, type(message)))
        if state is None:
            raise LocalError(f"{type(message).__name__} is not allowed in state {self.state.value}")
        self.state = state
        self.last_seq += 1
        entry = ControlEntry(seq=self.last_seq, message=message, after=Standing(state, self.epoch, self.generated))
        self._replay.keep(entry)
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
        self._replay.keep(entry)
        return entry
