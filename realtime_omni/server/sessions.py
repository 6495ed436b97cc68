"""The wire state of every session: what outlives a connection and ends with the session.

Owns the map from session id to record (stream, encoder choice, media clock, attached connection). The session itself is
the manager's; a record ends exactly when the manager says so (closed, evicted, expired), never by a timer of its own.
Invariant: one record per live session that this server created, at most one connection attached to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, get_args

from realtime_omni.server.backend import ModelDescription, Notice, SessionDoor
from realtime_omni.server.codes import WireFault, failure, wire_code
from realtime_omni.server.metrics import Metrics
from realtime_omni.server.outbox import Batch
from realtime_omni.server.pacing import Pacer
from realtime_omni.session.journal import EventLog
from realtime_omni.session.values import Chunk, Representation
from realtime_omni_protocols.envelope import MAX_SAFE_INT
from realtime_omni_protocols.world import Entry, WireCode, WorldSessionStream
from realtime_omni_protocols.world_messages import (
    CloseReason,
    DiscardReason,
    Format,
    KvUse,
    Remedy,
    Timings,
)
from realtime_omni_protocols.world_table import LIVE, WireState

_log = logging.getLogger(__name__)
GRAVES = 1024
"""Ended ids that are answered ``session_gone`` instead of ``session_not_found``."""
_CODES = {"stalled": WireCode.STALLED, "shutdown": WireCode.SHUTDOWN}
_REASONS: frozenset[str] = frozenset(get_args(CloseReason))


class Attached(Protocol):
    """What a record needs of the connection that drives it."""

    changed: asyncio.Event

    def emit(self, batch: Batch) -> None:
        """Queue entries behind everything queued before."""
        ...

    async def give_up(self) -> None:
        """Hand the session over: no tick of this connection is in flight when it returns."""
        ...


@dataclass(frozen=True, slots=True)
class Replay:
    """A log that is being played. ``ids``: those that its events may use."""

    chunks: AsyncGenerator[Chunk, None]
    last_chunk: int
    ids: range


@dataclass
class WireSession:
    """One session as this server sees it."""

    door: SessionDoor
    stream: WorldSessionStream
    model: ModelDescription
    format: Format
    codec: str | None
    pacer: Pacer
    outputs: tuple[str, ...]
    connection: Attached | None = None
    last_input_s: float = 0.0
    """When the client last said anything but ``ping`` (on the server's clock)."""
    failure: WireFault | None = None
    """What the engine said of the session while a block was asked for: told behind that block, which may be committed."""
    rollback_offered: bool = False
    """The failure that the stream tells of can be rolled back."""
    resetting: bool = False
    """A reset or a rewind is under way: no block is asked for."""
    answer_to: str | None = None
    """``id`` of the client's reset, rewind or close that is under way: its answer carries it, whoever emits the answer."""
    fill: Callable[[], None] | None = None
    """Waits for the media of the latest chunk, and so of all before it, where a device is still copying them."""
    replay: Replay | None = None
    played_ids: list[range] = field(default_factory=list)
    """Event ids that played logs used: no client has sent them, so none hears of them."""
    unsubscribe: Callable[[], None] | None = None
    block: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a block is asked for, and until it is emitted."""
    hands: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the session passes from one connection to nobody, or to the next: the manager hears of it in order."""

    @property
    def id(self) -> str:
        return self.stream.session_id

    def emit(self, entries: Entry | Sequence[Entry]) -> None:
        """To the attached client; without one the stream keeps them for the next resume."""
        self._emit(Batch(tuple(entries) if isinstance(entries, Sequence) else (entries,)))

    def _emit(self, batch: Batch) -> None:
        if self.connection is not None:
            self.connection.emit(batch)
            self.connection.changed.set()

    # -- what the session did, as numbered messages ----------------------------------------------------------------

    def emit_chunk(self, chunk: Chunk, started_s: float, now_s: Callable[[], float], since_s: float) -> bool:
        """A committed block; False when it is not sent: its epoch has ended (its events are discarded), or all is over.

        ``since_s``: when it could first have been begun, for the measure of the control plane."""
        if self.stream.state is WireState.CLOSED:
            return False  # committed just before the end; its events were receipted as discarded
        while chunk.epoch > self.stream.epoch:  # the connection that asked for it was lost before it could say so
            self._emit_new_epoch(chunk.chunk_index)
        ids = self._clients(tuple(int(event_id) for event_id in chunk.metadata.applied_event_ids))
        self.ensure_accepted(ids)
        if chunk.epoch < self.stream.epoch:
            self.discard(ids)
            return False
        media, latent_shape = self._media(chunk)
        entries = self.stream.chunk(
            now_s(),
            chunk_index=chunk.chunk_index,
            media=media,
            applied_event_ids=ids,
            prompt=chunk.prompt,
            timings_ms=Timings(tick=max(0.0, chunk.timings.tick_ms), encode=0.0, wait=max(0.0, chunk.timings.wait_ms)),
            kv=KvUse(pages_used=chunk.pages_used, pages_total=chunk.pages_total),
            oldest_rewind=self.door.view.oldest_rewind,
            latent_shape=latent_shape,
            latent_frames=None if latent_shape is None else chunk.frames,
        )

        def sent() -> None:
            at = now_s()
            self.pacer.delivered(chunk.first_frame, at, at - started_s)
            if self.connection is not None:
                self.connection.changed.set()

        self.fill = None if chunk.is_filled else chunk.fill
        model_s = chunk.timings.model_ms / 1000
        self._emit(Batch(tuple(entries), sent=sent, since_s=since_s, model_s=model_s, fill=self.fill))
        _log.debug(
            "block session=%s request=%s epoch=%d chunk=%d tick_ms=%.1f",
            self.id,
            chunk.metadata.request_id,
            chunk.epoch,
            chunk.chunk_index,
            chunk.timings.tick_ms,
        )
        return True

    def _media(self, chunk: Chunk) -> tuple[Sequence[object], tuple[int, ...] | None]:
        artifact = chunk.artifacts[self.outputs[0]]
        if artifact.representation is Representation.LATENT:
            return [artifact.data], tuple(int(side) for side in artifact.data.shape)
        return [frame.transpose(1, 2, 0) for frame in artifact.data], None

    def emit_reset_done(self) -> None:
        """The session was reset; the stream follows."""
        self.pacer.restart()
        re, self.answer_to = self.answer_to, None
        self.emit(self.stream.reset_done(prompt=self.door.prompt, seed=self.door.seed, re=re))

    def emit_rewound(self, chunk_index: int) -> None:
        """The session went back to ``chunk_index``; the stream follows."""
        self.pacer.restart()
        re, self.answer_to = self.answer_to, None
        self.emit(
            self.stream.rewound(
                chunk_index=chunk_index,
                next_frame=self.model.pictures_before(chunk_index),
                prompt=self.door.prompt,
                oldest_rewind=self.door.view.oldest_rewind,
                re=re,
            )
        )

    def _emit_new_epoch(self, chunk_index: int) -> None:
        """An epoch that nobody told of began at ``chunk_index``. A rewind to 0 is a reset that changes nothing."""
        if chunk_index:
            self.emit_rewound(chunk_index)
        else:
            self.emit_reset_done()

    def ensure_accepted(self, event_ids: Sequence[int]) -> None:
        """First receipts for events whose sender was lost before it could get one."""
        for event_id in event_ids:
            if event_id >= self.stream.next_event_id:
                self.emit(self.stream.event_accepted(event_id, pending=self.door.pending_event_count))

    def begin_replay(self, log: EventLog, re: str | None) -> None:
        """From now on the driver takes its blocks from the log, which begins where the session stands."""
        chunks = self.door.replay(log, self.outputs)
        ids = range(self.stream.next_event_id, MAX_SAFE_INT + 1)
        self.replay = Replay(chunks, log.next_chunk - 1, ids)
        count = log.next_chunk - log.first_chunk
        self.emit(self.stream.replaying(chunk_index=log.first_chunk, chunks=count, re=re))

    def end_replay(self, *, complete: bool) -> None:
        """Say so, once. Of a played event that still waits no client will hear either."""
        replay, self.replay = self.replay, None
        if replay is None:
            return
        next_event_id = max(replay.ids.start, self.door.view.event_floor + 1)
        self.played_ids.append(range(replay.ids.start, next_event_id))
        if self.stream.state in LIVE:
            self.emit(self.stream.replayed(complete=complete, next_event_id=next_event_id))

    def _clients(self, event_ids: Sequence[int]) -> tuple[int, ...]:
        """Without those of played logs."""
        played = [*self.played_ids, self.replay.ids] if self.replay is not None else self.played_ids
        return tuple(event_id for event_id in event_ids if not any(event_id in ids for ids in played))

    def discard(self, event_ids: Sequence[int], reason: DiscardReason = "reset") -> None:
        event_ids = self._clients(event_ids)
        if event_ids:
            self.ensure_accepted(event_ids)
            self.emit(self.stream.event_discarded(event_ids, reason=reason))

    def fail(self, fault: WireFault) -> None:
        """The engine says that the session failed. A chunk whose clean pass failed was committed, and goes before."""
        if self.block.locked():
            self.failure = fault
        else:
            self.emit_failed(fault.code, fault.message)

    def tell_failure(self) -> None:
        """The block is over. What was reset or rewound meanwhile has not failed any more."""
        fault, self.failure = self.failure, None
        if fault is not None and self.door.state == "failed":
            self.emit_failed(fault.code, fault.message)

    def emit_failed(self, code: WireCode, message: str) -> None:
        """The session cannot go on by itself. Said once."""
        if self.stream.state not in (WireState.PLAYING, WireState.PAUSED):
            return
        can: list[Remedy] = ["reset", "close"]
        self.rollback_offered = self.door.view.can_rollback
        if self.rollback_offered:
            can.insert(0, "rollback")
        self.emit(self.stream.failed(code=code, message=message, chunk_index=self.door.chunk_index, can=can))


class WireSessions:
    """All records of this server."""

    def __init__(self, metrics: Metrics) -> None:
        self._records: dict[str, WireSession] = {}
        self.graves: deque[str] = deque(maxlen=GRAVES)
        self._metrics = metrics

    def add(self, record: WireSession) -> None:
        """From now on the manager's notices reach the record."""
        self._records[record.id] = record
        record.unsubscribe = record.door.subscribe(lambda notice: self._noticed(record, notice))
        self._count()

    def get(self, session_id: str) -> WireSession | None:
        return self._records.get(session_id)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[WireSession]:
        return iter(tuple(self._records.values()))

    def changed(self) -> None:
        """A connection attached or detached."""
        self._count()

    def finish(
        self, record: WireSession, reason: str | None, code: WireCode | None = None, message: str | None = None
    ) -> None:
        """The session ended: say so once, to whoever is there, and forget it. Later calls do nothing."""
        if self._records.get(record.id) is not record:
            return
        del self._records[record.id]
        self.graves.append(record.id)
        if record.unsubscribe is not None:
            record.unsubscribe()
        said: CloseReason = reason if reason in _REASONS and reason != "taken_over" else "operator"  # type: ignore[assignment]
        record.emit(record.stream.closed(said, code=code, message=message, re=record.answer_to))
        self._metrics.count("sessions_closed_total", reason=said)
        self._count()
        _log.info("session ended session=%s reason=%s chunks=%d", record.id, said, record.stream.statistics().chunks)

    def _noticed(self, record: WireSession, notice: Notice) -> None:
        match notice.kind:
            case "events_discarded":
                record.discard(tuple(notice.event_ids), "rewind" if notice.reason == "rewind" else "reset")
            case "failed":
                record.fail(failure(notice.code, notice.message))
            case "evicted":
                code = wire_code(notice.code) if notice.code else WireCode.CAPACITY
                self.finish(record, "evicted", code, notice.message)
            case "closed":
                self.finish(record, notice.reason or "operator", _CODES.get(notice.reason or ""))
            case "cleanup_failed":  # a tombstone: the engine retries the release, the client has nothing left to do
                self.finish(record, notice.reason if notice.reason in _REASONS else "failed")
            case "progress":
                pass
            case other:
                _log.warning("unknown notice kind=%s session=%s", other, record.id)

    def _count(self) -> None:
        attached = sum(record.connection is not None for record in self._records.values())
        self._metrics.set("wire_sessions", attached, attached="yes")
        self._metrics.set("wire_sessions", len(self._records) - attached, attached="no")
