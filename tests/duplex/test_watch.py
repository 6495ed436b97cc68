"""A microphone that is off and a rate that was not agreed are noticed, once; neither is made up."""

from __future__ import annotations

import numpy as np
import pytest

from duplex.puppeteer import RATE
from realtime_omni.duplex.outputs import DuplexOptions, InputReport
from realtime_omni.duplex.session import DuplexSession
from realtime_omni.duplex.watch import InputWatch
from realtime_omni.models.puppet.model import Puppet, PuppetOptions

PACKET = RATE // 10
NOISE = np.random.default_rng(0).normal(0, 1e-3, PACKET).astype(np.float32)


def test_digital_silence_is_a_microphone_that_is_off() -> None:
    watch = InputWatch(RATE)
    said = [watch.silent(np.zeros(PACKET, np.float32)) for _ in range(80)]
    assert [i for i, s in enumerate(said) if s] == [49], "after five seconds, once"
    assert not watch.silent(NOISE)
    assert [watch.silent(np.zeros(PACKET, np.float32)) for _ in range(50)][-1], "and again when it has been on"


def test_a_quiet_room_is_not_silence() -> None:
    watch = InputWatch(RATE)
    assert not any(watch.silent(NOISE) for _ in range(200))


@pytest.mark.parametrize("rate", [8000, 16_000, 44_100, 48_000])
@pytest.mark.parametrize("agreed", [16_000, 24_000])
def test_a_wrong_rate_is_measured_and_a_right_one_is_not(rate: int, agreed: int) -> None:
    watch = InputWatch(agreed)
    found = [watch.measured_hz(rate // 10, k * 0.1) for k in range(200)]
    told = [hz for hz in found if hz is not None]
    assert len(told) == (rate != agreed)
    assert not told or told[0] == pytest.approx(rate, rel=0.02)


def test_pauses_and_drift_are_no_wrong_rate() -> None:
    watch, now_s = InputWatch(RATE), 0.0
    for k in range(600):
        now_s += 0.1001 if k % 50 else 3.0
        assert watch.measured_hz(PACKET, now_s) is None


def test_a_session_reports_both() -> None:
    spec = Puppet(PuppetOptions(input_rate_hz=RATE, output_rate_hz=RATE)).spec.duplex
    assert spec is not None
    session = DuplexSession(spec, DuplexOptions(), now_s=0.0)
    for k in range(100):
        session.append(np.zeros(2 * PACKET, np.float32), k * 0.1)
        session.due(k * 0.1)
    reports = [output for _, output in session.read(0) if isinstance(output, InputReport)]
    assert [r.kind for r in reports] == ["silent_microphone", "wrong_rate"]
    assert reports[1].measured_hz == pytest.approx(2 * RATE, rel=0.02)
