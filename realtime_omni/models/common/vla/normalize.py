"""Normalisation of states and actions: robot units to model space and back.

Formulas of lerobot 0.6.1 (``processor/normalize_processor.py``) and of openpi (``transforms.py``: Normalize, Unnormalize):

=========== ============================================ =====================================================
mode        lerobot                                      openpi
=========== ============================================ =====================================================
mean_std    (x - mean) / (std + 1e-8), back x std + mean (x - mean) / (std + 1e-6), back x (std + 1e-6) + mean
quantiles   2 (x - q01) / d - 1; d = q99 - q01, or 1e-8  2 (x - q01) / (q99 - q01 + 1e-6) - 1
            where that is 0
min_max     as quantiles, with min and max               not used
quantile10  as quantiles, with q10 and q90               not used
identity    x                                            x
=========== ============================================ =====================================================

A constant channel is therefore 0 in one and -1 in the other; nothing is clamped. float32 throughout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from realtime_omni.errors import ConfigError

Array = NDArray[np.float32]


class Mode(StrEnum):
    """lerobot's five modes, by their names in a checkpoint."""

    IDENTITY = "IDENTITY"
    MEAN_STD = "MEAN_STD"
    MIN_MAX = "MIN_MAX"
    QUANTILES = "QUANTILES"
    QUANTILE10 = "QUANTILE10"


STATISTICS = {
    Mode.MEAN_STD: ("mean", "std"),
    Mode.MIN_MAX: ("min", "max"),
    Mode.QUANTILES: ("q01", "q99"),
    Mode.QUANTILE10: ("q10", "q90"),
}
"""The two statistics that a mode needs."""


class Dialect(StrEnum):
    """Whose formula."""

    LEROBOT = "lerobot"
    OPENPI = "openpi"


EPS = {Dialect.LEROBOT: 1e-8, Dialect.OPENPI: 1e-6}


@dataclass(frozen=True, slots=True, eq=False)
class Normalizer:
    """One feature's normalisation. ``first`` and ``second`` [D]: the mode's statistics, empty for identity."""

    mode: Mode
    dialect: Dialect
    first: Array
    second: Array
    eps: float

    @staticmethod
    def identity() -> Normalizer:
        nothing = np.zeros(0, np.float32)
        return Normalizer(Mode.IDENTITY, Dialect.LEROBOT, nothing, nothing, 0.0)

    @staticmethod
    def of(
        mode: Mode, dialect: Dialect, statistics: Mapping[str, Array], where: str, eps: float | None = None
    ) -> Normalizer:
        """From a feature's statistics, name to [D]. Raises ConfigError when the mode's two are missing or not finite."""
        if mode is Mode.IDENTITY:
            return Normalizer.identity()
        names = STATISTICS[mode]
        absent = [name for name in names if name not in statistics]
        if absent:
            raise ConfigError(
                f"{where}: {mode} needs {' and '.join(names)}, {' and '.join(absent)} is missing", path=where
            )
        first, second = (np.asarray(statistics[name], np.float32).reshape(-1) for name in names)
        if first.shape != second.shape or not np.isfinite(first).all() or not np.isfinite(second).all():
            raise ConfigError(f"{where}: {' and '.join(names)} must be finite and of one length", path=where)
        return Normalizer(mode, dialect, first, second, EPS[dialect] if eps is None else eps)

    @property
    def width(self) -> int | None:
        """Channels the statistics cover; None for identity, which takes any."""
        return None if self.mode is Mode.IDENTITY else len(self.first)

    def normalize(self, x: Array) -> Array:
        """Robot units [..., D] to model space. openpi's statistics may cover more channels than x has, never fewer."""
        if self.mode is Mode.IDENTITY:
            return x.astype(np.float32)
        first, second = self._for(x)
        if self.mode is Mode.MEAN_STD:
            return ((x - first) / (second + np.float32(self.eps))).astype(np.float32)
        return (2 * (x - first) / self._span(first, second) - 1).astype(np.float32)

    def unnormalize(self, x: Array) -> Array:
        """Model space [..., D] to robot units."""
        if self.mode is Mode.IDENTITY:
            return x.astype(np.float32)
        first, second = self._for(x)
        if self.mode is Mode.MEAN_STD:
            scale = second + np.float32(self.eps) if self.dialect is Dialect.OPENPI else second
            return (x * scale + first).astype(np.float32)
        return ((x + 1) * self._span(first, second) / 2 + first).astype(np.float32)

    def _for(self, x: Array) -> tuple[Array, Array]:
        width = x.shape[-1]
        if width > len(self.first) or (width < len(self.first) and self.dialect is Dialect.LEROBOT):
            raise ValueError(f"statistics cover {len(self.first)} channels, the value has {width}")
        return self.first[:width], self.second[:width]

    def _span(self, low: Array, high: Array) -> Array:
        span = high - low
        if self.dialect is Dialect.OPENPI:
            return span + np.float32(self.eps)
        return np.where(span == 0, np.float32(self.eps), span)

    def digest(self) -> str:
        """A short name of these statistics; equal for equal formulas and numbers."""
        data = f"{self.mode}/{self.dialect}/{self.eps}/".encode() + self.first.tobytes() + self.second.tobytes()
        return hashlib.blake2b(data, digest_size=8).hexdigest()
