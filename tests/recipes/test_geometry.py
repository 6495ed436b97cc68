"""What stage A guesses besides pictures: how far the walls are, and how far a step went."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from realtime_omni.models.tiny_world.network import TinyWorldNet  # noqa: E402
from recipes.tiny_world.data import ClipPool  # noqa: E402
from recipes.tiny_world.geometry import RoomHead, room_loss, seen_room  # noqa: E402
from recipes.tiny_world.simulator import MOVE, PROP_CELL, RADIUS, SIDE, Maps, Simulator  # noqa: E402
from recipes.tiny_world.teacher import RoomPass, dense_attend, teacher_loss  # noqa: E402
from recipes.tiny_world.train import tiny_config  # noqa: E402


def room() -> Maps:
    solid = torch.zeros(1, SIDE, SIDE, dtype=torch.long)
    solid[:, 0], solid[:, -1], solid[:, :, 0], solid[:, :, -1] = 1, 1, 1, 1
    solid[0, 7, 10] = PROP_CELL  # nothing for a ray
    return Maps(solid, torch.tensor([[[10.5, 7.5]]]))


def test_distances_are_along_the_view_and_steps_in_its_directions():
    looks = torch.tensor([[[7.0, 7.0, 0.0, 0.0], [7.0, 7.0 + MOVE, math.pi / 2, 0.0]]])
    seen = seen_room(room(), looks, 8)
    assert seen.shape == (1, 2, 10)
    assert seen[0, 0, 3:5].exp().tolist() == pytest.approx([SIDE - 1 - 7.0] * 2)  # the wall ahead is flat
    assert seen[0, 1, 3:5].exp().tolist() == pytest.approx([SIDE - 1 - 7.0 - MOVE] * 2)
    assert seen[0, :, -2:].flatten().tolist() == pytest.approx([0, 0, 1, 0], abs=1e-4)  # it looks where it went


def test_a_step_into_a_wall_is_none():
    touch = SIDE - 1 - RADIUS
    looks = torch.tensor([[[touch, 7.0, 0.0, 0.0], [touch, 7.0, 0.0, 0.0]]])
    assert seen_room(room(), looks, 4)[0, 1, -2:].abs().max() == 0


def test_the_truth_costs_nothing_and_every_row_of_tokens_guesses():
    seen = seen_room(room(), torch.tensor([[[7.0, 7.0, 0.3, 0.0], [7.1, 7.0, 0.3, 0.0]]]), 16)
    distance = seen[:, :, None, :-2].expand(-1, -1, 4, -1)
    far, step = room_loss((distance, seen[..., -2:]), seen)
    assert far.abs().max() == step.abs().max() == 0
    wrong = distance.clone()
    wrong[:, :, 1] += 1.0
    far, _ = room_loss((wrong, seen[..., -2:]), seen)
    assert far.flatten().tolist() == pytest.approx([0.25, 0.25])


def test_stage_a_learns_the_room_through_the_tokens_of_the_network():
    torch.manual_seed(0)
    config = tiny_config()
    net, head = TinyWorldNet(config), RoomHead(config)
    pool = ClipPool(Simulator(config.image_size, "cpu", supersample=1), 4, 12, 60, seed=1, step=4, columns=head.columns)
    model = RoomPass(net, dense_attend(config, 4, "cpu"), head)
    index = torch.arange(4)
    loss, found = teacher_loss(model, *pool.clips(index), 3, pool.room[index])
    loss.backward()
    assert set(found) == {"mse", "distance", "step"}
    assert float(found["distance"]) > 0.1
    for part in (head.distance.weight, head.step.weight, net.embed.weight):
        assert part.grad.abs().max() > 0
