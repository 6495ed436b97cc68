"""check_model holds models to saving all of their state, and catches each way of not doing it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from msgspec.structs import replace as changed

from realtime_omni.config import load
from realtime_omni.models.base import PackedState, SessionSetup, Step, StepBatch
from realtime_omni.testing.check_model import Report, check_model
from realtime_omni.testing.elsewhere import continue_elsewhere, pictures
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import TinyKVWorld, TinyState
from realtime_omni.testing.recurrent import RecurrentState, TinyRecurrentWorld

COMPLETE = "A saved session goes on among strangers bit for bit, whatever it was in the middle of"
STRICT = "A packed state that was changed is refused"


def broken(report: Report) -> set[str]:
    return {f.rule for f in report.findings if f.passed is False}


def test_a_model_whose_whole_memory_is_a_vector_keeps_the_contract() -> None:
    report = check_model(TinyRecurrentWorld(), dtype="float64")
    assert report.passed, str(report)
    assert all(f.passed or "deferred" in f.rule for f in report.findings), str(report)


def test_a_model_of_the_catalog_goes_on_in_another_process() -> None:
    report = check_model("null")
    assert report.passed, str(report)
    assert next(f.detail for f in report.findings if f.rule == COMPLETE).endswith("and in another process")


class Forgets(TinyKVWorld):
    """Leaves out what every chunk adds to."""

    def pack(self, state: TinyState) -> PackedState:
        return super().pack(replace(state, drift=0))


class ForgetsOnReading(TinyRecurrentWorld):
    """Writes everything and reads half of it."""

    def unpack(self, packed: PackedState) -> RecurrentState:
        return replace(super().unpack(packed), chunks=0)


class Aside(TinyKVWorld):
    """Keeps a part of the state beside it, under the session's id, where other sessions of the process find theirs."""

    kept: ClassVar[dict[str, int]] = {}

    def _shift(self, row: Any, branch: str) -> int:
        made = self.kept.get(row.tick.session_id, 0)
        return super()._shift(row, branch) + made

    def _result(self, row: Any, x: Any) -> Any:
        self.kept[row.tick.session_id] = row.tick.chunk_index + 1
        return super()._result(row, x)


class Loose(TinyRecurrentWorld):
    """Believes what it reads."""

    def unpack(self, packed: PackedState) -> RecurrentState:
        return RecurrentState(packed.tensors["hidden"], packed.values["chunks"])


class Shares(TinyRecurrentWorld):
    """Goes on writing into the tensor that it has packed."""

    def open(self, setup: SessionSetup) -> RecurrentState:
        return RecurrentState(torch.zeros(12, dtype=torch.float64), 0)

    def step(self, batch: StepBatch) -> Step:
        results = yield from super().step(batch)
        for row, output in results.items():
            hidden_D = batch.rows[row].state.hidden
            hidden_D.copy_(output.next_state.hidden)
            results[row] = changed(output, next_state=replace(output.next_state, hidden=hidden_D))
        return results


@pytest.mark.parametrize(
    ("model", "rule"),
    [(Forgets, COMPLETE), (ForgetsOnReading, COMPLETE), (Aside, COMPLETE), (Loose, STRICT), (Shares, COMPLETE)],
)
def test_each_way_of_not_saving_is_named(model: Any, rule: str) -> None:
    assert rule in broken(check_model(model(), dtype="float64"))


@pytest.mark.parametrize("name", ["tiny-world", "null"])
def test_every_model_of_the_catalog_goes_on_in_another_process(name: str) -> None:
    config = load(name, {}, ["kv.requested_sessions=2", "session.max_sessions=2"])
    engine = InlineEngine(None, config)
    engine.create("a", seed=3)
    for _ in range(2):
        engine.next("a")
    snapshot = engine.snapshot("a")
    expected = [pictures(engine.next("a")) for _ in range(2)]
    got = continue_elsewhere(config, snapshot, [None, None])
    for found, wanted in zip(got, expected, strict=True):
        assert found.keys() == wanted.keys()
        assert all((found[name] == wanted[name]).all() for name in wanted)
