"""Which way a session's chunks are joined, and the step rule for a batch of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from realtime_omni.models.common.vla.flow import StepRule
from realtime_omni.rtc.previous import Previous
from realtime_omni.rtc.rules import Guided, Jacobian, OverlapRamp, TrainedPrefix, ramp
from realtime_omni.rtc.weights import Schedule, prefix_weights


class Mode(StrEnum):
    """How a new chunk continues the old one."""

    NONE = "none"
    IDENTITY = "identity"
    VJP = "vjp"
    AUTO = "auto"
    """Identity up to a delay of a quarter of the horizon, the true Jacobian above (measured: identity jumps more there)."""
    TRAINED = "trained"
    OVERLAP = "overlap"
    ENSEMBLE = "ensemble"
    """Chunks are averaged after they are made (``rtc.ensemble``); the loop itself is plain."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A session's choice. ``soft_end``: index after the last action that is held (the paper's H - s); None: horizon - delay."""

    mode: Mode = Mode.AUTO
    schedule: Schedule = Schedule.EXP
    limit: float = 5.0
    soft_end: int | None = None
    ramp_rate: float = 6.0

    def __post_init__(self) -> None:
        if self.limit <= 0 or self.ramp_rate <= 0:
            raise ValueError("limit and ramp_rate must be positive")


def resolve(mode: Mode, delay: int, horizon: int) -> Mode:
    """The mode itself, or what ``auto`` means at this delay."""
    if mode is not Mode.AUTO:
        return mode
    return Mode.IDENTITY if 4 * delay <= horizon else Mode.VJP


def soft_end(settings: Settings, delay: int, horizon: int, left: int) -> int:
    """Where the hold on the old chunk ends: as asked for, never beyond what is left of it."""
    wanted = horizon - delay if settings.soft_end is None else settings.soft_end
    return max(0, min(wanted, left, horizon))


def step_rule(settings: Settings, previous: Previous, delays: Sequence[int]) -> StepRule | None:
    """The rule for a batch whose rows share the settings and the resolved mode; None is the plain rule.

    ``delays``: actions of each row's new chunk that will be in the past when it arrives. A row with nothing left of an old
    chunk follows the plain rule. Raises ValueError when ``auto`` means different modes for different rows."""
    horizon = previous.actions.shape[1]
    modes = {resolve(settings.mode, delay, horizon) for delay in delays}
    if len(modes) != 1:
        raise ValueError("rows of one batch must resolve to one mode")
    mode = modes.pop()
    left = previous.length
    ends = [soft_end(settings, delay, horizon, n) for delay, n in zip(delays, left, strict=True)]
    device = previous.actions.device
    if mode in (Mode.NONE, Mode.ENSEMBLE) or not any(left):
        return None
    if mode is Mode.TRAINED:
        fixed = [min(delay, n) for delay, n in zip(delays, left, strict=True)]
        return TrainedPrefix(previous.actions, torch.tensor(fixed, device=device))
    if mode is Mode.OVERLAP:
        rows = [ramp(min(d, end), end, horizon, settings.ramp_rate) for d, end in zip(delays, ends, strict=True)]
        return OverlapRamp(previous.actions, torch.tensor(ends, device=device), torch.stack(rows).to(device))
    weights = [prefix_weights(d, end, horizon, settings.schedule) for d, end in zip(delays, ends, strict=True)]
    return Guided(previous.actions, torch.stack(weights).to(device), Jacobian(mode.value), settings.limit)
