"""Mutated frames in a process of their own: every one is a value or a coded error, nothing crashes, memory does not grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def fuzz(count: int, seed: int) -> Any:
    script = Path(__file__).with_name("fuzz_codec.py")
    command = [sys.executable, "-X", "faulthandler", str(script), str(count), str(seed)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False, env=os.environ)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def assert_sound(seen: Any, count: int) -> None:
    codes = seen["codes"]
    assert sum(codes.values()) == count
    for expected in ("accepted", "bad_frame", "bad_array", "dtype_refused", "limit_exceeded", "key_duplicate"):
        assert codes.get(expected), f"the mutations never reached {expected}"
    assert seen["grown_kib"] < 4096


def test_twenty_thousand_mutated_frames() -> None:
    assert_sound(fuzz(20_000, seed=1), 20_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_mutated_frames() -> None:
    assert_sound(fuzz(1_000_000, seed=2), 1_000_000)
