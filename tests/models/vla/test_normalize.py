"""Normalisation against the formulas of lerobot and openpi, written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.vla.normalize import Dialect, Mode, Normalizer

STATISTICS = {
    name: np.asarray(values, np.float32)
    for name, values in {
        "mean": [1.0, -2.0, 0.5],
        "std": [2.0, 0.5, 0.0],
        "min": [-4.0, 0.0, 3.0],
        "max": [4.0, 2.0, 3.0],
        "q01": [-2.0, 1.0, 3.0],
        "q99": [2.0, 5.0, 3.0],
        "q10": [-1.0, 2.0, 3.0],
        "q90": [1.0, 4.0, 3.0],
    }.items()
}
X = np.asarray([3.0, 4.0, 3.0], np.float32)
"""The third channel never varied: std 0, min = max, q01 = q99."""


def normalizer(mode: Mode, dialect: Dialect = Dialect.LEROBOT) -> Normalizer:
    return Normalizer.of(mode, dialect, STATISTICS, "state")


@pytest.mark.parametrize(
    ("mode", "dialect", "expected"),
    [
        (Mode.IDENTITY, Dialect.LEROBOT, [3.0, 4.0, 3.0]),
        (Mode.MEAN_STD, Dialect.LEROBOT, [1.0, 12.0, 2.5e8]),
        (Mode.MEAN_STD, Dialect.OPENPI, [2 / 2.000001, 6 / 0.500001, 2.5e6]),
        (Mode.MIN_MAX, Dialect.LEROBOT, [0.75, 3.0, -1.0]),
        (Mode.QUANTILES, Dialect.LEROBOT, [1.5, 0.5, -1.0]),
        (Mode.QUANTILES, Dialect.OPENPI, [2 * 5 / 4.000001 - 1, 2 * 3 / 4.000001 - 1, -1.0]),
        (Mode.QUANTILE10, Dialect.LEROBOT, [3.0, 1.0, -1.0]),
    ],
)
def test_normalised_values_by_hand(mode: Mode, dialect: Dialect, expected: list[float]) -> None:
    assert normalizer(mode, dialect).normalize(X).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("mode", list(Mode))
def test_unnormalising_undoes_it_where_a_channel_varies(mode: Mode, dialect: Dialect) -> None:
    both = normalizer(mode, dialect)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    back = both.unnormalize(both.normalize(x))
    assert np.abs(back - x)[:, :2].max() <= 2e-6


def test_lerobot_unnormalises_z_scores_without_the_epsilon() -> None:
    assert normalizer(Mode.MEAN_STD).unnormalize(np.ones(3, np.float32)).tolist() == [3.0, -1.5, 0.5]
    openpi = normalizer(Mode.MEAN_STD, Dialect.OPENPI).unnormalize(np.ones(3, np.float32))
    assert openpi[2] == pytest.approx(0.5 + 1e-6, abs=1e-7)


def test_a_constant_channel_stays_at_its_value() -> None:
    """Whatever the model says about it, up to the size of the epsilon."""
    for mode in (Mode.MIN_MAX, Mode.QUANTILES, Mode.QUANTILE10):
        back = normalizer(mode).unnormalize(np.asarray([0, 0, 0.7], np.float32))
        assert back[2] == pytest.approx(3.0, abs=1e-6)


def test_nothing_is_clamped() -> None:
    far = np.asarray([100.0, 100.0, 3.0], np.float32)
    assert normalizer(Mode.QUANTILES).normalize(far)[0] == pytest.approx(50.0)


def test_openpi_statistics_may_cover_more_channels_lerobots_not() -> None:
    assert normalizer(Mode.QUANTILES, Dialect.OPENPI).normalize(X[:2]).shape == (2,)
    with pytest.raises(ValueError, match="3 channels"):
        normalizer(Mode.QUANTILES).normalize(X[:2])
    with pytest.raises(ValueError, match="3 channels"):
        normalizer(Mode.QUANTILES, Dialect.OPENPI).normalize(np.zeros(4, np.float32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"std": None}, "std is missing"),
        ({"std": [1.0, np.nan, 1.0]}, "finite"),
        ({"std": [1.0, 1.0]}, "one length"),
    ],
)
def test_incomplete_statistics_are_refused(change: dict[str, list[float] | None], words: str) -> None:
    changed = {**STATISTICS, **change}
    numbers = {name: np.asarray(values, np.float32) for name, values in changed.items() if values is not None}
    with pytest.raises(ConfigError, match=words):
        Normalizer.of(Mode.MEAN_STD, Dialect.LEROBOT, numbers, "state")


def test_a_digest_names_formula_and_numbers() -> None:
    digests = {normalizer(mode, dialect).digest() for mode in STATISTICS_MODES for dialect in Dialect}
    assert len(digests) == 2 * len(STATISTICS_MODES)
    assert normalizer(Mode.MEAN_STD).digest() == normalizer(Mode.MEAN_STD).digest()


STATISTICS_MODES = [mode for mode in Mode if mode is not Mode.IDENTITY]
