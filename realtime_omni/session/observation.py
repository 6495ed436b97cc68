"""What a robot saw: the value that a policy computes a chunk of actions from.

Owns its checks of shape, dtype and range. Knows no camera, no robot, no network: what a policy needs of it is the policy's
to check. Arrays are not copied; whoever made them must not write to them any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realtime_omni.errors import ArgumentError
from realtime_omni.session.values import check_event_id, check_prompt

MAX_STEPS = 10_000
MAX_SAMPLES = 16
_UINT8, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Join:
    """How a new chunk continues the one that is being executed; ticks are the robot's control steps.

    Args:
        tick: when the observation was taken. Action 0 of its chunk belongs to it.
        delay: how many actions of the new chunk will be in the past when it arrives.
        follows: index of the chunk that the robot executes; None, or one that the session does not remember: nothing is
            continued.
        mode: one of the policy's ``rtc_modes``; None: the deployment's own.
    """

    tick: int
    delay: int = 0
    follows: int | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        check_event_id(self.tick, "join.tick")
        check_event_id(self.delay, "join.delay")
        if self.follows is not None:
            check_event_id(self.follows, "join.follows")


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """One observation.

    Args:
        images: by camera name, uint8 [H, W, 3], or [T, H, W, 3] with the latest last; a camera that is absent is masked.
        state: float32 [D], in the robot's units.
        prompt: the instruction; None: the session's prompt.
        noise: float32 [H, A], what the flow starts from, in model space.
        seed: noise from this seed alone, whatever the session, its epoch and its chunk index. With neither, the noise is a
            function of the session's seed and the chunk index.
        steps: denoise steps; None: the policy's own number.
        label: the client's name of the episode; nothing depends on it.
        join: how its chunk continues the one before; None: it does not.
        samples: how many chunks are drawn, from noises of their own, over one prefix; the artifact ``samples`` has all of them.
        budget_s: its chunk should be there so many seconds after it was asked for; None: what the recipe says.

    Raises:
        ArgumentError: naming the field.
    """

    images: Mapping[str, NDArray[np.uint8]]
    state: NDArray[np.float32]
    prompt: str | None = None
    noise: NDArray[np.float32] | None = None
    seed: int | None = None
    steps: int | None = None
    label: str | None = None
    join: Join | None = None
    budget_s: float | None = None
    samples: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "images", MappingProxyType(dict(self.images)))
        for name, image in self.images.items():
            _check_image(image, f"images.{name}")
        _check_numbers(self.state, 1, "state")
        if self.prompt is not None:
            check_prompt(self.prompt)
        if self.noise is not None:
            _check_numbers(self.noise, 2, "noise")
        if self.noise is not None and self.seed is not None:
            raise ArgumentError("noise and seed exclude each other", path="seed")
        if self.seed is not None:
            check_event_id(self.seed, "seed")
        if self.steps is not None and not 1 <= check_event_id(self.steps, "steps") <= MAX_STEPS:
            raise ArgumentError(f"steps must lie in 1..{MAX_STEPS}", path="steps")
        if not 1 <= check_event_id(self.samples, "samples") <= MAX_SAMPLES:
            raise ArgumentError(f"samples must lie in 1..{MAX_SAMPLES}", path="samples")
        if self.noise is not None and self.samples > 1:
            raise ArgumentError("noise is that of one sample", path="samples")
        if self.budget_s is not None and not (isinstance(self.budget_s, int | float) and 0 < self.budget_s < math.inf):
            raise ArgumentError("budget_s must be a positive number of seconds", path="budget_s")


def _check_image(image: Any, path: str) -> None:
    if not isinstance(image, np.ndarray) or image.dtype != _UINT8 or image.ndim not in (3, 4):
        raise ArgumentError(f"{path} must be a uint8 array of 3 or 4 dimensions", path=path)
    if image.shape[-1] != 3 or not image.size:
        raise ArgumentError(f"{path} is [height, width, 3]", path=path)


def _check_numbers(array: Any, rank: int, path: str) -> None:
    """A float32 array of this rank, its numbers finite."""
    if not isinstance(array, np.ndarray) or array.dtype != _FLOAT32 or array.ndim != rank:
        raise ArgumentError(f"{path} must be a float32 array of {rank} dimensions", path=path)
    if not np.isfinite(array).all():
        raise ArgumentError(f"{path} must be finite", path=path)
