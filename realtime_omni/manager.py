"""SessionManager: the in-process API. An async face over the engine's two doors, and nothing more.

Owns tickets and handles: which future an answer belongs to, what the outside last saw of each session. All state of a session
is the engine's; a handle shows the view that came with the latest answer or notice.

    async with SessionManager.from_recipe("tiny-world") as manager:
        session = await manager.create_session(prompt="a snowy valley", seed=1)
        await session.accept_event(SessionEvent(0, controls=(ControlInput("camera", schema, data),)))
        chunk = await session.next_chunk()
        chunk.artifacts["frames"].data        # uint8 [T, C, H, W]

Cancelling ``next_chunk`` loses nothing: a tick that has not settled is rolled back, a chunk that was already committed is
handed to the next call.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realtime_omni.clock import Clock, MonotonicClock
from realtime_omni.config import Config, load
from realtime_omni.engine import commands as c
from realtime_omni.engine.accounting import MemoryBytes
from realtime_omni.engine.inbox import Inbox
from realtime_omni.engine.outbox import Outbox
from realtime_omni.engine.thread import EngineThread
from realtime_omni.errors import EngineError, ErrorCode, OmniError, SessionGoneError
from realtime_omni.handle import ENDS, Session
from realtime_omni.ids import random_request_id, random_seed, random_session_id
from realtime_omni.session.session import RequestIdFactory
from realtime_omni.session.values import SessionId

if TYPE_CHECKING:
    from realtime_omni.engine.consumer import TickConsumer
    from realtime_omni.engine.engine import Engine
    from realtime_omni.models.base import ModelSpec, WorldModel
    from realtime_omni.snapshot.snapshot import Snapshot

log = logging.getLogger(__name__)

SessionNotice = c.Notice
SessionInfo = c.SessionView
STUCK_AFTER_S = 60.0
"""No checkpoint for this long while work waits: the server reports itself unhealthy."""


@dataclass(frozen=True, slots=True)
class ManagerStatistics:
    """Counts since start and gauges of now."""

    sessions: int
    tombstones: int
    pages_used: int
    pages_total: int
    memory: MemoryBytes
    chunks_committed: int
    chunks_failed: int
    chunks_aborted: int
    ticks_settled: int
    mean_batch: float
    sessions_created: int
    sessions_evicted: int
    cleanup_failures: int
    inbox_depth: int
    inbox_refused: int
    outbox_depth: int
    progress_age_s: float


@dataclass(frozen=True, slots=True)
class Health:
    """``ok`` is judged by progress. ``reason`` is for people and names no path."""

    ok: bool
    reason: str


class SessionManager:
    """All sessions of one model in this process. Use as an async context manager."""

    def __init__(
        self,
        model: WorldModel | str | None = None,
        config: Config | None = None,
        *,
        consumer: TickConsumer | None = None,
        clock: Clock | None = None,
        mint: Callable[[], str] | None = None,
        request_ids: RequestIdFactory | None = None,
    ) -> None:
        """``model``: an object, or a name for the catalog (default: the configuration's). ``consumer``: run ticks elsewhere."""
        if isinstance(model, str):
            config = config if config is not None else load(model, {})
            model = None
        self.config = config if config is not None else Config()
        self._model = model
        self._consumer = consumer
        self._clock = clock if clock is not None else MonotonicClock()
        self._mint = mint if mint is not None else random_session_id
        self._request_ids = request_ids if request_ids is not None else random_request_id
        self._inbox = Inbox(self.config.engine.inbox)
        self._outbox = Outbox()
        self._thread = EngineThread(self._build, self._inbox, self._outbox, self._clock)
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._tickets = 0
        self._nudge: asyncio.Handle | None = None
        self._nudge_at_s = math.inf
        self._handles: dict[SessionId, Session] = {}
        self._graves: deque[SessionId] = deque(maxlen=1024)
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_recipe(
        cls, recipe: str | Path = "tiny-world", overrides: Sequence[str] = (), **parts: Any
    ) -> SessionManager:
        """A recipe's name or path; ``overrides`` like ``("engine.max_batch=4",)``, on top of the environment."""
        return cls(config=load(str(recipe), os.environ, overrides), **parts)

    async def __aenter__(self) -> SessionManager:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Load the model on the engine's thread. Raises ConfigError, BackendUnavailable, CapacityError."""
        self._loop = asyncio.get_running_loop()
        self._outbox.bind(self._wake)
        ready = asyncio.Event()
        self._thread.start(lambda: self._call_soon(ready.set))
        try:
            await ready.wait()  # not in a thread of its own: a start that is given up must not wait for the model
        except asyncio.CancelledError:
            self._thread.stop(0)
            raise
        self._thread.wait_ready()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Close every session, end the thread. Calls that still wait get an error with code ``shutdown``."""
        stopped = await asyncio.to_thread(self._thread.stop, timeout_s)
        self._deliver()
        self._outbox.bind(None)
        error = EngineError("the session manager has stopped", code=ErrorCode.SHUTDOWN)
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
                future.exception()
        self._futures.clear()
        if not stopped:
            log.error("the engine thread did not stop within %g s", timeout_s)

    async def create_session(
        self,
        session_id: str | None = None,
        *,
        prompt: str | None = None,
        seed: int | None = None,
        image: Any = None,
        start: str | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Session:
        """A new world.

        Args:
            session_id: 1-64 of ``A-Z a-z 0-9 . _ -``; minted when None.
            prompt: text, or the model's default.
            seed: 0..2^53; random when None. Same seed, same events: same world.
            image: uint8 RGB [H, W, 3] to start from, or ``start``: the name of a bundled picture.
            outputs: names of the artifacts every chunk carries (default: the primary one).

        Raises:
            StateError: the id exists (``session_exists``) or is a tombstone.
            CapacityError: no place is left.
            ArgumentError: ``prompt_unknown``, ``image_invalid`` or a value out of range.
        """
        ticket = self.next_ticket()
        command = c.Create(
            ticket=ticket,
            session_id=session_id,
            prompt=prompt,
            seed=random_seed() if seed is None else seed,
            image=image,
            start=start,
            outputs=None if outputs is None else tuple(outputs),
        )
        return await self.open_session(command)

    async def restore(self, snapshot: Snapshot, session_id: str | None = None) -> Session:
        """A session that goes on where a saved one was: same seed, same events, same chunks; on the same kind of device bit
        for bit. It takes a place as a new session does.

        Args:
            session_id: None: the id that it was saved with.

        Raises:
            SnapshotError: ``snapshot_foreign`` (another model, other weights, geometry or dtype), ``snapshot_corrupt``.
            StateError: the id exists (``session_exists``), or a foreign engine runs the model (``unsupported``).
            CapacityError: no place is left. EventQueueFullError: more events wait in it than ``engine.max_pending_events``.
        """
        return await self.open_session(c.Restore(ticket=self.next_ticket(), snapshot=snapshot, session_id=session_id))

    def get_session(self, session_id: str) -> Session:
        """Raises SessionGoneError: closed (``session_gone``) or never known (``session_not_found``)."""
        handle = self._handles.get(SessionId(session_id))
        if handle is not None:
            return handle
        if session_id in self._graves:
            raise SessionGoneError(f"session {session_id!r} is closed")
        raise SessionGoneError(f"session {session_id!r} is not known", code=ErrorCode.SESSION_NOT_FOUND)

    async def close_session(self, session_id: str, reason: str = "client") -> None:
        await self.get_session(session_id).close(reason)

    async def disconnect(self, session_id: str) -> None:
        await self.get_session(session_id).disconnect()

    def sessions(self) -> tuple[SessionInfo, ...]:
        return tuple(h.view for h in self._handles.values())

    def describe(self) -> ModelSpec:
        return self._engine.consumer.spec

    def start_image(self, name: str) -> bytes:
        """PNG bytes of a bundled start picture. Raises KeyError."""
        model = getattr(self._engine.consumer, "model", None)
        if model is None or name not in self.describe().starts:
            raise KeyError(name)
        data = model.start_image(name)
        assert isinstance(data, bytes)
        return data

    @property
    def max_sessions(self) -> int:
        return self._engine.settings.max_sessions

    def statistics(self) -> ManagerStatistics:
        engine, counters = self._engine, self._engine.counters
        views = self.sessions()
        inbox, outbox = self._inbox.statistics(), self._outbox.statistics()
        used, total = engine.consumer.pages()
        return ManagerStatistics(
            sessions=len(views),
            tombstones=sum(v.state == "cleanup_failed" for v in views),
            pages_used=used,
            pages_total=total,
            memory=engine.consumer.memory(),
            chunks_committed=counters.chunks_committed,
            chunks_failed=counters.chunks_failed,
            chunks_aborted=counters.chunks_aborted,
            ticks_settled=counters.ticks_settled,
            mean_batch=counters.batch_rows / counters.ticks_settled if counters.ticks_settled else 0.0,
            sessions_created=engine.sessions_created,
            sessions_evicted=engine.sessions_evicted,
            cleanup_failures=engine.cleanup_failures,
            inbox_depth=inbox.depth + inbox.control_depth,
            inbox_refused=inbox.refused,
            outbox_depth=outbox.depth,
            progress_age_s=self._thread.pulse().progress_age_s,
        )

    def health(self) -> Health:
        """From progress: a live thread that settles nothing, or a pool that leaks, is not healthy."""
        pulse = self._thread.pulse()
        if pulse.fatal is not None:
            return Health(False, "the engine has stopped after an internal error")
        if not pulse.running:
            return Health(False, "the engine is not running")
        if pulse.progress_age_s > STUCK_AFTER_S:
            return Health(False, f"no progress for {pulse.progress_age_s:.0f} s")
        if (fault := self._engine.consumer.fault) is not None:
            return Health(False, f"{fault}; start the server again")
        used, total = self._engine.consumer.pages()
        if not len(self._engine.registry) and used:
            return Health(False, f"{used} of {total} pages are held by no session")
        return Health(True, "ok")

    # ------------------------------------------------------------------ doors (used by handles)

    def now_s(self) -> float:
        """The engine's clock."""
        return self._clock.now_s()

    def next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def send(self, command: c.Command, *, within_s: float | None = None) -> asyncio.Future[Any]:
        """Post a command; the future gets its answer.

        ``within_s``: a sleeping engine is woken so much later (0: in the loop's next round), once for this and for what is
        sent until then, or with the next command that cannot wait."""
        if self._loop is None:
            raise EngineError("the session manager is not started")
        self._inbox.put(command, quiet=within_s is not None)
        if within_s is not None:
            self._nudge_within(within_s)
        elif self._nudge is not None:
            self._end_nudge(self._nudge)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._futures[command.ticket] = future
        return future

    def expect(self, ticket: int) -> asyncio.Future[Any]:
        """A new future for an answer that has not come, in place of one that was cancelled with its caller."""
        assert self._loop is not None
        future = self._futures[ticket] = self._loop.create_future()
        return future

    def _nudge_within(self, within_s: float) -> None:
        """Wake the engine then, unless it is to be woken before."""
        assert self._loop is not None
        at_s = self._loop.time() + within_s
        if self._nudge is not None:
            if self._nudge_at_s <= at_s:
                return
            self._end_nudge(self._nudge)
        self._nudge_at_s = at_s
        wake = self._wake_engine
        self._nudge = self._loop.call_later(within_s, wake) if within_s else self._loop.call_soon(wake)

    def _end_nudge(self, nudge: asyncio.Handle) -> None:
        nudge.cancel()
        self._nudge = None

    def _wake_engine(self) -> None:
        self._nudge = None
        self._inbox.nudge()

    async def open_session(self, command: c.Create | c.Fork | c.Restore) -> Session:
        """Post a command that opens a session; should its caller go away, the session is closed again."""
        future = self.send(command)
        try:
            handle = await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._close_unwanted)
            raise
        assert isinstance(handle, Session)
        return handle

    def post(self, command: c.Command) -> None:
        """Post a command without an answer."""
        self._inbox.put(command)

    @property
    def _engine(self) -> Engine:
        engine = self._thread.engine
        if engine is None:
            raise EngineError("the session manager is not started")
        return engine

    def _build(self, inbox: Inbox, outbox: Outbox) -> Engine:
        from realtime_omni.build import build_engine

        return build_engine(
            self.config,
            inbox,
            outbox,
            clock=self._clock,
            mint=self._mint,
            request_ids=self._request_ids,
            model=self._model if not isinstance(self._model, str) else None,
            consumer=self._consumer,
        )

    def _handle(self, view: c.SessionView) -> Session:
        handle = self._handles.get(view.session_id)
        if handle is None or handle.view.generation != view.generation:
            handle = self._handles[view.session_id] = Session(self, view)
        return handle

    def _close_unwanted(self, future: asyncio.Future[Any]) -> None:
        """A create whose caller was cancelled has nobody to close it."""
        if not future.cancelled() and future.exception() is None:
            view = future.result().view
            try:
                self.post(c.Close(ticket=0, session_id=view.session_id, generation=view.generation, reason="client"))
            except OmniError:
                log.warning("close was refused session_id=%s", view.session_id)

    def _wake(self) -> None:
        self._call_soon(self._deliver)

    def _call_soon(self, callback: Callable[[], object]) -> None:
        """From the engine's thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            log.debug("the event loop is closed")

    def _deliver(self) -> None:
        for entry in self._outbox.take():
            if isinstance(entry, c.Notice):
                self._deliver_notice(entry)
            else:
                self._deliver_answer(entry)

    def _deliver_answer(self, answer: c.Answer) -> None:
        if answer.view is not None and answer.view.session_id in self._handles:
            self._handles[answer.view.session_id]._see(answer.view)
        value = answer.value
        if isinstance(value, c.SessionView):
            # Now: the next notice may end the session already, and a handle made after it would stay for ever.
            value = self._handle(value)
        future = self._futures.pop(answer.ticket, None)
        if future is None or future.done():
            if answer.view is not None and answer.view.session_id in self._handles:
                self._handles[answer.view.session_id]._missed(answer)
            return
        if answer.error is not None:
            future.set_exception(answer.error)
            future.exception()  # a caller that went away has not "forgotten" it
        else:
            future.set_result(value)

    def _deliver_notice(self, notice: c.Notice) -> None:
        handle = self._handles.get(notice.session_id)
        if handle is None and notice.kind == "cleanup_failed":
            handle = self._handle(notice.view)  # its create failed, and now it is a tombstone: seen, counted, closable
        if handle is None or handle.view.generation != notice.generation:
            return
        if notice.kind in ENDS:
            del self._handles[notice.session_id]
            self._graves.append(notice.session_id)
        handle._notify(notice)


__all__ = [
    "Health",
    "ManagerStatistics",
    "Session",
    "SessionInfo",
    "SessionManager",
    "SessionNotice",
]
