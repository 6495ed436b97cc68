"""Modes, alignment, ensembling and the measured delay."""

from __future__ import annotations

import math

import pytest
import torch

from realtime_omni.rtc.delay import DelayEstimate
from realtime_omni.rtc.ensemble import Stamped, ensemble
from realtime_omni.rtc.modes import Mode, Settings, resolve, soft_end, step_rule
from realtime_omni.rtc.previous import Previous, remaining
from realtime_omni.rtc.rules import Guided, Jacobian, OverlapRamp, TrainedPrefix
from realtime_omni.rtc.weights import Schedule, prefix_weights


def test_auto_is_identity_up_to_a_quarter_of_the_horizon() -> None:
    assert resolve(Mode.AUTO, 4, 16) is Mode.IDENTITY
    assert resolve(Mode.AUTO, 5, 16) is Mode.VJP
    assert resolve(Mode.TRAINED, 5, 16) is Mode.TRAINED


def test_what_remains_of_a_chunk_starts_at_the_tick() -> None:
    chunk = torch.arange(6.0)[:, None]
    assert remaining(chunk, 10, 12).flatten().tolist() == [2, 3, 4, 5]
    assert remaining(chunk, 10, 99).shape == (0, 1)
    with pytest.raises(ValueError, match="before"):
        remaining(chunk, 10, 9)


def test_previous_pads_with_zeros_and_counts_what_is_real() -> None:
    previous = Previous.of([torch.ones(2, 3), None, torch.ones(9, 4)], horizon=4, action_dim=4)
    assert previous.length == (2, 0, 4)
    assert previous.actions[0].tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert not previous.actions[1].any()


def test_the_hold_ends_where_the_old_chunk_ends() -> None:
    settings = Settings()
    assert soft_end(settings, delay=2, horizon=8, left=8) == 6
    assert soft_end(settings, delay=2, horizon=8, left=3) == 3
    assert soft_end(Settings(soft_end=5), delay=2, horizon=8, left=8) == 5


@pytest.mark.parametrize(
    ("mode", "kind"),
    [(Mode.IDENTITY, Guided), (Mode.VJP, Guided), (Mode.TRAINED, TrainedPrefix), (Mode.OVERLAP, OverlapRamp)],
)
def test_each_mode_has_its_rule(mode: Mode, kind: type) -> None:
    previous = Previous.of([torch.ones(6, 2)], horizon=8, action_dim=2)
    assert isinstance(step_rule(Settings(mode), previous, [2]), kind)


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.ENSEMBLE])
def test_modes_that_leave_the_loop_alone(mode: Mode) -> None:
    assert step_rule(Settings(mode), Previous.of([torch.ones(6, 2)], 8, 2), [2]) is None


def test_the_first_chunk_of_a_session_is_plain() -> None:
    assert step_rule(Settings(Mode.VJP), Previous.of([None, None], 8, 2), [2, 3]) is None


def test_guided_rows_have_their_own_weights() -> None:
    previous = Previous.of([torch.ones(6, 2), None], horizon=8, action_dim=2)
    rule = step_rule(Settings(Mode.AUTO, Schedule.LINEAR), previous, [1, 2])
    assert isinstance(rule, Guided)
    assert rule.jacobian is Jacobian.IDENTITY
    assert torch.equal(rule.weights[0], prefix_weights(1, 6, 8, Schedule.LINEAR))
    assert not rule.weights[1].any()


def test_rows_that_need_different_modes_are_not_one_batch() -> None:
    with pytest.raises(ValueError, match="one mode"):
        step_rule(Settings(), Previous.of([torch.ones(6, 2)] * 2, 8, 2), [2, 3])


def test_a_trained_prefix_is_no_longer_than_what_is_left() -> None:
    rule = step_rule(Settings(Mode.TRAINED), Previous.of([torch.ones(2, 2)], 8, 2), [3])
    assert isinstance(rule, TrainedPrefix)
    assert rule.delay.tolist() == [2]


def test_an_ensemble_weighs_the_oldest_most() -> None:
    """Two chunks over tick 3: (1 * 10 + e^-1 * 20) / (1 + e^-1); tick 4 has the newest alone."""
    chunks = [Stamped(0, torch.full((4, 1), 10.0)), Stamped(2, torch.full((3, 1), 20.0))]
    weight = math.exp(-1)
    mean = (10 + weight * 20) / (1 + weight)
    assert ensemble(chunks, 3, decay=1.0).flatten().tolist() == pytest.approx([mean, 20.0])
    with pytest.raises(ValueError, match="not covered"):
        ensemble(chunks, 5)


def test_the_delay_is_a_quantile_of_what_was_consumed() -> None:
    delay = DelayEstimate(initial=3, quantile=0.9, size=10)
    assert delay.ticks(0, limit=99) == 3
    for tick, consumed in enumerate([2, 2, 2, 2, 2, 2, 2, 2, 3, 9]):
        delay.observe(consumed, tick)
    assert delay.ticks(9, limit=99) == 3
    assert delay.ticks(9, limit=2) == 2


def test_one_slow_inference_is_forgotten() -> None:
    delay = DelayEstimate(quantile=1.0, size=100, max_age=20)
    delay.observe(40, tick=0)
    delay.observe(2, tick=10)
    assert delay.ticks(15, limit=99) == 40
    assert delay.ticks(25, limit=99) == 2
    delay.reset()
    assert delay.ticks(25, limit=99) == 0
