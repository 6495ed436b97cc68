"""Robots for conformance: a roboarena client written after its protocol, and the DROID arm that the stock clients drive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
import numpy as np
from websockets.sync.client import connect

from realtime_omni_protocols.openpi import ActionContract, Camera, PolicyContract, StateField

T = TypeVar("T")

DROID = PolicyContract(
    policy="null-droid",
    cameras=(
        Camera(name="exterior", keys=("observation/exterior_image_1_left", "observation/exterior_image_0_left")),
        Camera(name="wrist", keys=("observation/wrist_image_left",)),
    ),
    state=(StateField(name="joint_position", dim=7), StateField(name="gripper_position", dim=1)),
    state_dim=8,
    action=ActionContract(horizon=10, dim=8, control_hz=15.0),
    ignored=("observation/cartesian_position",),
    handshake={"policy": "null-droid", "action_horizon": 10, "action_space": "joint_velocity"},
)


def droid_observation(state: float = 0.5, exterior: str = "observation/exterior_image_1_left") -> dict[str, Any]:
    return {
        exterior: np.zeros((224, 224, 3), np.uint8),
        "observation/wrist_image_left": np.zeros((224, 224, 3), np.uint8),
        "observation/joint_position": np.full(7, state, np.float32),
        "observation/gripper_position": np.zeros(1, np.float32),
        "prompt": "pick up the cube",
    }


async def blocking(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """A call of a blocking client beside the server's loop."""
    async with asyncio.timeout(30):
        return await asyncio.to_thread(function, *args, **kwargs)


@dataclass
class PolicyServerConfig:
    """roboarena's metadata: a field more or less is a TypeError."""

    image_resolution: tuple[int, int] | None
    needs_wrist_camera: bool
    n_external_cameras: int
    needs_stereo_camera: bool
    needs_session_id: bool
    action_space: str


class RoboarenaClient:
    """The protocol of roboarena's client, with openpi's codec written out."""

    def __init__(self, uri: str) -> None:
        self._connection = connect(uri, compression=None, max_size=None)
        self._ws = self._connection.__enter__()
        self.config = PolicyServerConfig(**msgpack.unpackb(self._ws.recv()))

    def infer(self, observation: dict[str, Any]) -> Any:
        self._ws.send(msgpack.packb(observation | {"endpoint": "infer"}, default=_encode))
        reply = self._ws.recv()
        if isinstance(reply, str):
            raise RuntimeError(f"Error in inference server:\n{reply}")
        return msgpack.unpackb(reply, object_hook=_decode)

    def reset(self) -> Any:
        self._ws.send(msgpack.packb({"endpoint": "reset"}))
        return self._ws.recv()

    def close(self) -> None:
        self._connection.__exit__(None, None, None)


def _encode(value: Any) -> Any:
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}


def _decode(members: dict[Any, Any]) -> Any:
    if b"__ndarray__" in members:
        return np.ndarray(members[b"shape"], np.dtype(members[b"dtype"]), members[b"data"])
    return members
