"""Noise of a tick: the same numbers wherever tensors are made unless told."""

from __future__ import annotations

import torch

from realtime_omni.models.common.noise import block_noise
from realtime_omni.models.minicpmo.sampling import uniforms
from realtime_omni.models.moshi.sampling import races


def test_noise_is_drawn_on_the_cpu_under_another_default_device() -> None:
    plain = block_noise(1, 2, 3, (2, 5)), races(1, 2, 3, 4), uniforms(1, 2, 3)
    with torch.device("meta"):
        found = block_noise(1, 2, 3, (2, 5)), races(1, 2, 3, 4), uniforms(1, 2, 3)
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[1], plain[1])
    assert found[2] == plain[2]
