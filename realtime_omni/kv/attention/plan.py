"""The interface between a model's passes and paged history: one plan per tick, one ``attend`` per layer and pass.

Owns: the vocabulary (``RowPlan``) and the two protocols. Must not know: sessions, pools' ownership, kernels.

Within a tick, the passes of one row are *probes* (``commit=False``, any number) and then one clean pass
(``commit=True``). A probe leaves every committed and every reserved page as it was; the clean pass writes the row's
reserved pages and no others. Attention is over the row's history followed by the tokens it was given: all of them, or with
``causal`` (a language model reading several tokens at once) each token up to itself.

A model that is shown its block instead of making it (a world seen by cameras) writes first and looks ahead then: passes with
``ahead`` come after the clean pass and see history, the block, and the tokens they are given, which are never committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from realtime_omni.kv.manager import BranchBlock
from realtime_omni.kv.window import FrameRef

if TYPE_CHECKING:
    from torch import Tensor

    from realtime_omni.kv.storage import KVStorage


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row of a tick: one branch of one session.

    ``tokens`` counts everything the row brings to a pass: the tokens of ``frames`` first, then any extra ones (action
    registers), which are attended to and never committed. ``scratch`` and ``extra`` are where a paged kernel may put
    them, ``ahead`` where it may put those of a pass that looks ahead. ``history`` has what the block is shown: of the older
    part perhaps the last frame of each block alone (``KVSpec.dense_frames``). ``window``: of that, a layer sees what lies
    within so many frames, the pass's own included, and the first ``sinks``; None: all.
    """

    history: tuple[FrameRef, ...]
    frames: tuple[FrameRef, ...]
    scratch: tuple[FrameRef, ...]
    extra: tuple[FrameRef, ...]
    tokens: int
    ahead: tuple[FrameRef, ...] = ()
    window: int | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        surplus = self.tokens - sum(frame.tokens for frame in self.frames)
        room = sum(frame.tokens for frame in self.extra)
        if not 0 <= surplus <= room:
            raise ValueError(f"{self.tokens} tokens a pass: {surplus} beside the frames, and scratch for {room}")

    @classmethod
    def of(cls, block: BranchBlock, *, extra_tokens: int = 0) -> RowPlan:
        """The row of one branch of a reservation, with ``extra_tokens`` uncommitted tokens after the frames."""
        tokens = sum(frame.tokens for frame in block.frames) + extra_tokens
        return cls(block.history, block.frames, block.scratch, block.extra, tokens, block.ahead)

    def within(self, window: int | None, sinks: int) -> RowPlan:
        """The same row in a layer that sees at most ``window`` frames beside the sinks; None: all of them."""
        return self if window is None else replace(self, window=window, sinks=sinks)

    @property
    def seen(self) -> tuple[FrameRef, ...]:
        """What a pass sees beside its own tokens."""
        return self._newest(self.history, 1)

    @property
    def seen_ahead(self) -> tuple[FrameRef, ...]:
        """What a pass that looks ahead sees beside its own tokens, which are a block too; as thin as the block saw it."""
        return self._newest((*self.history, *self.frames), 1 + len(self.frames))

    @property
    def history_tokens(self) -> int:
        """Tokens of history that the row sees."""
        return sum(frame.tokens for frame in self.seen)

    def _newest(self, before: tuple[FrameRef, ...], beyond: int) -> tuple[FrameRef, ...]:
        """Of what is before a pass; its tokens end so many frames ``beyond`` the block's last index."""
        if self.window is None:
            return before
        first = self.frames[-1].index + beyond - self.window
        return tuple(frame for frame in before if frame.index < self.sinks or frame.index >= first)

    @property
    def room_ahead(self) -> int:
        """Tokens that such a pass may bring."""
        return sum(frame.tokens for frame in self.ahead)


class AttentionPlan(Protocol):
    """The attention of one tick. Not to be used after ``close``."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rows: Sequence[int],
        commit: bool,
        causal: bool = False,
        ahead: bool = False,
    ) -> Tensor:
        """Attend from ``q`` over each row's history plus ``k``, ``v``; returns ``q``'s shape.

        ``q`` is ``[B, T, heads, head_dim]``, ``k`` and ``v`` ``[B, T, kv_heads, head_dim]``, already rotated, for the B
        row numbers ``rows`` of the plan: any subset, so rows can be dropped between passes. A row's result does not
        depend on the other rows: bit for bit in float64, to 1e-5 in float32.

        ``ahead``: a pass after the clean pass (see the module); it cannot commit. Raises ValueError on a wrong shape, or when
        a row that looks ahead has not written this layer yet.
        """
        ...

    def write(self, layer: int, k: Tensor, v: Tensor, *, rows: Sequence[int]) -> None:
        """What ``attend(commit=True)`` does beside attending: k, v ``[B, T, kv_heads, head_dim]`` become the rows' block.
        For a clean pass, which needs no answer of its last layer."""
        ...

    def complete(self, row: int) -> bool:
        """Whether the clean pass has written every layer of this row: only then may its reservation be committed."""
        ...

    def close(self) -> None:
        """Drop what the plan holds. Harmless to repeat."""
        ...


class AttentionBackend(Protocol):
    """A way to compute attention over paged history."""

    @property
    def name(self) -> str:
        """What a recipe calls it."""
        ...

    def plan(self, rows: Sequence[RowPlan], storage: KVStorage) -> AttentionPlan:
        """Prepare one tick: indices only, no key or value is read before the first ``attend``."""
        ...
