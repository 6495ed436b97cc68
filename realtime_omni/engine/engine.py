"""MAIN STREET: absorb, plan, run, settle, reap.

The engine owns every session through its registry, and the one tick in flight. It runs on one thread; nothing else touches
what it owns. Commands come from the inbox, answers and notices leave through the outbox.

    cycle:  absorb    commands -> session machines (refuse before change)
            prefill   write what sessions carry: start pictures, and blocks that were delivered before they were written
            plan      choose due sessions, freeze their ticks, reserve pages
            run       the consumer computes, checkpoint by checkpoint; between two of them commands are absorbed,
                      so that close, abort and reset act within one denoise step
            settle    per row: verify, commit | roll back, answer
            reap      releases under way, tombstone retries, expired leases

``plan``, ``run`` and ``settle`` are separate calls so that tests can put commands between them. How a batch is computed is
in :mod:`realtime_omni.engine.flights`.

A world's batch is one cycle. Where the model lets sessions join a batch that runs (``spec.continuous``), a cycle is one
checkpoint of it: ``plan`` boards whoever may join, ``run`` computes one piece, ``settle`` takes out whoever is done.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from realtime_omni.artifacts import check_artifacts
from realtime_omni.clock import Clock
from realtime_omni.engine.consumer import PlannedRow, TickConsumer
from realtime_omni.engine.desk import Desk
from realtime_omni.engine.endings import Endings
from realtime_omni.engine.entry import MAX_WAITERS, Entry, Waiter
from realtime_omni.engine.flights import EngineCounters, Flight, Flights
from realtime_omni.engine.front import Front
from realtime_omni.engine.inbox import Inbox
from realtime_omni.engine.openings import Openings
from realtime_omni.engine.outbox import Outbox
from realtime_omni.engine.scheduler import Due, choose, joining
from realtime_omni.errors import ErrorCode, OmniError, StateError, TickError
from realtime_omni.models.base import RowOutput
from realtime_omni.session.lifecycle import SessionState
from realtime_omni.session.registry import Registry
from realtime_omni.session.session import RequestIdFactory
from realtime_omni.session.values import Chunk, ChunkIndex, ChunkTimings, TickRequest

if TYPE_CHECKING:
    from realtime_omni.snapshot.snapshot import Snapshot

log = logging.getLogger(__name__)

BRIEF_S = 0.005
"""A round that is over so soon is not interrupted by its own answers: who reads them needs the interpreter, too."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Bounds and policies; see the recipe's ``engine``, ``kv`` and ``session`` sections."""

    max_batch: int = 8
    max_sessions: int = 8
    max_pending_events: int = 32
    evict: bool = False
    """Policy ``lru``: a full server closes its least recently used idle session instead of refusing a new one."""
    keep_failed: bool = True
    """``on_failure: keep``, and the model declares itself rollback-safe."""
    horizon_frames: int | None = None
    budget_s: float | None = None
    """Deadline of an observation that names none, counted from when it was asked for."""


