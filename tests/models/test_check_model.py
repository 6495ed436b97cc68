"""check_model passes good models and catches each way of breaking the contract."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from msgspec.structs import replace as with_fields

from realtime_omni import cli
from realtime_omni.errors import ArgumentError, ConfigError
from realtime_omni.models.base import (
    Checkpoint,
    ControlReducer,
    LatestWinsReducer,
    PreparedControls,
    Step,
    StepBatch,
)
from realtime_omni.session.values import Artifact, ControlInput, SessionEvent
from realtime_omni.testing.check_model import Finding, Report, check_model
from realtime_omni.testing.malformed import example, malformed
from realtime_omni.testing.models import Knobs, TinyKVWorld, TinyState
from realtime_omni.testing.snapshot import changed, snapshot


def broken(report: Report) -> set[str]:
    return {f.rule for f in report.findings if f.passed is False}


@pytest.mark.parametrize(
    "how",
    [
        {"deferred": True},
        {"deferred": True, "prefill": True},
        {},
        {"prefill": True},
        {"branches": ("cond", "free")},
        {"serial": True},
        {"rollback_safe": False},
    ],
    ids=str,
)
def test_a_model_that_keeps_the_contract_passes(how: dict[str, Any]) -> None:
    report = check_model(TinyKVWorld(**how), dtype="float64")
    assert report.passed, str(report)
    skipped = [f.rule for f in report.findings if f.passed is None]
    claims = {"serial": 1, "rollback_safe": 3}  # without them: no batch; no retry, fork or rewind
    assert len(skipped) == sum(claims.get(name, 0) for name in how) + (0 if "deferred" in how else 2)


class Remembers(TinyKVWorld):
    """Keeps something of a session on itself."""

    last: Any = None

    def _result(self, row: Any, x: Any) -> Any:
        self.last = {row.tick.session_id: x}
        return super()._result(row, x)


class Mixes(TinyKVWorld):
    """A row's result depends on who else is in the batch."""

    def _pass(self, batch: Any, active: Any, x_BTD: Any, *rest: Any, **how: Any) -> Any:
        return super()._pass(batch, active, x_BTD + len(active) - 1, *rest, **how)


class Mutates(TinyKVWorld):
    """Edits a session's state in place, before the tick has committed."""

    def step(self, batch: StepBatch) -> Step:
        for row in batch.rows:
            object.__setattr__(row.state, "drift", row.state.drift + 1)
        return super().step(batch)


class Dice(TinyKVWorld):
    """Draws its noise from a generator that goes on."""

    def _shift(self, row: Any, branch: str) -> int:
        return super()._shift(row, branch) + int(torch.randint(50, ()))


class Eager(TinyKVWorld):
    """Decodes whether somebody asked or not."""

    def step(self, batch: StepBatch) -> Step:
        results = yield from super().step(batch)
        yield Checkpoint("decode")
        return results


class Uninterruptible(TinyKVWorld):
    """Has no checkpoint."""

    def step(self, batch: StepBatch) -> Step:
        step = super().step(batch)
        while True:
            try:
                next(step)
            except StopIteration as stop:
                return stop.value
        yield Checkpoint("forward")


class Stubborn(TinyKVWorld):
    """Cannot go on once a row has left."""

    def step(self, batch: StepBatch) -> Step:
        rows = batch.active
        for checkpoint in (step := super().step(batch)):
            yield checkpoint
            if batch.active != rows:
                raise RuntimeError("a row is missing")
        del step
        return {}


class Credulous(TinyKVWorld):
    """Accepts every event."""

    def understand(self, event: SessionEvent) -> str | None:
        return event.prompt


class Careless(TinyKVWorld):
    """Looks into a control without looking what it is."""

    def understand(self, event: SessionEvent) -> str | None:
        for control in event.controls:
            control.data["dx"] + 1
        return super().understand(event)


class Floats(TinyKVWorld):
    """Hands out pictures as floats."""

    def _result(self, row: Any, x: Any) -> Any:
        output = super()._result(row, x)
        wrong = tuple(
            a
            if a.name != "frames"
            else Artifact(a.name, a.modality, a.representation, a.layout, a.data.astype(np.float32))
            for a in output.artifacts
        )
        return with_fields(output, artifacts=wrong)


