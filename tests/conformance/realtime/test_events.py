"""Every event that our tests make the machine emit is accepted by the clients' own strict parsers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.realtime.clients import HERE, need, run
from realtime_omni_protocols.realtime import server_events

TESTS = HERE.parents[1]
EVERY_TYPE = {
    str(kind.__struct_config__.tag)
    for kind in server_events.ServerEvent.__args__
    if kind not in server_events.DuplexServerEvent.__args__
}
UNKNOWN_TO_PIPECAT = {"input_audio_buffer.timeout_triggered", "output_audio_buffer.cleared"}
"""Pipecat ignores types that it does not know."""


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the protocol's own tests emit, property tests and vectors included."""
    need("openai")
    file = tmp_path_factory.mktemp("realtime") / "events.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / "protocols" / "realtime")]
    done = subprocess.run(
        command,
        cwd=TESTS.parent,
        env=os.environ | {"REALTIME_EVENT_DUMP": str(file)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return file


def test_openai_agents_accepts_every_event(events: Path) -> None:
    result = run("openai", "validate_agents.py", str(events))
    assert result["failed"] == 0, result["first"]
    assert set(result["seen"]) == EVERY_TYPE


def test_pipecat_accepts_every_event(events: Path) -> None:
    result = run("pipecat", "validate_pipecat.py", str(events))
    assert result["failed"] == 0, result["first"]
    assert set(result["seen"]) == EVERY_TYPE
    assert set(result["ignored"]) == UNKNOWN_TO_PIPECAT
