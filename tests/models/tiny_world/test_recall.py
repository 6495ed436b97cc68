"""What a block is shown of earlier pictures: which, how it stands to them, and what it sees of them."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from realtime_omni.models.common.keys import KEYS  # noqa: E402
from realtime_omni.models.tiny_world.network import NetworkConfig, poses  # noqa: E402
from realtime_omni.models.tiny_world.recall import (  # noqa: E402
    MOST_TURN,
    MOST_WALK,
    Past,
    recall,
    relation,
    reproject,
    stood,
    walked,
)

TURN_STEPS = 72
HALF_FOV_TAN = NetworkConfig().half_fov_tan


def keys(*frames: str) -> torch.Tensor:
    held = torch.zeros(1, len(frames), len(KEYS))
    for number, pressed in enumerate(frames):
        for key in pressed:
            held[0, number, KEYS.index(key)] = 1
    return held


def path(*frames: str) -> list[list[float]]:
    pressed = keys(*frames)
    pose = poses(torch.zeros(1).long(), torch.zeros(1, 2).long(), pressed, 6)
    return walked(torch.zeros(1, 3).double(), pressed, pose[..., 1], TURN_STEPS)[0].tolist()


def test_who_walks_stands_where_the_keys_say():
    steps = [[1, 0], [2, 0], [1, 0], [1, 0], [1, 1], [1, 0]]
    for got, expected in zip(path("w", "w", "s", "", "d", "a"), steps, strict=True):
        assert got[:2] == pytest.approx(expected)
    assert path("wd")[0][:2] == pytest.approx([0.5**0.5] * 2)  # together they share the length
    right = path(*["l"] * 18, "w")[-1][:2]  # a quarter turn to the right, and a step
    assert right == pytest.approx([0, 1], abs=1e-9)
    assert path("lw")[0][:2] == pytest.approx(
        [math.cos(math.radians(5)), math.sin(math.radians(5))]
    )  # it turns, then steps


def test_the_way_walked_grows_with_every_step_there_and_back_and_not_with_turns_or_with_keys_that_cancel():
    assert [at[2] for at in path("w", "l", "s", "ws", "i", "ad", "wd")] == pytest.approx([1, 1, 2, 2, 2, 2, 2 + 2**0.5])


def past(*sights: tuple[int, int, float, float, int], ages: list[int] | None = None) -> Past:
    """Of (turned, looked, x, y, place), all of the same way walked."""
    table = torch.tensor([sights], dtype=torch.float64)
    ages = ages or list(range(len(sights), 0, -1))
    at = torch.cat((table[..., 2:4], torch.zeros_like(table[..., :1])), dim=-1)
    return Past(table[..., :2].long(), at, table[..., 4].long(), torch.tensor([ages]))


def recalled(of: Past, turned: int = 0, looked: int = 0, x: float = 0, y: float = 0, place: int = 0):
    index, sights = recall(
        of, torch.tensor([[turned, looked]]), torch.tensor([[x, y, 0.0]]).double(), torch.tensor([place]), TURN_STEPS
    )
    return index[0].tolist(), sights[0]


def test_the_last_picture_is_always_shown_and_of_the_others_the_nearest():
    of = past((0, 0, 0, 0, 0), (3, 0, 0, 0, 0), (9, 0, 0, 0, 0), (12, 0, 0, 0, 0))
    for turned, other in ((15, 2), (9, 2), (7, 2), (5, 1), (1, 0), (-3, 0)):
        index, sights = recalled(of, turned)
        assert index == [3, other]
        assert sights[:, 0].tolist() == [12, [0, 3, 9][other]]
        assert sights[:, 4].tolist() == [1, 1]


def test_a_full_turn_is_none_steps_count_as_turns_and_of_equals_the_newest_is_taken():
    assert recalled(past((1, 0, 0, 0, 0), (40, 0, 0, 0, 0), (69, 0, 0, 0, 0)), 72)[0] == [2, 0]
    assert recalled(past((2, 0, 0, 0, 0), (0, 0, 3, 0, 0), (9, 0, 0, 0, 0)))[0] == [2, 0]
    assert recalled(past((2, 0, 0, 0, 0), (0, 0, 1, 0, 0), (9, 0, 0, 0, 0)))[0] == [2, 1]
    assert recalled(past((0, 5, 0, 0, 0), (1, 0, 0, 0, 0), (9, 0, 0, 0, 0)))[0] == [2, 1]
    assert recalled(past((4, 0, 0, 0, 0), (4, 0, 0, 0, 0), (9, 0, 0, 0, 0)))[0] == [2, 1]


@pytest.mark.parametrize(
    "of",
    [
        past((0, 0, 0, 0, 0)),
        past((0, 0, 0, 0, 1), (0, 0, 0, 0, 0)),  # another place
        past((MOST_TURN + 1, 0, 0, 0, 0), (0, 0, 0, 0, 0)),
        past((0, 0, MOST_WALK + 1, 0, 0), (0, 0, 0, 0, 0)),
        past((0, 0, 0, 0, 0), (0, 0, 0, 0, 0), ages=[0, 1]),  # an empty place of a ring
    ],
    ids=["one", "place", "turned", "walked", "empty"],
)
def test_where_nothing_fits_nothing_is_recalled(of: Past):
    _, sights = recalled(of)
    assert sights[0, 4] == 1
    assert sights[1].abs().max() == 0
    assert relation(sights[None, None], TURN_STEPS).abs().max() == 0


def test_the_relation_is_the_turn_since_and_the_way_as_the_recalled_picture_looks():
    _, sights = recalled(past((18, 0, 4, 0, 0), (20, 0, 4, 10, 0)), 20, x=4.0, y=10.0)
    assert sights[1, :2].tolist() == [18, 0]
    assert sights[1, 2:5].tolist() == pytest.approx([10, 0, 1], abs=1e-5)  # it looked right, and went that way
    turn = math.radians(10)
    expected = [math.sin(turn), math.cos(turn), 1, 0, 1]
    assert relation(sights[None, None], TURN_STEPS).flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_a_frame_is_seen_from_where_a_picture_was_until_somebody_walks():
    """Walking to and fro ends elsewhere, too, where a wall stood in the way: the same numbers are no proof."""
    of = past((0, 0, 0, 0, 0), (3, 0, 0, 0, 0))
    _, still = recalled(of, 0)
    assert stood(still[None, None], keys("l", "i", "ws"))[0].tolist() == [[True, True]] * 3
    assert stood(still[None, None], keys("l", "w", "l"))[0].tolist() == [[True, True], [False, False], [False, False]]
    of.at[:, 0, 2] = -2  # a step there and a step back since the other
    _, moved = recalled(of, 0)
    assert stood(moved[None, None], keys("l", "", ""))[0].tolist() == [[True, False]] * 3
    _, none = recalled(past((40, 0, 0, 0, 0), (3, 0, 0, 0, 0)), 0)
    assert stood(none[None, None], keys("l", "", ""))[0].tolist() == [[True, False]] * 3
    two = torch.stack((still, moved))[None]
    assert stood(two, keys("", "", "w", "", "", ""))[0, :, 1].tolist() == [True, True, False, False, False, False]


def seen(turned: float = 0.0, looked: tuple[float, float] = (0.0, 0.0), motion: tuple[float, float] = (0.0, 0.0)):
    """`reproject` of a picture 8 x 8 whose two channels are where its pixels are, across and down, -1 to 1; bicubic samples of
    it are right to a twentieth of a pixel."""
    at = (torch.arange(8) + 0.5) / 4 - 1
    picture = torch.stack((at.expand(8, 8), at[:, None].expand(8, 8)))[None]
    walked = torch.tensor(motion).view(1, 2, 1, 1).expand(1, 2, 8, 8)
    return reproject(picture, walked, torch.tensor([turned]), torch.tensor([looked]), HALF_FOV_TAN)


def test_who_stands_still_sees_the_picture_before():
    at = (torch.arange(8) + 0.5) / 4 - 1
    moved, inside, _ = seen()
    torch.testing.assert_close(moved[0, 0], at.expand(8, 8))
    torch.testing.assert_close(moved[0, 1], at[:, None].expand(8, 8))
    assert inside.all()


def test_after_a_turn_to_the_right_a_pixel_is_where_its_direction_was():
    turned = math.radians(10)
    moved, inside, _ = seen(turned)
    at = (torch.arange(8) + 0.5) / 4 - 1
    direction = torch.atan(at * HALF_FOV_TAN) + turned
    expected = direction.tan() / HALF_FOV_TAN
    assert inside[0, 0, 3].tolist() == (expected <= 1).float().tolist()
    torch.testing.assert_close(moved[0, 0, 3, 1:6], expected[1:6], atol=0.02, rtol=0)


def test_looking_up_moves_the_picture_down():
    moved, inside, _ = seen(looked=(0.0, 0.25))
    at = (torch.arange(8) + 0.5) / 4 - 1
    torch.testing.assert_close(moved[0, 1, 2:6, 0], at[2:6] - 0.25, atol=1e-5, rtol=0)
    assert inside[0, 0, :, 0].tolist() == [0.0, *[1.0] * 7]


def test_a_step_ahead_makes_what_is_near_larger_and_one_aside_moves_it():
    """A wall two cells ahead now was at 2.5 before a step of half a cell: 0.25 of its present distance."""
    at = (torch.arange(8) + 0.5) / 4 - 1
    moved, *_ = seen(motion=(0.25, 0.0))
    torch.testing.assert_close(moved[0, 0, 3, 1:7], at[1:7] / 1.25, atol=0.02, rtol=0)
    torch.testing.assert_close(moved[0, 1, 1:7, 3], at[1:7] / 1.25, atol=0.02, rtol=0)
    moved, *_ = seen(motion=(0.0, 0.225))
    torch.testing.assert_close(moved[0, 0, 3, 1:6], at[1:6] + 0.25, atol=0.02, rtol=0)


def test_the_pixels_of_a_picture_to_one_of_now_are_those_along_the_axis_that_is_stretched_most():
    """A step ahead to 1 / 1.25 of the distance stretches both ways alike; a wall beside a way is stretched across."""
    *_, still = seen()
    torch.testing.assert_close(still, torch.ones(1, 1, 8, 8))
    *_, near = seen(motion=(0.25, 0.0))
    torch.testing.assert_close(near, torch.full((1, 1, 8, 8), 0.8))
    wall = torch.zeros(1, 2, 8, 8)
    wall[:, 0] = torch.linspace(0.5, 0.0, 8)  # near at the left, far at the right
    *_, along = reproject(torch.zeros(1, 1, 8, 8), wall, torch.zeros(1), torch.zeros(1, 2), HALF_FOV_TAN)
    assert along.min() < 0.7 < along[0, 0, 4, 6]
