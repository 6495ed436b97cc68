"""Unmodified clients of the Live protocol: their types accept every event, and they hold conversations with the puppet."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conformance.live.served import served
from conformance.realtime.clients import Group, need, run
from protocols.live.drive import Driver, random_steps
from protocols.live.make_vectors import SESSIONS
from realtime_omni.bench.eval_duplex import read_sound
from realtime_omni.models.voice.weights import cache_folder, missing
from realtime_omni.server.sound import PCM_24K, SoundEncoder

SCRIPTS = Path(__file__).parent / "scripts"
SESSIONS_DRIVEN = 400


async def talk(group: Group, script: str, *overrides: str) -> Any:
    need(group)
    async with served(*overrides) as url:
        return await asyncio.to_thread(run, group, str(SCRIPTS / script), url, timeout_s=90)


def test_openai_types_accept_every_event(tmp_path: Path) -> None:
    """Random sessions and the golden vectors; strictly, and without a field that the types do not know."""
    need("openai")
    events = [event for seed in range(SESSIONS_DRIVEN) for event in Driver().run(random_steps(seed)).events]
    told = [step["expect"] for vector in SESSIONS for step in vector["steps"]]
    events += [expect["event"] for expects in told for expect in expects if "event" in expect]
    for event in events:
        event.get("error", {}).setdefault("message", "")
    file = tmp_path / "events.jsonl"
    file.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    result = run("openai", str(SCRIPTS / "validate_live.py"), str(file), timeout_s=110)
    assert result["failed"] == 0, result["first"]
    assert len(result["seen"]) == 19
    assert sum(result["seen"].values()) == len(events) > 10_000


async def test_openai_holds_a_conversation() -> None:
    result = await talk("openai", "talk_openai.py")
    assert result.pop("seconds") == pytest.approx(result["heard_s"], abs=1.1)
    assert result.pop("heard_s") > 9
    assert result.pop("sideband")["reflected_input"] > 20
    assert result == {
        "started": "start",
        "ack": "greet",
        "greeting": "Hello there.",
        "two_turns": "Hello there. I hear you.",
        "muted": "Hello there. I hear you.",
        "fixture": "fixture",
        "fork": "Please go on.",
        "updated": 9,
        "closed": ["close_requested", "close"],
        "errors": [],
    }


SCRIPT = 'options.lines=["I hear you.", "Please go on.", "call weather {\\"town\\": \\"Bonn\\"}", "And then?"]'


def cut(said: str, after: str) -> None:
    """The long line was interrupted, and what follows is ``after``."""
    assert said.startswith("one two three")
    assert "and so on" not in said.removesuffix(after)
    assert said.endswith(after)


async def test_openai_interrupts_calls_a_function_and_comes_back() -> None:
    result = await talk("openai", "interrupt_openai.py", SCRIPT)
    cut(result.pop("said"), "I hear you. Please go on. It is sunny.")
    assert result == {
        "call": ["weather", {"town": "Bonn"}],
        "again": "And then?",
        "closed": "close_requested",
        "errors": [],
    }


async def test_livekit_interrupts_and_connects_anew() -> None:
    result = await talk("openai", "interrupt_livekit.py")
    cut(result["talk"].pop("greeted"), "")
    assert result["talk"] == {"turns": ["I hear you.", "Please go on."], "errors": []}
    assert result["recycled"] == {"reconnected": 1, "said": "I hear you.", "errors": []}


async def test_pipecat_interrupts_and_begins_anew() -> None:
    result = await talk("pipecat", "interrupt_pipecat.py")
    turns = " I hear you. Please go on."
    first, second = result["said"].split(turns)[:2]
    cut(first + turns, turns)
    cut(second + turns, turns)
    assert result["said"] == first + turns + second + turns
    assert len(result["heard"]) == 4
    assert result["errors"] == []


async def test_livekit_holds_a_conversation() -> None:
    result = await talk("openai", "talk_livekit.py")
    assert result["greeting"] == "I hear you."
    assert result["answer"] == " Please go on."
    assert "seconds of sound" in result["heard"]
    assert abs(result["received_s"] - result["sent_s"]) < 0.5
    assert result["session"]
    assert result["tools"] == {"called": "weather", "said": "It rains in Rome."}
    assert result["errors"] == []


async def test_pipecat_holds_a_conversation() -> None:
    result = await talk("pipecat", "talk_pipecat.py")
    spoken = result["talk"]
    assert spoken["said"] == "Good evening. I hear you. Please go on."
    assert "seconds of sound" in spoken["heard"][0]
    assert spoken["audio_s"] > 8
    assert result["called"] == [{"town": "Bonn"}]
    assert "sunny" in result["tool"]["said"]
    assert spoken["errors"] == result["tool"]["errors"] == []


def speak(text: str, folder: Path) -> Path:
    """PCM16 at 24 kHz, by flite."""
    recording, sound = folder / "said.wav", folder / "said.pcm"
    subprocess.run(["flite", "-voice", "slt", "-t", text, "-o", str(recording)], check=True)
    samples, rate = read_sound(recording)
    sound.write_bytes(SoundEncoder(rate, PCM_24K).feed(samples))
    return sound


@pytest.mark.parametrize(
    ("group", "script"),
    [("openai", "ask_openai.py"), ("openai", "interrupt_livekit.py"), ("pipecat", "interrupt_pipecat.py")],
    ids=["openai", "livekit", "pipecat"],
)
async def test_each_client_asks_the_embedded_voice(group: Group, script: str, tmp_path: Path) -> None:
    """Speech of another synthesiser; needs the voice's weights (realtime-omni fetch voice) and flite."""
    need(group)
    if missing(cache_folder()) or shutil.which("flite") is None:
        pytest.skip("the voice's weights or flite are not installed")
    question = speak("What is the capital of France?", tmp_path)
    async with served(model="voice") as url:
        result = await asyncio.to_thread(run, group, str(SCRIPTS / script), url, str(question), timeout_s=90)
    assert "capital of France" in "".join(result["heard"])
    assert "Paris" in result["said"]
