"""Cameras, states and actions: numbers worked out by hand, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.dreamzero.tiny import ROBOT
from realtime_omni.errors import ArgumentError
from realtime_omni.models.dreamzero.robot import Quantiles, Robot


def test_three_cameras_share_a_canvas_the_wrist_above_in_double_width() -> None:
    flat = {
        name: np.full((40, 80, 3), shade, np.uint8) for name, shade in (("wrist", 10), ("left", 100), ("right", 200))
    }
    canvas = ROBOT.canvas(flat, 32, 64)
    assert (canvas.shape, canvas.dtype) == ((1, 3, 32, 64), torch.uint8)
    for place, shade in ((canvas[0, 0, :16], 10), (canvas[0, 0, 16:, :32], 100), (canvas[0, 0, 16:, 32:], 200)):
        assert set(place.unique().tolist()) <= {
            shade - 1,
            shade,
        }  # cut off, not rounded, as the checkpoint's training did


def test_the_wrist_is_repeated_column_by_column() -> None:
    ramp = np.broadcast_to(np.arange(0, 160, 2, dtype=np.uint8)[None, :, None], (40, 80, 3)).copy()
    canvas = ROBOT.canvas({"wrist": ramp}, 32, 64)
    assert torch.equal(canvas[..., :16, 0::2], canvas[..., :16, 1::2])
    assert (canvas[0, 0, 0].diff() >= 0).all()


def test_a_view_is_its_middle_and_a_camera_that_is_absent_is_black() -> None:
    framed = np.full((100, 200, 3), 50, np.uint8)
    framed[:2], framed[-2:], framed[:, :4], framed[:, -4:] = 255, 255, 255, 255  # all of it in the 5 % that are cut off
    canvas = ROBOT.canvas({"left": framed}, 32, 64)
    assert set(canvas[0, :, 16:, :32].unique().tolist()) <= {49, 50}
    assert not canvas[0, :, :16].any()
    assert not canvas[0, :, 16:, 32:].any()


def test_stacks_become_a_clip_and_must_be_as_long() -> None:
    stack = np.zeros((4, 20, 40, 3), np.uint8)
    assert ROBOT.canvas({"left": stack, "wrist": stack}, 32, 64).shape == (4, 3, 32, 64)
    with pytest.raises(ArgumentError, match="as many"):
        ROBOT.canvas({"left": stack, "wrist": stack[:2]}, 32, 64)


def test_one_camera_may_have_the_canvas_for_itself() -> None:
    alone = Robot(("front",), "single", ROBOT.state, ROBOT.actions, ROBOT.relative)
    assert set(alone.canvas({"front": np.full((20, 30, 3), 7, np.uint8)}, 16, 32).unique().tolist()) <= {6, 7}
    with pytest.raises(ValueError, match="cameras"):
        Robot(("front", "back"), "single", ROBOT.state, ROBOT.actions, ROBOT.relative)


def test_a_state_is_scaled_by_its_percentiles_and_clamped_and_a_constant_channel_only_clamped() -> None:
    """Channels -1..1, -2..2, 0..4, and 5..5."""
    assert ROBOT.state.normalised(np.array([0.5, 3, 1, 0.25], np.float32)).tolist() == [0.5, 1.0, -0.5, 0.25]
    assert ROBOT.state.normalised(np.array([-2, -2, 4, 5], np.float32)).tolist() == [-1, -1, 1, 1]
    assert ROBOT.state.middle.tolist() == [0, 0, 2, 5]


def test_actions_go_back_and_relative_ones_are_added_to_the_state() -> None:
    """Percentiles -0.5..0.5, -0.5..0.25, -0.5..0.5, 0..1; three joints relative, the gripper absolute; padding is cut off."""
    chunk = np.array([[0, 1, -1, 0.5, 9, 9], [1, -1, 0, -1, 9, 9]], np.float32)
    acted = ROBOT.act(chunk, np.array([10, 20, 30, 5], np.float32))
    assert acted.tolist() == [[10, 20.25, 29.5, 0.75], [10.5, 19.5, 30, 0]]
    assert acted.dtype == np.float32


def test_a_relative_channel_needs_a_state_channel() -> None:
    low = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="relative"):
        Robot(("front",), "single", Quantiles(low, low), Quantiles(low, low), (0, 2))
