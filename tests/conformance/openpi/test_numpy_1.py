"""The light part on numpy 1.26, in an interpreter of its own: codec, observation contract, client."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.openpi.robot import blocking
from realtime_omni.testing.null_policy import NullPolicy
from server.robot_server import served

ROOT = Path(__file__).resolve().parents[3]
NUMPY_1 = ROOT / ".make" / "numpy1"
PROBE = """
import sys
import numpy as np
from realtime_omni_client import PolicyClient, PolicyServerError
from realtime_omni_protocols.openpi import pack, unpack

assert np.__version__ == "1.26.4", np.__version__
golden = bytes.fromhex(sys.argv[2])
assert pack(unpack(golden)) == golden
for value in (np.float16(1.5), np.int64(-3), np.zeros((0, 3), ">f4"), np.array(["ab"]), np.bool_(True)):
    assert pack(unpack(pack(value))) == pack(value)
image = np.zeros((8, 8, 3), np.uint8)
observation = {f"observation.images.{name}": image for name in ("base_0_rgb", "left_wrist_0_rgb")}
with PolicyClient(sys.argv[1]) as policy:
    actions = policy.infer({**observation, "state": np.full(14, 0.5, np.float32)})["actions"]
    assert actions.dtype == np.float32 and actions[2, 0] == 2.5, actions
    policy.reset()
    try:
        policy.infer(observation)
    except PolicyServerError as error:
        print(error.code)
"""
GOLDEN = "84c40b5f5f6e6461727261795f5fc3c40464617461c4040000803fc4056474797065a33c6634c405736861706591" + "01"


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="numpy 1.26 has no build for this Python")
async def test_a_robot_with_numpy_1_is_served() -> None:
    if not NUMPY_1.is_dir() and os.environ.get("CI") != "true":
        pytest.skip(f"make fills {NUMPY_1}")
    folders = (NUMPY_1, ROOT / "protocols", ROOT / "clients" / "python")
    path = os.pathsep.join(str(folder) for folder in folders)
    async with served(NullPolicy()) as url:
        run = await blocking(
            subprocess.run,
            [sys.executable, "-c", PROBE, url, GOLDEN],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | {"PYTHONPATH": path},
        )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "state_missing"
