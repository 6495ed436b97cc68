"""Our executor: batched ticks of one model over paged KV.

Owns what a resident session costs: its KV places (through the book), its model state, its seed. Must not know lifecycles,
events or waiters. A session's state is replaced, never edited, and only in ``commit``; its pages become history only there.
So a moment of a session is two references, a state and a count of frames: the last ``rewind_blocks`` of them are kept, and a
fork copies no more than those.

One run is one batch::

    plan: reserve pages for all rows, all or nothing
    advance*: the model's generator, up to the next checkpoint; faults and drops act between them
    then per row: outcome -> commit | rollback
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from realtime_omni.engine.accounting import Census, MemoryBytes, Storages, storages
from realtime_omni.engine.capture import Moment, check_parts, put_together, take_apart
from realtime_omni.engine.consumer import Done, PlannedRow, Release
from realtime_omni.errors import CapacityError, ErrorCode, TickError
from realtime_omni.kv.attention import AttentionBackend, AttentionPlan, RowPlan
from realtime_omni.kv.manager import BlockReservation, KVBook
from realtime_omni.kv.storage import KVStorage
from realtime_omni.models.base import (
    BlockAttention,
    ControlReducer,
    ModelSpec,
    RowError,
    RowOutput,
    SessionSetup,
    Step,
    StepRow,
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


def no_faults(point: str, sessions: Sequence[SessionId]) -> None:
    """The hook of a running server."""


@dataclass(slots=True)
class _Resident:
    state: Any
    seed: int
    needs_prefill: bool
    """What the model says of ``state``; asked once."""
    own: Storages
    """What ``state`` keeps alive; measured once."""
    moments: dict[int, Moment] = field(default_factory=dict)
    """The boundaries that a rewind can go back to, by chunk index, rising; the present one is not among them."""
    storages: Storages = field(default_factory=dict)
    """Of the present state and of all moments, each once; what the census knows of this session."""

    def remember(self, chunk_index: int, moment: Moment, most: int) -> None:
        """A moment that was the present one, as the boundary before chunk ``chunk_index``; at most ``most`` stay."""
        self.moments[chunk_index] = moment
        while len(self.moments) > most:
            del self.moments[next(iter(self.moments))]


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
    ) -> None:
        """``synchronize`` waits for the device inside the protected scope of a tick, so that its failures are that tick's."""
        self.model = model
        self.book = book
        self.storage = storage
        self.backend = backend
        self.faults: FaultHook = no_faults
        self._synchronize = synchronize
        self._residents: dict[SessionId, _Resident] = {}
        self._total_pages = book.statistics().total_pages - 1  # the null page is nobody's
        self._census = Census()
        self._weight_bytes = sum(storages(model).values())

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def abortable(self) -> bool:
        return True

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
        self._settle_in(name, replace(resident, moments=dict(resident.moments), storages={}))

    def rewind(self, session_id: SessionId, chunk_index: int) -> None:
        resident = self._residents[session_id]
        moment = resident.moments[chunk_index]
        self.book.rewind(session_id, self.book.completed_frames(session_id) - moment.frames)
        resident.state, resident.needs_prefill, resident.own = moment.state, False, moment.storages
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
        return IdentityRecord(
            model=self.spec.name,
            fingerprint=self.model.fingerprint(),
            dtype=str(self.storage.dtype).removeprefix("torch."),
            geometry=GeometryRecord.of(self.book.spec),
        )

    def capture(self, session_id: SessionId) -> tuple[WorkerRecord, Mapping[str, Tensor]]:
        resident = self._residents[session_id]
        present = Moment(resident.state, self.book.completed_frames(session_id))
        return take_apart(session_id, (*resident.moments.values(), present), self.model, self.book, self.storage)

    def check_saved(self, record: WorkerRecord, tensors: Mapping[str, Tensor]) -> None:
        moments = check_parts(record, tensors, self.model, self.storage).moments
        self.model.close(moments[-1].state)
        for moment in moments:
            self._checked(moment.storages)

    def adopt(self, setup: SessionSetup, record: WorkerRecord, tensors: Mapping[str, Tensor], chunk_index: int) -> None:
        parts = check_parts(record, tensors, self.model, self.storage)
        *past, present = parts.moments
        try:
            for moment in parts.moments:
                self._checked(moment.storages)
            put_together(setup.session_id, parts, self.book, self.storage)
        except BaseException:
            self.model.close(present.state)
            raise
        resident = _Resident(present.state, setup.seed, self.model.needs_prefill(present.state), present.storages)
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
        return "CUDA error" in str(error) or "device-side assert" in str(error)

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
        return 0 if resident is None else sum(resident.storages.values())

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
        )

    def measured(self, state: Any) -> Storages:
        """What a state keeps alive. Raises TickError (``state_too_large``) when that is more than the model has declared,
        and so more than was planned for."""
        return self._checked(storages(state))

    def count(self, resident: _Resident) -> None:
        """Tell the census what a session holds now."""
        held = dict(resident.own)
        for moment in resident.moments.values():
            held.update(moment.storages)
        if held != resident.storages:
            self._census.remove(resident.storages)
            self._census.add(held)
            resident.storages = held

    def _checked(self, held: Storages) -> Storages:
        size, limit = sum(held.values()), self.spec.kv.model_owned_bytes_per_session
        if size > limit:
            raise TickError(
                f"the model's state has {size} bytes; it declares at most {limit}", code=ErrorCode.STATE_TOO_LARGE
            )
        return held

    def check(self) -> None:
        """Raises AssertionError when the books disagree."""
        self.book.check()
        assert set(self.book.sessions) == set(self._residents), "KV places and resident sessions differ"
        for session_id, resident in self._residents.items():
            held = storages((resident.state, [moment.state for moment in resident.moments.values()]))
            assert held == resident.storages, f"the bytes of session {session_id!r} were not counted"
        self._census.check([r.storages for r in self._residents.values()])

    def close(self) -> None:
        """The end of the process's use: every session is dropped as well as it can be."""
        for session_id in tuple(self._residents):
            try:
                self._drop(session_id)
            except Exception:
                log.exception("cleanup failed at the end session_id=%s", session_id)

    def resident(self, session_id: SessionId) -> _Resident:
        return self._residents[session_id]

    def synchronize(self) -> None:
        if self._synchronize is not None:
            self._synchronize()

    def _begin(self, setup: SessionSetup) -> _Resident:
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
        self.faults("release", (session_id,))
        self.model.close(resident.state)
        del self._residents[session_id]
        self._census.remove(resident.storages)
        self.book.end(session_id)


