"""What is shown again to who has not walked: which pictures, where their pixels go, and when not."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from realtime_omni.models.common.keys import KEYS  # noqa: E402
from realtime_omni.models.tiny_world.network import NetworkConfig, poses  # noqa: E402
from realtime_omni.models.tiny_world.standing import (  # noqa: E402
    Past,
    Seen,
    nearest,
    remember,
    reproject,
    show_again,
    still,
)

CONFIG = NetworkConfig(image_size=16, patch=8, width=64, layers=1, heads=1)
SIDE = CONFIG.image_size
AT = (torch.arange(SIDE) + 0.5) / SIDE * 2 - 1
WHERE = torch.stack((AT.expand(SIDE, SIDE), AT[:, None].expand(SIDE, SIDE), torch.zeros(SIDE, SIDE)))
"""A picture whose first two channels say where its pixels are, across and down."""


def keys(*frames: str) -> torch.Tensor:
    held = torch.zeros(len(frames), len(KEYS))
    for number, pressed in enumerate(frames):
        for key in pressed:
            held[number, KEYS.index(key)] = 1
    return held


def plain(value: float) -> torch.Tensor:
    return torch.full((3, SIDE, SIDE), float(value))


def shown(past: Past, *frames: str, heading: tuple[int, int] = (0, 0)) -> torch.Tensor:
    pressed = keys(*frames)
    pose = poses(torch.zeros(1).long(), torch.tensor([heading]), pressed[None], CONFIG.look_limit)[0]
    return show_again(plain(-1).expand(len(frames), -1, -1, -1), past, pressed, pose, CONFIG)


def test_turns_looks_and_keys_that_cancel_are_no_steps_and_a_step_counts_from_its_frame_on():
    assert still(keys("l", "i", "ws")).tolist() == [True] * 3
    assert still(keys("", "w", "s")).tolist() == [True, False, False]
    assert still(keys("d", "", "l")).tolist() == [False] * 3


def test_a_step_and_a_change_of_place_begin_a_new_past_which_holds_no_more_than_it_may():
    past: Past = ()
    for turned in range(5):
        past = remember(past, plain(turned), (turned, 0), keys("l", "", ""), same_place=True, most=3)
    assert [seen.heading for seen in past] == [(2, 0), (3, 0), (4, 0)]
    for pressed, same in ((keys("", "", "a"), True), (keys("", "", ""), False)):
        after = remember(past, plain(1), (9, 1), pressed, same_place=same, most=3)
        assert [seen.heading for seen in after] == [(9, 1)]


def test_the_nearest_of_the_earlier_pictures_is_taken_a_full_turn_is_none_and_of_equals_the_oldest():
    past = tuple(Seen(plain(0), heading) for heading in ((1, 0), (40, 0), (60, 3), (66, 0), (68, 0)))
    assert nearest(past, (0, 0), 72).heading == (1, 0)
    assert nearest(past, (72 + 41, 0), 72).heading == (40, 0)
    assert nearest(past, (64, 2), 72).heading == (66, 0)  # of looks a third counts
    assert nearest(past, (61, 2), 72).heading == (60, 3)
    assert nearest(past[1:3], (50, 0), 72).heading == (40, 0)
    assert nearest((Seen(plain(0), (5, 0)), Seen(plain(0), (7, 0)), past[0]), (6, 0), 72).heading == (5, 0)
    assert nearest(past[:1], (0, 0), 72) is None


def test_who_stands_still_is_shown_the_same_picture():
    past = (Seen(WHERE, (0, 0)),)
    torch.testing.assert_close(shown(past, "", "", ""), WHERE.expand(3, -1, -1, -1), atol=1e-5, rtol=0)


def test_after_a_turn_to_the_right_a_pixel_is_where_its_direction_was():
    moved, share = reproject(WHERE, torch.tensor([1, 2, 3]), 0, torch.zeros(3).long(), CONFIG)
    for frame, steps in enumerate((1, 2, 3)):
        expected = (torch.atan(AT * CONFIG.half_fov_tan) + math.radians(5 * steps)).tan() / CONFIG.half_fov_tan
        inner = expected < 1 - 1.5 / SIDE  # bicubic samples at the very edge are not linear
        row, counts = moved[frame, 0, SIDE // 2], share[frame, 0, SIDE // 2]
        torch.testing.assert_close(row[inner], expected[inner], atol=0.02, rtol=0)
        assert (counts > 0).tolist() == (expected <= 1).tolist()
        assert (expected > 1).any()


def test_looking_up_moves_the_picture_down():
    moved, share = reproject(WHERE, torch.zeros(2).long(), -2, torch.tensor([-1, 2]), CONFIG)
    for frame, steps in enumerate((1, 4)):
        down = moved[frame, 1, 2 + steps : -2, 3]
        torch.testing.assert_close(down, AT[2 + steps : -2] - steps * CONFIG.look_step, atol=0.02, rtol=0)
        counts = share[frame, 0, :, SIDE // 2] > 0
        assert counts.tolist() == (AT - steps * CONFIG.look_step >= -1).tolist()


def test_what_moved_counts_from_its_edges_inward_and_what_did_not_in_full():
    turned, looked = torch.tensor([0, 1, 3]), torch.zeros(3).long()
    still, little, far = reproject(WHERE, turned, 0, looked, CONFIG)[1][:, 0, SIDE // 2]
    assert (still == 1).all()
    assert little[: SIDE // 2].max() == 1
    for counts in (little, far):
        falling = counts[SIDE // 2 :]
        assert falling.tolist() == sorted(falling.tolist(), reverse=True)
        assert ((falling > 0) & (falling < 1)).any()
        assert falling[-1] == 0
    assert (far[SIDE // 2 :] <= little[SIDE // 2 :]).all()
    picture = shown((Seen(plain(1), (0, 0)),), "l")[0, 0, SIDE // 2]  # drawn is -1
    torch.testing.assert_close(picture, 2 * little - 1)


def test_what_was_there_before_is_shown_over_what_the_last_picture_has_of_it():
    past = (Seen(plain(0.5), (0, 0)), Seen(plain(0.1), (30, 0)), Seen(plain(0.2), (71, 0)))
    picture = shown(past, "l", "", "", heading=(71, 0))
    torch.testing.assert_close(picture, torch.full_like(picture, 0.5))
    beside = shown(past, "j", "", "", heading=(71, 0))[
        0, 0, SIDE // 2
    ]  # two steps to the left of where the first looks
    assert beside[0] == -1
    assert beside[-4:].max() > 0.35  # the last picture has 0.2 there


def test_from_a_step_on_all_is_drawn_and_so_it_is_without_a_past():
    past = (Seen(plain(0.5), (0, 0)),)
    assert shown(past, "", "w", "")[:, 0, 0, 0].tolist() == [0.5, -1.0, -1.0]
    assert (shown((), "", "", "") == -1).all()


def test_what_lies_behind_is_not_shown():
    for turned in (18, 30, 36, 54):
        assert not reproject(WHERE, torch.tensor([turned]), 0, torch.tensor([0]), CONFIG)[1].any()
    assert (reproject(WHERE, torch.tensor([72]), 0, torch.tensor([0]), CONFIG)[1] == 1).all()
