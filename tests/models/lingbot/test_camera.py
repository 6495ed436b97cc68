"""The camera's published numbers, and what must not depend on how a walk is cut into blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from realtime_omni.models.lingbot.camera import (
    UNIT,
    Camera,
    default_intrinsics,
    fold,
    is_pose,
    motions,
    move,
    rays,
    scaled_intrinsics,
)


def walk(frames: list[str], camera: Camera | None = None) -> list[Camera]:
    camera, seen = camera or Camera.start(), []
    for keys in frames:
        camera = move(camera, keys)
        seen.append(camera)
    return seen


def test_the_published_vectors() -> None:
    seen = walk(["w", "wl", "i"])
    wanted = [(0, 0, 0.04999995), (0.00522642, 0, 0.09972600), (0.00522642, 0, 0.09972600)]
    for camera, position in zip(seen, wanted, strict=True):
        assert camera.pose[:3, 3] == pytest.approx(position, abs=1e-8)
    assert seen[-1].pitch == pytest.approx(4.0)
    assert seen[-1].pose[0, 1] == pytest.approx(0.00729154, abs=1e-8)
    found = motions(np.eye(4), [c.pose for c in seen])
    steps = [(0, 0, 0.999999), (0.10452836, 0, 0.9945209), (0, 0, 0)]
    for motion, step in zip(found, steps, strict=True):
        assert motion[:3, 3] == pytest.approx(step, abs=1e-6)


def test_the_corner_pixel_at_the_reference_size() -> None:
    found = rays(np.eye(4)[None], default_intrinsics(480, 832), 480, 832)
    assert found.shape == (1, 6, 480, 832)
    assert found[0, 3:, 0, 0].tolist() == pytest.approx((-0.59972228, -0.34568829, 0.72168746), abs=1e-7)
    assert not found[0, :3].any()


def test_the_tilt_ends_below_85_degrees_and_its_step_is_dropped_whole() -> None:
    assert walk(["i"] * 30)[-1].pitch == pytest.approx(84.0)
    down = walk(["k"] * 40)[-1]
    assert down.pitch == pytest.approx(-84.0)
    turned = move(down, "kl")  # the turn still acts
    assert turned.pitch == down.pitch
    assert not np.allclose(turned.pose, down.pose)


def test_walking_stays_level_whatever_the_tilt() -> None:
    camera = walk(["i"] * 21 + ["w"] * 5)[-1]
    assert camera.pose[1, 3] == 0.0
    assert np.linalg.norm(camera.pose[:3, 3]) == pytest.approx(5 * UNIT, rel=1e-4)


def test_opposite_keys_cancel() -> None:
    for pair in ("ws", "ad", "ik", "jl"):
        assert np.allclose(move(Camera.start(), pair).pose, np.eye(4))


def test_a_block_boundary_leaves_no_seam() -> None:
    keys = ["w", "wl", "i", "wj", "d", "k"]
    whole = [c.pose for c in walk(keys)]
    first = walk(keys[:3])
    second = walk(keys[3:], first[-1])
    apart = np.concatenate(
        (motions(np.eye(4), [c.pose for c in first]), motions(first[-1].pose, [c.pose for c in second]))
    )
    assert np.array_equal(apart, motions(np.eye(4), whole))


def test_slow_motion_stays_slow() -> None:
    """Not normalised per block: half the way is half the motion."""
    slow, fast = np.eye(4), np.eye(4)
    slow[2, 3], fast[2, 3] = UNIT / 2, UNIT
    assert motions(np.eye(4), [slow])[0, 2, 3] == pytest.approx(motions(np.eye(4), [fast])[0, 2, 3] / 2)


def test_a_tilt_is_read_off_a_pose() -> None:
    for keys in (["i"] * 7, ["l"] * 4 + ["k"] * 9, ["j", "i"]):
        camera = walk(keys)[-1]
        assert Camera.at(camera.pose).pitch == pytest.approx(camera.pitch, abs=1e-9)


def test_folding_orders_channel_row_column() -> None:
    picture = torch.arange(2 * 3 * 16 * 24, dtype=torch.float32).view(2, 3, 16, 24)
    folded = fold(picture)
    assert folded.shape == (2, 192, 2, 3)
    for channel, row, column in ((0, 0, 0), (1, 3, 5), (2, 7, 7)):
        assert torch.equal(folded[:, channel * 64 + row * 8 + column], picture[:, channel, row::8, column::8])


def test_intrinsics_scale_with_the_picture() -> None:
    reference = np.array([[500.0, 500.0, 416.0, 240.0]])
    assert np.allclose(scaled_intrinsics(reference, 240, 416), [[250.0, 250.0, 208.0, 120.0]])


def test_what_is_no_pose() -> None:
    good = walk(["wl", "i"])[-1].pose
    assert is_pose(good)
    mirrored, sheared, homogeneous = good.copy(), good.copy(), good.copy()
    mirrored[:3, 0] *= -1
    sheared[0, 1] += 0.1
    homogeneous[3, 0] = 0.5
    assert not any(is_pose(bad) for bad in (mirrored, sheared, homogeneous, np.zeros((4, 4))))
