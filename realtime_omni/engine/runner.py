"""Our executor: batched ticks of one model over paged KV.

Owns what a resident session costs: its KV places (through the book), its model state, its seed. Must not know lifecycles,
events or waiters. A session's state is replaced, never edited, and only in ``commit``; its pages become history only there.
So a moment of a session is two references, a state and a count of frames: the last ``rewind_blocks`` of them are kept, and a
fork copies no more than those. What runs is one batch (:mod:`realtime_omni.engine.batch`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from realtime_omni.engine.accounting import NOTHING, Census, Extent, Holding, MemoryBytes, Storages, measure, storages
from realtime_omni.engine.batch import BatchRun
from realtime_omni.engine.capture import Moment, check_parts, put_together, take_apart
from realtime_omni.engine.consumer import Done, PlannedRow, Release
from realtime_omni.errors import BackendUnavailable, CapacityError, ErrorCode, StateError, TickError
from realtime_omni.kv.attention import AttentionBackend
from realtime_omni.kv.manager import KVBook
from realtime_omni.kv.storage import KVStorage
from realtime_omni.models.base import (
    CachingModel,
    ControlReducer,
    ModelSpec,
    Ranks,
    SessionSetup,
    WorldModel,
)
from realtime_omni.session.observation import Observation
from realtime_omni.session.values import SessionEvent, SessionId
from realtime_omni.snapshot.header import GeometryRecord, IdentityRecord, WorkerRecord

if TYPE_CHECKING:
    from torch import Tensor

    from realtime_omni.models.policy import PolicyModel

log = logging.getLogger(__name__)

FaultHook = Callable[[str, Sequence[SessionId]], None]
"""Called before every named piece of work with the sessions it serves; a test makes it raise."""


@dataclass(slots=True)
class _Resident:
    state: Any
    seed: int
    needs_prefill: bool
    """What the model says of ``state``; asked once."""
    own: Extent
    """What ``state`` keeps alive; measured once."""
    moments: dict[int, Moment] = field(default_factory=dict)
    """The boundaries that a rewind can go back to, by chunk index, rising; the present one is not among them."""
    holding: Holding = field(default_factory=Holding)
    """Of the present state and of all moments; what the census knows of this session."""

    def remember(self, chunk_index: int, moment: Moment, most: int) -> int:
        """A moment that was the present one, as the boundary before chunk ``chunk_index``; at most ``most`` stay. Returns how
        many do not, the oldest."""
        self.moments[chunk_index] = moment
        forgotten = max(len(self.moments) - most, 0)
        for _ in range(forgotten):
            del self.moments[next(iter(self.moments))]
        return forgotten


class ModelRunner:
    """A :class:`~realtime_omni.engine.consumer.TickConsumer` over a :class:`~realtime_omni.models.base.WorldModel`."""

    def __init__(
        self,
        model: WorldModel,
        book: KVBook,
        storage: KVStorage,
        backend: AttentionBackend,
        *,
        synchronize: Callable[[], None] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """``synchronize`` waits for the device inside the protected scope of a tick, so that its failures are that tick's.
        ``ranks``: the other processes of the model, which end with the runner."""
        if model.spec.continuous and model.spec.kv.num_layers:
            raise ValueError(f"{model.spec.name!r} keeps a history, so its rows cannot join a step that runs")
        self.model = model
        self.book = book
        self.storage = storage
        self.backend = backend
        self.faults: FaultHook | None = None
        self._synchronize = synchronize
        self._ranks = ranks
        self._residents: dict[SessionId, _Resident] = {}
        self._total_pages = book.statistics().total_pages - 1  # the null page is nobody's
        self._census = Census()
        self._caching = model if isinstance(model, CachingModel) else None
        cached = storages(None if self._caching is None else self._caching.cached)
        self._weight_bytes = sum(size for key, size in storages(model).items() if key not in cached)

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def abortable(self) -> bool:
        return True

    @property
    def fault(self) -> str | None:
        return None if self._ranks is None else self._ranks.fault

    @property
    def rewind_blocks(self) -> int:
        return self.book.spec.rewind_blocks if self.spec.rollback_safe else 0

    def understand(self, event: SessionEvent) -> str | None:
        return self.model.understand(event)

    def check_observation(self, observation: Observation) -> None:
        cast("PolicyModel", self.model).check_observation(observation)  # to look would take 50 µs of every observation

    def new_reducer(self) -> ControlReducer:
        return self.model.new_reducer()

    def check_setup(self, setup: SessionSetup) -> None:
        self.model.close(self.model.open(setup))

    def open(self, setup: SessionSetup) -> None:
        """Raises CapacityError when no place is free, ArgumentError when the model refuses the setup."""
        if setup.session_id in self._residents:
            raise ValueError(f"session {setup.session_id!r} is resident already")
        resident = self._begin(setup)
        try:
            self.book.begin(setup.session_id)
        except CapacityError:
            self.model.close(resident.state)
            raise
        self._settle_in(setup.session_id, resident)

    def needs_prefill(self, session_id: SessionId) -> bool:
        return self._residents[session_id].needs_prefill

    def prefill(self, sessions: Sequence[PlannedRow]) -> BatchRun:
        return BatchRun(self, sessions, prefill=True)

    def plan(self, rows: Sequence[PlannedRow]) -> BatchRun:
        return BatchRun(self, rows, prefill=False)

    def reset(self, setup: SessionSetup) -> Release:
        resident = self._begin(setup)  # refuses a bad setup before anything is given up
        try:
            self._drop(setup.session_id)
            self.book.begin(setup.session_id)
        except BaseException:
            self.model.close(resident.state)
            raise
        self._settle_in(setup.session_id, resident)
        return Done()

    def fork(self, session_id: SessionId, name: SessionId) -> None:
        resident = self._residents[session_id]
        self.book.fork(session_id, name)
        self._settle_in(name, replace(resident, moments=dict(resident.moments), holding=Holding()))

    def rewind(self, session_id: SessionId, chunk_index: int) -> None:
        resident = self._residents[session_id]
        moment = resident.moments[chunk_index]
        self.book.rewind(session_id, self.book.completed_frames(session_id) - moment.frames)
        resident.state, resident.needs_prefill, resident.own = moment.state, False, Extent(moment.storages)
        resident.moments = {i: m for i, m in resident.moments.items() if i < chunk_index}
        self.count(resident)

    def retained(self, session_id: SessionId) -> Sequence[int]:
        """Not all moments when the window is emptied at a boundary: what was seen before it is gone."""
        resident = self._residents.get(session_id)
        if resident is None:
            return ()
        if not self.book.spec.reset_at_boundary:
            return tuple(resident.moments)
        completed = self.book.completed_frames(session_id)
        moments = resident.moments.items()
        return tuple(i for i, m in moments if self.book.can_rewind(session_id, completed - m.frames))

    def identity(self) -> IdentityRecord:
        if self._ranks is not None:
            raise StateError("sessions of a model on several devices cannot be saved", code=ErrorCode.UNSUPPORTED)
        return IdentityRecord(
            model=self.spec.name,
            fingerprint=self.model.fingerprint(),
            dtype=str(self.storage.dtype).removeprefix("torch."),
            geometry=GeometryRecord.of(self.book.spec),
        )

    def capture(self, session_id: SessionId) -> tuple[WorkerRecord, Mapping[str, Tensor]]:
        self.identity()
        resident = self._residents[session_id]
        present = Moment(resident.state, self.book.completed_frames(session_id))
        return take_apart(session_id, (*resident.moments.values(), present), self.model, self.book, self.storage)

    def check_saved(self, record: WorkerRecord, tensors: Mapping[str, Tensor]) -> None:
        self.identity()
        moments = check_parts(record, tensors, self.model, self.storage).moments
        self.model.close(moments[-1].state)
        for moment in moments:
            self._check_size(moment.storages)

    def adopt(self, setup: SessionSetup, record: WorkerRecord, tensors: Mapping[str, Tensor], chunk_index: int) -> None:
        self.identity()
        parts = check_parts(record, tensors, self.model, self.storage)
        *past, present = parts.moments
        try:
            for moment in parts.moments:
                self._check_size(moment.storages)
            put_together(setup.session_id, parts, self.book, self.storage)
        except BaseException:
            self.model.close(present.state)
            raise
        resident = _Resident(
            present.state, setup.seed, self.model.needs_prefill(present.state), Extent(present.storages)
        )
        completed = self.book.completed_frames(setup.session_id)
        for index, moment in enumerate(past, chunk_index - len(past)):
            if self.book.can_rewind(setup.session_id, completed - moment.frames):
                resident.remember(index, moment, self.rewind_blocks)
        self._settle_in(setup.session_id, resident)

    def release(self, session_id: SessionId) -> Release:
        """Raises what a ``release`` fault or the model's close hook raises; then nothing was given up and it can be retried."""
        self._drop(session_id)
        return Done()

    def oldest(self, idle: Collection[str]) -> str | None:
        return self.book.oldest(idle)

    def is_sticky(self, error: BaseException) -> bool:
        return isinstance(error, BackendUnavailable) or "CUDA error" in str(error) or "device-side assert" in str(error)

    def pages(self) -> tuple[int, int]:
        """Constant time, and safe to call from other threads: a full count would walk tables that a tick changes."""
        return self._total_pages - self.book.free_pages, self._total_pages

    def pages_of(self, session_id: SessionId) -> int:
        return self.book.page_count(session_id) if session_id in self.book else 0

    def kv_bytes(self, session_id: SessionId) -> int:
        return self.pages_of(session_id) * self.book.spec.page_bytes

    def state_bytes(self, session_id: SessionId) -> int:
        """Of the present state and of those that a rewind can go back to; storage that they share is counted once."""
        resident = self._residents.get(session_id)
        return 0 if resident is None else resident.holding.bytes

    def memory(self) -> MemoryBytes:
        page_bytes, scratch = self.book.spec.page_bytes, self.book.spec.scratch_pages * self.book.spec.page_bytes
        used, _ = self.pages()
        return MemoryBytes(
            kv_pool=self.storage.bytes - scratch,
            kv_used=used * page_bytes,
            kv_shared=self.book.pool.shared_pages * page_bytes,
            scratch=scratch,
            weights=self._weight_bytes,
            states=self._census.bytes,
            caches=0 if self._caching is None else self._census.bytes_without(storages(self._caching.cached)),
        )

    def measured(self, state: Any, before: Extent = NOTHING) -> Extent:
        """What a state keeps alive; ``before`` as in :func:`~.accounting.measure`. Raises TickError (``state_too_large``) when
        that is more than the model has declared, and so more than was planned for."""
        extent = measure(state, before)
        self._check_size(extent.storages)
        return extent

    def count(self, resident: _Resident) -> None:
        """Tell the census what a session holds now."""
        past = [moment.storages for moment in resident.moments.values()]
        resident.holding.update((*past, resident.own.storages), self._census)

    def count_next(self, resident: _Resident, forgotten: int) -> None:
        """The same after a tick: the present state came, and the oldest moments went."""
        resident.holding.push(resident.own.storages, self._census)
        for _ in range(forgotten):
            resident.holding.drop_oldest(self._census)

    def _check_size(self, held: Storages) -> None:
        size, limit = sum(held.values()), self.spec.kv.model_owned_bytes_per_session
        if size > limit:
            raise TickError(
                f"the model's state has {size} bytes; it declares at most {limit}", code=ErrorCode.STATE_TOO_LARGE
            )

    def check(self) -> None:
        """Raises AssertionError when the books disagree."""
        self.book.check()
        assert set(self.book.sessions) == set(self._residents), "KV places and resident sessions differ"
        for session_id, resident in self._residents.items():
            held = storages((resident.state, [moment.state for moment in resident.moments.values()]))
            counted = resident.holding
            assert held == counted.storages, f"the bytes of session {session_id!r} were not counted"
            assert counted.bytes == sum(held.values()), f"the bytes of session {session_id!r} do not add up"
        self._census.check([r.holding.storages for r in self._residents.values()])

    def close(self) -> None:
        """The end of the process's use: every session is dropped as well as it can be."""
        for session_id in tuple(self._residents):
            try:
                self._drop(session_id)
            except Exception:
                log.exception("cleanup failed at the end session_id=%s", session_id)
        if self._ranks is not None:
            self._ranks.close()

    def resident(self, session_id: SessionId) -> _Resident:
        return self._residents[session_id]

    def synchronize(self) -> None:
        if self._synchronize is not None:
            self._synchronize()

    def _begin(self, setup: SessionSetup) -> _Resident:
        if (fault := self.fault) is not None:
            raise BackendUnavailable(f"{fault}; the server must be started again")
        state = self.model.open(setup)
        try:
            return _Resident(state, setup.seed, self.model.needs_prefill(state), self.measured(state))
        except TickError:
            self.model.close(state)
            raise

    def _settle_in(self, session_id: SessionId, resident: _Resident) -> None:
        self._residents[session_id] = resident
        self.count(resident)

    def _drop(self, session_id: SessionId) -> None:
        resident = self._residents.get(session_id)
        if resident is None:
            return
        if self.faults is not None:
            self.faults("release", (session_id,))
        self.model.close(resident.state)
        del self._residents[session_id]
        resident.holding.update((), self._census)
        self.book.end(session_id)
