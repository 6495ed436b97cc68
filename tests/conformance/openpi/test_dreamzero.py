"""roboarena's client drives a tiny DreamZero: the whole server, a real network, both branches of a history in pages."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from conformance.openpi.robot import RoboarenaClient, blocking
from models.dreamzero.tiny import tiny_dreamzero
from realtime_omni.config import Config
from realtime_omni.manager import SessionManager
from realtime_omni.server.run import robot_backend
from realtime_omni_protocols.openpi import PATH
from server.robot_server import served

pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")
DEPLOY: dict[str, object] = {
    "control_hz": 15.0,
    "cameras": [
        {"name": "wrist", "keys": ["observation/wrist_image_left"], "max_frames": 8},
        {"name": "left", "keys": ["observation/exterior_image_0_left"], "max_frames": 8},
        {"name": "right", "keys": ["observation/exterior_image_1_left"], "rule": "optional", "max_frames": 8},
    ],
    "state": [
        {"name": "joint_position", "keys": ["observation/joint_position"], "dim": 3},
        {"name": "gripper_position", "keys": ["observation/gripper_position"], "dim": 1},
    ],
    "ignored": ["observation/cartesian_position"],
    "handshake": {
        "image_resolution": [180, 320],
        "n_external_cameras": 2,
        "needs_wrist_camera": True,
        "needs_stereo_camera": False,
        "needs_session_id": True,
        "action_space": "joint_position",
    },
}


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[SessionManager, str]]:
    async with SessionManager(tiny_dreamzero(), Config(deploy=DEPLOY)) as manager:
        backend = robot_backend(manager)
        assert backend is not None
        async with served(backend) as url:
            yield manager, url + PATH
        assert manager.statistics().sessions == 0
        assert manager.statistics().pages_used == 0


def observation(number: int, *, session: str = "episode", pictures: int | None = None, **more: Any) -> dict[str, Any]:
    random = np.random.default_rng(number)
    shape = (18, 32, 3) if pictures is None else (pictures, 18, 32, 3)
    names = ("wrist_image_left", "exterior_image_0_left", "exterior_image_1_left")
    return {
        **{f"observation/{name}": random.integers(0, 256, shape, np.uint8) for name in names},
        "observation/joint_position": random.uniform(-1, 1, 3),
        "observation/cartesian_position": np.zeros(6),
        "observation/gripper_position": np.zeros(1),
        "prompt": "Pick up the cube",
        "session_id": session,
        **more,
    }


@pytest.mark.parametrize(("reply", "bare"), [("dreamzero", True), ("roboarena", False)])
async def test_an_episode_of_one_picture_and_then_four_across_windows(reply: str, bare: bool) -> None:
    async with serving() as (manager, url):
        client = await blocking(RoboarenaClient, f"{url}?reply={reply}")
        assert (client.config.needs_session_id, client.config.n_external_cameras) == (True, 2)
        assert list(client.config.image_resolution or ()) == [180, 320]
        assert client.config.action_space == "joint_position"
        chunks = []
        for call in range(6):
            answer = await blocking(client.infer, observation(call, pictures=4 if call else None))
            chunks.append(answer if bare else answer["actions"])
        assert all((chunk.shape, chunk.dtype) == ((5, 4), np.float32) for chunk in chunks)
        assert all(np.isfinite(chunk).all() for chunk in chunks)
        assert len({chunk.tobytes() for chunk in chunks}) == 6
        assert manager.statistics().chunks_committed == 6
        assert await blocking(client.reset) == "reset successful"
        again = await blocking(client.infer, observation(0))
        np.testing.assert_array_equal(again if bare else again["actions"], chunks[0])
        await blocking(client.close)


async def test_another_session_id_or_another_instruction_is_another_episode() -> None:
    """What was seen before is gone: the answer is that of a server that has just been asked for the first time."""
    async with serving() as (manager, url):
        client = await blocking(RoboarenaClient, f"{url}?reply=dreamzero")
        first = await blocking(client.infer, observation(0, seed=3))
        second = await blocking(client.infer, observation(0, seed=3))
        assert not np.array_equal(first, second)  # the first picture is history now
        other = await blocking(client.infer, observation(0, session="another", seed=3))
        np.testing.assert_array_equal(other, first)
        assert manager.statistics().sessions == 1
        await blocking(client.infer, observation(1, session="another"))
        told = await blocking(client.infer, observation(0, session="another", prompt="put it down", seed=3))
        fresh = await blocking(client.infer, observation(0, session="third", prompt="put it down", seed=3))
        np.testing.assert_array_equal(told, fresh)
        await blocking(client.close)


async def test_two_robots_share_the_model_and_nothing_else() -> None:
    async with serving() as (_, url):
        one, two = [await blocking(RoboarenaClient, f"{url}?reply=dreamzero") for _ in range(2)]
        alone = [await blocking(one.infer, observation(i, seed=1)) for i in range(3)]
        await blocking(one.reset)
        for i in range(3):
            await blocking(two.infer, observation(50 + i, session="episode"))  # the same name, another robot
            np.testing.assert_array_equal(await blocking(one.infer, observation(i, seed=1)), alone[i])
        for client in (one, two):
            await blocking(client.close)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"observation/wrist_image_left": np.zeros((9, 18, 32, 3), np.uint8)}, "image_shape"),
        ({"observation/wrist_image_left": np.zeros((2, 18, 32, 3), np.uint8)}, "as many pictures"),
        ({"observation/joint_position": np.full(3, np.nan)}, "state_value"),
        ({"prompt": "a" * 300}, "too long"),
    ],
)
async def test_a_bad_observation_is_a_text_and_never_an_action(wrong: dict[str, Any], words: str) -> None:
    async with serving() as (manager, url):
        client = await blocking(RoboarenaClient, f"{url}?reply=dreamzero")
        await blocking(client.infer, observation(0))
        with pytest.raises(RuntimeError, match=words):
            await blocking(client.infer, observation(1) | wrong)
        assert manager.statistics().chunks_committed == 1