class Half(TinyKVWorld):
    """Writes the clean keys of one layer only."""

    def __init__(self) -> None:
        super().__init__(knobs=Knobs(skip_layer=True))


class Wears(TinyKVWorld):
    """Its clean pass edits the block that the state carries."""

    def __init__(self) -> None:
        super().__init__(deferred=True)

    def prefill(self, batch: StepBatch) -> Step:
        for row in batch.rows:
            row.state.unwritten.x.add_(1)
        return super().prefill(batch)


class Clings(TinyKVWorld):
    """Its clean pass, of two forwards, cannot go on once a row has left."""

    def __init__(self) -> None:
        super().__init__(deferred=True)

    def prefill(self, batch: StepBatch) -> Step:
        rows = batch.active
        results = yield from super().prefill(batch)
        yield Checkpoint("forward")
        if batch.active != rows:
            raise RuntimeError("a row is missing")
        return results


class Shapeless(TinyKVWorld):
    """Declares two primary artifacts."""

    @property
    def spec(self) -> Any:
        from dataclasses import replace

        spec = super().spec
        return replace(spec, artifacts=tuple(replace(a, primary=True) for a in spec.artifacts))


class Forgets(TinyKVWorld):
    """Starts where another session ended."""

    leftovers: list[TinyState]

    def __init__(self) -> None:
        super().__init__()
        self.leftovers = []

    def open(self, setup: Any) -> TinyState:
        fresh = super().open(setup)
        return self.leftovers.pop() if self.leftovers else fresh

    def close(self, state: TinyState) -> None:
        self.leftovers.append(state)


class Scuttles(TinyKVWorld):
    """The end of a session takes the state with it, whoever else has it."""

    def close(self, state: TinyState) -> None:
        object.__setattr__(state, "drift", 1000)


class Reuses(TinyKVWorld):
    """Edits the state that it was given once the tick is sure to succeed, or so it believes."""

    def _result(self, row: Any, x: Any) -> Any:
        output = super()._result(row, x)
        object.__setattr__(row.state, "drift", output.next_state.drift)
        return with_fields(output, next_state=row.state)


