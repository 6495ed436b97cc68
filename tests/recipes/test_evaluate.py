"""The evaluation of tiny-world: a player that sees, turns that end where they began, what counts as collapsed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from recipes.tiny_world.classifier import load_classifier  # noqa: E402
from recipes.tiny_world.data import to_signed  # noqa: E402
from recipes.tiny_world.evaluate import (  # noqa: E402
    LongRuns,
    generator_for,
    gradient_energy,
    long_run_scores,
    turn_scores,
    watched_run,
    watched_simulator,
)
from recipes.tiny_world.simulator import L, Player, Simulator, W, advance, random_maps  # noqa: E402

PER = 3


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    return Simulator(32, "cpu", supersample=1)


@pytest.fixture(scope="module")
def drawn(simulator: Simulator) -> LongRuns:
    """Two short runs; the mean sharpness of every place is set to that of their own start pictures."""
    generator = generator_for(1, "cpu")
    maps = random_maps(2, generator, "cpu")
    keys, place, pose = simulator.drive(maps, 12, Player(switch=0.0, still_start=1.0), generator)
    start = to_signed(simulator.draw(maps, place[:, :PER], pose[:, :PER]))
    expected = torch.full((6,), gradient_energy(start[:, -1]).min().item())
    return LongRuns(maps, keys, place, pose, start, expected)


def test_a_player_that_sees_a_plain_picture_turns_right_and_nothing_else(drawn: LongRuns):
    plain = torch.zeros(1, PER, 3, 32, 32)

    def show(part: slice, keys: torch.Tensor) -> torch.Tensor:
        return torch.cat((drawn.start[:1], plain))  # the second run sees grey

    _, pressed = watched_run(drawn, show, PER)
    assert torch.equal(pressed[0], drawn.keys[0])
    assert torch.equal(pressed[1, : 2 * PER], drawn.keys[1, : 2 * PER]), "its first own block follows a start picture"
    only_right = torch.zeros(12 - 2 * PER, 8)
    only_right[:, L] = 1
    assert torch.equal(pressed[1, 2 * PER :], only_right)


def test_in_the_simulator_the_keys_pressed_lead_to_the_frames_seen(drawn: LongRuns, simulator: Simulator):
    frames, pressed = watched_simulator(drawn, simulator, PER)
    pose, poses = drawn.pose[:, PER - 1], [drawn.pose[:, f] for f in range(PER)]
    for frame in range(PER, 12):
        pose = advance(drawn.maps, pose, pressed[:, frame])
        poses.append(pose)
    assert torch.equal(frames, to_signed(simulator.draw(drawn.maps, drawn.place, torch.stack(poses, 1))))


def test_a_turn_in_the_simulator_ends_where_it_began(simulator: Simulator):
    generator = generator_for(4, "cpu")  # the maps that turn_scores draws
    maps = random_maps(2, generator, "cpu")
    pose = simulator.drive(maps, PER, Player(switch=0.0, still_start=1.0), generator)[2][:, 0]

    def truth(start, keys, places, seed):
        at = pose
        for frame in range(keys.shape[1]):
            at = advance(maps, at, keys[:, frame])
        last = to_signed(simulator.draw(maps, places[:, :1], at[:, None]))
        return torch.cat((start, last), dim=1)

    found = turn_scores(simulator, truth, 2, 0, PER)
    assert found["turn_full_psnr_db"] > 35
    assert found["turn_back_psnr_db"] > 35


def test_a_run_that_turns_grey_has_collapsed_and_the_simulator_has_not(drawn: LongRuns, simulator: Simulator):
    runs = LongRuns.draw(simulator, 1, 60, 0, PER)
    truth = to_signed(simulator.draw(runs.maps, runs.place, runs.pose))
    judge = load_classifier("cpu")
    walked = runs.keys.clone()
    walked[..., W] = 1
    grey = torch.cat((truth[:, :10], truth[:, :50] * 0 + 0.1), dim=1)
    assert long_run_scores(grey, walked, runs.place, runs.expected, judge)["collapsed_seeds"] == 1
    found = long_run_scores(truth, walked, runs.place, runs.expected, judge)
    assert [fault for fault in found["collapsed_windows"] if fault[2] == "sharpness"] == []
