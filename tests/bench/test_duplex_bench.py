"""``bench duplex``: what it reports holds together, in process; a call that loses sound makes it void."""

from __future__ import annotations

import base64
import json
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from realtime_omni.bench import callers, duplex
from realtime_omni.bench.world import clients
from realtime_omni.errors import ConfigError


def test_calls_in_process_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    status = duplex.main(["--in-process", "--calls", "2", "--seconds", "1", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (
        (status == 0) is report["valid"] is not bool(report["wrong"])
    )  # a busy machine may lose frames, and then says so
    assert report["calls"] == 2
    assert report["tick_lateness_ms"]["p99"] >= report["tick_lateness_ms"]["p50"] > 0
    assert {"conditions", "ticks_per_s", "mean_batch"} <= set(report)


def test_pieces_are_late_against_the_earliest_of_their_call() -> None:
    record = callers.Record()
    caller = callers.Caller("", record, 0, frames=4, warm=0)
    caller._got_ms = 320.0
    caller._arrivals = [(10.000, 80.0), (10.090, 160.0), (10.160, 240.0), (10.640, 320.0)]
    caller._finish()
    assert [round(ms) for ms in record.lateness_ms] == [0, 10, 0, 400]
    assert record.gaps == 1
    assert not record.wrong


def test_a_recording_is_said_from_its_first_word_to_its_last(tmp_path: Path) -> None:
    samples = np.zeros(24_000, np.int16)
    samples[5_000:9_000] = 10_000
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(24_000)
        file.writeframes(samples.tobytes())
    packets = callers.recording(str(tmp_path / "a.wav"))
    audio = np.frombuffer(b"".join(base64.b64decode(json.loads(p)["audio"]) for p in packets), "<i2")
    assert len(packets) == 3
    assert np.count_nonzero(audio) == 4_000
    assert audio[-1] != 0, "its last sample ends the last packet"


@pytest.mark.parametrize("content", [None, b"", b"RIFF", bytes(100)])
def test_what_is_no_recording_is_refused_before_a_server_is_started(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(ConfigError, match="no WAV file"):
        duplex.main(["--talk", "--speech", str(tmp_path / "a.wav")])


NOBODY = "ws://127.0.0.1:1"
"""A port that nobody listens at."""


async def test_a_call_that_is_refused_makes_the_measurement_void() -> None:
    record = callers.Record()
    await callers.Caller(NOBODY, record, 0, frames=4, warm=0).run()
    assert record.wrong[0].startswith("no call: ")


async def test_what_clients_cannot_do_is_told_in_a_line() -> None:
    with pytest.raises(SystemExit, match=r"^the clients failed: [^\n]*Connect call failed[^\n]*$"):
        await clients([sys.executable, "-m", "realtime_omni.bench.load", "--url", NOBODY])


def test_a_call_that_lost_sound_says_so() -> None:
    record = callers.Record()
    caller = callers.Caller("", record, 0, frames=100, warm=0)
    caller._got_ms = 80.0
    caller._arrivals = [(10.0, 80.0)]
    caller._finish()
    assert record.wrong == ["sent 8000 ms, got 80 ms"]
