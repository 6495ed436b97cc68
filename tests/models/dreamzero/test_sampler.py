"""UniPC step by step against diffusers' scheduler, and the schedule against its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from realtime_omni.models.dreamzero.sampler import Schedule, step


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("final_noise", [0.0, 0.3])
def test_every_step_is_diffusers(steps: int, final_noise: float) -> None:
    schedule = Schedule.of(steps, 5.0, final_noise=final_noise)
    theirs: Any = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)  # type: ignore[no-untyped-call]
    theirs.set_timesteps(steps)
    theirs.sigmas = torch.tensor(schedule.sigmas, dtype=torch.float64)
    theirs.timesteps = torch.tensor([schedule.timestep(i) for i in range(steps)])
    theirs._step_index = 0
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(40, 40, generator=generator, dtype=torch.float64) * 0.1
    x = torch.randn(1, 40, 1, generator=generator, dtype=torch.float64)
    ours, memory = x, None
    for index in range(steps):
        x = theirs.step(torch.tanh(weights @ x + index), theirs.timesteps[index], x, return_dict=False)[0]
        ours, memory = step(schedule, index, ours, torch.tanh(weights @ ours.double() + index), memory)
        assert (ours - x).abs().max() <= 2e-6, f"step {index}"


def test_the_schedule_of_sixteen_steps() -> None:
    """Levels of linspace(0.999, 0, 17) shifted by 5; labels cut off to whole numbers."""
    schedule = Schedule.of(16, 5.0)
    assert schedule.steps == 16
    assert schedule.sigmas[-1] == 0.0
    assert schedule.sigmas[0] == pytest.approx(5 * 0.999 / (1 + 4 * 0.999))
    assert schedule.sigmas[8] == pytest.approx(5 * 0.4995 / (1 + 4 * 0.4995))
    assert [schedule.timestep(i) for i in (0, 1, 8, 15)] == [999, 986, 833, 249]


def test_a_final_noise_squeezes_the_levels_in_front_of_it() -> None:
    plain, squeezed = Schedule.of(4, 5.0), Schedule.of(4, 5.0, final_noise=0.5)
    assert squeezed.sigmas[0] == pytest.approx(plain.sigmas[0])
    assert squeezed.sigmas[-1] == pytest.approx(0.5)
    assert list(squeezed.sigmas) == sorted(squeezed.sigmas, reverse=True)


@pytest.mark.parametrize(("steps", "shift", "noise"), [(0, 5.0, 0.0), (4, 0.0, 0.0), (4, 5.0, 1.0), (4, 5.0, -0.1)])
def test_numbers_that_make_no_schedule_are_refused(steps: int, shift: float, noise: float) -> None:
    with pytest.raises(ValueError, match="no schedule"):
        Schedule.of(steps, shift, final_noise=noise)
