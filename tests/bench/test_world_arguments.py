"""What the benchmark of worlds is asked for: an option that would be ignored is refused."""

from __future__ import annotations

import pytest

from realtime_omni.bench.world import parse


def test_a_pace_belongs_to_its_cadence() -> None:
    assert parse(["--model", "null"]).hz == 12.0
    assert parse(["--model", "null", "--hz", "5"]).hz == 5.0
    assert parse(["--model", "tiny-world", "--fps", "30"]).fps == 30.0
    for refused in (["--model", "tiny-world", "--hz", "10"], ["--model", "null", "--fps", "10"]):
        with pytest.raises(SystemExit):
            parse(refused)
