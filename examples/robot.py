"""A control loop that never waits for its policy: 15 actions a second, an observation every fourth.

    realtime-omni serve null-policy --openpi-port 8001 &
    python examples/robot.py [--url ws://127.0.0.1:8001] [--hz 15] [--steps 60]

The robot here is a single joint that goes where it is told; the null policy tells it to count up from where it is.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import numpy as np

from realtime_omni_client import PolicyServerError, PolicyStream, WorldError

REPLAN_EVERY = 4


def look(joint: float) -> dict[str, object]:
    """What the cameras and the encoders say: two pictures uint8 [H, W, 3], a state float32 [n], an instruction."""
    picture = np.zeros((224, 224, 3), np.uint8)
    return {
        "observation.images.base_0_rgb": picture,
        "observation.images.left_wrist_0_rgb": picture,
        "state": np.full(14, joint, np.float32),
        "prompt": "count",
    }


async def drive(url: str, hz: float, steps: int) -> tuple[int, int]:
    """Actions executed, and steps on which the robot had to hold still."""
    joint, executed, held = 0.0, 0, 0
    async with PolicyStream.connect(url, control_hz=hz) as robot:
        begun = time.perf_counter()
        for tick in range(steps):
            if tick % REPLAN_EVERY == 0:
                await robot.observe(look(joint), tick)
            action = robot.actions.pop(tick)
            if action is None:
                held += 1
            else:
                joint, executed = float(action[0]), executed + 1
            print(f"tick {tick}: joint {joint:g}, planned for {robot.actions.dry_in(tick + 1)} more")
            await asyncio.sleep(max(0.0, begun + (tick + 1) / hz - time.perf_counter()))
    return executed, held


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="ws://127.0.0.1:8001")
    parser.add_argument("--hz", type=float, default=15.0)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if not 0 < options.hz <= 1000:
        parser.error("--hz: above 0, up to 1000")
    if options.steps < 1:
        parser.error("--steps: 1 or more")
    try:
        executed, held = asyncio.run(drive(options.url, options.hz, options.steps))
    except (WorldError, PolicyServerError) as error:  # no server, a refusal, a lost connection
        raise SystemExit(f"{options.url}: {error}") from None
    print(f"{executed} actions executed, {held} steps held still")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
