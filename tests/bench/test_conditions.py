"""What a benchmark says about its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from realtime_omni.bench import conditions


def test_time_that_the_host_took_is_a_share_of_all_since_the_process_began(tmp_path: Path, monkeypatch):
    """proc_stat(5): the eighth number of the first line is what is stolen; guests' time is in the first two already."""
    stat = tmp_path / "stat"
    monkeypatch.setattr(conditions, "_STAT", stat)
    monkeypatch.setattr(conditions, "_BEGAN", (1000, 10))
    stat.write_text("cpu  500 100 200 900 50 20 10 20 7 7\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    assert conditions.stolen_percent() == pytest.approx(100 * 10 / 800, abs=0.01)
    assert conditions.hardware()["stolen_pct"] == conditions.stolen_percent()


@pytest.mark.parametrize("text", [None, "", "cpu  1 2 3\n", "something else\n"])
def test_a_machine_that_does_not_say_has_none(tmp_path: Path, monkeypatch, text: str | None):
    stat = tmp_path / "stat"
    monkeypatch.setattr(conditions, "_STAT", stat)
    monkeypatch.setattr(conditions, "_BEGAN", (0, 0))
    if text is not None:
        stat.write_text(text)
    assert conditions.stolen_percent() == 0.0
