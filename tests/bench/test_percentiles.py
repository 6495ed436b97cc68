"""Percentiles from a histogram, and what the bench reads of the server's metrics."""

from __future__ import annotations

import math

import pytest

from realtime_omni.bench.conditions import histogram_percentile, percentile

INF = math.inf


def test_percentiles_of_a_histogram_are_straight_within_a_bucket() -> None:
    counts = {0.001: 10.0, 0.002: 30.0, 0.005: 30.0, INF: 40.0}
    assert histogram_percentile(counts, 0.25) == pytest.approx(0.001)
    assert histogram_percentile(counts, 0.5) == pytest.approx(0.0015)
    assert histogram_percentile(counts, 0.75) == pytest.approx(0.002)


def test_what_lies_beyond_the_last_bound_is_at_least_that_bound() -> None:
    assert histogram_percentile({0.001: 1.0, 0.1: 1.0, INF: 4.0}, 0.9) == 0.1


def test_nothing_has_no_percentile() -> None:
    assert histogram_percentile({}, 0.5) is None
    assert histogram_percentile({0.001: 0.0, INF: 0.0}, 0.5) is None
    assert percentile([], 0.5) is None


def test_nearest_rank() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0], 0.99) == 1.0
