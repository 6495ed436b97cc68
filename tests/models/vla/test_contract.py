"""The policies keep the model contract, also while chunks are joined; a policy that forgets what it planned does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from models.vla import checkpoints
from realtime_omni.config import Config
from realtime_omni.models.base import PackedState, RowOutput, StepRow
from realtime_omni.models.null.policy import NullPolicy, NullPolicyState
from realtime_omni.testing.check_model import check_model

COMPLETE = "A saved session goes on among strangers bit for bit, whatever it was in the middle of"


@pytest.mark.parametrize(
    ("name", "checkpoint", "mode"),
    [("pi0", "pi0", "identity"), ("pi0.5", "pi05", "none"), ("smolvla", "smolvla", "ensemble")],
)
def test_a_policy_keeps_the_contract(name: str, checkpoint: str, mode: str) -> None:
    options = {"checkpoint": str(checkpoints.GOLDEN / checkpoint), "rtc": {"mode": mode}}
    report = check_model(Config(model=name, dtype="float32", options=options))
    assert report.passed, str(report)
    saved = next(f.detail for f in report.findings if f.rule == COMPLETE)
    assert saved.endswith("and in another process")


class Counting(NullPolicy):
    """Its actions depend on how many chunks there were, and it does not save that."""

    def _output(self, row: StepRow) -> RowOutput:
        output = super()._output(row)
        output.artifacts[0].data[...] += row.state.chunks
        return output

    def pack(self, state: NullPolicyState) -> PackedState:
        return super().pack(replace(state, chunks=0))


def test_a_policy_that_forgets_is_named() -> None:
    broken = {f.rule for f in check_model(Counting()).findings if f.passed is False}
    assert COMPLETE in broken
