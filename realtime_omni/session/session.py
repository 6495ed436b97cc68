"""One session: the pure machine that turns events into ticks and commits into progress.

Owns the lifecycle, the intake, the prompt, the controls, the chunk counter and the one tick that may be in flight. Must
not know what runs the tick, who waits for it, or what time it is.

A tick is a transaction. ``begin_tick`` freezes a snapshot; ``commit_tick`` applies it if, and only if, the output's metadata
equals the snapshot; ``fail_tick`` and ``abort_tick`` forget it. Index, prompt, controls and queue change in ``commit_tick``
alone, and there only after the reducer's commit, which is the one step that may raise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from realtime_omni.errors import ChunkMetadataError, ErrorCode, StateError
from realtime_omni.session.controls import ControlReducer, PreparedControls
from realtime_omni.session.intake import Intake
from realtime_omni.session.lifecycle import Lifecycle, SessionState, Trigger
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
)

RequestIdFactory = Callable[[SessionId, ChunkIndex], str]


@dataclass(frozen=True, slots=True)
class InFlight:
    """The tick that runs, and what it will change when it commits."""

    tick: TickRequest
    prepared: PreparedControls


class Session:
    """One world. See the module docstring for the transaction."""

    def __init__(
        self,
        session_id: SessionId,
        generation: Generation,
        *,
        prompt: str | None,
        reducer: ControlReducer,
        max_pending_events: int,
        request_ids: RequestIdFactory,
        frames_per_block: int = 1,
        horizon_frames: int | None = None,
    ) -> None:
        self.id = session_id
        self.generation = generation
        self.lifecycle = Lifecycle()
        self.intake = Intake(max_pending_events)
        self.chunk_index = ChunkIndex(0)
        self.epoch = 0
        self.prompt = prompt
        self.controls: dict[str, ControlInput] = {}
        self.in_flight: InFlight | None = None
        self._reducer = reducer
        self._request_ids = request_ids
        self._frames_per_block = frames_per_block
        self._horizon_frames = horizon_frames

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

    def begin_tick(self, requested_outputs: tuple[str, ...]) -> TickRequest:
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
        )
        self.in_flight = InFlight(tick, prepared)
        return tick

    def verify(self, metadata: ChunkMetadata) -> None:
        """Raises ChunkMetadataError: there is none, or the first field that differs from the submitted tick."""
        assert self.in_flight is not None
        if not isinstance(metadata, ChunkMetadata):
            raise ChunkMetadataError("the output carries no chunk metadata", path="metadata")
        expected = ChunkMetadata.from_tick(self.in_flight.tick)
        for name in ("session_id", "request_id", "chunk_index", "applied_event_ids"):
            got, want = getattr(metadata, name), getattr(expected, name)
            if got != want:
                raise ChunkMetadataError(f"the output's {name} is {got!r}, the tick's is {want!r}", path=name)

    def commit_tick(self) -> None:
        """Apply the tick in flight; the caller has verified the metadata. Raises only what the reducer's commit raises."""
        flight = self.in_flight
        assert flight is not None
        self._reducer.commit(flight.prepared)
        self.in_flight = None
        self.intake.applied(flight.tick.applied_event_ids)
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

    def begin_reset(self) -> None:
        """Raises StateError when not allowed. A tick in flight must have been aborted before."""
        self.lifecycle.require("reset")
        assert self.in_flight is None
        self.lifecycle.move(Trigger.RESET)

    def finish_reset(self, prompt: str | None) -> tuple[EventId, ...]:
        """Chunk 0 of a new epoch; the event floor stays. Returns the events that the reset discarded.

        Raises only what the reducer's reset raises; nothing has changed then."""
        self._reducer.reset()
        self.lifecycle.move(Trigger.RESET_DONE)
        discarded = self.intake.discard_pending()
        self.controls = {}
        self.prompt = prompt
        self.chunk_index = ChunkIndex(0)
        self.epoch += 1
        return discarded

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        self.intake.check()
        if self.in_flight is not None:
            assert self.state is SessionState.ACTIVE, "a tick runs in a session that is not active"
            assert self.in_flight.tick.chunk_index == self.chunk_index, "the tick in flight is not the next chunk"
