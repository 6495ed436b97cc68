"""What steers LingBot's camera: keys per latent frame, held keys, or poses; and how they become one block's control.

``lingbot.camera_trajectory.v1``: ``{"poses": [[4 x 4], ...], "intrinsics": [[fx, fy, cx, cy], ...]}``, one of each per latent
frame of the block; poses are camera to world, in the units of a key's step, intrinsics in pixels of 832 x 480 (default: those
of keys). The last control before a block rules it; keys that are held go on after a trajectory from where that ended.
"""

from __future__ import annotations

import math

import numpy as np

from realtime_omni.models.base import ControlSchema
from realtime_omni.models.common import keys
from realtime_omni.models.lingbot.camera import FARTHEST, is_pose
from realtime_omni.session.values import ControlInput

MIN_FOCAL = 1e-3
"""Pixels: a shorter one sees no more, and its rays overflow."""
TRAJECTORY = "lingbot.camera_trajectory.v1"

_NUMBER = {"type": "number"}
_AHEAD = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0.05], [0, 0, 0, 1]]
"""One step forward."""


def schemas(frames: int) -> tuple[ControlSchema, ...]:
    """What a client may send, for discovery; ``frames``: latent frames of a block."""
    row = {"type": "array", "items": _NUMBER, "minItems": 4, "maxItems": 4}
    pose = {"type": "array", "items": row, "minItems": 4, "maxItems": 4, "examples": [_AHEAD]}
    listed = {"minItems": frames, "maxItems": frames}
    return (
        *keys.schemas(frames),
        ControlSchema(
            keys.TRACK,
            TRAJECTORY,
            {
                "type": "object",
                "properties": {
                    "poses": {"type": "array", "items": pose, **listed},
                    "intrinsics": {"type": "array", "items": row, **listed},
                },
                "required": ["poses"],
                "additionalProperties": False,
            },
            f"Camera-to-world poses for each of the {frames} latent frames of one block.",
        ),
    )


def check_control(control: ControlInput, frames: int) -> None:
    """Raises ArgumentError: ``schema_unknown``, or ``control_invalid`` with the path."""
    if control.track != keys.TRACK or control.schema != TRAJECTORY:
        keys.check_control(control, frames)
        return
    data = control.data
    keys.refuse_others(data, {"poses", "intrinsics"})
    poses = data.get("poses")
    if not isinstance(poses, tuple) or len(poses) != frames:
        raise keys.invalid(f"must be a list of {frames} poses", "data.poses")
    for i, pose in enumerate(poses):
        path = f"data.poses[{i}]"
        if not isinstance(pose, tuple) or len(pose) != 4:
            raise keys.invalid("must be a 4 x 4 matrix", path)
        for j, row in enumerate(pose):
            _check_row(row, f"{path}[{j}]")
        if not is_pose(np.array(pose, dtype=np.float64)):
            raise keys.invalid(f"must be a rotation and a translation of at most {FARTHEST:g}", path)
    if "intrinsics" not in data:
        return
    intrinsics = data["intrinsics"]
    if not isinstance(intrinsics, tuple) or len(intrinsics) != frames:
        raise keys.invalid(f"must be a list of {frames} rows", "data.intrinsics")
    for i, row in enumerate(intrinsics):
        _check_row(row, f"data.intrinsics[{i}]")
        if row[0] < MIN_FOCAL or row[1] < MIN_FOCAL:
            raise keys.invalid(f"focal lengths must be at least {MIN_FOCAL:g}", f"data.intrinsics[{i}]")


def _check_row(row: object, path: str) -> None:
    if not isinstance(row, tuple) or len(row) != 4:
        raise keys.invalid("must be a list of 4 numbers", path)
    for value in row:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise keys.invalid("must be a list of 4 finite numbers", path)
