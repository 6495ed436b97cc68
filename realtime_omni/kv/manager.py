"""The KV book of one engine: sessions x branches -> window tables over one pool, and who may plan a block.

Owns: every table, the pool, the scratch lanes, the cross-attention index, and the order of last use. Must not know:
tensors, models, what a session means, and when to evict one (it offers ``oldest``; the engine decides, runs the close
hook, then calls ``end``).

A block of one session covers all its branches and is planned all or nothing::

    plan_block -> BlockReservation -> commit | rollback          at most ``max_in_flight`` open, at most one per session

``end`` settles an open block by itself, so a session can be released in any state; the reservation is dead then, and
a late commit of it is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msgspec import Struct

from realtime_omni.errors import ArgumentError, CapacityError
from realtime_omni.kv.blocks import PagePool
from realtime_omni.kv.capacity import CapacityPlan, KVSpec
from realtime_omni.kv.cross import CrossIndex
from realtime_omni.kv.window import FrameRef, WindowTable


class BranchBlock(Struct, frozen=True):
    """One branch of a block: what it sees, where its clean keys and values go, and where its noisy ones may.

    ``before``: frames of earlier blocks that the same tick writes anew. ``frames`` are in frame order. ``scratch``
    has one FrameRef per frame, at most ``frames_per_block``;
    ``extra`` has one per page of scratch tokens, ``ahead`` room for a block of ``frames_per_block`` and the scratch tokens.
    Those are outside the pool, have index -1, and are never history.
    """

    branch: str
    local_index: int
    table: WindowTable
    before: tuple[FrameRef, ...]
    frames: tuple[FrameRef, ...]
    scratch: tuple[FrameRef, ...]
    extra: tuple[FrameRef, ...]
    ahead: tuple[FrameRef, ...]

    @property
    def history(self) -> tuple[FrameRef, ...]:
        """What the block sees beside itself, in frame order. Of a block in flight; walks the window, so ask once."""
        return (*self.table.visible(), *self.before)


class BlockReservation(Struct, frozen=True):
    """The pages of one block of one session on all its branches; settle it once.

    ``first_frame`` is the absolute index of the block's first frame. ``rewritten``: earlier blocks that this one writes anew,
    oldest first, each on all branches; one sees what is before it, as it is written now.
    """

    number: int
    session: str
    first_frame: int
    frames: int
    lane: int
    branches: tuple[BranchBlock, ...]
    rewritten: tuple[tuple[BranchBlock, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class BookStatistics:
    """Counts for metrics; pages are counts of pages, the null page excluded from ``free``."""

    sessions: int
    capacity: int
    in_flight: int
    total_pages: int
    free_pages: int
    shared_pages: int
    low_water_free: int
    blocks_committed: int
    blocks_rolled_back: int
    frames_evicted: int


class KVBook:
    """All KV memory of one engine, as numbers. Use from one thread."""

    def __init__(self, spec: KVSpec, *, sessions: int) -> None:
        """``sessions``: how many may be open at once (``CapacityPlan.sessions``)."""
        self.spec = spec
        self.capacity = sessions
        self.pool = PagePool(spec.managed_pages(sessions), run_pages=spec.pages_per_frame)
        self.cross = CrossIndex(sessions, (b.name for b in spec.branches), (c.name for c in spec.cross_attention))
        self._tables: dict[str, tuple[WindowTable, ...]] = {}  # ordered: least recently used first
        self._open: dict[str, BlockReservation] = {}
        self._pages_per_frame = spec.pages_per_frame
        self._lanes = list(range(spec.max_in_flight - 1, -1, -1))
        self._lane_frames = tuple(
            tuple(self._scratch(lane, b.local_index) for b in spec.branches) for lane in range(spec.max_in_flight)
        )
        self._next_number = 0
        self._committed = 0
        self._rolled_back = 0
        self._evicted = 0

    @classmethod
    def from_plan(cls, plan: CapacityPlan) -> KVBook:
        """The book of a capacity plan."""
        return cls(plan.spec, sessions=plan.sessions)

    @property
    def free_pages(self) -> int:
        """Pages of the pool that are neither reserved nor committed."""
        return self.pool.free_pages

    @property
    def sessions(self) -> tuple[str, ...]:
        """Open sessions, least recently used first."""
        return tuple(self._tables)

    def __contains__(self, session: str) -> bool:
        return session in self._tables

    def begin(self, session: str) -> None:
        """Open a session with no frames. Raises CapacityError when all places are taken, ValueError when it is open."""
        self._require_place(session)
        self.cross.open(session)
        self._tables[session] = tuple(
            WindowTable(kv_id(session, branch.name), self.spec.window, self.pool) for branch in self.spec.branches
        )

    def end(self, session: str) -> int:
        """Release everything the session holds, an open block included; returns the pages freed. Raises KeyError if
        unknown.
        """
        tables = self._tables[session]
        reservation = self._open.pop(session, None)
        if reservation is not None:
            self._lanes.append(reservation.lane)
            self._rolled_back += 1
        del self._tables[session]
        self.cross.close(session)
        return sum(table.release() for table in tables)

    def plan_block(self, session: str, frames: int | None = None, rewritten: int = 0) -> BlockReservation:
        """Reserve pages for the session's next block on all branches; ``frames`` defaults to what the geometry says.
        ``rewritten``: so many earlier blocks are written anew with it, and take the old ones' place when it is committed.

        Raises CapacityError when pages or lanes run out, ValueError when the session has a block open, KeyError when
        it is unknown; nothing has changed then. Moves the session to the most recently used end.
        """
        tables = self._tables[session]
        count = tables[0].geometry.block_frames(tables[0].completed) if frames is None else frames
        if session in self._open:
            raise ValueError(f"session {session!r} has a block in flight")
        if not 1 <= count <= self.spec.frames_per_block:
            raise ValueError(f"a block has 1 to {self.spec.frames_per_block} frames, got {count}")
        if not self._lanes:
            raise CapacityError(f"all {self.spec.max_in_flight} blocks that may be in flight are")
        anew = rewritten * self.spec.frames_per_block
        most = min(self.spec.rewrite_frames, tables[0].rewritable)
        if not 0 <= anew <= most:
            raise ValueError(f"{anew} frames cannot be written anew, at most {most}")
        need = len(tables) * (count + anew) * self._pages_per_frame
        if need > self.pool.free_pages:
            raise CapacityError(f"no pages for a block: {need} needed, {self.pool.free_pages} free")
        lane = self._lanes.pop()
        for table in tables:
            table.reserve(count, anew)
        blocks = [self._branch_blocks(tables, lane, number, anew) for number in range(rewritten + 1)]
        reservation = BlockReservation(
            self._next_number, session, tables[0].completed, count, lane, blocks[-1], tuple(blocks[:-1])
        )
        self._next_number += 1
        self._open[session] = reservation
        self.touch(session)
        return reservation

    def commit(self, reservation: BlockReservation) -> tuple[FrameRef, ...]:
        """Make the block history on every branch, then evict; returns the evicted frames. Raises ValueError if not
        open.
        """
        tables = self._settle(reservation)
        evicted = tuple(frame for table in tables for frame in table.commit())
        self._committed += 1
        self._evicted += len(evicted)
        return evicted

    def rollback(self, reservation: BlockReservation) -> None:
        """Give the block's pages back; the session is as before ``plan_block``. Raises ValueError if not open."""
        for table in reversed(self._settle(reservation)):  # reversed: a retry then gets the very same pages
            table.rollback()
        self._rolled_back += 1

    def is_open(self, reservation: BlockReservation) -> bool:
        """Whether this reservation still waits to be settled."""
        return self._open.get(reservation.session) is reservation

    def can_rewind(self, session: str, frames: int) -> bool:
        """Whether the session can go back by this many frames exactly."""
        return all(table.can_rewind(frames) for table in self._tables[session])

    def rewind(self, session: str, frames: int) -> None:
        """Forget the last frames on every branch. Raises ArgumentError when their context is gone, ValueError in a
        block.
        """
        self._require_settled(session, "rewind")
        if not self.can_rewind(session, frames):
            raise ArgumentError(
                f"session {session!r} cannot go back by {frames} frames: their context is no longer stored",
                path="frames",
            )
        for table in self._tables[session]:
            table.rewind(frames)

    def fork(self, session: str, name: str) -> None:
        """Open session ``name`` with the same committed history, sharing its pages. A block in flight stays the source's.
        Cross-attention entries are not shared: rebuild them.

        Raises CapacityError or ValueError as ``begin`` does, KeyError when the source is unknown.
        """
        tables = self._tables[session]
        self._require_place(name)
        self.cross.open(name)
        self._tables[name] = tuple(
            table.fork(kv_id(name, branch.name)) for branch, table in zip(self.spec.branches, tables, strict=True)
        )

    def restore(
        self, session: str, completed: int, retained: Sequence[Sequence[int]]
    ) -> tuple[tuple[FrameRef, ...], ...]:
        """Open a session with saved history: ``completed`` frames, of which ``retained`` (per branch) are stored.

        Returns per branch the places of the frames, to be filled before the session's next block; see
        ``WindowTable.restore``. Raises CapacityError or ValueError as ``begin`` does, ArgumentError for frames that
        cannot be; nothing has changed then. Cross-attention entries are rebuilt by the model.
        """
        self._require_place(session)
        if len(retained) != len(self.spec.branches):
            raise ValueError(f"frames of {len(retained)} branches, expected {len(self.spec.branches)}")
        tables: list[WindowTable] = []
        places: list[tuple[FrameRef, ...]] = []
        try:
            for branch, indices in zip(self.spec.branches, retained, strict=True):
                tables.append(WindowTable(kv_id(session, branch.name), self.spec.window, self.pool))
                places.append(tables[-1].restore(completed, indices))
            self.cross.open(session)
        except BaseException:
            for table in reversed(tables):
                table.release()
            raise
        self._tables[session] = tuple(tables)
        return tuple(places)

    def touch(self, session: str) -> None:
        """Make the session the most recently used."""
        self._tables[session] = self._tables.pop(session)

    def oldest(self, idle: Collection[str]) -> str | None:
        """The least recently used session among ``idle`` that has no block in flight; the engine may evict it."""
        return next((s for s in self._tables if s in idle and s not in self._open), None)

    def completed_frames(self, session: str) -> int:
        """Frames the session has committed so far, evicted ones included."""
        return self._tables[session][0].completed

    def table(self, session: str, branch: str) -> WindowTable:
        """One branch's table. Raises KeyError when unknown."""
        for spec, table in zip(self.spec.branches, self._tables[session], strict=True):
            if spec.name == branch:
                return table
        raise KeyError(f"unknown branch {branch!r}")

    def page_count(self, session: str) -> int:
        """How many committed pages a session holds on all branches."""
        return sum([table.page_count for table in self._tables[session]])

    def pages_of(self, session: str, branch: str | None = None) -> tuple[int, ...]:
        """Committed pages of a session, of one branch or of all in order."""
        tables = self._tables[session] if branch is None else (self.table(session, branch),)
        return tuple(page for table in tables for page in table.pages())

    def check(self) -> None:
        """Recount everything: pool, tables, references, lanes, rows. Raises AssertionError on the first broken rule."""
        self.pool.check()
        self.cross.check(self.capacity)
        references: dict[int, int] = {}
        in_tables: set[int] = set()
        for session, tables in self._tables.items():
            completed = {table.completed for table in tables}
            in_block = {bool(table.block) for table in tables}
            if len(completed) != 1 or in_block != {session in self._open}:
                raise AssertionError(f"branches of {session!r} disagree: completed {completed}, in a block {in_block}")
            if self.page_count(session) != len(self.pages_of(session)):
                raise AssertionError(f"{session!r} counts {self.page_count(session)} pages and lists others")
            for table in tables:
                table.check()
                for page in table.pages():
                    references[page] = references.get(page, 0) + 1
                in_tables.update(page for frame in table.block for page in frame.pages)
        counted = self.pool.statistics()
        if counted.referenced != len(references) or any(self.pool.references(p) != n for p, n in references.items()):
            raise AssertionError("the pool's reference counts are not those of the tables")
        if counted.reserved != len(in_tables):
            raise AssertionError("the pool has reserved pages that no block holds")
        if sorted([*self._lanes, *(r.lane for r in self._open.values())]) != list(range(self.spec.max_in_flight)):
            raise AssertionError("scratch lanes are lost or shared")

    def statistics(self) -> BookStatistics:
        """A snapshot of the counts."""
        pool = self.pool.statistics()
        return BookStatistics(
            sessions=len(self._tables),
            capacity=self.capacity,
            in_flight=len(self._open),
            total_pages=pool.total,
            free_pages=pool.free,
            shared_pages=pool.shared,
            low_water_free=pool.low_water_free,
            blocks_committed=self._committed,
            blocks_rolled_back=self._rolled_back,
            frames_evicted=self._evicted,
        )

    def _branch_blocks(
        self, tables: tuple[WindowTable, ...], lane: int, number: int = 0, anew: int = 0
    ) -> tuple[BranchBlock, ...]:
        """Of the ``number``-th block that is written, the last of which is the new one."""
        blocks: list[BranchBlock] = []
        first = number * self.spec.frames_per_block
        last = None if first == anew else first + self.spec.frames_per_block
        for branch, table in zip(self.spec.branches, tables, strict=True):
            scratch = self._lane_frames[lane][branch.local_index]
            fpb = self.spec.frames_per_block
            blocks.append(
                BranchBlock(
                    branch.name,
                    branch.local_index,
                    table,
                    table.block[:first],
                    table.block[first:last],
                    scratch[: len(table.block[first:last])],
                    scratch[fpb:],
                    scratch,
                )
            )
        return tuple(blocks)

    def _settle(self, reservation: BlockReservation) -> tuple[WindowTable, ...]:
        if not self.is_open(reservation):
            raise ValueError(
                f"block {reservation.number} of {reservation.session!r} is not open: settled, or its session ended"
            )
        del self._open[reservation.session]
        self._lanes.append(reservation.lane)
        return self._tables[reservation.session]

    def _scratch(self, lane: int, branch: int) -> tuple[FrameRef, ...]:
        spec = self.spec
        each, size = spec.pages_per_frame, spec.page_size_tokens
        lane_start = self.pool.statistics().total + (lane * len(spec.branches) + branch) * spec.scratch_pages_per_branch
        frames = [
            FrameRef(-1, tuple(range(lane_start + i * each, lane_start + (i + 1) * each)), spec.tokens_per_frame)
            for i in range(spec.frames_per_block)
        ]
        first_extra = lane_start + spec.frames_per_block * each
        extra = [
            FrameRef(-1, (first_extra + i,), min(size, spec.scratch_tokens_per_branch - i * size))
            for i in range(spec.scratch_pages_per_branch - spec.frames_per_block * each)
        ]
        return (*frames, *extra)

    def _require_place(self, session: str) -> None:
        if session in self._tables:
            raise ValueError(f"session {session!r} is open already")
        if len(self._tables) >= self.capacity:
            raise CapacityError(f"all {self.capacity} KV places are taken")

    def _require_settled(self, session: str, verb: str) -> None:
        if session not in self._tables:
            raise KeyError(session)
        if session in self._open:
            raise ValueError(f"cannot {verb} session {session!r} while a block is in flight")


def kv_id(session: str, branch: str) -> str:
    """The name of one branch's table: ``ar::<session>::<branch>``."""
    return f"ar::{session}::{branch}"
