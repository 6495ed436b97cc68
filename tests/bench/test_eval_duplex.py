"""The evaluator of two recordings, on conversations whose onsets are known. Expected numbers are counted by hand."""

from __future__ import annotations

import json
import math
import wave
from pathlib import Path

import numpy as np
import pytest

from realtime_omni.bench import floor
from realtime_omni.bench.eval_duplex import evaluate, find_speech, main, read_sound
from realtime_omni.cli import app
from realtime_omni.errors import ConfigError

USER = [(1.0, 2.0), (2.3, 3.0), (6.0, 7.0), (10.0, 10.5), (14.0, 15.0)]
"""A turn with a pause of 0.3 s, one into the agent's speech, a short one, one that is never answered."""
AGENT = [(3.4, 5.0), (5.2, 6.4), (7.75, 9.25), (10.2, 10.4), (11.0, 12.0)]
"""An answer with a gap that is none, stopped 0.4 s after the interruption; the second answer; a word while the user
speaks, and the answer to it."""


def tone(path: Path, segments: list[tuple[float, float]], total_s: float = 16.0, rate: int = 24_000) -> Path:
    samples = np.zeros(round(total_s * rate))
    for start, end in segments:
        span = slice(round(start * rate), round(end * rate))
        samples[span] = 0.3 * np.sin(2 * np.pi * 220 * np.arange(span.stop - span.start) / rate)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return path


