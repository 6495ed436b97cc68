"""How sessions begin, and begin again: a place at the consumer, the prefill, the answer.

Owns the way from "asked for" to "open": create and reset both end here. Knows nothing of ticks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from realtime_omni.clock import Clock
from realtime_omni.engine.consumer import Release, TickConsumer
from realtime_omni.engine.endings import Endings
from realtime_omni.engine.entry import Entry
from realtime_omni.engine.front import Front
from realtime_omni.errors import CapacityError, OmniError, TickError
from realtime_omni.models.base import SessionSetup
from realtime_omni.session.lifecycle import SessionState, Trigger
from realtime_omni.session.registry import Registry
from realtime_omni.session.values import SessionId

log = logging.getLogger(__name__)


class After:
    """A reset that begins when the release of the failed tick, which is under way, has succeeded."""

    def __init__(self, release: Release, begin: Callable[[], Release]) -> None:
        self._release = release
        self._begin = begin
        self._reset: Release | None = None

    def poll(self) -> bool:
        if self._reset is None:
            if not self._release.poll():
                return False
            self._reset = self._begin()
        return self._reset.poll()


class Openings:
    """Opens sessions of one registry."""

    def __init__(
        self,
        registry: Registry[Entry],
        consumer: TickConsumer,
        front: Front,
        endings: Endings,
        clock: Clock,
        *,
        max_sessions: int,
        evict: bool,
    ) -> None:
        self._registry = registry
        self._consumer = consumer
        self._front = front
        self._endings = endings
        self._clock = clock
        self._max_sessions = max_sessions
        self._evict = evict

    def take_place(self, setup: SessionSetup) -> None:
        """Open the session at the consumer. A full server refuses, or closes its oldest idle session first.

        Raises CapacityError, or what the consumer has against the setup; nobody is evicted for a setup that cannot be."""
        if len(self._registry) >= self._max_sessions:
            self._consumer.check_setup(setup)
        self._take(lambda: self._consumer.open(setup))

    def take_place_of_saved(self, check: Callable[[], None], adopt: Callable[[], None]) -> None:
        """The same for a saved session. Raises CapacityError, or what the consumer has against the saved state."""
        if len(self._registry) >= self._max_sessions:
            check()
        self._take(adopt)

    def take_place_of_fork(self, parent: SessionId, name: SessionId) -> None:
        """The same for a fork. Raises CapacityError; the parent is never evicted for its fork."""
        self._take(lambda: self._consumer.fork(parent, name), spared=parent)

    def _take(self, open_: Callable[[], None], spared: SessionId | None = None) -> None:
        if len(self._registry) >= self._max_sessions and not self._evict_one(spared):
            raise CapacityError(f"all {self._max_sessions} sessions are taken")
        try:
            open_()
        except CapacityError:
            if not self._evict_one(spared):
                raise
            open_()

    def _evict_one(self, spared: SessionId | None) -> bool:
        """Close the least recently used idle session; True when its place is free now.

        A victim whose cleanup fails frees nothing, and the next one is tried: its fault is not the newcomer's. While a
        close takes time no other session is evicted: a place will be free soon."""
        while self._evict and not any(e.session.state is SessionState.CLOSING for e in self._registry):
            victim = self._victim(spared)
            if victim is None:
                return False
            self._endings.close(victim, "evicted")
            if victim.session.state is SessionState.CLOSED:
                return True
        return False

    def _victim(self, spared: SessionId | None) -> Entry | None:
        """A failed session whose worker state is gone costs nobody a world; else the least recently used idle one."""
        idle = [e for e in self._registry if e.is_idle and e.session.id != spared]
        released = [e for e in idle if e.released]
        if released:
            return min(released, key=lambda e: e.last_used_at_s)
        oldest = self._consumer.oldest([e.session.id for e in idle])
        return None if oldest is None else self._registry.get(oldest)

    def begin(self, entry: Entry, ticket: int) -> None:
        """The place is taken: open at once, or after the prefill. ``ticket`` is answered then."""
        entry.opening.append(ticket)
        entry.needs_prefill = self._consumer.needs_prefill(entry.session.id)
        if not entry.needs_prefill:
            self.opened(entry)

    def go_on(self, entry: Entry, ticket: int) -> None:
        """A session with a past (a fork, a restored one) is open at once, whatever it still has to write."""
        entry.needs_prefill = self._consumer.needs_prefill(entry.session.id)
        self._front.ok(ticket, self._front.view(entry), entry)

    def opened(self, entry: Entry) -> None:
        """Everything is in place; a reset becomes visible only now."""
        if entry.session.state is SessionState.RESETTING:
            try:
                discarded = entry.session.finish_reset(entry.setup.origin)
            except Exception as error:  # the reducer's
                tickets, entry.opening = tuple(entry.opening), []
                self.reset_failed(entry, error, tickets)
                return
            entry.released = False
            if discarded:
                self._front.notice("events_discarded", entry, reason="reset", event_ids=discarded)
        for ticket in entry.opening:
            self._front.ok(ticket, self._front.view(entry), entry)
        entry.opening.clear()

    def failed(self, entry: Entry, error: Exception) -> None:
        """The prefill failed: a new session is closed again, a reset one is FAILED."""
        log.error("opening failed session_id=%s", entry.session.id, exc_info=error)
        tickets, entry.opening = tuple(entry.opening), []
        if entry.session.state is SessionState.RESETTING:
            self.reset_failed(entry, error, tickets)
            return
        refused = error if isinstance(error, OmniError) else TickError("the model could not start the session")
        for ticket in tickets:
            self._front.fail(ticket, refused)
        self._endings.close(entry, "failed")

    def reset(self, entry: Entry, setup: SessionSetup, ticket: int) -> None:
        """Start over with ``setup``; the caller has taken the session out of a running batch.

        A setup that the consumer refuses changes nothing and raises."""
        entry.session.lifecycle.require("reset")
        try:
            if entry.closing is None:
                entry.resetting = self._consumer.reset(setup)
            else:
                entry.resetting, entry.closing = After(entry.closing, lambda: self._consumer.reset(setup)), None
        except OmniError:
            raise
        except Exception as error:
            entry.session.begin_reset()
            self.reset_failed(entry, error, (ticket,))
            return
        entry.session.begin_reset()
        entry.needs_prefill = False  # what the old state carried is given up with it
        entry.setup = setup
        entry.opening.append(ticket)
        self.poll_reset(entry)

    def poll_reset(self, entry: Entry) -> None:
        """Move a worker reset that takes time."""
        assert entry.resetting is not None
        try:
            if not entry.resetting.poll():
                return
        except Exception as error:
            tickets, entry.opening = tuple(entry.opening), []
            self.reset_failed(entry, error, tickets)
            return
        entry.resetting = None
        self.begin(entry, entry.opening.pop())

    def reset_failed(self, entry: Entry, error: Exception, tickets: Iterable[int]) -> None:
        """FAILED, worker state released: reset again, or close."""
        log.error("reset failed session_id=%s", entry.session.id, exc_info=error)
        entry.resetting = None
        entry.session.lifecycle.move(Trigger.RESET_FAILED)
        refused = error if isinstance(error, OmniError) else TickError("the reset failed; reset again or close")
        for ticket in tickets:
            self._front.fail(ticket, refused, entry)
        self._endings.release_failed_session(entry)