class BatchRun:
    """One batch: the reservation, the model's generator, and the settlement of every row. Also the model's ``StepBatch``."""

    def __init__(self, runner: ModelRunner, planned: Sequence[PlannedRow], *, prefill: bool) -> None:
        self._runner = runner
        self._planned = tuple(planned)
        self._reservations: dict[int, BlockReservation] = {}
        self._plans: dict[str, AttentionPlan] = {}
        self._results: Mapping[int, RowOutput | Exception] = {}
        self._needs_prefill: dict[int, bool] = {}
        self._storages: dict[int, Storages] = {}
        self._prefill = prefill
        self._forwards = 0
        self._pending_point: str | None = None
        self.stage = "begin"
        self._finished = False
        try:
            for row, item in enumerate(self._planned):
                self._reservations[row] = runner.book.plan_block(item.tick.session_id)
            self._blocks = tuple(self._reservations.values())
            self._step_rows = tuple(self._step_row(row, item) for row, item in enumerate(self._planned))
            self._step: Step = runner.model.prefill(self) if prefill else runner.model.step(self)
        except BaseException:  # a model whose step is no generator function fails here
            self.close()
            raise

    def _step_row(self, row: int, item: PlannedRow) -> StepRow:
        resident = self._runner.resident(item.tick.session_id)
        return StepRow(item.tick, resident.state, resident.seed, self._reservations[row].first_frame, item.outputs)

    # What the model sees.

    @property
    def rows(self) -> Sequence[StepRow]:
        return self._step_rows

    @property
    def active(self) -> tuple[int, ...]:
        return tuple(self._reservations)

    def attention(self, branch: str | None = None) -> BlockAttention:
        name = self._runner.spec.kv.branches[0].name if branch is None else branch
        if name not in self._plans:
            blocks = [next(b for b in whole.branches if b.branch == name) for whole in self._blocks]
            self._plans[name] = self._runner.backend.plan([RowPlan.of(b) for b in blocks], self._runner.storage)
        return self._plans[name]

    # What the engine does.

    @property
    def planned(self) -> Sequence[PlannedRow]:
        return self._planned

    def advance(self) -> bool:
        if self._finished or not self._reservations:
            return False
        sessions = tuple(self._planned[row].tick.session_id for row in self._reservations)
        if self._pending_point is not None:
            self._runner.faults(self._pending_point, sessions)
        checkpoint = None
        try:
            checkpoint = next(self._step)
        except StopIteration as stop:
            self._results = stop.value
        except RowError as error:
            raise TickError(f"row {error.row}: {error}") from error
        if checkpoint is None:  # outside the handler, so that a device error does not carry the results with it
            self._runner.faults("sync", sessions)
            self._runner.synchronize()
            self._finished = True
            return False
        self.stage = checkpoint.stage or checkpoint.kind
        if checkpoint.kind == "forward":
            self._forwards += 1
            prefix = "prefill" if self._prefill else "forward"
            self._pending_point = f"{prefix}:{self._forwards}"
        else:
            self._pending_point = checkpoint.kind
        return True

    def drop(self, row: int) -> None:
        self.rollback(row)

    def outcome(self, row: int) -> RowOutput | Exception:
        result = self._results.get(row)
        if result is None:
            return TickError("the model returned nothing for this session")
        return result

    def precommit(self, row: int) -> None:
        """Everything that can still fail: faults, and a clean pass that left a layer unwritten."""
        self._runner.faults("commit", (self._planned[row].tick.session_id,))
        output = self._results[row]
        assert isinstance(output, RowOutput)
        self._storages[row] = self._runner.measured(output.next_state)
        self._needs_prefill[row] = self._runner.model.needs_prefill(output.next_state)
        if self._deferred(row):
            return
        for name, plan in self._plans.items():
            if not plan.complete(row):
                raise TickError(f"the clean pass did not write every layer of branch {name!r}")

    def commit(self, row: int) -> None:
        output = self._results[row]
        assert isinstance(output, RowOutput)
        reservation, tick = self._reservations[row], self._planned[row].tick
        resident = self._runner.resident(tick.session_id)
        if not self._prefill:
            before = Moment(resident.state, reservation.first_frame, resident.own)
            resident.remember(tick.chunk_index, before, self._runner.rewind_blocks)
        resident.state, resident.needs_prefill = output.next_state, self._needs_prefill[row]
        resident.own = self._storages[row]
        self._runner.count(resident)
        if self._deferred(row):
            self.rollback(row)  # the prefill reserves for itself
            return
        del self._reservations[row]
        self._runner.book.commit(reservation)
        self._close_when_settled()

    def _deferred(self, row: int) -> bool:
        """A tick that left its clean pass to the prefill."""
        return self._needs_prefill[row] and not self._prefill

    def rollback(self, row: int) -> None:
        reservation = self._reservations.pop(row, None)
        if reservation is not None and self._runner.book.is_open(reservation):
            self._runner.book.rollback(reservation)
        self._close_when_settled()

    def close(self) -> None:
        """Roll back every row that is not settled; harmless to repeat."""
        for row in tuple(self._reservations):
            self.rollback(row)
        self._close_when_settled()

    def _close_when_settled(self) -> None:
        if self._reservations:
            return
        step = getattr(self, "_step", None)
        if step is not None and not self._finished and not step.gi_running:
            try:
                step.close()
            except Exception:  # the row is rolled back; how a model ends its step must not stop the withdrawal
                log.exception("the model's step did not end cleanly")
        for plan in self._plans.values():
            plan.close()
