"""One batch of the runner: the reservation, the model's generator, and the settlement of every row.

Owns the pages that are reserved for its rows until each is committed or rolled back. Only ``commit`` changes a resident
session: its state is replaced, and its pages become history::

    plan: reserve pages for all rows, all or nothing
    advance*: the model's generator, up to the next checkpoint; faults and drops act between them
    then per row: outcome -> commit | rollback
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from realtime_omni.engine.accounting import Extent
from realtime_omni.engine.capture import Moment
from realtime_omni.engine.consumer import PlannedRow
from realtime_omni.errors import TickError
from realtime_omni.kv.attention import AttentionPlan, RowPlan
from realtime_omni.kv.attention.decode import DecodePlan
from realtime_omni.kv.attention.growing import GrowingPlan, Turn
from realtime_omni.kv.attention.sdpa import SdpaBackend
from realtime_omni.kv.manager import BlockReservation
from realtime_omni.kv.window import FrameRef
from realtime_omni.models.base import BlockAttention, Checkpoint, RewritingModel, RowError, RowOutput, Step, StepRow

if TYPE_CHECKING:
    from realtime_omni.engine.runner import ModelRunner

log = logging.getLogger(__name__)


class BatchRun:
    """One batch: the reservation, the model's generator, and the settlement of every row. Also the model's ``StepBatch``."""

    def __init__(self, runner: ModelRunner, planned: Sequence[PlannedRow], *, prefill: bool) -> None:
        self._runner = runner
        self._planned: dict[int, PlannedRow] = {}
        self._reservations: dict[int, BlockReservation] = {}
        self._plans: dict[str, AttentionPlan | GrowingPlan | DecodePlan] = {}
        self._results: dict[int, RowOutput | Exception] = {}
        self._step_rows: dict[int, StepRow] = {}
        self._blocks: dict[int, BlockReservation] = {}
        self._rewritten: dict[int, tuple[int, ...]] = {}
        self._joined = 0
        self._needs_prefill: dict[int, bool] = {}
        self._extents: dict[int, Extent] = {}
        self._prefill = prefill
        self._forwards = 0
        self._pending: Checkpoint | None = None
        """What the model does next."""
        self.stage = "begin"
        self._finished = False
        try:
            self.join(planned)
            self._step: Step = runner.model.prefill(self) if prefill else runner.model.step(self)
        except BaseException:  # a model whose step is no generator function fails here
            self.close()
            raise

    def join(self, rows: Sequence[PlannedRow]) -> Sequence[int]:
        numbers = range(self._joined, self._joined + len(rows))  # never used again: a model tells rows apart by them
        try:
            for row, item in zip(numbers, rows, strict=True):
                self._reservations[row] = self._reserve(item)
        except BaseException:
            for row in numbers:
                self._give_back(row)
            raise
        self._joined += len(rows)
        beyond = self._joined  # a model that rewrites keeps a history, so no other row joins
        for row, item in zip(numbers, rows, strict=True):
            self._planned[row], self._blocks[row] = item, self._reservations[row]
            self._step_rows[row] = self._step_row(row, item)
            self._rewritten[row] = tuple(range(beyond, beyond + len(self._reservations[row].rewritten)))
            beyond += len(self._rewritten[row])
        return numbers

    def _reserve(self, item: PlannedRow) -> BlockReservation:
        session_id, book = item.tick.session_id, self._runner.book
        if self._prefill or not book.spec.rewrite_frames:
            return book.plan_block(session_id)
        model = cast("RewritingModel", self._runner.model)
        anew = model.rewritten_blocks(self._runner.resident(session_id).state, item.tick)
        return book.plan_block(session_id, rewritten=anew)

    def _step_row(self, row: int, item: PlannedRow) -> StepRow:
        resident = self._runner.resident(item.tick.session_id)
        return StepRow(item.tick, resident.state, resident.seed, self._reservations[row].first_frame, item.outputs)

    # What the model sees.

    @property
    def rows(self) -> Sequence[StepRow]:
        return tuple(self._step_rows.values())

    def row(self, number: int) -> StepRow:
        return self._step_rows[number]

    @property
    def active(self) -> tuple[int, ...]:
        results = self._results
        return tuple([row for row in self._reservations if row not in results] if results else self._reservations)

    def finish(self, row: int, result: RowOutput | Exception) -> None:
        self._results[row] = result

    def rewritten(self, row: int) -> tuple[int, ...]:
        return self._rewritten[row]

    def attention(self, branch: str | None = None) -> BlockAttention:
        name = self._runner.spec.kv.branches[0].name if branch is None else branch
        plan = self._plans.get(name)
        if plan is None:
            wholes = [whole.branches for whole in self._blocks.values()]
            wholes += [earlier for whole in self._blocks.values() for earlier in whole.rewritten]
            blocks = [next(b for b in branches if b.branch == name) for branches in wholes]
            plan = self._runner.backend.plan([RowPlan.of(b) for b in blocks], self._runner.storage)
            self._plans[name] = plan
        assert not isinstance(plan, GrowingPlan | DecodePlan), "this tick attends in another way"
        return plan

    def decoding(self) -> DecodePlan:
        name = self._runner.spec.kv.branches[0].name
        plan = self._plans.get(name)
        if plan is None:
            plan = DecodePlan([whole.branches[0] for whole in self._blocks.values()], self._runner.storage)
            self._plans[name] = plan
        assert isinstance(plan, DecodePlan), "one plan a tick"
        return plan

    def growing(self, tokens: Callable[[int, int], int], turn: Turn) -> GrowingPlan:
        name = self._runner.spec.kv.branches[0].name
        assert name not in self._plans, "one plan a tick"
        plans: list[RowPlan] = []
        for row, whole in self._blocks.items():
            planned = RowPlan.of(whole.branches[0])
            held = tuple(FrameRef(f.index, f.pages, tokens(row, f.index)) for f in planned.history)
            plans.append(replace(planned, history=held))
        keep = self._runner.backend.cache_history if isinstance(self._runner.backend, SdpaBackend) else None
        made = GrowingPlan(plans, self._runner.storage, turn=turn, cache_history=keep)
        self._plans[name] = made
        return made

    # What the engine does.

    def advance(self) -> bool:
        active = self.active
        if self._finished or not active:
            return False
        if self._pending is not None and self._runner.faults is not None:
            self._reach(self._point(self._pending), active)
        checkpoint = None
        try:
            checkpoint = next(self._step)
        except StopIteration as stop:
            self._results |= stop.value
        except RowError as error:
            raise TickError(f"row {error.row}: {error}") from error
        if checkpoint is None:  # outside the handler, so that a device error does not carry the results with it
            self._reach("sync", active)
            self._runner.synchronize()
            self._finished = True
            return False
        if self._results and (done := [row for row in active if self.is_done(row)]):
            self._reach("sync", done)
            self._runner.synchronize()
        self.stage = checkpoint.stage or checkpoint.kind
        self._forwards += checkpoint.kind == "forward"
        self._pending = checkpoint
        return True

    def _point(self, checkpoint: Checkpoint) -> str:
        """Its name for faults; forwards have numbers."""
        if checkpoint.kind != "forward":
            return checkpoint.kind
        return f"{'prefill' if self._prefill else 'forward'}:{self._forwards}"

    def _reach(self, point: str, rows: Sequence[int]) -> None:
        faults = self._runner.faults
        if faults is not None:
            faults(point, tuple(self._planned[row].tick.session_id for row in rows))

    def is_done(self, row: int) -> bool:
        return row in self._results

    def drop(self, row: int) -> None:
        self.rollback(row)

    def outcome(self, row: int) -> RowOutput | Exception:
        result = self._results.get(row)
        if result is None:
            return TickError("the model returned nothing for this session")
        return result

    def precommit(self, row: int) -> None:
        """Everything that can still fail: faults, and a clean pass that left a layer unwritten."""
        self._reach("commit", (row,))
        output = self._results[row]
        assert isinstance(output, RowOutput)
        resident = self._runner.resident(self._planned[row].tick.session_id)
        self._extents[row] = self._runner.measured(output.next_state, resident.own)
        self._needs_prefill[row] = self._runner.model.needs_prefill(output.next_state)
        if self._deferred(row):
            return
        for name, plan in self._plans.items():
            if not all(plan.complete(number) for number in (row, *self._rewritten[row])):
                raise TickError(f"the clean pass did not write every layer of branch {name!r}")

    def commit(self, row: int) -> None:
        output = self._results[row]
        assert isinstance(output, RowOutput)
        reservation, tick = self._reservations[row], self._planned[row].tick
        resident = self._runner.resident(tick.session_id)
        forgotten = 0
        if not self._prefill:
            before = Moment(resident.state, reservation.first_frame, resident.own.storages)
            forgotten = resident.remember(tick.chunk_index, before, self._runner.rewind_blocks)
            if self._rewritten[row]:  # what earlier moments saw is not stored any more
                resident.moments.clear()
        resident.state, resident.needs_prefill = output.next_state, self._needs_prefill[row]
        resident.own = self._extents[row]
        if self._prefill or self._rewritten[row]:
            self._runner.count(resident)
        else:
            self._runner.count_next(resident, forgotten)
        if self._deferred(row):
            self.rollback(row)  # the prefill reserves for itself
            return
        del self._reservations[row]
        self._runner.book.commit(reservation)
        self._forget(row)
        self._close_when_settled()

    def _deferred(self, row: int) -> bool:
        """A tick that left its clean pass to the prefill."""
        return self._needs_prefill[row] and not self._prefill

    def rollback(self, row: int) -> None:
        self._give_back(row)
        self._forget(row)
        self._close_when_settled()

    def _give_back(self, row: int) -> None:
        reservation = self._reservations.pop(row, None)
        if reservation is not None and self._runner.book.is_open(reservation):
            self._runner.book.rollback(reservation)

    def _forget(self, row: int) -> None:
        """A batch that is joined may go on for ever. One that is not ends, and its model may still look at the row."""
        if self._runner.spec.continuous:
            for held in (
                self._planned,
                self._blocks,
                self._step_rows,
                self._results,
                self._extents,
                self._needs_prefill,
                self._rewritten,
            ):
                cast("dict[int, object]", held).pop(row, None)

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
