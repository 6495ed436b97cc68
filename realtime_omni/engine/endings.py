"""How sessions end: close, release, tombstone, retry, expiry.

Owns the order "release, then bury": a closing session keeps its id, slot and pages until the release succeeded. A release that
fails leaves a tombstone that blocks the id and is tried again with growing pauses and whenever somebody asks for close again;
no other session notices.
"""

from __future__ import annotations

import logging

from realtime_omni.clock import Clock
from realtime_omni.engine.consumer import TickConsumer
from realtime_omni.engine.entry import Entry
from realtime_omni.engine.front import Front
from realtime_omni.errors import CleanupError, ErrorCode, SessionGoneError
from realtime_omni.session.lifecycle import SessionState, Trigger
from realtime_omni.session.registry import Registry

log = logging.getLogger(__name__)


class Endings:
    """Closes sessions of one registry. The caller has withdrawn a running tick before."""

    def __init__(self, registry: Registry[Entry], consumer: TickConsumer, front: Front, clock: Clock) -> None:
        self._registry = registry
        self._consumer = consumer
        self._front = front
        self._clock = clock
        self.cleanup_failures = 0
        self.evicted = 0

    def close(self, entry: Entry, reason: str, ticket: int = 0) -> None:
        """Begin, join or retry closing; ``ticket`` is answered when it is over."""
        session = entry.session
        if ticket:
            entry.closers.append(ticket)
        if session.state is SessionState.CLOSING:
            return
        gone = SessionGoneError(f"session {session.id!r} was closed: {reason}")
        for waiter in entry.waiters:
            self._front.fail(waiter.ticket, gone)
        entry.waiters.clear()
        for opener in entry.opening:
            self._front.fail(opener, gone)
        entry.opening.clear()
        entry.needs_prefill = False
        entry.resetting = None
        entry.lease_until_s = None
        entry.close_reason = entry.close_reason or reason
        session.lifecycle.move(Trigger.CLOSE)
        if entry.closing is None:  # else the release of a failed tick is under way, and this close joins it
            self._release(entry)

    def release_failed_session(self, entry: Entry) -> None:
        """``on_failure: release``: a FAILED session gives its worker state back at once and keeps only its id."""
        entry.released = True
        entry.needs_prefill = False
        self._release(entry)

    def poll(self, entry: Entry) -> None:
        """Move a release that takes time; retry a tombstone whose pause is over; close a session whose lease ran out."""
        now_s = self._clock.now_s()
        if entry.closing is not None:
            self._poll_release(entry)
        elif entry.retry_at_s is not None and now_s >= entry.retry_at_s:
            self.close(entry, entry.close_reason)

    def expired(self, entry: Entry) -> bool:
        """Whether nobody came back within the grace."""
        return entry.lease_until_s is not None and self._clock.now_s() >= entry.lease_until_s

    def _release(self, entry: Entry) -> None:
        entry.retry_at_s = None
        try:
            entry.closing = self._consumer.release(entry.session.id)
        except Exception as error:
            self._release_failed(entry, error)
            return
        self._poll_release(entry)

    def _poll_release(self, entry: Entry) -> None:
        assert entry.closing is not None
        try:
            done = entry.closing.poll()
        except Exception as error:
            self._release_failed(entry, error)
            return
        if not done:
            return
        entry.closing = None
        if entry.session.state is SessionState.CLOSING:
            self._bury(entry)

    def _bury(self, entry: Entry) -> None:
        entry.session.lifecycle.move(Trigger.RELEASED)
        reason = entry.close_reason
        self.evicted += reason == "evicted"
        self._registry.bury(entry.session.id, reason, self._clock.now_s())
        # The notice first: whoever has waited for the close finds everybody told.
        self._front.notice("evicted" if reason == "evicted" else "closed", entry, reason=reason)
        for ticket in entry.closers:
            self._front.ok(ticket, None, entry)
        entry.closers.clear()

    def _release_failed(self, entry: Entry, error: Exception) -> None:
        session = entry.session
        entry.closing = None
        self.cleanup_failures += 1
        log.error("cleanup failed session_id=%s error=%s", session.id, error, exc_info=error)
        session.lifecycle.move(Trigger.RELEASE_FAILED)
        entry.close_reason = entry.close_reason or "cleanup_failed"
        entry.back_off(self._clock.now_s())
        refused = CleanupError(f"cleanup of session {session.id!r} failed; it is retried")
        for ticket in entry.closers:
            self._front.fail(ticket, refused, entry)
        entry.closers.clear()
        self._front.notice(
            "cleanup_failed", entry, reason=entry.close_reason, code=ErrorCode.CLEANUP_FAILED, message=refused.message
        )
