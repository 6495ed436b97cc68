"""What `check_model` shows a policy: observations that depend on the chunk index alone, so that a session can be repeated."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from realtime_omni.models.base import ModelSpec
from realtime_omni.session.observation import Join, Observation

SEEN_TWICE = 2
"""Chunks in a row that see the same pictures, so that a policy that reuses what it made of them does."""
INSTRUCTIONS = ("push", "pick up the cube")
TICKS = 4
"""Control steps from one observation to the next."""
DENOISE_STEPS = 3
"""At most: every one is a checkpoint, and several rules run a tick for each."""


def observer(spec: ModelSpec) -> Callable[[int], Observation | None]:
    """The observation before a chunk of this model, by chunk index; None for a world."""
    policy = spec.policy

    def observe(chunk_index: int) -> Observation | None:
        if policy is None:
            return None
        random = np.random.default_rng(chunk_index // SEEN_TWICE)
        shape = (policy.image_size, policy.image_size, 3)
        images = {name: random.integers(0, 256, shape, np.uint8) for name in policy.cameras}
        state = np.random.default_rng(chunk_index).uniform(-1, 1, policy.state_dim).astype(np.float32)
        tick, follows = chunk_index * TICKS, chunk_index - 1 if chunk_index else None
        join = Join(tick, delay=min(1, policy.horizon - 1), follows=follows) if policy.joins else None
        instruction = INSTRUCTIONS[chunk_index // SEEN_TWICE % len(INSTRUCTIONS)]
        return Observation(images, state, instruction, steps=min(policy.steps, DENOISE_STEPS), join=join)

    return observe
