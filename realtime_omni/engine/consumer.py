"""What executes ticks: the seam between sessions and whatever runs a model.

Two implementations: :class:`~realtime_omni.engine.runner.ModelRunner` (our own batched ticks over paged KV) and
:class:`~realtime_omni.generate.GenerateConsumer` (any async ``generate()`` client, one request per tick). The engine
knows only this page.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from realtime_omni.engine.accounting import MemoryBytes
from realtime_omni.models.base import ControlReducer, ModelSpec, RowOutput, SessionSetup
from realtime_omni.session.observation import Observation
from realtime_omni.session.values import SessionEvent, SessionId, TickRequest
from realtime_omni.snapshot.header import IdentityRecord, WorkerRecord

if TYPE_CHECKING:
    from torch import Tensor


class Release(Protocol):
    """Worker cleanup under way. ``poll`` returns True once it succeeded, False while it runs, and raises when it failed."""

    def poll(self) -> bool: ...


class Done:
    """A release that has already succeeded."""

    def poll(self) -> bool:
        return True


class PlannedRow(Struct, frozen=True):
    """One row of a tick to run."""

    tick: TickRequest
    outputs: tuple[str, ...]


class TickRun(Protocol):
    """One batch between its reservation and its settlement. Every row is settled exactly once: ``commit``, ``rollback`` or
    ``drop``; ``close`` rolls back what is left."""

    @property
    def active(self) -> tuple[int, ...]:
        """Rows that were neither dropped nor settled."""
        ...

    @property
    def stage(self) -> str:
        """What the next ``advance`` runs, for timings."""
        ...

    def advance(self) -> bool:
        """Run up to the next checkpoint; False when everything is computed. An exception concerns the whole batch."""
        ...

    def join(self, rows: Sequence[PlannedRow]) -> Sequence[int]:
        """Add rows to the batch that runs, all or nothing; their numbers. Only where ``spec.continuous``. Raises as
        ``plan`` does."""
        ...

    def is_done(self, row: int) -> bool:
        """The row has its outcome, though others may go on."""
        ...

    def drop(self, row: int) -> None:
        """Leave the batch at a checkpoint; the row's reservation is rolled back at once."""
        ...

    def outcome(self, row: int) -> RowOutput | Exception:
        """Once the row is done, or ``advance`` returned False."""
        ...

    def precommit(self, row: int) -> None:
        """Whatever can still fail; raises, and then the row is rolled back."""
        ...

    def commit(self, row: int) -> None:
        """Publish what the row reserved. Does not fail."""
        ...

    def rollback(self, row: int) -> None: ...

    def close(self) -> None: ...


class TickConsumer(Protocol):
    """Everything the engine asks of an executor. Called from the engine's thread only."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def fault(self) -> str | None:
        """Why nothing can be computed until the server starts again, or None. Safe to ask from any thread."""
        ...

    @property
    def abortable(self) -> bool:
        """A row that is dropped leaves its session as it was. If not, dropping a row without ending its session fails it."""
        ...

    @property
    def rewind_blocks(self) -> int:
        """How many blocks a session can go back. 0: a session's state is no value here, so it cannot be forked either."""
        ...

    def understand(self, event: SessionEvent) -> str | None: ...

    def check_observation(self, observation: Observation) -> None:
        """Raises ArgumentError for one that the model cannot compute from; changes nothing. Only asked of a policy."""
        ...

    def new_reducer(self) -> ControlReducer: ...

    def check_setup(self, setup: SessionSetup) -> None:
        """Raises ArgumentError for a setup that cannot be; changes nothing. Asked before anything is given up for it."""
        ...

    def open(self, setup: SessionSetup) -> None:
        """Take a place for a session. Raises CapacityError when full, ArgumentError for a setup that cannot be."""
        ...

    def needs_prefill(self, session_id: SessionId) -> bool:
        """The session carries a block that must be written before its next tick: given content, or the latest tick's."""
        ...

    def prefill(self, sessions: Sequence[PlannedRow]) -> TickRun: ...

    def plan(self, rows: Sequence[PlannedRow]) -> TickRun:
        """Reserve for a block of every row, all or nothing. Raises CapacityError."""
        ...

    def reset(self, setup: SessionSetup) -> Release:
        """Start the session over with a new setup. Raises ArgumentError, changing nothing, when the setup cannot be."""
        ...

    def fork(self, session_id: SessionId, name: SessionId) -> None:
        """Take a place for session ``name``, which is what ``session_id`` is at its last committed block, and copy no KV.
        A tick of ``session_id`` may be running. Raises CapacityError; only asked for when ``rewind_blocks`` is not 0."""
        ...

    def rewind(self, session_id: SessionId, chunk_index: int) -> None:
        """Go back to the boundary before a chunk that ``retained`` names. No tick of the session may be running."""
        ...

    def retained(self, session_id: SessionId) -> Sequence[int]:
        """The chunks that ``rewind`` can go back to, rising; the next chunk is not among them."""
        ...

    def identity(self) -> IdentityRecord:
        """Which saved sessions fit here. Raises StateError (``unsupported``) where none can be made."""
        ...

    def capture(self, session_id: SessionId) -> tuple[WorkerRecord, Mapping[str, Tensor]]:
        """A copy of everything held for a session as of its last committed block; tensors are on the CPU. A tick of it may
        be running. Raises StateError (``unsupported``)."""
        ...

    def check_saved(self, record: WorkerRecord, tensors: Mapping[str, Tensor]) -> None:
        """Raises ArgumentError for what ``capture`` cannot have made; changes nothing."""
        ...

    def adopt(self, setup: SessionSetup, record: WorkerRecord, tensors: Mapping[str, Tensor], chunk_index: int) -> None:
        """Take a place for a session that goes on where a captured one was, with chunk ``chunk_index``.

        Raises CapacityError, ArgumentError."""
        ...

    def release(self, session_id: SessionId) -> Release:
        """Give back everything a session holds; idempotent."""
        ...

    def oldest(self, idle: Collection[str]) -> str | None:
        """The least recently used of the idle sessions, for eviction."""
        ...

    def is_sticky(self, error: BaseException) -> bool:
        """The device is broken until restart: only release makes sense."""
        ...

    def pages(self) -> tuple[int, int]:
        """Used and total pages."""
        ...

    def pages_of(self, session_id: SessionId) -> int: ...

    def kv_bytes(self, session_id: SessionId) -> int:
        """Bytes of a session's pages, shared ones included."""
        ...

    def state_bytes(self, session_id: SessionId) -> int:
        """Bytes of a session's model state, measured."""
        ...

    def memory(self) -> MemoryBytes:
        """Bytes by owner. Safe to call from other threads."""
        ...

    def check(self) -> None: ...

    def close(self) -> None: ...
