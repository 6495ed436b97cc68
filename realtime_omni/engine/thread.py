"""The thread that runs an engine: cycle while there is work, else wait for the inbox or the next deadline.

Owns the thread and nothing of the engine's state. An exception that escapes a cycle is ours and fatal: every session's callers
are told, and the engine stops taking commands. Health is read from other threads, as plain numbers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from realtime_omni.clock import Clock
from realtime_omni.engine.commands import Answer, Command
from realtime_omni.engine.engine import Engine
from realtime_omni.engine.inbox import Inbox
from realtime_omni.engine.outbox import Outbox
from realtime_omni.errors import EngineError, ErrorCode

log = logging.getLogger(__name__)

LAST_RELEASES_S = 5.0
LAST_LOOK_S = 0.01
"""At shutdown: how long workers that release slowly are waited for, and how often they are asked."""
LONGEST_WAIT_S = 1.0
"""The idle thread looks around once a second, so that its heartbeat shows it is alive."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """What health is made of. ``progress_age_s``: since the last finished cycle or checkpoint."""

    running: bool
    fatal: str | None
    progress_age_s: float


class EngineThread:
    """Starts, stops and watches the engine's thread. ``build`` runs on that thread, so that the model is born there."""

    def __init__(self, build: Callable[[Inbox, Outbox], Engine], inbox: Inbox, outbox: Outbox, clock: Clock) -> None:
        self._build = build
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._pause = threading.Event()
        self._startup_error: BaseException | None = None
        self._fatal: str | None = None
        self._thread = threading.Thread(target=self._main, name="realtime-omni-engine", daemon=True)
        self.engine: Engine | None = None

    def start(self, on_ready: Callable[[], object] = lambda: None) -> None:
        """``on_ready`` is called on the engine's thread when :meth:`wait_ready` would not block any more."""
        self._on_ready = on_ready
        self._thread.start()

    def wait_ready(self, timeout_s: float | None = None) -> Engine:
        """Blocks until the model is loaded. Raises what loading raised."""
        if not self._ready.wait(timeout_s):
            raise EngineError("the model did not load in time")
        if self._startup_error is not None:
            raise self._startup_error
        assert self.engine is not None
        return self.engine

    def stop(self, timeout_s: float) -> bool:
        """Close all sessions, release everything, end the thread; False when it did not end in time."""
        self._stopping.set()
        self._inbox.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if not ended:  # it hangs in the model and will not read the inbox any more
            self._refuse_all(self._inbox.close(), EngineError("the engine hangs", code=ErrorCode.SHUTDOWN))
        return ended

    def pulse(self) -> Pulse:
        engine = self.engine
        age_s = 0.0 if engine is None else self._clock.now_s() - engine.progress_at_s
        return Pulse(self._thread.is_alive() and engine is not None, self._fatal, age_s)

    def _main(self) -> None:
        try:
            engine = self._build(self._inbox, self._outbox)
        except BaseException as error:
            self._startup_error = error
            self._ready.set()
            self._on_ready()
            return
        self.engine = engine
        self._ready.set()
        self._on_ready()
        try:
            self._loop(engine)
        except BaseException as error:  # a model may raise anything: whoever waits must hear of it
            self._fatal = type(error).__name__
            log.critical("engine stopped", exc_info=error)
            stopped = EngineError("the engine has stopped", code=ErrorCode.INTERNAL)
            unread = self._inbox.close()
            engine.abandon(stopped)
            self._refuse_all(unread, stopped)
        finally:
            self._inbox.close()
            engine.consumer.close()

    def _loop(self, engine: Engine) -> None:
        while not self._stopping.is_set():
            engine.cycle()
            if engine.has_work():
                continue
            deadline_s = engine.next_deadline_s()
            wait_s = LONGEST_WAIT_S
            if deadline_s is not None:
                wait_s = min(max(deadline_s - self._clock.now_s(), 0.0), LONGEST_WAIT_S)
            if wait_s > 0:
                self._inbox.wait(wait_s)
        engine.absorb()
        engine.close_all("shutdown")
        for _ in range(int(LAST_RELEASES_S / LAST_LOOK_S)):
            if not engine.is_closing():
                break
            engine.reap()
            self._pause.wait(LAST_LOOK_S)
        self._refuse_all(self._inbox.close(), EngineError("the engine is shutting down", code=ErrorCode.SHUTDOWN))

    def _refuse_all(self, waiting: list[Command], error: EngineError) -> None:
        for command in waiting:
            if command.ticket:
                self._outbox.put(Answer(ticket=command.ticket, error=error))
