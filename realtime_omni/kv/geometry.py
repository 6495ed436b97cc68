"""Sink and window: which committed frames one (session, branch) keeps, and which of them the next block sees.

Owns: the arithmetic of frame indices, and the sizes. Must not know: which frames there are, pages, tensors, clocks.

A frame (one latent frame, ``tokens_per_frame`` tokens) is the unit of eviction and owns whole pages:
``ceil(tokens_per_frame / page_tokens)`` of them, filled in order, the last perhaps partly. So any resolution works
with any page size (1,560 tokens and pages of 16: 98 pages, the last half full), and evicting a frame never touches a
neighbour's page.

With ``n`` frames committed, ``S`` sink, ``W`` window and ``F`` frames a block::

    frame index      0 .. S-1        S .. n-W-1       n-W .. n-W+F-1      n-W+F .. n-1       n .. n+F-1
                     sink            evicted          retained, unseen    seen               the block in flight
    seen by block    yes             no               no                  yes                yes (itself)

The block sees ``S + W`` frames *including itself*, as the official ring buffer does. One block more than it can see
is retained on purpose: a rewind by a block then finds the exact context that block had. ``rewind_blocks = R`` retains
``(R - 1) F`` frames more, for a rewind by ``R`` blocks. Storage is O(S + W + R F) however long the session runs; the
absolute index is a number kept apart from storage and simply grows.

With ``dense_frames = D`` a window is dense near and thin far: of what is older than its newest ``D`` frames, the block's own
included, a block sees only the last frame of each block (``index % F == F - 1``), and all of the sink as ever. What no block
can see any more is not kept, also after the rewinds that there may be::

    frame index      n-W .. n-D-1                   n-D .. n-D+F-1          n-D+F .. n-1      n .. n+F-1
    retained         the last frame of each block   yes                     yes               the block in flight
    seen by block    the same, from n-W+F on        the last frame alone    yes               yes (itself)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from realtime_omni.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class WindowGeometry:
    """Sizes of a window, in frames and tokens; without ``dense_frames`` all of it is dense. Raises ValueError when they do not
    make one."""

    sink_frames: int
    window_frames: int
    frames_per_block: int
    tokens_per_frame: int
    page_tokens: int
    reset_at_boundary: bool = False
    rewind_blocks: int = 1
    opening_frames: int | None = None
    dense_frames: int | None = None

    def __post_init__(self) -> None:
        for name in ("window_frames", "frames_per_block", "tokens_per_frame", "page_tokens", "rewind_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.sink_frames < 0:
            raise ValueError(f"sink_frames must not be negative, got {self.sink_frames}")
        if self.window_frames < self.frames_per_block:
            raise ValueError(
                f"window_frames={self.window_frames} must hold a block of frames_per_block={self.frames_per_block}"
            )
        self._check_dense()
        opening = self.opening_frames
        if opening is None:
            return
        if not self.reset_at_boundary or not 1 <= opening <= self.frames_per_block:
            raise ValueError(f"opening_frames={opening} needs reset_at_boundary, and at most a block")
        if (self.window_frames - opening) % self.frames_per_block:
            raise ValueError(
                f"window_frames={self.window_frames} is not {opening} and blocks of {self.frames_per_block} frames"
            )

    def _check_dense(self) -> None:
        dense, block = self.dense_frames, self.frames_per_block
        if dense is None:
            return
        if dense % block or not 0 < dense <= self.window_frames:
            raise ValueError(f"dense_frames={dense} must be whole blocks of {block}, at most the window")
        if block == 1 or self.reset_at_boundary:
            raise ValueError("dense_frames: needs blocks of several frames and a window that slides")

    @property
    def pages_per_frame(self) -> int:
        """Whole pages that one frame owns: ``ceil(tokens_per_frame / page_tokens)``."""
        return -(-self.tokens_per_frame // self.page_tokens)

    @property
    def retained_frames(self) -> int:
        """The most frames that stay after a commit: ``S + W + (R - 1) F``, or ``S + D + ceil((W - D) / F) + (R - 1) F``."""
        return self.sink_frames + self._dense + self._thin_frames + self.rewind_frames

    def block_frames(self, completed: int) -> int:
        """Frames of the block that follows ``completed`` ones: ``opening_frames``, where there are, if it begins a window."""
        if self.opening_frames is None or completed % self.window_frames:
            return self.frames_per_block
        return self.opening_frames

    @property
    def rewind_frames(self) -> int:
        """Frames kept beyond ``sink + window``, which already serves a rewind by one block."""
        return (self.rewind_blocks - 1) * self.frames_per_block

    def kept_from(self, completed: int) -> int:
        """Index of the oldest non-sink frame that stays when ``completed`` frames are committed.

        Sliding: ``max(S, n - W)``, so ``skipped = max(0, n - W - S)`` frames. With ``reset_at_boundary`` the window
        is emptied whenever a whole number of windows is complete: ``skipped = max(0, W * floor(n / W) - S)``. Both
        with ``n`` less the frames that ``rewind_blocks`` adds.
        """
        completed = max(0, completed - self.rewind_frames)
        oldest = max(self.sink_frames, completed - self.window_frames)
        return max(oldest, self._boundary(completed))

    def seen_from(self, completed: int) -> int:
        """Index of the oldest non-sink frame that the next block sees: ``max(S, n - (W - F))``, but never evicted."""
        oldest = max(self.sink_frames, completed - (self.window_frames - self.frames_per_block))
        return max(oldest, self._boundary(completed))

    def seen(self, completed: int) -> Collection[int]:
        """Indices of the non-sink frames that the next block sees: whole from ``n - (D - F)`` on."""
        return self._thinned(self.seen_from(completed), completed - self._dense + self.frames_per_block, completed)

    def kept(self, completed: int) -> Collection[int]:
        """Indices of the non-sink frames that stay when ``completed`` frames are committed: whole from ``n - D`` on, with ``n``
        less the frames that ``rewind_blocks`` adds."""
        return self._thinned(self.kept_from(completed), completed - self.rewind_frames - self._dense, completed)

    def is_tail(self, completed: int, tail: Sequence[int]) -> bool:
        """Whether these may be the non-sink frames of a table after ``completed``: rising, all that the next block sees among
        them, and nothing that does not stay. After a rewind they may begin later than ``kept``, and be thin up to a newer
        frame; they have no other gaps."""
        held = set(tail)
        gaps = set(range(tail[0], completed)) - held if tail else ()
        return (
            list(tail) == sorted(held)
            and held.issuperset(self.seen(completed))
            and held.issubset(self.kept(completed))
            and not any(self.dense_frames is None or self._ends_block(index) for index in gaps)
        )

    @property
    def seen_frames(self) -> int:
        """The most frames that a block sees beside itself, sinks included; it does so as soon as its window is full."""
        return self.sink_frames + self._dense - self.frames_per_block + self._thin_frames

    def restored(self, completed: int, indices: Sequence[int]) -> tuple[int, ...]:
        """Which of the saved frames ``indices`` a table keeps that goes on after ``completed`` frames.

        Frames that this geometry would have evicted are left out. Raises ArgumentError when frames that the next block
        sees are missing, or the indices are not what a table can hold.
        """
        sink, stays = min(self.sink_frames, completed), self.kept(completed)
        kept = [index for index in indices if index < sink or index in stays]
        if kept[:sink] != list(range(sink)) or not self.is_tail(completed, kept[sink:]):
            raise ArgumentError(f"these are not the frames of a session after {completed} frames", path="retained")
        return tuple(kept)

    def ring_place(self, index: int) -> int:
        """Where a frame lies among ``sink + window`` places that a session uses again and again: no two frames that a block
        sees share one."""
        return index if index < self.sink_frames else self.sink_frames + (index - self.sink_frames) % self.window_frames

    def skipped_frames(self, completed: int) -> int:
        """How many frames have been evicted once ``completed`` are committed; sink frames never are."""
        return completed - min(completed, self.sink_frames) - len(self.kept(completed))

    @property
    def _dense(self) -> int:
        return self.window_frames if self.dense_frames is None else self.dense_frames

    @property
    def _thin_frames(self) -> int:
        return -(-(self.window_frames - self._dense) // self.frames_per_block)

    def _thinned(self, first: int, dense_from: int, end: int) -> Collection[int]:
        """Of the frames from ``first`` to ``end`` those that are left where all before ``dense_from`` is thin."""
        if self.dense_frames is None:
            return range(first, end)
        dense, block = max(first, dense_from), self.frames_per_block
        ends_of_blocks = range(first + (-1 - first) % block, min(dense, end), block)
        return frozenset((*ends_of_blocks, *range(dense, end)))

    def _ends_block(self, index: int) -> bool:
        return index % self.frames_per_block == self.frames_per_block - 1

    def _boundary(self, completed: int) -> int:
        return completed // self.window_frames * self.window_frames if self.reset_at_boundary else 0
