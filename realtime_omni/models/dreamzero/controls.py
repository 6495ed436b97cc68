"""What a world's client may say of the robot: where it is. Without it the robot is where its last action put it.

``robot.state.v1`` on track ``robot``: ``{"state": [D numbers]}`` in the robot's units; it holds for one block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from realtime_omni.errors import ArgumentError, ErrorCode
from realtime_omni.models.base import ControlSchema, LatestWinsReducer, PreparedControls
from realtime_omni.session.values import ControlInput, SessionEvent

TRACK = "robot"
STATE = "robot.state.v1"
LARGEST = 1e6
"""A number beyond it is no state of a robot."""


def schemas(state_dim: int) -> tuple[ControlSchema, ...]:
    """For discovery."""
    number = {"type": "number", "minimum": -LARGEST, "maximum": LARGEST}
    return (
        ControlSchema(
            TRACK,
            STATE,
            {
                "type": "object",
                "properties": {
                    "state": {"type": "array", "items": number, "minItems": state_dim, "maxItems": state_dim}
                },
                "required": ["state"],
                "additionalProperties": False,
            },
            f"The robot's {state_dim} state channels at the beginning of one block.",
        ),
    )


def check_control(control: ControlInput, state_dim: int) -> None:
    """Raises ArgumentError: ``schema_unknown``, or ``control_invalid`` with the path."""
    if (control.track, control.schema) != (TRACK, STATE):
        raise ArgumentError(
            f"known is {TRACK}/{STATE}, not {control.track}/{control.schema}",
            code=ErrorCode.SCHEMA_UNKNOWN,
            path="controls",
        )
    for name in control.data:
        if name != "state":
            raise _invalid(f"unknown field {name!r}", f"data.{name}")
    state = control.data.get("state")
    if not isinstance(state, tuple) or len(state) != state_dim:
        raise _invalid(f"must be a list of {state_dim} numbers", "data.state")
    for i, value in enumerate(state):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or abs(value) > LARGEST:
            raise _invalid(f"must be a number of at most {LARGEST:g}", f"data.state[{i}]")


class OneBlockReducer(LatestWinsReducer):
    """The last control per track, for one block."""

    def prepare(
        self, current: Mapping[str, ControlInput], events: Sequence[SessionEvent], chunk_index: int
    ) -> PreparedControls:
        return PreparedControls(super().prepare({}, events, chunk_index).controls, carried=())


def _invalid(message: str, path: str) -> ArgumentError:
    return ArgumentError(f"{path}: {message}", code=ErrorCode.CONTROL_INVALID, path=path)
