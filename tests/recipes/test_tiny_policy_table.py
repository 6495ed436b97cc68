"""The tabletop of tiny-policy: contact, grasping, tasks, the expert, the pictures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from recipes.tiny_policy import expert  # noqa: E402
from recipes.tiny_policy.pictures import GREEN, RED, pictures  # noqa: E402
from recipes.tiny_policy.table import (  # noqa: E402
    BLOCK,
    EPISODE_TICKS,
    FINGER,
    HALF,
    INSTRUCTIONS,
    MAX_SPEED,
    REACH,
    TASKS,
    TICK_S,
    Scene,
    box_distance,
    new_scenes,
    state_of,
    step,
    succeeded,
)


def scenes(count: int, seed: int = 1, task: int | None = None) -> Scene:
    tasks = torch.arange(count) % len(TASKS) if task is None else torch.full((count,), task)
    return new_scenes(count, torch.Generator().manual_seed(seed), tasks)


def bare(**changes: object) -> Scene:
    """One scene: the gripper open in the middle, the T far left, blocks in a row far behind."""
    bodies = torch.tensor([[[-0.3, -0.3, 0.0], [-0.2, 0.4, 0.0], [0.0, 0.4, 0.0], [0.2, 0.4, 0.0]]])
    scene = replace(scenes(1), tool=torch.zeros(1, 2), bodies=bodies)
    return replace(scene, **changes)


def act(x: float = 0.0, y: float = 0.0, closed: float = 0.0) -> torch.Tensor:
    return torch.tensor([[x, y, closed]])


def placed(scene: Scene, body: int, x: float, y: float, angle: float = 0.0) -> Scene:
    bodies = scene.bodies.clone()
    bodies[0, body] = torch.tensor([x, y, angle])
    return replace(scene, bodies=bodies)


def test_the_gripper_moves_at_most_at_its_speed_and_keeps_its_direction():
    after = step(bare(), act(3.0, 4.0))
    assert torch.allclose(after.tool, torch.tensor([[0.6, 0.8]]) * MAX_SPEED * TICK_S, atol=1e-6)


def test_the_gripper_stays_on_the_table():
    scene = bare()
    for _ in range(20):
        scene = step(scene, act(1.0, 0.0))
    assert scene.tool[0, 0] == pytest.approx(REACH)


def test_closing_over_a_block_grasps_it_and_it_comes_along_until_released():
    scene = step(placed(bare(), 2, 0.01, 0.0), act(closed=1.0))
    assert scene.held.item() == 2
    scene = step(scene, act(0.2, 0.1, closed=1.0))
    assert torch.allclose(scene.bodies[0, 2, :2], torch.tensor([0.03, 0.01]), atol=1e-6)
    scene = step(step(scene, act()), act(0.2))
    assert scene.held.item() == -1
    assert scene.bodies[0, 2, 0].item() == pytest.approx(0.03, abs=1e-6)


def test_an_open_gripper_touches_nothing_and_a_closed_one_pushes():
    scene = placed(bare(), 1, BLOCK + FINGER + 0.005, 0.0)
    assert torch.equal(step(scene, act(0.4)).bodies, scene.bodies)
    down = step(scene, act(closed=1.0))
    pushed = step(down, act(0.4, closed=1.0))
    # The finger went 4 cm; the gap was 5 mm.
    assert pushed.bodies[0, 1, 0].item() == pytest.approx(scene.bodies[0, 1, 0].item() + 0.035, abs=1e-4)
    assert pushed.bodies[0, 1, 2].item() == pytest.approx(0.0, abs=1e-6)


def test_a_push_beside_the_centre_turns_a_body_the_way_a_hand_would():
    scene = step(placed(bare(), 1, 0.055, 0.02), act(closed=1.0))
    turned = step(scene, act(0.3, closed=1.0)).bodies[0, 1, 2].item()
    assert turned > 0.05  # pushed to the right below the centre: against the clock


def test_the_finger_drives_the_t_before_it():
    scene = step(placed(bare(), 0, 0.0, 0.13), act(closed=1.0))
    for _ in range(6):
        scene = step(scene, act(0.0, 0.2, closed=1.0))
    x, y, angle = scene.bodies[0, 0].tolist()
    assert (x, angle) == pytest.approx((0.0, 0.0), abs=1e-5)  # straight through its centre: it does not turn
    # Bar 16 x 4.5 cm and stem 4.5 x 11 cm: the centre of mass lies 10.1 cm above the stem's foot.
    assert y - 0.1009 == pytest.approx(scene.tool[0, 1].item() + FINGER, abs=1e-3)


def test_the_distance_of_a_box_is_signed_and_its_normal_points_outward():
    half = torch.tensor([0.2, 0.1])
    points = torch.tensor([[0.5, 0.5], [0.0, 0.08], [-0.25, 0.0]])
    distance, normal = box_distance(points, half)
    assert distance.tolist() == pytest.approx([0.5, -0.02, 0.05], abs=1e-6)
    assert torch.allclose(normal, torch.tensor([[0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]]), atol=1e-6)


def test_equal_seeds_give_equal_scenes_and_other_seeds_others():
    first, again, other = scenes(9), scenes(9), scenes(9, seed=2)
    assert torch.equal(first.bodies, again.bodies)
    assert not torch.equal(first.bodies, other.bodies)


def test_no_scene_begins_solved_and_blocks_begin_apart():
    scene = scenes(900)
    assert not succeeded(scene).any()
    for a in (1, 2, 3):
        for b in range(1, a):
            assert ((scene.bodies[:, a, :2] - scene.bodies[:, b, :2]).norm(dim=1) > 2 * BLOCK).all()


def test_the_state_is_the_robots_own_body_and_says_nothing_of_the_task():
    scene = scenes(8, task=1)
    other = replace(scene, task=torch.full((8,), 5), bodies=scene.bodies + 0.01, goal=-scene.goal, trays=-scene.trays)
    assert torch.equal(state_of(scene), state_of(other))


@pytest.mark.parametrize("task", range(len(TASKS)), ids=[text.replace(" ", "-") for text in INSTRUCTIONS])
def test_the_expert_solves_each_task_in_98_of_100(task):
    scene = scenes(200, seed=11, task=task)
    done = torch.zeros(200, dtype=torch.bool)
    for _ in range(EPISODE_TICKS):
        scene = step(scene, expert.act(scene))
        done |= succeeded(scene)
        if done.all():
            break
    assert done.float().mean() >= 0.98


def test_what_solves_one_task_solves_no_other():
    scene = scenes(450, seed=12)
    asked = scene.task
    for _ in range(60):
        scene = step(scene, expert.act(scene))
    for other in range(1, len(TASKS)):
        told = replace(scene, task=(asked + other) % len(TASKS))
        assert succeeded(told).float().mean() < 0.05


def test_the_expert_lets_go_of_what_it_should_not_hold():
    scene = step(placed(bare(task=torch.tensor([1])), 2, 0.0, 0.0), act(closed=1.0))
    assert scene.held.item() == 2
    assert step(scene, expert.act(scene)).held.item() == -1


def test_a_chunk_is_what_the_expert_does_alone():
    scene = scenes(9)
    planned = expert.chunk(scene, 5)
    for tick in range(5):
        action = expert.act(scene)
        assert torch.equal(planned[:, tick], action)
        scene = step(scene, action)


def pixel(x: float, y: float, half: float, size: int) -> tuple[int, int]:
    """Row and column of a point from the middle of a view."""
    return int((half - y) / (2 * half) * size), int((x + half) / (2 * half) * size)


def test_pictures_show_blocks_where_they_are_in_both_cameras():
    scene = placed(placed(bare(tool=torch.tensor([[0.25, -0.2]])), 1, 0.3, -0.3), 3, -0.1, 0.1)
    top, wrist = pictures(scene, 96)[0]
    assert top.dtype == torch.uint8
    assert top.shape == wrist.shape == (3, 96, 96)
    height = 0.025  # a block's top face lies 5 cm high and is seen from the front: 2.5 cm up the picture

    def near(picture: torch.Tensor, at: tuple[int, int], colour: tuple[float, float, float]) -> bool:
        return bool((picture[:, at[0], at[1]] / 255 - torch.tensor(colour)).abs().max() < 0.2)

    assert near(top, pixel(0.3, -0.3 + height, HALF, 96), RED)
    assert near(top, pixel(-0.1, 0.1 + height, HALF, 96), GREEN)
    assert near(wrist, pixel(0.05, -0.1 + height, 0.16, 96), RED)


def test_pictures_do_not_depend_on_the_instruction():
    scene = scenes(3)
    assert torch.equal(pictures(scene, 48), pictures(replace(scene, task=(scene.task + 4) % len(TASKS)), 48))


def test_a_stacked_block_hides_the_one_below():
    scene = placed(placed(bare(last=torch.tensor([1])), 1, 0.0, 0.0), 2, 0.0, 0.0)
    open_far = replace(scene, tool=torch.tensor([[0.4, 0.4]]))
    row, column = pixel(0.0, 0.05, HALF, 96)  # red stands on blue: its top is 10 cm high
    red, green, blue = pictures(open_far, 96)[0, 0, :, row, column].tolist()
    assert red > 2 * blue
    assert red > 2 * green


def test_beginnings_turn_the_t_every_way():
    angles = scenes(2000, seed=5).bodies[:, 0, 2]
    assert angles.min() < -0.9 * math.pi
    assert angles.max() > 0.9 * math.pi
