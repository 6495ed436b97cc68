"""The media clock: a block starts as late as it can still be in time, and a delay is never followed by a burst."""

from __future__ import annotations

import math

import pytest

from realtime_omni.server.pacing import MARGIN_S, Pacer

FPS, BLOCK = 10.0, 3
BLOCK_S = 0.3


def delivered(pacer: Pacer, frame: int, due: float, took: float) -> None:
    pacer.started()
    pacer.delivered(frame, due, took)


def test_the_first_block_starts_at_once_and_the_second_waits_for_its_delivery() -> None:
    pacer = Pacer(FPS, BLOCK)
    assert pacer.start_at(0) is None
    pacer.started()
    assert pacer.start_at(3) == math.inf
    pacer.delivered(0, 100.0, 0.05)
    assert pacer.start_at(3) == pytest.approx(100.3 - pacer.estimate_s)


def test_the_estimate_settles_on_a_steady_cost_plus_margin() -> None:
    pacer = Pacer(FPS, BLOCK)
    for block in range(60):
        delivered(pacer, 3 * block, 100 + BLOCK_S * block, 0.05)
    assert pacer.estimate_s == pytest.approx(0.05 + MARGIN_S, abs=1e-4)
    assert pacer.start_at(180) == pytest.approx(100 + 18.0 - 0.05 - MARGIN_S, abs=1e-3)


def test_an_unsteady_cost_leaves_more_room() -> None:
    pacer = Pacer(FPS, BLOCK)
    for block in range(60):
        delivered(pacer, 3 * block, 100 + BLOCK_S * block, 0.03 if block % 2 else 0.07)
    assert pacer.estimate_s > 0.07


def test_a_model_slower_than_the_clock_starts_the_next_block_at_once() -> None:
    pacer = Pacer(FPS, BLOCK)
    now = 100.0
    for block in range(10):
        delivered(pacer, 3 * block, now, 0.5)
        start_at = pacer.start_at(3 * block + 3)
        assert start_at is not None
        assert start_at <= now + 1e-9
        now += 0.5


def test_a_hold_of_ten_seconds_moves_the_clock_instead_of_making_a_burst() -> None:
    pacer = Pacer(FPS, BLOCK)
    delivered(pacer, 0, 100.0, 0.02)
    delivered(pacer, 3, 110.0, 0.02)
    start_at = pacer.start_at(6)
    assert start_at is not None
    assert start_at == pytest.approx(110.3 - pacer.estimate_s)


def test_a_small_delay_does_not_move_the_clock_so_the_rate_stays_true() -> None:
    pacer = Pacer(FPS, BLOCK)
    delivered(pacer, 0, 100.0, 0.02)
    delivered(pacer, 3, 100.4, 0.12)
    assert pacer.start_at(6) == pytest.approx(100.6 - pacer.estimate_s)


def test_a_restart_defines_the_clock_anew() -> None:
    pacer = Pacer(FPS, BLOCK)
    delivered(pacer, 30, 100.0, 0.02)
    pacer.restart()
    assert pacer.start_at(33) is None
    delivered(pacer, 0, 500.0, 0.02)
    assert pacer.start_at(3) == pytest.approx(500.3 - pacer.estimate_s)
