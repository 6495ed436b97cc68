"""openpi's own server with a policy that computes nothing: what ``bench vla`` compares ours with, in a process of its own.

    python -m realtime_omni.bench.stock PORT POLICY_MS

Needs the extra ``bench`` (openpi-server), or the folder ``.make/robots`` of a checkout where ``make`` has put it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

HORIZON, WIDTH = 50, 32
ROBOTS = Path(__file__).resolve().parents[2] / ".make" / "robots"


class StockNullPolicy:
    """The same numbers as ``null-policy``."""

    def __init__(self, policy_ms: float) -> None:
        self._policy_s = policy_ms / 1000

    def infer(self, obs: dict[str, Any]) -> dict[str, Any]:
        time.sleep(self._policy_s)
        actions = np.repeat(np.arange(HORIZON, dtype=np.float32)[:, None], WIDTH, axis=1)
        return {"actions": actions + obs["state"], "policy_timing": {"infer_ms": self._policy_s * 1000}}


def is_installed() -> bool:
    if ROBOTS.is_dir() and str(ROBOTS) not in sys.path:
        sys.path.append(str(ROBOTS))  # at the end: what the environment has itself goes first
    return importlib.util.find_spec("openpi_server") is not None


def main(argv: list[str]) -> None:
    if not is_installed():
        raise SystemExit("openpi-server is not installed: pip install 'realtime-omni[bench]'")
    port, policy_ms = int(argv[0]), float(argv[1])
    server = importlib.import_module("openpi_server.websocket_policy_server")
    server.WebsocketPolicyServer(StockNullPolicy(policy_ms), "127.0.0.1", port, {"policy": "null"}).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
