"""A session without an engine: the engine's rules in miniature, synthetic frames, one tick at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from realtime_omni.errors import (
    ArgumentError,
    CleanupError,
    ErrorCode,
    EventConflictError,
    EventQueueFullError,
    OmniError,
    SessionGoneError,
    StaleEventError,
    StateError,
    TickError,
)
from realtime_omni.session.values import (
    AcceptStatus,
    Artifact,
    Chunk,
    ChunkIndex,
    ChunkMetadata,
    ChunkTimings,
    EventAcceptance,
    Modality,
    Representation,
    SessionEvent,
    SessionId,
)
from server.fake_values import FakeNotice, FakeView

if TYPE_CHECKING:
    from server.fakes import FakeManager

REWIND_BLOCKS = 5


async def moments(count: int = 3) -> None:
    """The way of an answer from the engine's thread to the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


class FakeSession:
    """One session: events in order, one tick at a time, the engine's rules in miniature."""

    def __init__(self, manager: FakeManager, session_id: str, prompt: str | None, seed: int) -> None:
        self.manager = manager
        self.id = session_id
        self.state = "active"
        self.epoch = 0
        self.chunk_index = 0
        self.prompt = prompt
        self.seed = seed
        self.pending: list[SessionEvent] = []
        self.seen: dict[int, str] = {}
        self.highest = -1
        self.frames = 0
        self.ticking = False
        self.close_reasons: list[str] = []
        self.undelivered: list[Chunk] = []
        self.prompts: dict[int, str | None] = {}  # at the boundary before each chunk
        self._callbacks: list[Callable[[Any], None]] = []
        self._detach_timer: asyncio.Task[None] | None = None
        self.aborted: asyncio.Event = asyncio.Event()
        self.answer: asyncio.Task[EventAcceptance] | None = None

    @property
    def pending_event_count(self) -> int:
        return len(self.pending)

    @property
    def view(self) -> FakeView:
        attached = self._detach_timer is None and self.state != "tombstone"
        return FakeView(
            self.id,
            self.state,
            self.epoch,
            self.chunk_index,
            len(self.pending),
            3,
            attached,
            self.state == "failed",
            max(0, self.chunk_index - REWIND_BLOCKS) if self.manager.branches else None,
            self.highest,
        )

    def _alive(self) -> None:
        if self.state in ("closing", "closed", "tombstone"):
            raise SessionGoneError("the session is gone")

    def post_event(self, event: SessionEvent) -> asyncio.Future[EventAcceptance]:
        refused, receipt = None, None
        try:
            receipt = self._queue(event)
        except OmniError as error:
            refused = error

        async def answer() -> EventAcceptance:
            await self.manager.answered()
            if refused is not None:
                raise refused
            assert receipt is not None
            return receipt

        self.answer = asyncio.ensure_future(answer())
        return self.answer

    def _queue(self, event: SessionEvent) -> EventAcceptance:
        self._alive()
        if self.state == "failed":
            raise StateError("failed", code=ErrorCode.SESSION_FAILED)
        if event.prompt == "nonsense":
            raise ArgumentError("no such prompt", code=ErrorCode.PROMPT_UNKNOWN, path="prompt")
        known = self.seen.get(event.event_id)
        status = AcceptStatus.ACCEPTED
        if known is not None:
            if known != event.fingerprint:
                raise EventConflictError("other payload")
            status = AcceptStatus.DUPLICATE
        elif event.event_id <= self.highest:
            raise StaleEventError("stale")
        elif len(self.pending) >= self.manager.config.engine.max_pending_events:
            raise EventQueueFullError("full")
        else:
            self.pending.append(event)
            self.highest = event.event_id
            self.seen[event.event_id] = event.fingerprint
        return EventAcceptance(SessionId(self.id), event.event_id, status, len(self.pending), event.prompt)

    async def committed_chunk(self, outputs: Sequence[str] | None = None) -> Chunk:
        self._alive()
        if self.undelivered:
            return self.undelivered.pop(0)
        if self.state == "failed":
            raise StateError("failed", code=ErrorCode.SESSION_FAILED)
        assert not self.ticking, "two ticks of one session at once"
        self.ticking = True
        self.aborted.clear()
        snapshot = tuple(self.pending)
        self.manager.ticks_started += 1
        self.manager.tick_started.set()
        try:
            if self.answer is not None:
                await asyncio.wait([self.answer])  # answers come in order
            await self.manager.gate(self)
            self._alive()
            if self.manager.failures:
                self.manager.ticks_failed += 1
                error = self.manager.failures.pop(0)
                if isinstance(error, TickError):
                    self.state = "failed"
                raise error
            chunk = self._commit(snapshot, outputs)
            await moments(self.manager.chunk_takes)
            return chunk
        except asyncio.CancelledError:
            if self.manager.commits_although_cancelled and not self.aborted.is_set():
                self.undelivered.append(self._commit(snapshot, outputs))
            await moments(20)  # withdrawing a tick takes the engine a moment
            raise
        finally:
            self.ticking = False

    def _commit(self, snapshot: tuple[SessionEvent, ...], outputs: Sequence[str] | None) -> Chunk:
        info = self.manager.info
        self.prompts[self.chunk_index] = self.prompt
        for event in snapshot:
            self.pending.remove(event)
            self.prompt = event.prompt or self.prompt
        count, first = info.frames_per_block, self.frames
        index = self.chunk_index
        self.frames += count
        self.chunk_index += 1
        self.manager.ticks_settled += 1
        frames = np.empty((count, 3, info.height, info.width), np.uint8)
        for i in range(count):
            frames[i] = (37 * self.epoch + 11 * (first + i)) % 256
        artifacts = {
            "frames": Artifact("frames", Modality.VIDEO, Representation.DECODED, "TCHW", frames, fps=info.fps),
            "latents": Artifact(
                "latents", Modality.VIDEO, Representation.LATENT, "TCHW", np.ones((1, 4, 2, 2), np.float32)
            ),
        }
        wanted = outputs or ("frames",)
        ids = tuple(event.event_id for event in snapshot)
        return Chunk(
            metadata=ChunkMetadata(SessionId(self.id), f"r{index}", ChunkIndex(index), ids),
            artifacts={name: artifacts[name] for name in wanted},
            primary=wanted[0],
            epoch=self.epoch,
            first_frame=first,
            frames=count,
            prompt=self.prompt,
            timings=ChunkTimings(wait_ms=0.5, tick_ms=5.0, model_ms=4.0, batch_size=1),
            pages_used=3,
            pages_total=100,
        )

    async def reset(
        self, *, prompt: str | None = None, seed: int | None = None, image: Any = None, start: str | None = None
    ) -> None:
        self._alive()
        if prompt == "nonsense":
            raise ArgumentError("no such prompt", code=ErrorCode.PROMPT_UNKNOWN, path="prompt")
        self.aborted.set()
        self.manager.images.append(image)
        discarded = tuple(event.event_id for event in self.pending)
        self.pending.clear()
        self.epoch += 1
        self.chunk_index = 0
        self.frames = 0
        self.state = "active"
        self.prompt = prompt or self.prompt
        self.seed = self.seed if seed is None else seed
        if discarded:
            self.notify(FakeNotice("events_discarded", reason="reset", event_ids=discarded))

    async def fork(self, new_id: str | None = None) -> FakeSession:
        self._alive()
        self._branches()
        twin = await self.manager.create_session(new_id, prompt=self.prompt, seed=self.seed)
        twin.epoch, twin.chunk_index, twin.frames, twin.highest = (
            self.epoch,
            self.chunk_index,
            self.frames,
            self.highest,
        )
        twin.prompts = dict(self.prompts)
        try:
            await self.manager.answered()
        except asyncio.CancelledError:
            await twin.close("client")
            raise
        return twin

    async def rewind(self, chunk_index: int) -> FakeView:
        self._alive()
        self._branches()
        if chunk_index > self.chunk_index:
            raise ArgumentError("not a chunk of the past", path="chunk_index")
        if chunk_index < self.view.oldest_rewind:  # type: ignore[operator]
            raise ArgumentError("not retained", code=ErrorCode.NOT_RETAINED, path="chunk_index")
        self.aborted.set()
        discarded = tuple(event.event_id for event in self.pending)
        self.pending.clear()
        self.epoch += 1
        self.prompt = self.prompts.get(chunk_index, self.prompt)
        self.chunk_index, self.frames = chunk_index, chunk_index * self.manager.info.frames_per_block
        self.state = "active"
        if discarded:
            self.notify(FakeNotice("events_discarded", reason="rewind", event_ids=discarded))
        await self.manager.answered()
        return self.view

    def _branches(self) -> None:
        if not self.manager.branches:
            raise StateError("not possible here", code=ErrorCode.UNSUPPORTED)

    async def rollback(self) -> None:
        self._alive()
        if self.state != "failed":
            raise StateError("not failed")
        self.state = "active"

    async def abort(self) -> int | None:
        self._alive()
        if not self.ticking:
            return None
        self.aborted.set()
        return self.chunk_index

    async def close(self, reason: str = "client") -> None:
        if self.state in ("closing", "closed", "tombstone"):
            return
        self.close_reasons.append(reason)
        if self._detach_timer is not None and self._detach_timer is not asyncio.current_task():
            self._detach_timer.cancel()
        self._detach_timer = None
        self.state = "closing"
        self.aborted.set()
        await moments(self.manager.release_takes)
        if self.manager.release_fails:
            self.state = "tombstone"
            self.manager.tombstones[self.id] = self
            self.notify(FakeNotice("cleanup_failed", reason=reason, code="cleanup_failed"))
            self.manager.live.pop(self.id, None)
            raise CleanupError("release failed")
        self.state = "closed"
        self.manager.live.pop(self.id, None)
        self.manager.gone[self.id] = self.state
        self.notify(FakeNotice("evicted" if reason == "evicted" else "closed", reason=reason))

    async def detach(self, grace_s: float) -> None:
        self._alive()
        if grace_s <= 0:
            await self.close("detached_expired")
            return
        self._detach_timer = asyncio.create_task(self._expire(self.manager.clock.now_s() + grace_s))

    async def _expire(self, until: float) -> None:
        await self.manager.clock.wait(asyncio.Event(), until)
        await self.close("detached_expired")

    async def attach(self) -> None:
        self._alive()
        if self._detach_timer is not None:
            self._detach_timer.cancel()
            self._detach_timer = None

    def subscribe(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    @property
    def subscribers(self) -> int:
        return len(self._callbacks)

    def notify(self, notice: FakeNotice) -> None:
        for callback in tuple(self._callbacks):
            callback(notice)

    async def evict(self) -> None:
        """The engine takes the session away."""
        await self.close("evicted")
