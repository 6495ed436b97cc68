"""Whole conversations of unmodified clients with the server, over a socket, in real time; the puppet speaks.

The clients' known traps are in them: a truncation of more than was sent (Pipecat's clock), a cancel that comes too late,
answers that are found by their metadata (LiveKit), a strict validator that makes an error of every odd event (OpenAI
Agents), connections that end at the first error they do not know (Pipecat).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from conformance.realtime.clients import need, run, serve

LINES = ["I hear you.", "Please go on."]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    need("openai")
    with serve("puppet") as url:
        yield url


@pytest.mark.timeout(180)
def test_the_openai_sdk(server: str) -> None:
    found = run("openai", "openai_sdk.py", server, timeout_s=120)
    assert found["greet"] == {"said": "Good evening.", "metadata": {"n": "1"}, "ms": 560, "status": "completed"}
    assert found["two_turns"]["said"] == LINES
    assert all("seconds of sound" in transcript for transcript in found["two_turns"]["heard"])
    barge_in = found["barge_in"]
    assert (barge_in["status"], barge_in["reason"], barge_in["item_status"]) == (
        "cancelled",
        "turn_detected",
        "incomplete",
    )
    assert barge_in["truncated_ms"] == 400
    assert barge_in["kept"] == "one two"
    # Of the word that was cut in the middle the puppet remembers all, the transcript nothing.
    assert barge_in["repeated"] in ("one two", "one two three")
    assert found["cancel_and_create"] == {"first": "cancelled", "second": "completed", "metadata": {"n": "2"}}
    assert found["tool"] == {"name": "weather", "arguments": '{"town": "Bonn"}', "said": "It is sunny."}
    assert found["text"] == {"text": "In writing.", "audio": 0}
    assert found["by_hand"] == {"committed": True, "said": LINES[0], "detected": False}
    assert found["g711"]["ms"] == 560


@pytest.mark.timeout(120)
def test_openai_agents(server: str) -> None:
    found = run("openai", "openai_agents.py", server)
    assert found["errors"] == []
    assert found["said"][:3] == ["Good evening.", *LINES]
    assert "one two three four five six seven eight nine ten".startswith(found["interrupted"])
    assert found["greeted_ms"] == 560
    assert found["called"] == ["Bonn"]
    assert found["tool_events"] == ["tool_start", "tool_end"]


@pytest.mark.timeout(120)
def test_livekit(server: str) -> None:
    found = run("openai", "livekit_realtime.py", server)
    assert found["errors"] == []
    assert found["greeting"] == {"text": "Good evening.", "ms": 560, "asked": True}
    assert found["turns"] == LINES
    assert found["kinds"] == ["speech_started", "speech_stopped"] * 2
    assert len(found["transcripts"]) == 2
    assert (found["call"], found["answer"]) == (["weather", {"town": "Bonn"}], "Sunny.")
    assert found["cut"].startswith("one two")
    assert found["repeated"] == "one two", "300 ms of it were heard"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("turns", ["server", "local"])
def test_pipecat(server: str, turns: str) -> None:
    found: Any = run("pipecat", "pipecat_realtime.py", server, turns)
    talk, tool = found["talk"], found["tool"]
    assert talk["errors"] == tool["errors"] == []
    assert (talk["greeting"], talk["greeting_ms"]) == ("Good evening.", 560)
    assert talk["turns"] == "".join(LINES)
    assert talk["interruptions"] == 4
    assert tool["called"] == [{"town": "Bonn"}]
    assert "sunny" in tool["answer"]
