"""Flights: the sessions whose ticks run, and how their batches are computed, checkpoint by checkpoint.

Owns who is flying, with what run, and what came of it; settling is the engine's. There are two ways to compute. ``drive``
takes a batch from its first checkpoint to its last: a world's tick. ``step`` takes one checkpoint of a batch that sessions
join and leave while it runs (``spec.continuous``): a policy's. Either way a batch that fails as a whole is computed again
row by row, so that one member's fault stays its own; while that lasts, nobody joins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from realtime_omni.clock import Clock
from realtime_omni.engine.consumer import PlannedRow, TickConsumer, TickRun
from realtime_omni.engine.entry import Entry, Waiter
from realtime_omni.models.base import RowOutput
from realtime_omni.session.values import SessionId

Plan = Callable[[list[PlannedRow]], TickRun]


@dataclass(slots=True, eq=False)
class Flight:
    """One session whose tick runs. ``waiter`` is None for a prefill."""

    entry: Entry
    planned: PlannedRow
    waiter: Waiter | None
    began_at_s: float
    run: TickRun | None = None
    row: int = 0
    alone: bool = False
    """The batch it was in has failed as a whole: it is computed again by itself."""
    result: RowOutput | Exception | None = None
    model_s: float = 0.0
    stages_s: dict[str, float] = field(default_factory=dict)
    """What the pieces took that were computed while it was in their batch."""
    together: int = 1
    """The most rows that one of these pieces had."""

    def enter(self, run: TickRun, row: int) -> None:
        self.run, self.row = run, row


@dataclass(slots=True)
class EngineCounters:
    ticks_settled: int = 0
    chunks_committed: int = 0
    chunks_failed: int = 0
    chunks_aborted: int = 0
    isolated_reruns: int = 0
    """Rows that were computed again because their batch had failed as a whole."""
    batch_rows: int = 0


class Flights:
    """All flights, in the order in which they began."""

    def __init__(
        self, consumer: TickConsumer, clock: Clock, counters: EngineCounters, absorb: Callable[[], None]
    ) -> None:
        """``absorb``: what happens between two checkpoints; it may make flights leave."""
        self._consumer = consumer
        self._clock = clock
        self._counters = counters
        self._absorb = absorb
        self._flights: dict[SessionId, Flight] = {}
        self.progress_at_s = clock.now_s()

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        """Those of this moment; who leaves meanwhile is still named."""
        return iter(tuple(self._flights.values()))

    def __contains__(self, flight: Flight) -> bool:
        return self._flights.get(flight.entry.session.id) is flight

    @property
    def may_join(self) -> bool:
        """Nobody is computed again by itself."""
        return not any(flight.alone for flight in self)

    def board(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            self._flights[flight.entry.session.id] = flight
            flight.entry.flying = True
            flight.entry.flying_ticket = flight.waiter.ticket if flight.waiter else 0

    def leave(self, entry: Entry) -> Flight | None:
        entry.flying = False
        return self._flights.pop(entry.session.id, None)

    # ------------------------------------------------------------------ a batch as a whole

    def drive(self, flights: list[Flight], plan: Plan) -> None:
        """Run flights to their results: together first, one by one when together failed."""
        groups: deque[list[Flight]] = deque([flights])
        while groups:
            group = [f for f in groups.popleft() if f in self]
            if not group:
                continue
            error = self._compute(group, plan)
            live = [f for f in group if f in self]
            if error is None:
                for flight in live:
                    assert flight.run is not None
                    flight.result = flight.run.outcome(flight.row)
            elif len(live) > 1 and not self._consumer.is_sticky(error):
                self._counters.isolated_reruns += len(live)
                groups.extendleft([f] for f in reversed(live))
            else:
                for flight in live:
                    flight.result = error

    def _compute(self, group: list[Flight], plan: Plan) -> Exception | None:
        """One run of one group; returns what stopped it. After an error nothing is reserved any more."""
        run = group[0].run
        try:
            if run is None:
                run = plan([f.planned for f in group])
                for row, flight in enumerate(group):
                    flight.enter(run, row)
            more = True
            while more:
                more = self._advance(run)
                self._absorb()  # also after the last piece: what arrived before the commit acts before it
        except Exception as error:
            if run is not None:
                run.close()
            for flight in group:
                flight.run = None
            return error
        return None

    # ------------------------------------------------------------------ a batch that sessions join and leave

    def join(self, flights: Sequence[Flight]) -> None:
        """Put flights into the batch that runs, or into a new one. Those that find no place together are tried alone."""
        planned = [flight.planned for flight in flights]
        run = self._running()
        try:
            if run is None:
                run = self._consumer.plan(planned)
                rows: Sequence[int] = range(len(planned))
            else:
                rows = run.join(planned)
        except Exception:
            for flight in flights:
                flight.alone = True
            return
        for flight, row in zip(flights, rows, strict=True):
            flight.enter(run, row)

    def step(self) -> None:
        """One checkpoint of the batch that runs; whoever is done has a result afterwards."""
        run = self._running() or self._run_alone()
        if run is None:
            return
        try:
            more = self._advance(run)
        except Exception as error:
            self._fall_apart(run, error)
        else:
            for flight in self:
                if flight.run is run and (run.is_done(flight.row) or not more):
                    flight.result = run.outcome(flight.row)
        self._absorb()  # what arrived before a commit acts before it

    def _running(self) -> TickRun | None:
        return next((flight.run for flight in self if flight.run is not None), None)

    def _run_alone(self) -> TickRun | None:
        flight = next((f for f in self if f.result is None), None)
        if flight is None:
            return None
        try:
            flight.enter(self._consumer.plan([flight.planned]), 0)
        except Exception as error:
            flight.result = error
        return flight.run

    def _fall_apart(self, run: TickRun, error: Exception) -> None:
        run.close()
        members = [flight for flight in self if flight.run is run]
        for flight in members:
            flight.run = None
        if len(members) == 1 or self._consumer.is_sticky(error):
            for flight in members:
                flight.result = error
            return
        self._counters.isolated_reruns += len(members)
        for flight in members:
            flight.alone = True

    def _advance(self, run: TickRun) -> bool:
        members = [flight for flight in self._flights.values() if flight.run is run]
        together = len(members)
        began_s, stage = self._clock.now_s(), run.stage
        more = run.advance()
        self.progress_at_s = now_s = self._clock.now_s()
        spent_s = now_s - began_s
        for flight in members:
            flight.model_s += spent_s
            flight.stages_s[stage] = flight.stages_s.get(stage, 0.0) + spent_s
            if together > flight.together:
                flight.together = together
        return more
