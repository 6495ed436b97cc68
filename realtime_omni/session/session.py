"""One session: the pure machine that turns events into ticks and commits into progress.

Owns the lifecycle, the intake, the journal, the prompt, the controls, the chunk counter and the one tick that may be in
flight. Must not know what runs the tick, who waits for it, or what time it is.

A tick is a transaction. ``begin_tick`` freezes a snapshot; ``commit_tick`` applies it if, and only if, the output's metadata
equals the snapshot; ``fail_tick`` and ``abort_tick`` forget it. Index, prompt, controls and queue change in ``commit_tick``
alone, and there only after the reducer's commit, which is the one step that may raise.

What a session is between two ticks, beside its queue, is a value: a :class:`Memento`. Those of the last ``rewind_blocks``
chunk boundaries are kept; ``rewind`` goes back to one of them, and ``fork`` begins another session at the latest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from msgspec import Struct

from realtime_omni.errors import ArgumentError, ChunkMetadataError, ErrorCode, StateError
from realtime_omni.session.controls import ControlReducer, PreparedControls
from realtime_omni.session.frame import Frame
from realtime_omni.session.intake import Intake
from realtime_omni.session.journal import EventLog, Journal, Origin
from realtime_omni.session.lifecycle import Lifecycle, SessionState, Trigger
from realtime_omni.session.observation import Observation
from realtime_omni.session.record import ControlRecord, MomentRecord, SessionRecord
from realtime_omni.session.values import (
    ChunkIndex,
    ChunkMetadata,
    ControlInput,
    EventAcceptance,
    EventId,
    Generation,
    SessionEvent,
    SessionId,
    TickRequest,
    check_prompt,
)


class Memento(Struct, frozen=True):
    """A session at the boundary before chunk ``chunk_index``.

    ``memory`` is what its reducer saved, a JSON value; ``lineage`` says what led here (see ``journal``)."""

    chunk_index: ChunkIndex
    prompt: str | None
    controls: tuple[ControlInput, ...]
    memory: Any
    lineage: str


def no_moment(chunk_index: int, oldest: int, next_chunk: int) -> ArgumentError:
    """The refusal of a rewind to a chunk that is no longer retained, or that is none of the past."""
    if 0 <= chunk_index < next_chunk:
        return ArgumentError(
            f"chunk {chunk_index} is no longer retained; the oldest that a rewind can go back to is {oldest}",
            code=ErrorCode.NOT_RETAINED,
            path="chunk_index",
        )
    return ArgumentError(
        f"chunk_index must lie in {oldest}..{next_chunk}: what is retained, and the next chunk", path="chunk_index"
    )


RequestIdFactory = Callable[[SessionId, ChunkIndex], str]


class InFlight(Struct, frozen=True):
    """The tick that runs, and what it will change when it commits."""

    tick: TickRequest
    events: tuple[SessionEvent, ...]
    prepared: PreparedControls


class Session:
    """One world. See the module docstring for the transaction."""

    def __init__(
        self,
        session_id: SessionId,
        generation: Generation,
        *,
        origin: Origin,
        reducer: ControlReducer,
        max_pending_events: int,
        request_ids: RequestIdFactory,
        frames_per_block: int = 1,
        horizon_frames: int | None = None,
        rewind_blocks: int = 0,
    ) -> None:
        self.id = session_id
        self.generation = generation
        self.lifecycle = Lifecycle()
        self.intake = Intake(max_pending_events)
        self.chunk_index = ChunkIndex(0)
        self.epoch = 0
        self.prompt = origin.prompt
        self.journal = Journal(origin)
        self.controls: dict[str, ControlInput] = {}
        self.in_flight: InFlight | None = None
        self._reducer = reducer
        self._request_ids = request_ids
        self._frames_per_block = frames_per_block
        self._horizon_frames = horizon_frames
        self._past: deque[Memento] = deque(maxlen=rewind_blocks)

    @property
    def state(self) -> SessionState:
        return self.lifecycle.state

    def accept_event(self, event: SessionEvent, understand: Callable[[SessionEvent], str | None]) -> EventAcceptance:
        """Queue an event. ``understand`` is the model's check; it runs only for an event that would be new.

        Raises StateError, EventConflictError, StaleEventError, EventQueueFullError, or what ``understand`` raises; nothing
        has changed then.
        """
        self.lifecycle.require("accept_event")
        status = self.intake.recall(event)
        understood = None
        if status is None:
            understood = understand(event)
            status = self.intake.accept(event)
        return EventAcceptance(self.id, event.event_id, status, self.intake.pending_count, understood)

    def require_tick(self) -> None:
        """Raises StateError when the next chunk may not be asked for (state, horizon)."""
        self.lifecycle.require("next_chunk")
        horizon = self._horizon_frames
        if horizon is not None and (self.chunk_index + 1) * self._frames_per_block > horizon:
            raise StateError(
                f"chunk {self.chunk_index} would pass the model's horizon of {horizon} frames; reset the session",
                code=ErrorCode.HORIZON,
            )

    def begin_tick(
        self,
        requested_outputs: tuple[str, ...],
        observation: Observation | None = None,
        frame: Frame | None = None,
    ) -> TickRequest:
        """Freeze the next tick. Raises StateError, or whatever the reducer raises (then call ``fail_tick``)."""
        self.require_tick()
        if self.in_flight is not None:
            raise StateError("a tick of this session is running")
        events = self.intake.snapshot()
        prepared = self._reducer.prepare(dict(self.controls), events, self.chunk_index)
        prompt = self.prompt
        for event in events:
            prompt = event.prompt if event.prompt is not None else prompt
        tick = TickRequest(
            session_id=self.id,
            request_id=self._request_ids(self.id, self.chunk_index),
            chunk_index=self.chunk_index,
            applied_event_ids=tuple(e.event_id for e in events),
            prompt=prompt,
            controls=tuple(sorted(prepared.controls, key=lambda c: c.track)),
            requested_outputs=requested_outputs,
            observation=observation,
            frame=frame,
        )
        self.in_flight = InFlight(tick, events, prepared)
        return tick

    def verify(self, metadata: ChunkMetadata) -> None:
        """Raises ChunkMetadataError: there is none, or the first field that differs from the submitted tick."""
        assert self.in_flight is not None
        if not isinstance(metadata, ChunkMetadata):
            raise ChunkMetadataError("the output carries no chunk metadata", path="metadata")
        expected = ChunkMetadata.from_tick(self.in_flight.tick)
        if metadata == expected:
            return
        for name in ("session_id", "request_id", "chunk_index", "applied_event_ids"):
            got, want = getattr(metadata, name), getattr(expected, name)
            if got != want:
                raise ChunkMetadataError(f"the output's {name} is {got!r}, the tick's is {want!r}", path=name)

    def commit_tick(self) -> None:
        """Apply the tick in flight; the caller has verified the metadata. Raises only what the reducer raises."""
        flight = self.in_flight
        assert flight is not None
        before = self.memento() if self._past.maxlen else None
        self._reducer.commit(flight.prepared)
        self.in_flight = None
        if before is not None:
            self._past.append(before)
        self.intake.applied(flight.tick.applied_event_ids)
        self.journal.record(self.epoch, self.chunk_index, flight.events)
        self.prompt = flight.tick.prompt
        self.controls = {c.track: c for c in flight.prepared.after}
        self.chunk_index = ChunkIndex(self.chunk_index + 1)

    def abort_tick(self) -> None:
        """Forget the tick in flight; the session stays as it was and the same chunk may run again."""
        self.in_flight = None

    def fail_tick(self) -> None:
        """The tick failed: nothing it proposed is kept and no tick runs until rollback, reset or close."""
        self.in_flight = None
        self.lifecycle.move(Trigger.TICK_FAILED)

    def memento(self) -> Memento:
        """The session as it is between ticks. Raises what the reducer's ``save`` raises."""
        controls = tuple(self.controls.values())
        return Memento(self.chunk_index, self.prompt, controls, self._reducer.save(), self.journal.lineage)

    @property
    def past(self) -> tuple[Memento, ...]:
        """The boundaries that ``rewind`` can go back to, oldest first, the present one not among them."""
        return tuple(self._past)

    def moment(self, chunk_index: int) -> Memento:
        """The memento of a boundary, the present one included.

        Raises ArgumentError: the chunk is none of the past, or (``not_retained``) the boundary is too long ago."""
        if chunk_index == self.chunk_index:
            return self.memento()
        found = next((m for m in self._past if m.chunk_index == chunk_index), None)
        if found is None:
            oldest = self._past[0].chunk_index if self._past else self.chunk_index
            raise no_moment(chunk_index, oldest, self.chunk_index)
        return found

    def is_at(self, log: EventLog) -> bool:
        """Whether the session is where the log begins: active, at that chunk, by the same events from the same origin."""
        here = (self.chunk_index, self.journal.lineage) == (log.first_chunk, log.lineage)
        return here and self.state is SessionState.ACTIVE

    def rewind(self, moment: Memento, reducer: ControlReducer) -> tuple[EventId, ...]:
        """Be what the session was at ``moment``, in a new epoch; ``reducer`` has loaded its memory. The event floor stays.

        Returns the waiting events, which are discarded. A tick in flight must have been aborted before."""
        self.lifecycle.require("rewind")
        assert self.in_flight is None
        self.lifecycle.move(Trigger.REWIND)
        while self._past and self._past[-1].chunk_index >= moment.chunk_index:
            self._past.pop()
        self.journal.rewind(moment.chunk_index, moment.lineage)
        self._take(moment, reducer)
        self.epoch += 1
        return self.intake.discard_pending()

    def fork(self, session_id: SessionId, generation: Generation, reducer: ControlReducer) -> Session:
        """A session that is what this one is at its last committed chunk; ``reducer`` has loaded that memento's memory.

        It has this one's past and epoch. Its event ids rise from this one's floor; events that wait are not inherited,
        and ids up to the floor are stale there."""
        self.lifecycle.require("fork")
        twin = Session(
            session_id,
            generation,
            origin=self.journal.origin,
            reducer=reducer,
            max_pending_events=self.intake.max_pending,
            request_ids=self._request_ids,
            frames_per_block=self._frames_per_block,
            horizon_frames=self._horizon_frames,
        )
        twin._take(self.memento(), reducer)
        twin._past = self._past.copy()
        twin.journal = self.journal.copy()
        twin.epoch = self.epoch
        twin.intake.floor = self.intake.floor
        return twin

    def begin_reset(self) -> None:
        """Raises StateError when not allowed. A tick in flight must have been aborted before."""
        self.lifecycle.require("reset")
        assert self.in_flight is None
        self.lifecycle.move(Trigger.RESET)
        self._past.clear()

    def finish_reset(self, origin: Origin) -> tuple[EventId, ...]:
        """Chunk 0 of a new epoch; the event floor stays. Returns the events that the reset discarded.

        Raises only what the reducer's reset raises; nothing has changed then."""
        self._reducer.reset()
        self.lifecycle.move(Trigger.RESET_DONE)
        discarded = self.intake.discard_pending()
        self.controls = {}
        self.prompt = origin.prompt
        self.journal = Journal(origin)
        self.chunk_index = ChunkIndex(0)
        self.epoch += 1
        return discarded

    def _take(self, moment: Memento, reducer: ControlReducer) -> None:
        self._reducer = reducer
        self.prompt = moment.prompt
        self.controls = {c.track: c for c in moment.controls}
        self.chunk_index = moment.chunk_index

    def save(self, model: str, past: int) -> SessionRecord:
        """The session at its last committed chunk, its journal and ``past`` moments before it at most included; a tick in
        flight is not part of it.

        Raises StateError unless it is ACTIVE, or FAILED (what the failed tick proposed was never kept)."""
        self.lifecycle.require("snapshot")
        return SessionRecord(
            epoch=self.epoch,
            present=_record(self.memento()),
            past=tuple(_record(m) for m in self.past[max(len(self._past) - past, 0) :]),
            intake=self.intake.save(),
            journal=self.journal.log(model, self.chunk_index).to_json(),
        )

    def load(self, record: SessionRecord, model: str, reducers: Callable[[], ControlReducer]) -> None:
        """Take over a saved session of the same origin; only for a new one. ``reducers`` makes fresh ones, which check what
        was remembered.

        Raises ArgumentError or EventQueueFullError; the session is of no use then."""
        log = EventLog.from_json(record.journal)
        journal = Journal.of(log)
        moments = [_memento(r) for r in (*record.past, record.present)]
        present = moments[-1]
        if any(b.chunk_index != a.chunk_index + 1 for a, b in pairwise(moments)):
            raise ArgumentError("the past is not the chunks before the next one", path="past")
        if any(journal.lineage_at(m.chunk_index) not in (m.lineage, None) for m in moments):
            raise ArgumentError("the past is not the journal's", path="past")
        told = (log.model, log.origin, log.next_chunk, journal.lineage)
        if told != (model, self.journal.origin, present.chunk_index, present.lineage):
            raise ArgumentError("the journal is another session's", path="journal")
        for moment in moments:
            reducer = reducers()
            reducer.load(moment.memory)
        self.intake.load(record.intake)
        self._take(moments.pop(), reducer)
        self._past.extend(moments)
        self.journal = journal
        self.epoch = record.epoch

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        self.intake.check()
        self.journal.check(self.chunk_index)
        retained = [m.chunk_index for m in self._past]
        assert retained == list(range(self.chunk_index - len(retained), self.chunk_index)), "the past has a gap"
        if self.in_flight is not None:
            assert self.state is SessionState.ACTIVE, "a tick runs in a session that is not active"
            assert self.in_flight.tick.chunk_index == self.chunk_index, "the tick in flight is not the next chunk"


def _record(moment: Memento) -> MomentRecord:
    return MomentRecord(
        chunk_index=moment.chunk_index,
        prompt=moment.prompt,
        controls=tuple(ControlRecord.of(c) for c in moment.controls),
        memory=moment.memory,
        lineage=moment.lineage,
    )


def _memento(record: MomentRecord) -> Memento:
    """Raises ArgumentError."""
    prompt = None if record.prompt is None else check_prompt(record.prompt)
    controls = tuple(c.value() for c in record.controls)
    return Memento(ChunkIndex(record.chunk_index), prompt, controls, record.memory, record.lineage)
