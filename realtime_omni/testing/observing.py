"""What `check_model` shows a policy, and lets a duplex model hear: functions of the chunk index alone, so that a session can be
repeated."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from realtime_omni.duplex.spec import DuplexSpec
from realtime_omni.models.base import ModelSpec
from realtime_omni.session.frame import Directive, Frame, Respond, Say
from realtime_omni.session.observation import Join, Observation

SEEN_TWICE = 2
"""Chunks in a row that see the same pictures, so that a policy that reuses what it made of them does."""
INSTRUCTIONS = ("push", "pick up the cube")
TICKS = 4
"""Control steps from one observation to the next."""
DENOISE_STEPS = 3
"""At most: every one is a checkpoint, and several rules run a tick for each."""


SPEECH_FRAMES = range(3, 6)
"""Of every ten: the user speaks."""
PITCH_HZ = 150.0


def hearing(duplex: DuplexSpec, chunk_index: int) -> Frame:
    """The frame of a chunk: somebody hums in the fourth to sixth of every ten, and asks for speech in the first."""
    turn, place = divmod(chunk_index, 10)
    audio = np.zeros(duplex.input_samples, np.float32)
    if place in SPEECH_FRAMES:
        at = chunk_index * duplex.input_samples + np.arange(duplex.input_samples)
        audio = (0.3 * np.sin(2 * np.pi * PITCH_HZ * at / duplex.input_rate_hz)).astype(np.float32)
    directives: tuple[Directive, ...] = ()
    if place == 0 and duplex.says:
        directives = (Say(f"said-{turn}", "one two three"),)
    elif place == 0 and duplex.takes_requests:
        directives = (Respond(f"asked-{turn}"),)
    return Frame(audio, directives)


def observer(spec: ModelSpec) -> Callable[[int], Observation | Frame | None]:
    """What a chunk of this model takes in, by chunk index: an observation, a frame of sound; None for a world."""
    policy, duplex = spec.policy, spec.duplex

    def observe(chunk_index: int) -> Observation | Frame | None:
        if duplex is not None:
            return hearing(duplex, chunk_index)
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
