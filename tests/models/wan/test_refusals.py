"""What bad input gets from a world of the Wan family: a code and the name of the field, before the network is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from models.lingbot.tiny import tiny_lingbot
from models.matrix_game.tiny import tiny_matrix_game
from realtime_omni.errors import OmniError
from realtime_omni.session.values import ControlInput
from realtime_omni.testing.inline import InlineEngine, small_config

SCRIPT = "lingbot.camera_actions.v1"
TRAJECTORY = "lingbot.camera_trajectory.v1"
ACTIONS = "matrix_game.actions.v1"
EYE = np.eye(4).tolist()
NOT_FINITE = [[1, 0, 0, float("inf")], *EYE[1:]]
SHEARED = [[1, 0.5, 0, 0], *EYE[1:]]


def control(schema: str, track: str = "camera", **data: Any) -> dict[str, Any]:
    """Made when it is sent: some of these cannot be made."""
    return {"controls": lambda: ControlInput(track, schema, data)}


EVENTS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "unknown schema": ("lingbot", control("camera.v9", keys=[]), "schema_unknown", "controls"),
    "another model's schema": ("lingbot", control(ACTIONS, frames=[{}] * 3), "schema_unknown", "controls"),
    "unknown track": (
        "lingbot",
        control(SCRIPT, "light", mode="script", frames=[[]] * 3),
        "schema_unknown",
        "controls",
    ),
    "too few frames": ("lingbot", control(SCRIPT, mode="script", frames=[[]] * 2), "control_invalid", "data.frames"),
    "too many poses": ("lingbot", control(TRAJECTORY, poses=[EYE] * 4), "control_invalid", "data.poses"),
    "a pose that is not finite": (
        "lingbot",
        control(TRAJECTORY, poses=[EYE, NOT_FINITE, EYE]),
        "invalid_argument",
        "data.poses[1][0][3]",
    ),
    "a matrix that is no rotation": (
        "lingbot",
        control(TRAJECTORY, poses=[EYE, EYE, SHEARED]),
        "control_invalid",
        "data.poses[2]",
    ),
    "a prompt that is too long": ("lingbot", {"prompt": "a" * 201}, "invalid_argument", "prompt"),
    "a prompt that is blank": ("lingbot", {"prompt": "  "}, "invalid_argument", "prompt"),
    "too few actions": ("matrix-game", control(ACTIONS, frames=[{}] * 2), "control_invalid", "data.frames"),
    "a movement that is not finite": (
        "matrix-game",
        control(ACTIONS, frames=[{"mouse": [0, float("nan")]}, {}, {}]),
        "invalid_argument",
        "data.frames[0].mouse[1]",
    ),
    "a camera for keys and mouse": ("matrix-game", control(TRAJECTORY, poses=[EYE] * 3), "schema_unknown", "controls"),
    "a prompt that nobody reads": ("matrix-game", {"prompt": "a street"}, "prompt_unknown", "prompt"),
}
OPENINGS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "an image that is none": ("lingbot", {"image": np.zeros((40, 40), np.uint8)}, "image_invalid", "image"),
    "an image of other numbers": ("lingbot", {"image": np.zeros((40, 40, 3), np.float32)}, "image_invalid", "image"),
    "an image too small": ("matrix-game", {"image": np.zeros((15, 40, 3), np.uint8)}, "image_invalid", "image"),
    "an image too large": ("matrix-game", {"image": np.zeros((16, 4097, 3), np.uint8)}, "image_invalid", "image"),
    "a picture that is not bundled": ("lingbot", {"start": "castle"}, "invalid_argument", "start"),
    "a long prompt at the beginning": ("lingbot", {"prompt": "a" * 201}, "invalid_argument", "prompt"),
}


@pytest.fixture(scope="module")
def engines() -> dict[str, InlineEngine]:
    config = small_config(dtype="float32")
    return {
        "lingbot": InlineEngine(tiny_lingbot(vae=True), config),
        "matrix-game": InlineEngine(tiny_matrix_game(vae=True), config),
    }


def refused(engine: InlineEngine, act: Callable[[], object]) -> OmniError:
    """What ``act`` is refused with; the network must not be asked meanwhile."""
    network = engine.runner.model.network

    def asked(*args: Any) -> None:
        raise AssertionError("the network was asked")

    hook = network.register_forward_pre_hook(asked)
    try:
        with pytest.raises(OmniError) as caught:
            act()
    finally:
        hook.remove()
    return caught.value


@pytest.mark.parametrize("name", EVENTS)
def test_a_bad_event_is_refused_and_the_session_goes_on(engines: dict[str, InlineEngine], name: str) -> None:
    which, given, code, path = EVENTS[name]
    engine, given = engines[which], dict(given)
    made = given.pop("controls", None)
    engine.create("a", seed=1)
    error = refused(engine, lambda: engine.accept("a", 0, controls=[made()] if made else [], **given))
    assert (error.code, error.path) == (code, path)
    engine.accept("a", 0, controls=[ControlInput("camera", SCRIPT, {"mode": "script", "frames": [["w"]] * 3})])
    engine.close("a")


@pytest.mark.parametrize("name", OPENINGS)
def test_a_bad_beginning_is_refused_and_its_place_stays_free(engines: dict[str, InlineEngine], name: str) -> None:
    which, given, code, path = OPENINGS[name]
    engine = engines[which]
    error = refused(engine, lambda: engine.create("a", seed=1, **given))
    assert (error.code, error.path) == (code, path)
    engine.create("a", seed=1)
    engine.close("a")
