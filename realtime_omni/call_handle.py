"""The handle of one call: what a caller holds, and the frames that the engine has of it.

Owns the futures of those frames, and the way back when one fails or the model is rewound. What the call says and when it
stops is :class:`~realtime_omni.duplex.session.DuplexSession`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from realtime_omni.duplex.attachment import Attachment
from realtime_omni.duplex.journal import Lost
from realtime_omni.duplex.outputs import Ended, InterruptReason, Output
from realtime_omni.duplex.session import DuplexSession, Feed
from realtime_omni.duplex.spec import DuplexSpec
from realtime_omni.engine.commands import Notice
from realtime_omni.errors import AbortedError, ErrorCode, OmniError, SessionGoneError, StateError, TickError
from realtime_omni.handle import ENDS, Session
from realtime_omni.ids import random_token
from realtime_omni.session.frame import Directive
from realtime_omni.session.values import Chunk, SessionId

if TYPE_CHECKING:
    from realtime_omni.call import Calls

log = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Of one frame. It is fed again once as it was, then as silence; then the call ends."""


class Call:
    """One call. Made by :meth:`Calls.open`. Safe to share between tasks of one event loop."""

    def __init__(self, calls: Calls, session: Session, duplex: DuplexSession, phase: int) -> None:
        self.resume_token: str | None = random_token()
        """Opens the call once more (:meth:`Calls.resume`). Handed out to its first holder; not kept after the first resume."""
        self.attachment = Attachment(self.resume_token)
        self.phase = phase
        self.duplex = duplex
        self._calls = calls
        self._session = session
        self._futures: set[asyncio.Future[Chunk]] = set()
        self._failures: Counter[int] = Counter()
        self._postponed_ms: float | None = None
        self._rewind_to: int | None = None
        self._mending: asyncio.Task[None] | None = None
        self._changed: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None
        self._unsubscribe = session.subscribe(self._noticed)

    @property
    def id(self) -> SessionId:
        return self._session.id

    @property
    def spec(self) -> DuplexSpec:
        return self.duplex.spec

    @property
    def session(self) -> Session:
        """The session below: to fork, save or look at it. Its frames are the call's alone."""
        return self._session

    @property
    def now_ms(self) -> float:
        """The session's clock: how much sound was taken in."""
        return self.duplex.now_ms

    # ------------------------------------------------------------------ in: all of these act before they return

    def append(self, audio: NDArray[np.float32], sequence: int | None = None) -> bool:
        """Sound from the client: float32 [N], -1..1, mono, at ``spec.input_rate_hz``, any N.

        ``sequence``: numbers packets by ones, so that one that is sent twice is taken once (False) and one that is lost becomes
        silence. Raises ArgumentError, EventQueueFullError (too much waits; nothing was taken), SessionGoneError."""
        return self.duplex.append(audio, self._now_s(), sequence)

    def direct(self, *directives: Directive) -> None:
        """What acts at the beginning of the next frame, in order; the tick that reflects it names it.

        Raises ArgumentError (``unsupported``: this model cannot), CapacityError, SessionGoneError; nothing has changed then."""
        self.duplex.direct(*directives)

    def interrupt(self, heard_ms: float | None = None, reason: InterruptReason = "client_cancelled") -> None:
        """Stop what is said, and what was asked for and is not said yet. When this returns it has happened: no output that is
        read from now on carries any of it, and what is directed from now on comes after.

        ``heard_ms``: how much of the response's sound the user heard; None: what was sent by now. The conversation keeps no
        more. Raises SessionGoneError."""
        oldest = self._session.oldest_rewind
        self._follow(self.duplex.interrupt(self._now_s(), heard_ms=heard_ms, reason=reason, oldest_rewind=oldest))

    def truncate(self, response: str, heard_ms: float) -> float | None:
        """The client says how much it played of a response. One that runs is interrupted. Returns what stays (never more than
        was sent), or None for a response that is not known."""
        if response == self.duplex.response:
            self.interrupt(heard_ms)
            return self.played(response, heard_ms)
        return self.duplex.truncate(response, heard_ms, self._now_s())

    def played(self, response: str, ms: float) -> float | None:
        """The client says how much it has played so far. Returns what is believed of it."""
        return self.duplex.played(response, ms)

    def mute(self, muted: bool) -> None:
        """While muted the model hears silence."""
        self.duplex.muted = muted

    def clear(self) -> None:
        """Forget sound that was appended and not taken in."""
        self.duplex.clear()

    # ------------------------------------------------------------------ out

    async def outputs(
        self, after: int = 0, generation: int | None = None
    ) -> AsyncGenerator[tuple[int, Output | Lost], None]:
        """Everything told behind number ``after``, with its number, as it comes; the last is :class:`Ended`.

        Any number of readers may. One that is slow misses sound first (a tick then has none), and then gets ``Lost``.
        ``generation``: of the holder that reads; when another takes over, ``Ended("taken_over")`` is its last."""
        while True:
            if generation is not None and generation != self.attachment.generation:
                yield after, Ended("taken_over")
                return
            found = self.duplex.read(after, 1)  # one by one: an interruption between two must reach the second
            if not found:
                await self._wait()
                continue
            ((after, output),) = found
            yield after, output
            if isinstance(output, Ended):
                return

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Instead of :meth:`outputs`, for one reader that has no task of its own: ``listener``, which must not raise, is called
        when there may be something new to read (``duplex.read``). For a tick that is at once, without a task's turn for each
        of a thousand a second. For anything else it is in the loop's next round, so never in the middle of what the reader
        does to the call."""
        self._listener = listener

    async def close(self, reason: str = "client") -> None:
        """End the call and release its session. Idempotent; raises CleanupError when the release failed (it is retried)."""
        self._end(reason)
        await self._session.close(reason)

    async def detach(self, grace_s: float) -> None:
        """Nobody listens any more; it goes on, and ends by itself unless :meth:`attach` comes within ``grace_s`` seconds."""
        await self._session.detach(grace_s)

    async def attach(self) -> None:
        """Somebody is back, and reads on with ``outputs(after=...)``. Raises SessionGoneError when the grace is over."""
        await self._session.attach()

    # ------------------------------------------------------------------ the clock

    def pulse(self, now_s: float) -> None:
        """Hand over every frame that is due. Called by the clock of all calls; a fault of one call ends that one alone."""
        try:
            if self._mending is None:
                self._hand_over(now_s)
        except Exception:
            self._break()

    def _hand_over(self, now_s: float) -> None:
        feeds = self.duplex.due(now_s)
        if not feeds and self.duplex.now_ms != self._postponed_ms and self.duplex.intake.starves(now_s):
            self._postponed_ms = self.duplex.now_ms  # once a frame: who is late by more is late
            self._calls.postpone(self)
        for feed in feeds:
            try:
                future = self._session.feed(feed.frame)
            except OmniError as error:
                self._failed(feed, error)
                return
            self._futures.add(future)
            future.add_done_callback(partial(self._settled, feed, now_s))

    def _settled(self, feed: Feed, due_s: float, future: asyncio.Future[Chunk]) -> None:
        try:
            self._take_answer(feed, due_s, future)
        except Exception:
            self._break()

    def _take_answer(self, feed: Feed, due_s: float, future: asyncio.Future[Chunk]) -> None:
        self._futures.discard(future)
        if future.cancelled() or self.duplex.ended is not None:
            return
        error = future.exception()
        if error is not None:
            self._failed(feed, error)
            return
        chunk = future.result()
        if chunk.chunk_index != feed.number or chunk.primary is None:
            log.error("frame %d became chunk %d session_id=%s", feed.number, chunk.chunk_index, self.id)
            self._end("failed")
            return
        audio = chunk.artifacts[chunk.primary].data[0]
        oldest = self._session.oldest_rewind
        self._follow(self.duplex.settled(feed, audio, chunk.signals, self._now_s(), oldest), at_once=True)
        self._calls.observe(due_s)

    def _failed(self, feed: Feed, error: BaseException) -> None:
        if isinstance(error, SessionGoneError):
            self._end("closed")
            return
        if isinstance(error, TickError) and not isinstance(error, AbortedError):
            log.warning("a frame failed session_id=%s frame=%d", self.id, feed.number)
            self._failures[feed.number] += 1
        self._mend()

    def _follow(self, rewind_to: int | None, *, at_once: bool = False) -> None:
        if rewind_to is not None:
            self._rewind_to = rewind_to if self._rewind_to is None else min(rewind_to, self._rewind_to)
            self._mend()
        self.changed(at_once=at_once)

    def _mend(self) -> None:
        if self._mending is None and self.duplex.ended is None:
            self._mending = asyncio.get_running_loop().create_task(self._go_back())

    async def _go_back(self) -> None:
        """Bring the model to the frame that is fed next: nothing of the call is with the engine meanwhile."""
        try:
            while self._futures:
                await asyncio.wait(self._futures)
                await asyncio.sleep(0)  # their callbacks
            if self._session.state == "failed":
                await self._session.rollback()
            committed = self._session.chunk_index
            if self._rewind_to is not None and self._rewind_to < committed:
                await self._session.rewind(self._rewind_to)
            else:
                self._retry(committed)
        except SessionGoneError:
            self._end("closed")
        except OmniError:
            log.exception("the call cannot go on session_id=%s", self.id)
            self._end("failed")
        finally:
            self._rewind_to = self._mending = None

    def _retry(self, committed: int) -> None:
        failures = self._failures[committed]
        if failures >= MOST_FAILURES:
            raise StateError(f"frame {committed} failed {failures} times", code=ErrorCode.TICK_FAILED)
        if failures == MOST_FAILURES - 1:
            self.duplex.give_up_frame(committed)
        for number in [n for n in self._failures if n < committed]:
            del self._failures[number]
        self.duplex.recover(committed)

    def _break(self) -> None:
        log.exception("a call broke session_id=%s", self.id)
        self._end("failed")

    def _noticed(self, notice: Notice) -> None:
        if notice.kind in ENDS or notice.kind == "cleanup_failed":
            self._end(notice.reason or notice.kind)

    def _end(self, reason: str) -> None:
        if self.duplex.ended is None:
            self.duplex.end(reason, self._now_s())
            self._unsubscribe()
            del self._unsubscribe  # it holds the call, with the sound that nobody has read
            self._calls.forget(self)
            if reason == "failed":  # nobody may be there to close it
                self._calls.release(self._session)
        self.changed()

    def _now_s(self) -> float:
        return self._calls.now_s()

    def changed(self, *, at_once: bool = False) -> None:
        """Readers look again."""
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)
        if self._listener is not None and at_once:
            self._listener()
        elif self._listener is not None:
            asyncio.get_running_loop().call_soon(self._listener)

    async def _wait(self) -> None:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)