class Counting(LatestWinsReducer):
    """Adds up what it was told, and tells the model the sum."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def prepare(self, current: Any, events: Any, chunk_index: int) -> PreparedControls:
        told = [c.data["dx"] for e in events for c in e.controls] + [1] * len(events)
        total = sum(self.told) + sum(told)
        return PreparedControls((ControlInput("move", "testing.move.v1", {"dx": total % 7}),), (), private=told)

    def commit(self, prepared: PreparedControls) -> None:
        self.told.extend(prepared.private)

    def reset(self) -> None:
        self.told.clear()

    def save(self) -> Any:
        return list(self.told)

    def load(self, memory: Any) -> None:
        if not isinstance(memory, list) or not all(isinstance(n, int) for n in memory):
            raise ArgumentError("a list of integers", path="memory")
        self.told = list(memory)


class Amnesic(Counting):
    """Saves nothing."""

    def save(self) -> Any:
        return []


class Lends(Counting):
    """Hands its memory itself out."""

    def save(self) -> Any:
        return self.told


class Trusting(Counting):
    """Loads anything."""

    def load(self, memory: Any) -> None:
        self.told = list(memory)


def reduced_by(reducer: type[Counting]) -> Callable[[], TinyKVWorld]:
    """A model with this reducer."""

    class Reduced(TinyKVWorld):
        def new_reducer(self) -> ControlReducer:
            return reducer()

    Reduced.__name__ = f"reduced by {reducer.__name__}"
    return Reduced


def test_a_reducer_that_remembers_passes() -> None:
    report = check_model(reduced_by(Counting)(), dtype="float64")
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("model", "rules"),
    [
        (Remembers, "Sessions leave nothing"),
        (Mixes, "A batch of N"),
        (Mutates, "A failed tick"),
        (Dice, "A reset world"),
        (Eager, "Every artifact"),
        (Uninterruptible, "Every pass has a checkpoint"),
        (Stubborn, "A row that leaves"),
        (Credulous, ("Every declared prompt", "A control as declared")),
        (Careless, "A control as declared"),
        (Floats, "Every artifact"),
        (Half, "A reset world"),
        (Wears, "A deferred clean pass"),
        (Clings, "A row that leaves a deferred"),
        (Shapeless, "The declaration"),
        (Forgets, "Sessions leave nothing"),
        (Scuttles, "A fork goes on"),
        (Reuses, ("A fork goes on", "A rewound session")),
        (reduced_by(Amnesic), ("What a reducer remembers", "A fork goes on", "A rewound session")),
        (reduced_by(Lends), "What a reducer remembers"),
        (reduced_by(Trusting), "What a reducer remembers"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_each_way_of_breaking_the_contract_is_named(
    model: Callable[[], TinyKVWorld], rules: str | tuple[str, ...]
) -> None:
    report = check_model(model(), dtype="float64")
    assert not report.passed
    for rule in (rules,) if isinstance(rules, str) else rules:
        assert any(r.startswith(rule) for r in broken(report)), str(report)
    assert f"breaks {len(broken(report))} of" in str(report)


def test_the_null_model_passes_by_name_and_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["realtime-omni", "check-model", "null"])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert exited.value.code in (0, None)
    assert "null keeps the model contract" in capsys.readouterr().out


def test_findings_are_told_as_soon_as_each_rule_is_done() -> None:
    told: list[Finding] = []
    report = check_model(TinyKVWorld(), dtype="float64", found=told.append)
    assert tuple(told) == report.findings


SCRIPT = {
    "type": "object",
    "properties": {
        "mode": {"const": "script"},
        "frames": {"type": "array", "items": {"type": "array"}, "minItems": 2, "maxItems": 2},
        "t_ms": {"type": "number", "minimum": 0},
    },
    "required": ["mode", "frames"],
    "additionalProperties": False,
}


def test_malformed_controls_are_all_refused_by_a_reference_validator() -> None:
    good, full = example(SCRIPT), example(SCRIPT, full=True)
    assert good == {"mode": "script", "frames": [[], []]}
    assert full == {"mode": "script", "frames": [[None], [None]], "t_ms": 0}
    wrong = list(malformed(SCRIPT, good))
    validator = jsonschema.Draft202012Validator(SCRIPT)
    assert validator.is_valid(good)
    assert validator.is_valid(full)
    # A validator takes NaN for a number; JSON has none.
    assert [what for what, data in wrong if validator.is_valid(data)] == ["data.t_ms is NaN"]
    what = {text for text, _ in wrong}
    assert {
        "data.mode is missing",
        "data has a field too many",
        "data.frames is too long",
        "data.frames is too short",
    } < what


def test_a_model_that_breaks_the_contract_is_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["realtime-omni", "check-model", "broken_world:Broken", "--set", "dtype=float64"])
    module = type(sys)("broken_world")
    module.Broken = Credulous  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "broken_world", module)
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert exited.value.code == 1


def test_a_model_without_all_members_is_told_which_and_tried_no_further() -> None:
    class Mini:
        spec = TinyKVWorld().spec
        open = understand = new_reducer = prefill = needs_prefill = step = pack = unpack = TinyKVWorld.close

    told: list[Finding] = []
    report = check_model(Mini(), found=told.append)  # type: ignore[arg-type]
    assert not report.passed
    assert report.findings == tuple(told)
    assert [(f.rule, f.detail) for f in told] == [
        ("The declaration is complete and consistent", "lacks fingerprint, close, start_image; no other rule was tried")
    ]


def test_an_unknown_model_is_refused_before_any_rule() -> None:
    with pytest.raises(ConfigError, match="unknown model"):
        check_model("no-such-model")


def test_a_snapshot_sees_what_hangs_on_an_object_and_nothing_else() -> None:
    class Thing:
        def __init__(self) -> None:
            self.weights = torch.zeros(3)
            self.table = {"a": [1, 2]}
            self.again = self.table
            self.me = self

        def method(self) -> None: ...

    thing = Thing()
    before = snapshot(thing)
    assert changed(before, snapshot(thing)) == ()
    thing.weights[1] = 1
    thing.table["a"].append(3)
    thing.table["b"] = []
    assert set(changed(before, snapshot(thing))) >= {"model.weights"}
    assert any("table" in p or "again" in p for p in changed(before, snapshot(thing)))
