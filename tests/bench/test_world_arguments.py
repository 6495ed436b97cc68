"""What the benchmark of worlds is asked for: an option that would be ignored is refused. And what it needs installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import pytest

from realtime_omni.bench import duplex, sessions, vla, world
from realtime_omni.bench.world import _rss_mb, parse


def test_a_pace_belongs_to_its_cadence() -> None:
    assert parse(["--model", "null"]).hz == 12.0
    assert parse(["--model", "null", "--hz", "5"]).hz == 5.0
    assert parse(["--model", "tiny-world", "--fps", "30"]).fps == 30.0
    for refused in (["--model", "tiny-world", "--hz", "10"], ["--model", "null", "--fps", "10"]):
        with pytest.raises(SystemExit):
            parse(refused)


@pytest.mark.parametrize("flag", ["--sessions", "--chunks", "--hz", "--churn", "--warm-up", "--seed"])
@pytest.mark.parametrize("value", ["-1", "x", "nan", "inf", "1e99", "99999999999999999999", ""])
def test_a_number_that_measures_nothing_or_never_ends_is_refused(flag: str, value: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([f"{flag}={value}"])
    assert ended.value.code == 2


@pytest.mark.parametrize("flag", ["--sessions", "--chunks", "--hz"])
def test_nothing_is_not_measured(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([flag, "0"])
    assert f"argument {flag}: 0: " in capsys.readouterr().err
    assert parse(["--churn", "0", "--warm-up", "0", "--seed", "0"]).churn == 0


@pytest.mark.parametrize(
    ("main", "argv"),
    [
        (sessions.main, ["--rounds", "0"]),
        (duplex.main, ["--calls", "0"]),
        (duplex.main, ["--seconds", "nan"]),
        (vla.main, ["--robots", "0"]),
        (vla.main, ["--policy-ms", "-5"]),
        (vla.main, ["--hz", "inf"]),
        (duplex.main, ["--in-process", "--talk"]),
        (duplex.main, ["--model", "moshi-geometry", "--calls", "0", "--device", "cpu"]),
        (duplex.main, ["--model", "moshi-geometry", "--ticks", "-1", "--device", "cpu"]),
        (world.main, ["--model", "lingbot-geometry", "--blocks", "0", "--device", "cpu"]),
        (world.main, ["--model", "lingbot-geometry", "--device", "cuda:99"]),
        (world.main, ["--model", "lingbot-geometry", "--device", "tpu"]),
        (world.main, ["--model", "lingbot-geometry", "--parallel", "sp=2", "--metered", "0", "--device", "cpu"]),
    ],
)
def test_the_other_benchmarks_refuse_it_too(main: Callable[[Sequence[str]], int], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2


def test_without_psutil_which_serving_does_not_install_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (_rss_mb(os.getpid()) or 0) > 0
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert _rss_mb(os.getpid()) is None
