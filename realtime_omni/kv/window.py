"""The committed frames of one (session, branch): reserved, committed, evicted, forgotten, shared.

Owns: the frames of one branch of one session and their absolute indices. Which of them stay and which the next block sees is
the geometry's to say (:mod:`.geometry`). Must not know: other branches, tensors, clocks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from realtime_omni.errors import ArgumentError
from realtime_omni.kv.blocks import PagePool, PageReservation
from realtime_omni.kv.geometry import WindowGeometry


class FrameRef(Struct, frozen=True):
    """Where one frame's keys and values lie: token ``t`` is in ``pages[t // page_tokens]`` at offset ``t %
    page_tokens``.
    """

    index: int
    pages: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class WindowStatistics:
    """Counts of frames of one table."""

    completed: int
    retained: int
    in_flight: int


class WindowTable:
    """The frames of one (session, branch), over a shared page pool whose runs are frames.

    ``reserve`` then ``commit`` or ``rollback``; ``rewind`` only between blocks. A ``fork`` has the committed frames only.
    """

    def __init__(self, name: str, geometry: WindowGeometry, pool: PagePool) -> None:
        if pool.run_pages != geometry.pages_per_frame:
            raise ValueError(f"the pool's runs have {pool.run_pages} pages, a frame {geometry.pages_per_frame}")
        self.name = name
        self.geometry = geometry
        self._each = geometry.pages_per_frame
        self._pool = pool
        self._sink: list[FrameRef] = []
        self._tail: deque[FrameRef] = deque()
        self._completed = 0
        self._reservation: PageReservation | None = None
        self._block: tuple[FrameRef, ...] = ()
        self._rewritten = 0
        self._ring: array[int] | None = None

    @property
    def completed(self) -> int:
        """Frames committed so far, evicted ones included: the absolute index of the next frame."""
        return self._completed

    @property
    def block(self) -> tuple[FrameRef, ...]:
        """The frames reserved for the block in flight, those that it writes anew first; empty between blocks."""
        return self._block

    @property
    def rewritable(self) -> int:
        """Committed frames, the latest, that a block may write anew: those that are no sink."""
        return len(self._tail)

    def retained(self) -> tuple[FrameRef, ...]:
        """All committed frames still stored, oldest first; at most ``retained_frames`` of the geometry."""
        return (*self._sink, *self._tail)

    def visible(self) -> tuple[FrameRef, ...]:
        """The committed frames that the current block attends to beside itself, oldest first, without those that it writes
        anew."""
        seen, last = self.geometry.seen(self._completed), self._completed - self._rewritten
        return (*self._sink, *(frame for frame in self._tail if frame.index in seen and frame.index < last))

    def ring(self) -> array[int]:
        """The first page of every frame that the current block sees and of its own, int32 by ``ring_place``. Made when it is
        first asked for and kept by ``reserve`` from then on, so that a tick costs a frame and not a window. Not to be changed,
        and to be read before the block is settled. Raises ValueError when the block writes earlier frames anew."""
        if self._rewritten:
            raise ValueError(f"{self.name}: a block that writes earlier frames anew may be longer than the window")
        if self._ring is None:
            self._ring = array("i", bytes(4 * (self.geometry.sink_frames + self.geometry.window_frames)))
            self._note((*self.visible(), *self._block))
        return self._ring

    @property
    def page_count(self) -> int:
        """How many pages are committed, without listing them."""
        return (len(self._sink) + len(self._tail)) * self._each

    def pages(self) -> tuple[int, ...]:
        """The committed pages, in frame order."""
        return tuple(page for frame in self.retained() for page in frame.pages)

    def reserve(self, frames: int, rewritten: int = 0) -> tuple[FrameRef, ...]:
        """Set pages aside for a block of ``frames`` frames (at most ``frames_per_block``), and for the last ``rewritten`` ones
        that are no sink: the block writes these anew, and a commit puts them in the place of the old.

        Raises ValueError when a block is in flight or a count is wrong, CapacityError when the pool is full; nothing
        changes then.
        """
        self._require_idle("reserve")
        size = self.geometry
        if not 1 <= frames <= size.frames_per_block:
            raise ValueError(f"{self.name}: a block has 1 to {size.frames_per_block} frames, got {frames}")
        if not 0 <= rewritten <= self.rewritable:
            raise ValueError(f"{self.name}: {self.rewritable} frames can be written anew, not {rewritten}")
        each, first = self._each, self._completed - rewritten
        reservation = self._pool.reserve((rewritten + frames) * each)
        self._reservation, self._rewritten = reservation, rewritten
        self._block = tuple(
            FrameRef(first + i, reservation.pages[i * each : (i + 1) * each], size.tokens_per_frame)
            for i in range(rewritten + frames)
        )
        if rewritten:
            self._ring = None
        self._note(self._block)
        return self._block

    def commit(self) -> tuple[FrameRef, ...]:
        """Make the block history, then evict what no longer fits; returns the evicted frames.

        Eviction comes after, never before: a block that fails has cost no history.
        """
        reservation = self._take_reservation("commit")
        self._pool.commit(reservation)
        self._drop([self._tail.pop() for _ in range(self._rewritten)])
        self._completed -= self._rewritten
        self._rewritten = 0
        for frame in self._block:
            (self._sink if frame.index < self.geometry.sink_frames else self._tail).append(frame)
        self._completed += len(self._block)
        self._block = ()
        return self._evict()

    def rollback(self) -> None:
        """Give the block's pages back; the committed frames are as before ``reserve``."""
        reservation = self._take_reservation("rollback")
        self._block, self._rewritten = (), 0
        self._pool.rollback(reservation)

    def can_rewind(self, frames: int) -> bool:
        """Whether everything the block at ``completed - frames`` saw is still stored.

        Always true for a rewind into the sink or within a session that evicted nothing, and for ``rewind_blocks``
        blocks after as many commits (``reset_at_boundary``: unless a boundary lies between).
        """
        target = self._completed - frames
        if frames < 0 or target < 0:
            return False
        if self.geometry.dense_frames is None:  # no gaps, and perhaps thousands of frames
            first_stored = self._tail[0].index if self._tail else self._completed
            return self.geometry.seen_from(target) >= min(first_stored, target)
        return {frame.index for frame in self._tail}.issuperset(self.geometry.seen(target))

    def rewind(self, frames: int) -> tuple[FrameRef, ...]:
        """Forget the last ``frames`` committed frames; returns those that were stored, oldest first.

        Raises ArgumentError when the context of that earlier block is no longer stored, ValueError when a block is in
        flight.
        """
        self._require_idle("rewind")
        if frames < 0:
            raise ValueError(f"{self.name}: cannot rewind by {frames} frames")
        if not self.can_rewind(frames):
            raise ArgumentError(
                f"{self.name}: cannot rewind {frames} frames: {self._completed} committed, "
                f"{len(self._sink) + len(self._tail)} stored, and the earlier block's context is gone",
                path="frames",
            )
        target = self._completed - frames
        dropped: deque[FrameRef] = deque()
        for stored in (self._tail, self._sink):
            while stored and stored[-1].index >= target:
                dropped.appendleft(stored.pop())
        self._completed = target
        self._ring = None  # later frames have taken the places of those that are seen again
        self._drop(dropped)
        return tuple(dropped)

    def fork(self, name: str) -> WindowTable:
        """A second table over the same committed pages. Nothing is copied: committed pages are never written again."""
        twin = WindowTable(name, self.geometry, self._pool)
        self._pool.incref([frame.pages[0] for frame in self.retained()])
        twin._sink = list(self._sink)
        twin._tail = deque(self._tail)
        twin._completed = self._completed
        return twin

    def restore(self, completed: int, indices: Sequence[int]) -> tuple[FrameRef, ...]:
        """Make the saved frames ``indices`` the history of this new table, on fresh pages that the caller fills.

        Returns the places of the frames that ``WindowGeometry.restored`` names. Raises ArgumentError as that does,
        CapacityError when pages run out; nothing has changed then.
        """
        if self._completed or self._reservation is not None:
            raise ValueError(f"{self.name}: only a new table can be restored")
        size = self.geometry
        kept = size.restored(completed, indices)
        if not kept:  # also right behind a boundary, where the window was emptied
            self._completed = completed
            return ()
        each = size.pages_per_frame
        reservation = self._pool.reserve(len(kept) * each)
        self._pool.commit(reservation)
        frames = [
            FrameRef(index, reservation.pages[i * each : (i + 1) * each], size.tokens_per_frame)
            for i, index in enumerate(kept)
        ]
        self._sink = [frame for frame in frames if frame.index < size.sink_frames]
        self._tail = deque(frame for frame in frames if frame.index >= size.sink_frames)
        self._completed = completed
        return tuple(frames)

    def release(self) -> int:
        """Drop everything, a block in flight included, and return the number of pages that became free."""
        freed = 0
        if self._reservation is not None:
            freed += len(self._reservation.pages)
            self.rollback()
        dropped = self.retained()
        self._sink.clear()
        self._tail.clear()
        self._completed = 0
        self._ring = None
        return freed + self._drop(dropped)

    def check(self) -> None:
        """Recount against the geometry and the pool. Raises AssertionError when the table breaks its own rule."""
        size = self.geometry
        expected_sink = list(range(min(size.sink_frames, self._completed)))
        if [frame.index for frame in self._sink] != expected_sink:
            raise AssertionError(
                f"{self.name}: sink holds {[frame.index for frame in self._sink]}, not {expected_sink}"
            )
        tail = [frame.index for frame in self._tail]
        if not size.is_tail(self._completed, tail):
            raise AssertionError(f"{self.name}: {tail} are not the frames to be kept after {self._completed}")
        if self._reservation is not None and not self._pool.is_open(self._reservation):
            raise AssertionError(f"{self.name}: the block's reservation is not open in the pool")
        for frame in self.retained():
            if len(frame.pages) != size.pages_per_frame or any(self._pool.references(page) < 1 for page in frame.pages):
                raise AssertionError(f"{self.name}: frame {frame.index} refers to pages that are not committed")

    def statistics(self) -> WindowStatistics:
        """A snapshot of the counts."""
        return WindowStatistics(self._completed, len(self._sink) + len(self._tail), len(self._block))

    def _note(self, frames: Iterable[FrameRef]) -> None:
        if self._ring is not None:
            for frame in frames:
                self._ring[self.geometry.ring_place(frame.index)] = frame.pages[0]

    def _evict(self) -> tuple[FrameRef, ...]:
        size, tail = self.geometry, self._tail
        evicted: list[FrameRef] = []
        first = size.kept_from(self._completed)
        while tail and tail[0].index < first:
            evicted.append(tail.popleft())
        if size.dense_frames is not None:  # else no frame behind the front goes, and a window may have thousands
            kept = size.kept(self._completed)
            evicted += [frame for frame in tail if frame.index not in kept]
            self._tail = deque(frame for frame in tail if frame.index in kept)
        if evicted:
            self._drop(evicted)
        return tuple(evicted)

    def _drop(self, frames: Iterable[FrameRef]) -> int:
        return self._pool.decref([frame.pages[0] for frame in frames])

    def _take_reservation(self, verb: str) -> PageReservation:
        if self._reservation is None:
            raise ValueError(f"{self.name}: {verb} without a block in flight")
        reservation, self._reservation = self._reservation, None
        return reservation

    def _require_idle(self, verb: str) -> None:
        if self._reservation is not None:
            raise ValueError(f"{self.name}: cannot {verb} while a block is in flight")
