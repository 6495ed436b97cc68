"""The handle of one session: what a caller holds, and what became of the calls it gave up.

Owns the latest view of its session, its subscribers, and the chunks that were committed for callers that went away. All
state of the session itself is the engine's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from realtime_omni.engine import commands as c
from realtime_omni.errors import OmniError, SessionGoneError, StateError
from realtime_omni.session.frame import Frame
from realtime_omni.session.journal import EventLog
from realtime_omni.session.observation import Observation
from realtime_omni.session.values import Chunk, ChunkIndex, EventAcceptance, EventId, SessionEvent, SessionId

if TYPE_CHECKING:
    from realtime_omni.manager import SessionManager
    from realtime_omni.snapshot.snapshot import Snapshot

log = logging.getLogger(__name__)

ENDS = frozenset({"closed", "evicted"})
"""Notices after which a session is no more."""

RECEIPT_WITHIN_S = 0.002
"""How long an event waits for the block that is asked for behind it, before the engine is woken for it alone: two ways to the
engine and back, and two writes to the client, cost twice what one does."""


class Session:
    """Handle of one session. Safe to share between tasks of one event loop."""

    def __init__(self, manager: SessionManager, view: c.SessionView) -> None:
        self._manager = manager
        self._view = view
        self._subscribers: list[Callable[[c.Notice], None]] = []
        self._undelivered: deque[Chunk] = deque()
        self._orphans: set[asyncio.Future[Any]] = set()
        self._asked: set[int] = set()
        """Tickets of calls of :meth:`committed_chunk` that are not answered."""
        self._closing: asyncio.Future[Any] | None = None
        self._end: c.Notice | None = None
        self._epoch_began = 0
        """The chunk that the last reset or rewind went back to."""

    @property
    def id(self) -> SessionId:
        return self._view.session_id

    @property
    def view(self) -> c.SessionView:
        """Everything the outside may know, as of the latest answer or notice."""
        return self._view

    @property
    def state(self) -> str:
        return self._view.state

    @property
    def epoch(self) -> int:
        return self._view.epoch

    @property
    def chunk_index(self) -> int:
        """Index of the next chunk = number of committed chunks of this epoch."""
        return self._view.chunk_index

    @property
    def prompt(self) -> str | None:
        return self._view.prompt

    @property
    def seed(self) -> int:
        return self._view.seed

    @property
    def pending_event_count(self) -> int:
        return self._view.pending_event_count

    @property
    def oldest_rewind(self) -> int | None:
        """The smallest chunk that :meth:`rewind` can go back to; None where the session can neither be rewound nor forked."""
        return self._view.oldest_rewind

    async def accept_event(self, event: SessionEvent) -> EventAcceptance:
        """Queue an event; it is applied by the next tick that starts.

        Raises StateError, EventConflictError, StaleEventError, EventQueueFullError, ArgumentError; nothing changed then.
        """
        return await self._accept(event)

    def post_event(self, event: SessionEvent) -> asyncio.Future[EventAcceptance]:
        """:meth:`accept_event` for callers that go on at once: when this returns the event is queued, ahead of whatever is
        asked of the session next; the future gets the receipt, or what :meth:`accept_event` raises.

        Answers come in order: a chunk that applied the event is not handed out before its receipt. An engine that sleeps is
        told with what is asked next, or after :data:`RECEIPT_WITHIN_S`.
        Raises CapacityError: too many commands wait for the engine; the event is not queued."""
        return self._accept(event, RECEIPT_WITHIN_S)

    def _accept(self, event: SessionEvent, within_s: float | None = None) -> asyncio.Future[EventAcceptance]:
        return self._manager.send(c.Accept(**self._address(), event=event), within_s=within_s)

    async def next_chunk(self, outputs: Sequence[str] | None = None) -> Chunk:
        """The next block of the world. Concurrent calls are served one after the other.

        A chunk that a cancelled call left behind comes first, with the outputs that were asked for then.
        Two calls at a time let a GPU decode a block while it denoises the next one.
        Raises StateError, TickError (nothing was committed; see ``rollback``), AbortedError, CapacityError.
        """
        chunk = await self.committed_chunk(outputs)
        if not chunk.is_filled:
            try:
                await asyncio.to_thread(chunk.fill)
            except asyncio.CancelledError:
                self._keep(chunk)
                raise
        return chunk

    async def committed_chunk(self, outputs: Sequence[str] | None = None) -> Chunk:
        """:meth:`next_chunk` for callers that can go on before the data is there: what is still copied from a device is to be
        waited for with :meth:`Chunk.fill`."""
        while self._orphans:
            await asyncio.wait(self._orphans)
        left = self._left_behind()
        if left is not None:
            return left
        command = c.Next(
            **self._address(),
            outputs=None if outputs is None else tuple(outputs),
            asked_at_s=self._manager.now_s(),
        )
        future = self._manager.send(command)
        self._asked.add(command.ticket)
        try:
            chunk = await future  # not through a shield, which is one more round of the loop for every chunk
        except asyncio.CancelledError:
            if not future.cancelled():
                self._abandon(command.ticket, future)
            elif command.ticket in self._asked:
                self._abandon(command.ticket, self._manager.expect(command.ticket))
            raise
        finally:
            self._asked.discard(command.ticket)
        assert isinstance(chunk, Chunk)
        left = self._left_behind()
        if left is None:
            return chunk
        self._keep(chunk)  # this call waited behind one that was cancelled after its commit
        return left

    async def act(self, observation: Observation, *, outputs: Sequence[str] | None = None) -> Chunk:
        """A policy's chunk of actions for an observation. The newest wins: a call that still waits when another comes gets
        SupersededError, one that runs is finished. Cancelling forgets the chunk, committed or not: the world has moved on.

        Raises ArgumentError (an observation that the policy cannot use; nothing has happened), SupersededError, StateError,
        TickError (nothing was committed; see ``rollback``), AbortedError, CapacityError.
        """
        wanted = None if outputs is None else tuple(outputs)
        command = c.Next(**self._address(), outputs=wanted, asked_at_s=self._manager.now_s(), observation=observation)
        try:
            chunk = await self._manager.send(command)
        except asyncio.CancelledError:
            self._withdraw(command.ticket)
            raise
        assert isinstance(chunk, Chunk)
        return chunk

    def feed(self, frame: Frame) -> asyncio.Future[Chunk]:
        """One frame for a duplex session, behind those fed before; the future gets its tick: the chunk's primary artifact is
        float32 [1, N] of one frame, ``chunk.signals`` what was told with it. All sessions whose frames wait share a batch.

        At most 64 frames of a session may wait. A future that nobody waits for any more is harmless: its frame is taken in
        all the same. For a clock, gaps and interruptions see :mod:`realtime_omni.call`, which is built on this.

        Raises CapacityError: too many commands wait for the engine. The future raises ArgumentError (the model cannot take
        this frame in; nothing has happened), StateError, TickError (see ``rollback``), AbortedError, CapacityError."""
        return self._manager.send(c.Next(**self._address(), asked_at_s=self._manager.now_s(), frame=frame), within_s=0)

    async def reset(
        self,
        *,
        prompt: str | None = None,
        seed: int | None = None,
        image: Any = None,
        start: str | None = None,
        observation: Observation | None = None,
    ) -> None:
        """Chunk 0 of a new epoch; waiting events are discarded, the event floor stays. ``None`` keeps what was given before.

        ``observation``: what ``act`` will be asked next. One that the policy cannot use is refused, and nothing was reset."""
        await self._ask(
            c.Reset(**self._address(), prompt=prompt, seed=seed, image=image, start=start, observation=observation)
        )

    async def fork(self, new_id: str | None = None) -> Session:
        """A new session that equals this one at its last committed chunk; this one goes on undisturbed.

        It shares all KV and model state, and has the same seed, prompt, controls, requested outputs, epoch, past (for
        ``rewind``) and setup (for ``reset``). Its event ids start above this one's floor; waiting events are not inherited.

        Args:
            new_id: 1-64 of ``A-Z a-z 0-9 . _ -``; minted when None.

        Raises:
            StateError: the id exists (``session_exists``); this session is closing, resetting or has lost its state; or
                forks are not possible here (``unsupported``: the model is not rollback-safe, or a foreign engine's).
            CapacityError: no place is left.
        """
        return await self._manager.open_session(c.Fork(**self._address(), name=new_id))

    async def rewind(self, chunk_index: int) -> c.SessionView:
        """Go back to the moment when ``chunk_index`` was the next chunk, in a new epoch; returns the view.

        Prompt, controls and world are those of that moment; the same events make the same chunks again, bit for bit. A
        running or waiting ``next_chunk`` gets AbortedError, waiting events are discarded, the event floor stays. From FAILED
        it also recovers, where ``rollback`` could.

        Raises:
            ArgumentError: not a chunk of the past (``chunk_index``), or one that is no longer retained (``not_retained``;
                see ``oldest_rewind``). Nothing has changed.
            StateError: as for :meth:`fork`.
        """
        await self._ask(c.Rewind(**self._address(), chunk_index=chunk_index))
        return self._view

    async def log(self) -> EventLog:
        """What made this world: how it began and the events that its chunks applied, without what resets and rewinds undid.

        Bounded: of a very long session the oldest chunks are forgotten, and ``first_chunk`` says from where it is complete."""
        log = await self._ask(c.Log(**self._address()))
        assert isinstance(log, EventLog)
        return log

    async def return_to(self, log: EventLog) -> None:
        """Go to where a log begins, as :meth:`replay` does first, and raises what that raises."""
        if self._undelivered or self._orphans:
            raise StateError("chunks of this session wait; a log is played alone")
        await self._ask(c.Return(**self._address(), log=log))

    async def replay(self, log: EventLog, outputs: Sequence[str] | None = None) -> AsyncGenerator[Chunk, None]:
        """Run the chunks of a log again, each with the events that it applied then, under fresh ids; equal bit for bit.

        A session that is where the log begins goes on from there; any other starts over with the log's prompt, seed and
        start picture (a picture of the client's own must have been this session's, too). Nothing else may be asked of the
        session meanwhile. Leaving the iterator leaves the session after the last chunk that was taken.

        Raises:
            ArgumentError: another model's log (``unsupported``), another picture (``image_invalid``), or one that does not
                begin at chunk 0 and is not played on from the same line (``not_retained``). Nothing has changed.
            EventQueueFullError: a chunk of it has more events than may wait here. Nothing has changed.
            StateError: chunks or events of this session wait, or somebody else took part.
        """
        await self.return_to(log)
        recorded = {applied.chunk_index: applied.events for applied in log.chunks}
        for index in range(log.first_chunk, log.next_chunk):
            first_id = self._view.event_floor + 1
            events = [
                replace(e, event_id=EventId(first_id + i)) for i, e in enumerate(recorded.get(ChunkIndex(index), ()))
            ]
            for event in events:
                await self._accept_played(event)
            chunk = await self.next_chunk(outputs)
            if (chunk.chunk_index, chunk.metadata.applied_event_ids) != (index, tuple(e.event_id for e in events)):
                raise StateError(
                    f"chunk {index} of the log came out otherwise: something else was asked of the session"
                )
            yield chunk

    async def _accept_played(self, event: SessionEvent) -> None:
        """A replay that is given up here has its receipt all the same: the floor then counts the event, and no other gets
        its id."""
        receipt = self._accept(event)
        try:
            await asyncio.shield(receipt)
        except asyncio.CancelledError:
            await asyncio.wait([receipt])
            if not receipt.cancelled():
                receipt.exception()  # the refusal of an event that nobody asks for any more
            raise

    async def snapshot(self) -> Snapshot:
        """This session at its last committed chunk, as a value to keep, send or restore; a running tick is not disturbed.

        Chunks that were committed and not yet handed out are no part of it. Raises StateError: closing, resetting, its state
        is gone, or a foreign engine runs the model (``unsupported``)."""
        from realtime_omni.snapshot.snapshot import Snapshot

        snapshot = await self._ask(c.Save(**self._address()))
        assert isinstance(snapshot, Snapshot)
        return snapshot

    async def rollback(self) -> None:
        """From FAILED back to the last committed chunk; the same chunk runs again with the same noise."""
        await self._ask(c.Rollback(**self._address()))

    async def abort(self) -> int | None:
        """Roll back the running chunk (its caller gets AbortedError); returns its index, or None when nothing ran."""
        index = await self._ask(c.Abort(**self._address()))
        return index if isinstance(index, int) else None

    async def close(self, reason: str = "client") -> None:
        """Release everything. Idempotent; raises CleanupError when the release failed (it is retried by the engine)."""
        if self._view.state == "closed":
            return
        if self._closing is None or self._closing.done():  # calls that overlap share one close and its outcome
            self._closing = self._manager.send(c.Close(**self._address(), reason=reason))
        try:
            await asyncio.shield(self._closing)
        except SessionGoneError:
            return

    async def disconnect(self) -> None:
        """The same as :meth:`close`, under the name a transport looks for."""
        await self.close("disconnected")

    async def detach(self, grace_s: float) -> None:
        """Nobody listens any more: close by itself after ``grace_s`` seconds (0: at once) unless ``attach`` comes first."""
        await self._ask(c.Detach(**self._address(), grace_s=grace_s))

    async def attach(self) -> None:
        """Somebody is back. Raises SessionGoneError when the grace is over."""
        await self._ask(c.Attach(**self._address()))

    def subscribe(self, callback: Callable[[c.Notice], None]) -> Callable[[], None]:
        """Call back on the event loop for every notice; returns the way to stop it.

        Who comes after the end is told of the end."""
        self._subscribers.append(callback)
        if self._end is not None:
            asyncio.get_running_loop().call_soon(self._notify, self._end)
        return lambda: self._subscribers.remove(callback) if callback in self._subscribers else None

    def _address(self) -> dict[str, Any]:
        return {
            "ticket": self._manager.next_ticket(),
            "session_id": self._view.session_id,
            "generation": self._view.generation,
        }

    async def _ask(self, command: c.SessionCommand) -> Any:
        return await self._manager.send(command)

    def _left_behind(self) -> Chunk | None:
        """The oldest chunk that was committed and not handed out."""
        return self._undelivered.popleft() if self._undelivered else None

    def _keep(self, chunk: Chunk) -> None:
        """For the next call; but one of an earlier epoch is dropped, and nobody will see what its undone events did."""
        if chunk.epoch == self._view.epoch:
            self._undelivered.append(chunk)
        elif chunk.chunk_index >= self._epoch_began and chunk.metadata.applied_event_ids:
            self._notify(
                c.Notice(
                    kind="events_discarded",
                    session_id=self.id,
                    generation=self._view.generation,
                    view=self._view,
                    reason="rewind" if self._epoch_began else "reset",
                    event_ids=chunk.metadata.applied_event_ids,
                )
            )

    def _abandon(self, ticket: int, future: asyncio.Future[Any]) -> None:
        """The caller of ``next_chunk`` is gone: withdraw it, and keep the chunk should it have been committed already."""

        def settled(done: asyncio.Future[Any]) -> None:
            self._orphans.discard(done)
            if not done.cancelled() and done.exception() is None:
                self._keep(done.result())

        if future.done():
            settled(future)
            return
        self._orphans.add(future)
        future.add_done_callback(settled)
        self._withdraw(ticket)

    def _missed(self, answer: c.Answer) -> None:
        """It came between the moment when its caller was cancelled and the moment when the caller hears of that."""
        if answer.ticket in self._asked:
            self._asked.discard(answer.ticket)
            if isinstance(answer.value, Chunk):
                self._keep(answer.value)

    def _withdraw(self, ticket: int) -> None:
        """Tell the engine that nobody waits for this answer any more."""
        try:
            address = self._address() | {"ticket": 0}
            self._manager.post(c.Cancel(**address, target=ticket))
        except OmniError:
            log.warning("cancel was refused session_id=%s", self.id)

    def _see(self, view: c.SessionView) -> None:
        if view.generation != self._view.generation:
            return
        if view.epoch != self._view.epoch:
            self._epoch_began = view.chunk_index
        self._view = view
        if self._undelivered and self._undelivered[0].epoch != view.epoch:
            obsolete, self._undelivered = self._undelivered, deque()
            for chunk in obsolete:
                self._keep(chunk)

    def _notify(self, notice: c.Notice) -> None:
        self._see(notice.view)
        if notice.kind in ENDS:
            self._end = notice
        for callback in tuple(self._subscribers):
            try:
                callback(notice)
            except Exception:
                log.exception("subscriber failed session_id=%s", self.id)
