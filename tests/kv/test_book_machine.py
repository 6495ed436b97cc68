"""Random sequences of everything a KV book can do, against a model that knows nothing of pools, tables or reference counts.

The model keeps, per session, the numbered frames it committed (the same number on every branch), and one dictionary that plays
the device's memory: page -> what was last written there. After every step the book recounts itself, every frame that the window
rule says is stored must still hold what its session wrote, the history offered to a block must be the rule's, and free pages
must be exactly those that no session needs.

Faults seeded on purpose, one at a time, to see that this machine bites; each was found:

- pool: double free; a page freed while another table has it; rollback commits; the null page handed out; a reservation of
  an earlier session of the same name, or settled before, is accepted
- window: eviction, rewind or release drops no references; eviction before the commit or at reserve; kept or seen window one
  frame too short or too long; reset at the boundary ignored; a rewind keeps one frame too many, forgets the sink, or goes
  where the context is gone; a fork takes no references or shares the list; pages of a frame
  rounded down; a fork has the block in flight, or its completed count; rewind_blocks ignored in what is kept or in the pool;
  of a thin window: a frame too many or too few is seen or kept, or the wrong one of a block; nothing is given back, or keeps
  its references; what a rewind needs is given back
- book: one branch of two rolled back; branches swapped; end keeps the scratch lane; two blocks in one lane; scratch inside
  the pool; a fork without cross-attention rows; order of use not kept; a busy session offered for eviction; the pool sized
  without the blocks in flight
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from realtime_omni.errors import ArgumentError, CapacityError
from realtime_omni.kv.capacity import KVBranch, KVSpec
from realtime_omni.kv.manager import BlockReservation, BranchBlock, KVBook

BEGUN = ("a", "b")
SESSIONS = (*BEGUN, "c", "d")  # c and d come about by a fork only, or forks would rarely find a free place
CAPACITY = 3
Geometry = tuple[int, int, int, int, int, bool, int, int | None]
"""Sink, window, frames a block, tokens a frame, page tokens, reset at boundary, blocks of rewind, dense frames."""
GEOMETRIES: tuple[Geometry, ...] = (
    (1, 3, 1, 3, 2, False, 1, None),
    (3, 6, 3, 1, 1, False, 1, None),
    (0, 4, 2, 5, 2, False, 3, None),
    (2, 2, 2, 2, 4, False, 2, None),
    (1, 4, 2, 1, 1, True, 1, None),
    (1, 3, 1, 1, 1, True, 3, None),
    (1, 6, 3, 1, 1, False, 1, 3),
    (0, 8, 2, 3, 2, False, 2, 4),
)


@dataclass
class Shadow:
    """What one session should have: frames committed in all, and which of them are stored, with the version written."""

    completed: int = 0
    stored: dict[int, int] = field(default_factory=dict)


class BookMachine(RuleBasedStateMachine):
    """See the module."""

    geometry: ClassVar[Geometry]

    @initialize()
    def open_book(self) -> None:
        self.sink, self.window, self.block, tokens, page, self.reset, self.rewind_blocks, self.dense = self.geometry
        self.spec = KVSpec(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            tokens_per_frame=tokens,
            frames_per_block=self.block,
            window_frames=self.window,
            sink_frames=self.sink,
            page_tokens=page,
            branches=(KVBranch("positive", 0), KVBranch("negative", 1)),
            max_in_flight=2,
            reset_at_boundary=self.reset,
            rewind_blocks=self.rewind_blocks,
            rewrite_frames=2 * self.block if self.dense is None else 0,
            dense_frames=self.dense,
        )
        self.book = KVBook(self.spec, sessions=CAPACITY)
        self.per_frame = -(-tokens // page)
        managed = self.book.pool.statistics().total
        self.scratch_pages = range(managed, managed + self.spec.scratch_pages)
        self.fresh = self.book.free_pages
        self.shadows: dict[str, Shadow] = {}
        self.order: list[str] = []
        self.memory: dict[int, tuple[str, int, int]] = {}
        self.open: dict[str, BlockReservation] = {}
        self.past: dict[str, list[BlockReservation]] = {}
        self.written: dict[int, dict[int, int]] = {}
        self.versions = 0

    # the rule of the window, on sets

    def kept(self, completed: int) -> set[int]:
        """What a window with one block of rewind holds, and what it held up to ``rewind_blocks - 1`` blocks ago."""
        earlier = max(0, completed - (self.rewind_blocks - 1) * self.block)
        first = max(earlier - self.window, self.boundary(earlier))
        return {i for i in range(completed) if i < self.sink or (i >= first and not self.thin(i, earlier))}

    def seen(self, completed: int) -> set[int]:
        first = max(completed - (self.window - self.block), self.boundary(completed))
        after = completed + self.block
        return {i for i in range(completed) if i < self.sink or (i >= first and not self.thin(i, after))}

    def thin(self, index: int, end: int) -> bool:
        """Whether a frame is older than the dense part of a window that ends so, and not the last of its block."""
        return self.dense is not None and index < end - self.dense and index % self.block != self.block - 1

    def boundary(self, completed: int) -> int:
        return completed // self.window * self.window if self.reset else 0

    # what a session may do

    @rule(session=st.sampled_from(BEGUN))
    def begin(self, session: str) -> None:
        if session in self.shadows:
            with pytest.raises(ValueError, match="open already"):
                self.book.begin(session)
        elif len(self.shadows) == CAPACITY:
            with pytest.raises(CapacityError):
                self.book.begin(session)
        else:
            self.book.begin(session)
            self.shadows[session] = Shadow()
            self.order.append(session)

    @rule(session=st.sampled_from(SESSIONS), frames=st.integers(1, 3))
    def plan(self, session: str, frames: int) -> None:
        frames = min(frames, self.block)
        if session not in self.shadows:
            with pytest.raises(KeyError):
                self.book.plan_block(session, frames)
            return
        if session in self.open or len(self.open) == self.spec.max_in_flight:
            with pytest.raises((ValueError, CapacityError)):
                self.book.plan_block(session, frames)
            return
        # By the capacity formula this can never fail for want of pages.
        self.start(self.book.plan_block(session, frames))

    @rule(session=st.sampled_from(SESSIONS), blocks=st.integers(1, 3))
    def plan_anew(self, session: str, blocks: int) -> None:
        """A block that writes earlier ones anew; the sink and what is not stored cannot be."""
        if session not in self.shadows or session in self.open or len(self.open) == self.spec.max_in_flight:
            return
        rewritable = sum(index >= self.sink for index in self.shadows[session].stored)
        if blocks * self.block > min(rewritable, self.spec.rewrite_frames):
            with pytest.raises(ValueError, match="written anew"):
                self.book.plan_block(session, rewritten=blocks)
            return
        self.start(self.book.plan_block(session, rewritten=blocks))

    def start(self, reservation: BlockReservation) -> None:
        session = reservation.session
        self.order.remove(session)
        self.order.append(session)
        self.open[session] = reservation
        self.run_tick(reservation)
        for late in self.past.setdefault(session, []):
            # Settled before, or planned by an earlier session of this name: refused, whatever is in flight now.
            for settle in (self.book.commit, self.book.rollback):
                with pytest.raises(ValueError, match="not open"):
                    settle(late)
        self.past[session] = [reservation]

    def run_tick(self, reservation: BlockReservation) -> None:
        """Write noise to scratch and a fresh version to every reserved page, as a tick that may yet fail does."""
        shadow = self.shadows[reservation.session]
        first = shadow.completed
        assert reservation.first_frame == first
        oldest = first - len(reservation.rewritten) * self.block
        versions = {i: self.versions + i - oldest for i in range(oldest, first + reservation.frames)}
        self.versions += len(versions)
        self.written[reservation.number] = versions
        expected = {i: v for i, v in shadow.stored.items() if i in self.seen(first) and i < oldest}
        for earlier in reservation.rewritten:
            for block in earlier:
                assert self.holds(block, expected), f"history {block.history} is not {expected}"
                self.write(block, versions)
            expected |= {frame.index: versions[frame.index] for frame in earlier[0].frames}
        for block in reservation.branches:
            for frame in (*block.scratch, *block.extra):
                for page in frame.pages:
                    assert page in self.scratch_pages
                    self.memory[page] = ("scratch", 0, 0)
            self.write(block, versions)
        for block in reservation.branches:
            assert self.holds(block, expected), f"history {block.history} is not {expected}"
            if reservation.rewritten:
                continue
            ring, place = block.table.ring(), block.table.geometry.ring_place
            seen = (*block.table.visible(), *block.table.block)
            assert [ring[place(frame.index)] for frame in seen] == [frame.pages[0] for frame in seen]

    def write(self, block: BranchBlock, versions: dict[int, int]) -> None:
        for frame in block.frames:
            for place, page in enumerate(frame.pages):
                self.memory[page] = (block.branch, versions[frame.index], place)

    def holds(self, block: BranchBlock, expected: dict[int, int]) -> bool:
        return [frame.index for frame in block.history] == sorted(expected) and all(
            self.memory[page] == (block.branch, expected[frame.index], place)
            for frame in block.history
            for place, page in enumerate(frame.pages)
        )

    @rule(session=st.sampled_from(SESSIONS), blocks=st.integers(1, 5))
    def run_blocks(self, session: str, blocks: int) -> None:
        """Several whole ticks at once, so that most runs get past sink and window."""
        if session in BEGUN and session not in self.shadows:
            self.begin(session)
        for _ in range(blocks if session in self.shadows and session not in self.open else 0):
            self.plan(session, self.block)
            if session not in self.open:
                return
            self.commit(session)

    @rule(session=st.sampled_from(SESSIONS))
    def commit(self, session: str) -> None:
        if session not in self.open:
            return
        reservation = self.open[session]
        evicted = self.book.commit(reservation)
        del self.open[reservation.session]
        shadow = self.shadows[reservation.session]
        versions = self.written[reservation.number]
        shadow.stored.update(versions)
        shadow.completed += reservation.frames
        gone = set(shadow.stored) - self.kept(shadow.completed)
        shadow.stored = {i: v for i, v in shadow.stored.items() if i not in gone}
        assert sorted(frame.index for frame in evicted) == sorted([*gone, *gone])

    @rule(session=st.sampled_from(SESSIONS))
    def rollback(self, session: str) -> None:
        if session in self.open:
            self.book.rollback(self.open.pop(session))

    @rule(session=st.sampled_from(SESSIONS), frames=st.integers(0, 8))
    def rewind(self, session: str, frames: int) -> None:
        shadow = self.shadows.get(session)
        if shadow is None or session in self.open:
            with pytest.raises((KeyError, ValueError)):
                self.book.rewind(session, frames)
            return
        target = shadow.completed - frames
        exact = target >= 0 and self.seen(target) <= set(shadow.stored)
        assert self.book.can_rewind(session, frames) == exact
        if not exact:
            with pytest.raises(ArgumentError):
                self.book.rewind(session, frames)
            return
        self.book.rewind(session, frames)
        shadow.completed = target
        shadow.stored = {i: v for i, v in shadow.stored.items() if i < target}

    @rule(session=st.sampled_from(SESSIONS), name=st.sampled_from(SESSIONS))
    def fork(self, session: str, name: str) -> None:
        refused = session not in self.shadows or name in self.shadows
        if refused or len(self.shadows) == CAPACITY:
            with pytest.raises((KeyError, ValueError, CapacityError)):
                self.book.fork(session, name)
            return
        self.book.fork(session, name)
        source = self.shadows[session]
        self.shadows[name] = Shadow(source.completed, dict(source.stored))
        self.order.append(name)

    @precondition(lambda self: len(self.shadows) == CAPACITY)
    @rule(session=st.sampled_from(SESSIONS))
    def end(self, session: str) -> None:
        if session not in self.shadows:
            with pytest.raises(KeyError):
                self.book.end(session)
            return
        free = self.book.free_pages
        assert self.book.end(session) == self.book.free_pages - free
        self.open.pop(session, None)
        del self.shadows[session]
        self.order.remove(session)

    @rule(idle=st.sets(st.sampled_from(SESSIONS)))
    def oldest(self, idle: set[str]) -> None:
        offered = [session for session in self.order if session in idle and session not in self.open]
        assert self.book.oldest(idle) == (offered[0] if offered else None)

    # what must hold at every moment

    @invariant()
    def recounts(self) -> None:
        self.book.check()
        assert self.book.sessions == tuple(self.order)

    @invariant()
    def stored_frames_hold_what_their_session_wrote(self) -> None:
        for session, shadow in self.shadows.items():
            assert self.book.completed_frames(session) == shadow.completed
            for branch in ("positive", "negative"):
                retained = self.book.table(session, branch).retained()
                assert [frame.index for frame in retained] == sorted(shadow.stored)
                for frame in retained:
                    for place, page in enumerate(frame.pages):
                        assert page != 0
                        assert self.memory[page] == (branch, shadow.stored[frame.index], place)

    @invariant()
    def free_pages_are_those_that_nobody_needs(self) -> None:
        stored = {version for shadow in self.shadows.values() for version in shadow.stored.values()}
        in_flight = sum(len(self.written[reservation.number]) for reservation in self.open.values())
        frames = 2 * (len(stored) + in_flight)
        assert self.fresh - self.book.free_pages == frames * self.per_frame

    def teardown(self) -> None:
        if hasattr(self, "book"):
            for session in list(self.shadows):
                self.book.end(session)
            self.book.check()
            assert self.book.free_pages == self.fresh


SETTINGS = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_book_does_what_its_rules_say_whatever_happens(geometry: Geometry) -> None:
    run_state_machine_as_test(type("Book", (BookMachine,), {"geometry": geometry}), settings=SETTINGS)
