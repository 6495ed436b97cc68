"""The true motion of a clip's pixels against the picture before their block."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from realtime_omni.models.tiny_world.network import TinyWorldNet, poses  # noqa: E402
from realtime_omni.models.tiny_world.recall import reproject  # noqa: E402
from recipes.tiny_world.data import ClipPool, to_signed  # noqa: E402
from recipes.tiny_world.geometry import inverse_depth, motion_error, true_motion  # noqa: E402
from recipes.tiny_world.renderer import HALF_FOV_TAN  # noqa: E402
from recipes.tiny_world.simulator import LOOK, MOVE, SIDE, TURN, Maps, Player, Simulator  # noqa: E402
from recipes.tiny_world.teacher import TeacherPass, dense_attend, teacher_loss  # noqa: E402
from recipes.tiny_world.train import tiny_config  # noqa: E402

PER = 3


def room() -> Maps:
    solid = torch.zeros(1, SIDE, SIDE, dtype=torch.long)
    solid[:, 0], solid[:, -1], solid[:, :, 0], solid[:, :, -1] = 1, 1, 1, 1
    return Maps(solid, torch.tensor([[[10.5, 5.5]]]))


def test_a_wall_is_as_far_as_it_is_and_the_ground_as_its_row_says():
    near, known = inverse_depth(room(), torch.tensor([0]), torch.tensor([[7.0, 7.0, 0.0, 0.0]]), 64)
    assert near[0, 31:33, 31:33].flatten().tolist() == pytest.approx(
        [1 / (SIDE - 1 - 7.0)] * 4
    )  # flat, six cells ahead
    lowest = 2 * HALF_FOV_TAN * (63.5 / 64 * 2 - 1)  # its slope against half a cell of height
    assert near[0, 63].tolist() == pytest.approx([lowest] * 64)
    assert known[0, :, 40].all()
    assert not known[0, 30, 17]  # the prop, three and a half cells ahead, one and a half to the left


def test_who_only_turns_sees_no_motion_and_who_walks_ahead_his_step_at_each_distance():
    pose = torch.tensor([[7.0, 7.0, 0.0, 0.0]]).repeat(1, 2 * PER, 1)
    pose[0, PER:, 2] = torch.arange(1, PER + 1) * TURN
    place, then = torch.zeros(1, 2 * PER, dtype=torch.long), pose[:, None, PER - 1 : PER]
    assert true_motion(room(), place, pose, then, 8)[0].abs().max() == 0
    pose[0, PER:, 2] = 0
    pose[0, PER:, 0] += torch.arange(1, PER + 1) * MOVE
    motion, _ = true_motion(room(), place, pose, then, 64)
    assert motion.shape == (1, PER, 1, 2, 64, 64)
    assert motion[0, :, 0, 0, 31, 31].tolist() == pytest.approx(
        [n * MOVE / (6 - n * MOVE) for n in (1, 2, 3)], rel=1e-4
    )
    assert motion[0, :, 0, 1].abs().max() < 1e-6


def test_the_picture_before_moved_by_the_true_motion_is_the_picture():
    """Where it was in sight, hidden surfaces included: what the picture before itself has is 8 dB less."""
    simulator = Simulator(64, "cpu")
    clips = simulator.clips(6, 4 * PER, torch.Generator().manual_seed(5), Player(still_start=0.0, idle=0.0, switch=0.0))
    frames = to_signed(clips.frames)
    then = clips.pose[:, PER - 1 : -PER : PER, None]
    motion, known = (part[:, :, 0] for part in true_motion(clips.maps, clips.place, clips.pose, then, 64))
    zero = torch.zeros(6, 2, dtype=torch.long)
    pose = poses(zero[:, 0], zero, clips.keys, 6)
    last = slice(PER - 1, -PER, PER)
    then, before = (value[:, last].repeat_interleave(PER, dim=1) for value in (pose, frames))
    turned = (pose[:, PER:, 1] - then[..., 1]).float() * TURN
    looked = torch.stack((then[..., 2], pose[:, PER:, 2]), dim=-1) * LOOK
    parts = (value.flatten(0, 1) for value in (before, motion, turned, looked))
    moved, inside, _ = reproject(*parts, HALF_FOV_TAN)
    seen = (inside > 0) & known.flatten(0, 1)[:, None]
    truth = frames[:, PER:].flatten(0, 1)

    def psnr(shown: torch.Tensor) -> float:
        return 10 * math.log10(4 / (shown - truth).square()[seen.expand_as(truth)].mean())

    assert seen.float().mean() > 0.6
    assert psnr(moved) > max(27, psnr(before.flatten(0, 1)) + 7)


def test_the_true_motion_costs_nothing_and_a_wrong_one_its_error():
    """Against two pictures, of which the second is none."""
    pose = torch.tensor([[7.0, 7.0, 0.0, 0.0]]).repeat(1, 2 * PER, 1)
    pose[0, PER:, 0] += torch.arange(1, PER + 1) * MOVE
    then = pose[:, None, PER - 1 : PER].repeat(1, 1, 2, 1)
    told = (Maps(room().solid, torch.full((1, 1, 2), 0.5)), torch.zeros(1, 2 * PER, dtype=torch.long), pose, then)
    motion, known = true_motion(*told, 16)
    assert known.all()
    guess, found = motion.repeat_interleave(2, dim=4).repeat_interleave(2, dim=5), torch.tensor([[[1.0, 0.0]]])
    assert motion_error(guess, *told, found).abs().max() < 1e-6
    guess[:, 1, :, 0] += 0.5
    assert motion_error(guess, *told, found)[0].tolist() == [[0, 0], [pytest.approx(0.5, abs=1e-5), 0], [0, 0]]


def test_who_walked_too_far_is_told_nothing():
    pose = torch.tensor([[7.0, 7.0, 0.0, 0.0]]).repeat(1, 2 * PER, 1)
    then = pose[:, None, :1] - torch.tensor([5.0, 0.0, 0.0, 0.0])  # five cells behind: more than the ground's distance
    _, known = true_motion(room(), torch.zeros(1, 2 * PER, dtype=torch.long), pose, then, 16)
    assert not known[0, 0, 0, 15].any()
    assert known[0, 0, 0, 8].any()


def test_stage_a_teaches_the_motion_through_the_tokens_of_the_network():
    torch.manual_seed(0)
    config = tiny_config()
    net = TinyWorldNet(config)
    torch.nn.init.normal_(net.head.to_motion.weight, std=0.1)
    pool = ClipPool(Simulator(config.image_size, "cpu", supersample=1), 4, 4 * PER, 60, seed=1, step=4)
    model, index = TeacherPass(net, dense_attend(config, 4, "cpu")), torch.arange(4)
    loss, found = teacher_loss(model, *pool.clips(index), config, pool.where(index))
    loss.backward()
    assert set(found) == {"mse", "motion", "recalled"}
    for part in (net.head.to_motion.weight.grad, net.head.to_rgb.weight.grad[12:], net.embed.weight.grad):
        assert part.abs().max() > 0
