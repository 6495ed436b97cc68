"""How many actions pass between an observation and the arrival of its chunk, learned from what was really consumed.

A quantile of recent measurements, in ticks. Old ones age out, so one slow inference (the first, often) does not raise the
estimate for ever, which a running maximum does. Pure: the tick is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class DelayEstimate:
    """``initial``: the answer before the first measurement; ``size``: measurements kept; ``max_age``: their age in ticks."""

    initial: int = 0
    quantile: float = 0.95
    size: int = 50
    max_age: int = 1500
    _seen: deque[tuple[int, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.initial < 0 or not 0 < self.quantile <= 1 or self.size < 1 or self.max_age < 1:
            raise ValueError("initial >= 0, 0 < quantile <= 1, size >= 1 and max_age >= 1 are needed")
        self._seen = deque(maxlen=self.size)

    def observe(self, consumed: int, tick: int) -> None:
        """``consumed``: actions the robot executed between an observation and its chunk, which arrived at ``tick``."""
        if consumed < 0:
            raise ValueError(f"consumed must not be negative, is {consumed}")
        self._seen.append((tick, consumed))

    def ticks(self, tick: int, limit: int) -> int:
        """The estimate at ``tick``, at most ``limit`` (what is left of the old chunk, or H - s)."""
        recent = sorted(consumed for at, consumed in self._seen if tick - at <= self.max_age)
        value = recent[math.ceil(self.quantile * len(recent)) - 1] if recent else self.initial
        return max(0, min(value, limit))

    def reset(self) -> None:
        """Forget everything: a new connection, another network."""
        self._seen.clear()