def test_every_number_of_a_scripted_pair_is_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user, agent = tone(tmp_path / "user.wav", USER), tone(tmp_path / "agent.wav", AGENT, rate=16_000)
    assert main(["--user", str(user), "--agent", str(agent), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["user_segments"] == [list(segment) for segment in USER]
    assert report["agent_segments"] == [list(segment) for segment in AGENT]
    assert report["conditions"]["seconds"] == 16.0

    first, second, third, fourth = report["turns"]
    assert first == {
        "start_s": 1.0,
        "end_s": 3.0,
        "answered": True,
        "latency_s": 0.4,
        "in_pause": False,
        "interrupts": False,
        "stop_s": None,
    }
    assert (second["interrupts"], second["stop_s"], second["answered"], second["latency_s"]) == (True, 0.4, True, 0.75)
    assert (third["in_pause"], third["answered"], third["latency_s"]) == (False, True, 0.0)
    assert (fourth["answered"], fourth["latency_s"]) == (False, None)

    assert report["turn_taking"]["turns"] == 4
    assert report["turn_taking"]["take_turn_rate"] == 0.75
    assert report["turn_taking"]["latency_s"]["max"] == 0.75
    assert report["turn_taking"]["latency_s"]["mean"] == pytest.approx((0.4 + 0.75 + 0.0) / 3, abs=1e-4)
    assert report["interruptions"] == {
        "count": 1,
        "take_turn_rate": 1.0,
        "stop_s": {"n": 1, "mean": 0.4, "p50": 0.4, "p95": 0.4, "max": 0.4},
        "latency_s": {"n": 1, "mean": 0.75, "p50": 0.75, "p95": 0.75, "max": 0.75},
    }
    assert report["overlap"]["stop_latency_list"] == [[6.0, 6.4], [10.2, 10.4]]
    assert report["overlap"]["response_latency_list"] == [[3.0, 3.4], [7.0, 7.75], [10.5, 11.0]]
    assert report["backchannels"] == {"count": 5, "per_second": 0.3125, "takeover": True, "js_distance": None}


def test_an_agent_that_talks_in_a_pause_takes_the_turn() -> None:
    (turn,) = floor.turns([(0.0, 1.0), (1.5, 3.0)], [(1.1, 2.3)])
    assert turn.in_pause
    assert turn.latency_s == 0.0
    (polite,) = floor.turns([(0.0, 1.0), (1.5, 3.0)], [(1.1, 1.4)])
    assert not polite.in_pause


def test_words_decide_where_durations_do_not() -> None:
    words = [floor.Word(text, 4 + i / 10, 4 + i / 10 + 0.1) for i, text in enumerate(("yes", "of", "course", "sir"))]
    (without,) = floor.turns([(1.0, 3.0)], [(4.0, 4.4)])
    (with_words,) = floor.turns([(1.0, 3.0)], [(4.0, 4.4)], words)
    assert (without.answered, with_words.answered) == (False, True)
    assert floor.backchannels([(4.0, 4.4)])[1] is False
    assert floor.backchannels([(4.0, 4.4)], words)[1] is True


def test_three_short_words_are_no_turn_and_two_are_a_backchannel() -> None:
    words = [floor.Word("a", 4.0, 4.1), floor.Word("b", 4.1, 4.2), floor.Word("c", 4.2, 4.3)]
    assert not floor.takes_turn((4.0, 4.3), words)
    assert floor.backchannels([(4.0, 4.3)], words[:2]) == ([(4.0, 4.3)], False)


def test_of_overlaps_with_one_end_the_shortest_counts() -> None:
    assert floor.stop_latencies([(0.0, 2.0), (4.0, 9.0)], [(1.0, 9.0)]) == [(1.0, 2.0), (4.0, 9.0)]
    assert floor.response_latencies([(0.0, 1.0), (2.0, 3.0)], [(4.0, 5.0)]) == [(3.0, 4.0)]


def test_the_distance_is_that_of_two_histograms() -> None:
    p, q = np.array([1.0, 0.0]), np.array([0.5, 0.5])
    middle = np.array([0.75, 0.25])
    expected = math.sqrt((math.log(1 / 0.75) + 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / middle[1])) / 2)
    assert floor.jensen_shannon(p, q) == pytest.approx(expected)
    assert floor.jensen_shannon(p, p) == 0.0
    assert floor.backchannel_distance([], 10.0, [1.0]) == 1.0
    assert floor.backchannel_distance([(0.0, 0.1)], 0.3, [1.0, 1.0]) == pytest.approx(
        floor.jensen_shannon(p, q), abs=1e-4
    )


def test_clicks_and_hum_are_no_speech(tmp_path: Path) -> None:
    rate = 16_000
    samples = (0.002 * np.random.default_rng(1).standard_normal(rate * 2)).astype(np.float32)
    samples[8000:8200] = 0.5
    assert find_speech(samples, rate, -40.0) == []
    assert evaluate([], [], 2.0)["turn_taking"] == {"turns": 0, "take_turn_rate": None, "latency_s": None}


def test_what_is_no_sound_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.wav").write_bytes(b"no sound at all")
    with pytest.raises(ConfigError, match="not a sound file"):
        read_sound(tmp_path / "x.wav")
    with pytest.raises(ConfigError, match="not a sound file"):
        read_sound(tmp_path / "missing.wav")


def test_words_and_histogram_come_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user, agent = tone(tmp_path / "user.wav", [(1.0, 3.0)]), tone(tmp_path / "agent.wav", [(4.0, 4.4)])
    words, histogram = tmp_path / "words.json", tmp_path / "histogram.json"
    words.write_text(json.dumps([{"text": t, "start_s": 4.0, "end_s": 4.1} for t in ("of", "course", "I", "do")]))
    histogram.write_text("[0, 1, 1, 0]")
    files = ["--words", str(words), "--reference", str(histogram)]
    assert main(["--user", str(user), "--agent", str(agent), *files, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["turn_taking"]["take_turn_rate"] == 1.0
    assert 0 < report["backchannels"]["js_distance"] < math.sqrt(math.log(2))
    with pytest.raises(ConfigError, match="not a list"):
        main(["--user", str(user), "--agent", str(agent), "--words", str(histogram)])


@pytest.mark.parametrize("level", ["nan", "inf", "1e99", "3", "x"])
def test_a_threshold_that_is_no_level_is_refused(level: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--user", "user.wav", "--agent", "agent.wav", "--threshold-dbfs", level])
    assert ended.value.code == 2


def test_the_command_line_knows_it(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    user, agent = tone(tmp_path / "user.wav", USER), tone(tmp_path / "agent.wav", AGENT)
    result = CliRunner().invoke(app, ["eval", "duplex", "--user", str(user), "--agent", str(agent), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["interruptions"]["count"] == 1