class Engine:
    """All sessions of one consumer. ``cycle`` once, or its parts one by one."""

    def __init__(
        self,
        consumer: TickConsumer,
        settings: EngineSettings,
        *,
        clock: Clock,
        inbox: Inbox,
        outbox: Outbox,
        mint: Callable[[], str],
        request_ids: RequestIdFactory,
    ) -> None:
        self.consumer = consumer
        self.settings = settings
        self.inbox = inbox
        self.registry: Registry[Entry] = Registry(mint)
        self.counters = EngineCounters()
        self._clock = clock
        self._front = Front(outbox, consumer)
        self._endings = Endings(self.registry, consumer, self._front, clock)
        self._openings = Openings(
            self.registry,
            consumer,
            self._front,
            self._endings,
            clock,
            max_sessions=settings.max_sessions,
            evict=settings.evict,
        )
        self._desk = Desk(
            self.registry,
            consumer,
            self._front,
            self._openings,
            self._endings,
            clock,
            self._withdraw,
            request_ids=request_ids,
            max_pending_events=settings.max_pending_events,
            horizon_frames=settings.horizon_frames,
            budget_s=settings.budget_s,
        )
        self._flights = Flights(consumer, clock, self.counters, self.absorb)
        self._primary = consumer.spec.primary
        self._prefill_began_s = 0.0
        self._cycle_began_s = self._cycle_took_s = math.inf

    # ------------------------------------------------------------------ the street

    def cycle(self) -> bool:
        """One round; True when a tick was run, so that there may be more to do at once.

        Where rounds are brief, the receipts of its commands are heard with its chunks: one wake instead of two."""
        began_s = self._cycle_began_s = self._clock.now_s()
        with self._front.together() if self._cycle_took_s < BRIEF_S else nullcontext():
            self.absorb()
            worked = self.prefill()
            if self.plan():
                self.run()
                self.settle()
                worked = True
        self.reap()
        now_s = self._flights.progress_at_s = self._clock.now_s()
        if worked:
            self._cycle_took_s = now_s - began_s
        return worked

    def absorb(self) -> None:
        """Take every waiting command, control lane first."""
        for command in self.inbox.take():
            self._desk.handle(command)
        if self._clock.now_s() - self._cycle_began_s >= BRIEF_S:
            self._front.speak()  # not as brief as the last one

    def prefill(self) -> bool:
        """Write one block for every session that carries one; True when there was any.

        Sessions that open, and those of the next tick, come first; whoever else carries a block shares their batch. A
        tick in whose way nothing stands goes first: it waits for such a batch only when that has begun."""
        carrying = [e for e in self.registry if e.needs_prefill]
        if not carrying:
            return False
        batch = set(choose(self._due(), self.settings.max_batch))
        awaited = [e for e in carrying if e.opening or e.session.id in batch]
        if batch and not awaited:
            return False
        entries = sorted(carrying, key=lambda e: (not e.opening, e.session.id not in batch))[: self.settings.max_batch]
        self._prefill_began_s = self._clock.now_s()
        flights = [Flight(e, PlannedRow(self._prefill_tick(e), ()), None, self._prefill_began_s) for e in entries]
        self._flights.board(flights)
        self._flights.drive(flights, self.consumer.prefill)
        for flight in flights:
            if flight in self._flights:
                self._settle_prefill(flight)
                self._flights.leave(flight.entry)
        return True

    def plan(self) -> bool:
        """Choose who flies next, freeze their ticks, reserve their pages; False when nobody is flying then."""
        flights = []
        for session_id in self._chosen():
            flight = self._begin(self.registry.get(session_id))
            if flight is not None:
                flights.append(flight)
        self._flights.board(flights)
        if flights and self.consumer.spec.continuous:
            self._flights.join(flights)
        elif flights:
            self._reserve(flights)
        return bool(self._flights)

    def run(self) -> None:
        """Compute the planned batch, or its next piece. Nothing is committed here."""
        if self.consumer.spec.continuous:
            self._flights.step()
        else:
            self._flights.drive(list(self._flights), self.consumer.plan)

    def settle(self) -> None:
        """Commit or roll back every row that is done and answer its waiter."""
        done = [flight for flight in self._flights if flight.result is not None]
        with self._front.together():
            for flight in done:
                self._settle_tick(flight)
                self._flights.leave(flight.entry)
        if done:
            self.counters.ticks_settled += 1
            self.counters.batch_rows += len(done)

    def reap(self) -> None:
        """Everything that waits for time or for a release."""
        for entry in (e for e in self.registry if e.is_restless):
            if entry.resetting is not None:
                self._openings.poll_reset(entry)
            self._endings.poll(entry)
            if self._endings.expired(entry):
                self._desk.close(entry, "detached_expired")

    def next_deadline_s(self) -> float | None:
        """When ``reap`` has something to do by itself; None when only a command can change anything."""
        times = [t for e in self.registry for t in (e.retry_at_s, e.lease_until_s) if t is not None]
        if any(e.closing is not None or e.resetting is not None for e in self.registry):
            times.append(self._clock.now_s() + 0.01)
        return min(times, default=None)

    @property
    def progress_at_s(self) -> float:
        """When a piece of work was last finished."""
        return self._flights.progress_at_s

    @property
    def sessions_created(self) -> int:
        return self._desk.created

    @property
    def sessions_evicted(self) -> int:
        return self._endings.evicted

    @property
    def cleanup_failures(self) -> int:
        return self._endings.cleanup_failures

    def has_work(self) -> bool:
        return bool(self._flights) or any(e.waiters or e.needs_prefill for e in self.registry)

    def take_snapshot(self, session_id: str) -> Snapshot:
        """What the command ``Save`` answers, at once; also in the middle of a tick. Raises as that does."""
        return self._desk.snapshot(self.registry.get(session_id))

    def close_all(self, reason: str) -> None:
        """Shut down: every session takes the ordinary close path."""
        for entry in self.registry:
            self._desk.close(entry, reason)

    def is_closing(self) -> bool:
        """Whether a release is under way."""
        return any(e.closing is not None for e in self.registry)

    def abandon(self, error: Exception) -> None:
        """The engine stops after an internal error: everybody who waits for something is told, nothing is tidied up."""
        for entry in self.registry:
            tickets = [*(w.ticket for w in entry.waiters), *entry.opening, *entry.closers]
            for ticket in [*tickets, entry.flying_ticket if entry.flying else 0]:
                self._front.fail(ticket, error)

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken. Between cycles no page may be reserved."""
        self.consumer.check()
        for entry in self.registry:
            session = entry.session
            session.check()
            assert len(entry.waiters) <= MAX_WAITERS
            if entry.can_rollback and session.state in (SessionState.ACTIVE, SessionState.FAILED):
                assert {m.chunk_index for m in session.past} >= set(self.consumer.retained(session.id))
        if not self._flights:
            assert all(e.session.in_flight is None for e in self.registry), "a tick is in flight outside a batch"

    # ------------------------------------------------------------------ ticks

    def _due(self, *, carrying: bool = True) -> list[Due]:
        """Sessions that want a tick; with ``carrying`` also those that must be prefilled before it."""
        return [
            Due(e.session.id, e.waiters[0].order, e.waiters[0].due_s, e.waiters[0].urgent)
            for e in self.registry
            if e.waiters and not e.flying and not e.opening and (carrying or not e.needs_prefill)
        ]

    def _chosen(self) -> tuple[str, ...]:
        """A batch when none runs, else those that may join it."""
        due = self._due(carrying=False)
        if not self._flights:
            return choose(due, self.settings.max_batch)
        if not self._flights.may_join:
            return ()
        flying = [
            Due(f.entry.session.id, f.waiter.order, f.waiter.due_s, f.waiter.urgent) for f in self._flights if f.waiter
        ]
        return joining(due, flying, self.settings.max_batch, self._clock.now_s())

    def _begin(self, entry: Entry) -> Flight | None:
        """Freeze the next tick of a session, or answer its waiter with why not."""
        waiter = entry.waiters.popleft()
        try:
            entry.session.require_tick()
        except StateError as refused:
            self._front.fail(waiter.ticket, refused, entry)
            return None
        try:
            tick = entry.session.begin_tick(waiter.outputs, waiter.observation, waiter.frame)
        except Exception as error:  # the reducer's, whatever its type
            self._tick_failed(entry, waiter, error)
            return None
        return Flight(entry, PlannedRow(tick, waiter.outputs), waiter, self._clock.now_s())

    def _reserve(self, flights: list[Flight]) -> None:
        try:
            run = self.consumer.plan([f.planned for f in flights])
        except Exception as error:
            if len(flights) == 1:
                self._fail_flight(flights[0], error)
            return  # a batch is planned once more by ``run``, and then row by row
        for row, flight in enumerate(flights):
            flight.enter(run, row)

    def _withdraw(self, entry: Entry, error: Exception, ends: bool = False) -> None:
        """Take a session out of the batch that runs, if it is in it; its pages are free at once.

        ``ends``: its worker state is about to go anyway, so it does not matter what the worker made of the tick."""
        flight = self._flights.leave(entry)
        if flight is None:
            return
        if flight.run is not None:
            flight.run.drop(flight.row)
        if flight.waiter is None:
            return
        if self.consumer.abortable or ends:
            self.counters.chunks_aborted += 1
            entry.session.abort_tick()
            self._front.fail(flight.waiter.ticket, error, entry)
        else:
            self._tick_failed(entry, flight.waiter, error)

    def _settle_tick(self, flight: Flight) -> None:
        entry, run, result = flight.entry, flight.run, flight.result
        waiter, spec = flight.waiter, self.consumer.spec
        assert waiter is not None
        try:
            if isinstance(result, Exception):
                raise result
            assert run is not None
            assert isinstance(result, RowOutput)
            tick = flight.planned.tick
            entry.session.verify(result.metadata)
            artifacts = check_artifacts(
                spec.name,
                tick.request_id,
                spec.artifacts,
                flight.planned.outputs,
                result.artifacts,
            )
            run.precommit(flight.row)
            entry.session.commit_tick()
        except Exception as error:
            self._fail_flight(flight, error)
            return
        run.commit(flight.row)
        entry.needs_prefill = self.consumer.needs_prefill(entry.session.id)
        now_s = self._clock.now_s()
        entry.last_used_at_s = now_s
        self.counters.chunks_committed += 1
        used, total = self.consumer.pages()
        first, following = spec.pictures_before(tick.chunk_index), spec.pictures_before(tick.chunk_index + 1)
        chunk = Chunk(
            metadata=result.metadata,
            artifacts=artifacts,
            primary=self._primary if self._primary in artifacts else None,
            epoch=entry.session.epoch,
            first_frame=first,
            frames=following - first,
            prompt=tick.prompt,
            timings=ChunkTimings(
                wait_ms=(flight.began_at_s - waiter.asked_at_s) * 1000,
                tick_ms=(now_s - flight.began_at_s) * 1000,
                model_ms=(flight.model_s + waiter.prefill_s) * 1000,
                batch_size=flight.together,
                stages_ms={stage: spent_s * 1000 for stage, spent_s in flight.stages_s.items()},
            ),
            pages_used=used,
            pages_total=total,
            signals=result.signals,
        )
        self._front.ok(waiter.ticket, chunk, entry)

    def _settle_prefill(self, flight: Flight) -> None:
        entry, run, result = flight.entry, flight.run, flight.result
        try:
            if isinstance(result, Exception):
                raise result
            assert run is not None
            assert isinstance(result, RowOutput)
            run.precommit(flight.row)
        except Exception as error:
            if run is not None:
                run.rollback(flight.row)
            self._prefill_failed(entry, error)
            return
        run.commit(flight.row)
        entry.needs_prefill = self.consumer.needs_prefill(entry.session.id)
        now_s = self._clock.now_s()
        for waiter in entry.waiters:
            waiter.prefill_s += now_s - max(self._prefill_began_s, waiter.asked_at_s)
        if entry.opening and not entry.needs_prefill:
            self._openings.opened(entry)

    def _prefill_failed(self, entry: Entry, error: Exception) -> None:
        """The chunk that the block belongs to stands: it was delivered. A rollback tries to write the block again."""
        if entry.opening:
            self._openings.failed(entry, error)
            return
        waiter = entry.waiters.popleft() if entry.waiters else None
        self._fail(entry, waiter, error, f"the history could not be extended by chunk {entry.session.chunk_index - 1}")

    def _fail_flight(self, flight: Flight, error: Exception) -> None:
        self._flights.leave(flight.entry)
        if flight.run is not None:
            flight.run.rollback(flight.row)
        assert flight.waiter is not None
        self._tick_failed(flight.entry, flight.waiter, error)

    def _tick_failed(self, entry: Entry, waiter: Waiter, error: Exception) -> None:
        self.counters.chunks_failed += 1
        self._fail(entry, waiter, error, f"chunk {entry.session.chunk_index} failed")

    def _fail(self, entry: Entry, waiter: Waiter | None, error: Exception, what: str) -> None:
        """FAILED, nothing changed; keep or release worker state by policy; tell everybody who waits."""
        session = entry.session
        log.error("%s session_id=%s", what, session.id, exc_info=error)
        session.fail_tick()
        entry.needs_prefill = False
        shown = error if isinstance(error, OmniError) else TickError(what)
        keep = self.settings.keep_failed and not self.consumer.is_sticky(error)
        if not keep:
            self._endings.release_failed_session(entry)
        if waiter is not None:
            self._front.fail(waiter.ticket, shown, entry)
        refused = StateError("the session failed; reset, roll back or close it", code=ErrorCode.SESSION_FAILED)
        for other in entry.waiters:
            self._front.fail(other.ticket, refused, entry)
        entry.waiters.clear()
        self._front.notice("failed", entry, reason="failed", code=shown.code, message=shown.message)

    def _prefill_tick(self, entry: Entry) -> TickRequest:
        """The content, and all that it depends on, is in the session's state."""
        index = ChunkIndex(max(entry.session.chunk_index - 1, 0))
        return TickRequest(entry.session.id, f"prefill-{entry.session.id}-{index}", index, (), None, ())
