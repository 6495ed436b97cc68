"""How sessions branch and go back: fork and rewind.

Owns the order in which the pure session and the consumer follow, so that a refusal changes nothing. Never computes: a
fork and a rewind are exchanges of references, because committed pages and model states are never edited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from realtime_omni.clock import Clock
from realtime_omni.engine import commands as c
from realtime_omni.engine.consumer import TickConsumer
from realtime_omni.engine.entry import Entry
from realtime_omni.engine.front import Front
from realtime_omni.engine.openings import Openings
from realtime_omni.errors import AbortedError, ArgumentError, ErrorCode, StateError
from realtime_omni.session.controls import ControlReducer
from realtime_omni.session.registry import Registry
from realtime_omni.session.session import Memento, no_moment


class Branches:
    """Forks and rewinds sessions of one registry. ``stop`` takes a session out of a running batch and answers its waiters."""

    def __init__(
        self,
        registry: Registry[Entry],
        consumer: TickConsumer,
        front: Front,
        openings: Openings,
        clock: Clock,
        stop: Callable[[Entry, Exception], None],
    ) -> None:
        self._registry = registry
        self._consumer = consumer
        self._front = front
        self._openings = openings
        self._clock = clock
        self._stop = stop
        self.forked = 0

    def fork(self, parent: Entry, command: c.Fork) -> None:
        """Answer the view of a new session that is what ``parent`` is at its last committed chunk.

        The parent goes on undisturbed. Raises StateError (state, ``unsupported``, ``session_exists``), CapacityError."""
        self._require(parent, "fork")
        name, generation = self._registry.claim(command.name)
        session = parent.session.fork(name, generation, self._reducer(parent.session.memento()))
        self._openings.take_place_of_fork(parent.session.id, name)  # last: from here on nothing can fail
        now_s = self._clock.now_s()
        parent.last_used_at_s = now_s
        setup = replace(parent.setup, session_id=name)
        entry = Entry(session, setup, parent.outputs, created_at_s=now_s, last_used_at_s=now_s)
        self._registry.add(name, entry)
        self.forked += 1
        self._openings.go_on(entry, command.ticket)

    def rewind(self, entry: Entry, command: c.Rewind) -> None:
        """Answer the view of the session as it was when ``chunk_index`` was the next chunk, in a new epoch.

        What runs or waits is aborted, events that wait are discarded. Raises StateError (state, ``unsupported``) or
        ArgumentError (``not_retained``); nothing has changed then."""
        self._require(entry, "rewind")
        session = entry.session
        index = command.chunk_index
        if isinstance(index, bool) or not isinstance(index, int):
            raise ArgumentError("chunk_index must be an integer", path="chunk_index")
        retained = self._consumer.retained(session.id)
        if index != session.chunk_index and index not in retained:
            raise no_moment(index, min(retained, default=session.chunk_index), session.chunk_index)
        moment = session.moment(index)
        reducer = self._reducer(moment)
        self._stop(entry, AbortedError("the session was rewound"))
        if index < session.chunk_index:
            self._consumer.rewind(session.id, index)
        discarded = session.rewind(moment, reducer)
        entry.last_used_at_s = self._clock.now_s()
        entry.needs_prefill = self._consumer.needs_prefill(session.id)
        if discarded:
            self._front.notice("events_discarded", entry, reason="rewind", event_ids=discarded)
        self._front.ok(command.ticket, self._front.view(entry), entry)

    def _require(self, entry: Entry, call: str) -> None:
        entry.session.lifecycle.require(call)
        if not self._consumer.rewind_blocks:
            raise StateError(f"{call}: this model's sessions are no values", code=ErrorCode.UNSUPPORTED)
        if not entry.can_rollback:
            raise StateError(f"{call}: worker state was released when the tick failed; reset or close the session")

    def _reducer(self, moment: Memento) -> ControlReducer:
        """A fresh one that remembers what the session's did at ``moment``."""
        reducer = self._consumer.new_reducer()
        reducer.load(moment.memory)
        return reducer
