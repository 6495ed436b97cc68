"""What steers Matrix-Game 2: keys per latent frame, held keys, or keys and mouse; and how they become numbers for the network.

``matrix_game.actions.v1``: ``{"frames": [{"keys": ["w"], "mouse": [dx, dy]}, ...]}``, one per latent frame of the block, used
for one block: w a s d walk, the mouse looks, dx to the right and dy up, in the model's units (:data:`LOOK` is what a held
key does), both optional. The last control before a block rules it.

Keys that are held or scripted (:mod:`realtime_omni.models.common.keys`) mean the same: w a s d walk, i j k l look.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from realtime_omni.models.base import ControlSchema
from realtime_omni.models.common import keys
from realtime_omni.session.values import ControlInput

ACTIONS = "matrix_game.actions.v1"
KEYBOARD = ("w", "s", "a", "d")
"""In the order of the network's input."""
LOOK = 0.1
"""Of the mouse, per picture, while one of i j k l is held: what the published demonstrations send."""
MOUSE_LIMIT = 1.0
"""Ten times :data:`LOOK`: no published use goes beyond that."""

Action = tuple[tuple[float, ...], tuple[float, float]]
"""Of one latent frame: the keyboard in its order, 1 where pressed, and (pitch, yaw), positive up and to the right."""
STILL: Action = ((0.0,) * len(KEYBOARD), (0.0, 0.0))


def schemas(frames: int) -> tuple[ControlSchema, ...]:
    """What a client may send, for discovery; ``frames``: latent frames of a block."""
    move = {"type": "number", "minimum": -MOUSE_LIMIT, "maximum": MOUSE_LIMIT}
    walk = {"type": "array", "items": {"type": "string", "enum": list(KEYBOARD)}, "maxItems": keys.MAX_KEYS}
    action = {
        "type": "object",
        "properties": {"keys": walk, "mouse": {"type": "array", "items": move, "minItems": 2, "maxItems": 2}},
        "additionalProperties": False,
    }
    listed = {"type": "array", "items": action, "minItems": frames, "maxItems": frames}
    return (
        *keys.schemas(frames),
        ControlSchema(
            keys.TRACK,
            ACTIONS,
            {
                "type": "object",
                "properties": {"frames": listed},
                "required": ["frames"],
                "additionalProperties": False,
            },
            f"Keys (w a s d) and mouse (dx, dy; a held key is {LOOK:g}) for each of the {frames} frames of one block.",
        ),
    )


def check_control(control: ControlInput, frames: int) -> None:
    """Raises ArgumentError: ``schema_unknown``, or ``control_invalid`` with the path."""
    if control.track != keys.TRACK or control.schema != ACTIONS:
        keys.check_control(control, frames)
        return
    keys.refuse_others(control.data, {"frames"})
    found = control.data.get("frames")
    if not isinstance(found, tuple) or len(found) != frames:
        raise keys.invalid(f"must be a list of {frames} actions", "data.frames")
    for i, action in enumerate(found):
        path = f"data.frames[{i}]"
        if not isinstance(action, Mapping):
            raise keys.invalid("must be an object", path)
        keys.refuse_others(action, {"keys", "mouse"}, path)
        _check_walk(action.get("keys", ()), f"{path}.keys")
        _check_mouse(action.get("mouse", (0, 0)), f"{path}.mouse")


def actions_of(control: ControlInput | None, frames: int) -> tuple[Action, ...]:
    """One per latent frame, of a checked control or of none."""
    if control is None:
        return (STILL,) * frames
    if control.schema == ACTIONS:
        return tuple(
            _action(frame.get("keys", ()), *frame.get("mouse", (0.0, 0.0))) for frame in control.data["frames"]
        )
    return tuple(_action(held, *_looked(held)) for held in control.data["frames"])


def _looked(held: Collection[str]) -> tuple[float, float]:
    """(dx, dy) of the keys that look."""
    return LOOK * (("l" in held) - ("j" in held)), LOOK * (("i" in held) - ("k" in held))


def _action(held: Collection[str], dx: float, dy: float) -> Action:
    pressed = {key.lower() for key in held}
    return tuple(float(key in pressed) for key in KEYBOARD), (float(dy), float(dx))


def _check_walk(held: object, path: str) -> None:
    keys.check_keys(held, path)
    for key in held:  # type: ignore[attr-defined]
        if key.lower() not in KEYBOARD:
            raise keys.invalid(f"unknown key {key!r}; known: {' '.join(KEYBOARD)}", path)


def _check_mouse(moved: object, path: str) -> None:
    if not isinstance(moved, tuple) or len(moved) != 2:
        raise keys.invalid("must be a list of dx and dy", path)
    for value in moved:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise keys.invalid("must be two finite numbers", path)
        if abs(value) > MOUSE_LIMIT:
            raise keys.invalid(f"must be between -{MOUSE_LIMIT:g} and {MOUSE_LIMIT:g}", path)
