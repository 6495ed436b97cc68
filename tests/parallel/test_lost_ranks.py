"""A rank that ends, hangs or never comes: a coded error within the bound, and a server that says so."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import pytest

from parallel.tiny_ranks import config, ranked, start
from realtime_omni.errors import BackendUnavailable, ErrorCode
from realtime_omni.testing.inline import InlineEngine


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_rank_that_is_lost_fails_the_sessions_with_a_code_and_is_seen(how: signal.Signals) -> None:
    model = start(2, 1, timeout_s=3.0)
    engine = InlineEngine(model, config(sp=2))
    engine.create("a", seed=5)
    engine.next("a")
    (process,) = ranked(model).processes
    assert engine.runner.fault is None

    def hit(at: str, sessions: Sequence[str]) -> None:
        if at == "forward:3":
            os.kill(process, how)

    engine.runner.faults = hit
    began_s = time.monotonic()
    with pytest.raises(BackendUnavailable, match="must be started again") as lost:
        engine.next("a")
    assert time.monotonic() - began_s < 30
    assert lost.value.code == ErrorCode.BACKEND_UNAVAILABLE
    assert engine.runner.fault is not None
    assert engine.view("a").state == "failed"
    assert engine.runner.pages()[0] == 0
    with pytest.raises(BackendUnavailable):
        engine.create("b", seed=1)
    engine.close("a")
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_rank_that_cannot_build_its_part_is_no_team() -> None:
    with pytest.raises(BackendUnavailable, match=r"over 2 ranks|has ended"):
        start(2, 1, arguments=b"nonsense")
