"""The camera of LingBot-World v2: keys to poses, poses to motion between latent frames, motion to the network's input.

Poses are float64 numpy; a pose is a 4 x 4 camera-to-world matrix with +X right, +Y down
and +Z forward, a length is in world units. A key holds for one *latent* frame (four pictures): w s a d move by 0.05 units
on the horizontal plane, j l turn by 6 degrees (l to the right), i k tilt by 4 degrees, and a tilt beyond 85 degrees is
dropped. Formulas: the model's published description, checked against its numbers in the tests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

Pose = NDArray[np.float64]
"""[4, 4] camera to world."""

UNIT = 0.05
"""Length of one step, and what translations are divided by: a slow block stays slow."""
YAW_DEGREES = 6.0
PITCH_DEGREES = 4.0
PITCH_LIMIT_DEGREES = 85.0
REFERENCE_SIZE = (480, 832)
"""Height and width that given intrinsics refer to."""
FOCAL = 500.0
"""fx and fy of key-driven cameras, in pixels of the target resolution; the centre is the picture's."""
FARTHEST = 1e6
"""Of a pose from where the session began, per axis, in the units of a key's step: what lies beyond makes float32 overflow."""
FOLD = 8
"""Pixels per latent cell and side."""


@dataclass(frozen=True, slots=True)
class Camera:
    """Where the camera of a session is. ``pitch`` in degrees; ``pose`` must not be edited."""

    pose: Pose
    pitch: float

    @classmethod
    def start(cls) -> Camera:
        return cls(np.eye(4), 0.0)

    @classmethod
    def at(cls, pose: Pose) -> Camera:
        """A camera whose tilt is read off its rotation."""
        return cls(pose, float(np.degrees(-np.arcsin(np.clip(pose[1, 2], -1.0, 1.0)))))


def move(camera: Camera, keys: Collection[str]) -> Camera:
    """One latent frame with these keys held (lower case; others are ignored)."""
    yaw = YAW_DEGREES * (("l" in keys) - ("j" in keys))
    pitch = PITCH_DEGREES * (("i" in keys) - ("k" in keys))
    if abs(camera.pitch + pitch) > PITCH_LIMIT_DEGREES:
        pitch = 0.0
    rotation = _about_y(yaw) @ camera.pose[:3, :3] @ _about_x(pitch)
    forward, right = _level(rotation[:, 2]), _level(rotation[:, 0])
    step = UNIT * ((("w" in keys) - ("s" in keys)) * forward + (("d" in keys) - ("a" in keys)) * right)
    pose = np.eye(4)
    pose[:3, :3] = rotation
    pose[:3, 3] = camera.pose[:3, 3] + step
    return Camera(pose, camera.pitch + pitch)


def motions(anchor: Pose, poses: Sequence[Pose]) -> NDArray[np.float64]:
    """[F, 4, 4]: each pose in the frame of the one before it, the first in that of ``anchor``; translations in steps."""
    before = [anchor, *poses[:-1]]
    found = np.stack([_inverse(a) @ b for a, b in zip(before, poses, strict=True)])
    found[:, :3, 3] /= UNIT
    return found


def default_intrinsics(height: int, width: int) -> NDArray[np.float64]:
    """fx, fy, cx, cy in pixels of a picture of this size."""
    return np.array([FOCAL, FOCAL, width / 2, height / 2])


def scaled_intrinsics(reference: NDArray[np.float64], height: int, width: int) -> NDArray[np.float64]:
    """[F, 4] given for 480 x 832, for a picture of another size."""
    sy, sx = height / REFERENCE_SIZE[0], width / REFERENCE_SIZE[1]
    scaled: NDArray[np.float64] = reference * np.array([sx, sy, sx, sy])
    return scaled


def rays(
    motion: NDArray[np.float64],
    intrinsics: NDArray[np.float64],
    height: int,
    width: int,
    *,
    device: torch.device | str = "cpu",
) -> Tensor:
    """float32 [F, 6, height, width] of motions [F, 4, 4] and intrinsics [4] or [F, 4]: the translation, constant over the
    picture, then the unit direction of each pixel's centre turned by the motion. Computed on ``device`` in float64."""
    frames = motion.shape[0]
    moved = torch.from_numpy(motion).to(device)
    focal = torch.from_numpy(np.broadcast_to(intrinsics, (frames, 4)).copy()).to(device)
    fx, fy, cx, cy = focal.T[..., None, None]
    x = ((torch.arange(width, device=device, dtype=torch.float64) + 0.5)[None, None] - cx) / fx
    y = ((torch.arange(height, device=device, dtype=torch.float64) + 0.5)[None, :, None] - cy) / fy
    shape = (frames, height, width)
    straight = torch.stack((x.expand(shape), y.expand(shape), torch.ones_like(x).expand(shape)), dim=1)
    straight = straight / torch.linalg.vector_norm(straight, dim=1, keepdim=True)
    turned = torch.einsum("fij,fjhw->fihw", moved[:, :3, :3], straight)
    translation = moved[:, :3, 3, None, None].expand_as(turned)
    return torch.cat((translation, turned), dim=1).float()


def fold(picture: Tensor) -> Tensor:
    """[F, C, H, W] to [F, C * 64, H / 8, W / 8]: each cell's pixels become channels, ordered channel, row, column."""
    return functional.pixel_unshuffle(picture, FOLD)


def is_pose(matrix: NDArray[np.float64], *, tolerance: float = 1e-3) -> bool:
    """Whether a finite [4, 4] matrix is a rotation and a translation of at most :data:`FARTHEST`."""
    rotation = matrix[:3, :3]
    return bool(
        np.abs(matrix).max() <= FARTHEST
        and np.allclose(rotation @ rotation.T, np.eye(3), atol=tolerance)
        and np.linalg.det(rotation) > 0
        and np.allclose(matrix[3], (0.0, 0.0, 0.0, 1.0), atol=tolerance)
    )


def _about_y(degrees: float) -> NDArray[np.float64]:
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return np.array([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])


def _about_x(degrees: float) -> NDArray[np.float64]:
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return np.array([[1.0, 0.0, 0.0], [0.0, c, -s], [0.0, s, c]])


def _level(direction: NDArray[np.float64]) -> NDArray[np.float64]:
    """The horizontal part, of about unit length (exactly: over its length plus 1e-6)."""
    flat = np.array([direction[0], 0.0, direction[2]])
    unit: NDArray[np.float64] = flat / (np.linalg.norm(flat) + 1e-6)
    return unit


def _inverse(pose: Pose) -> Pose:
    inverse = np.eye(4)
    inverse[:3, :3] = pose[:3, :3].T
    inverse[:3, 3] = -pose[:3, :3].T @ pose[:3, 3]
    return inverse
