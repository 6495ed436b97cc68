"""Where the foreign clients live: ``.make/robots``, filled by ``make`` from requirements.txt (see there)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROBOTS = Path(__file__).resolve().parents[3] / ".make" / "robots"
if ROBOTS.is_dir():
    sys.path.append(str(ROBOTS))  # at the end: what the environment has itself goes first


@pytest.fixture(autouse=True)
def _installed() -> None:
    if not ROBOTS.is_dir():
        reason = f"pip install --no-deps --target {ROBOTS} -r {Path(__file__).with_name('requirements.txt')}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
