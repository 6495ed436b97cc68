"""The golden vectors, replayed: each conversation step by step, each refused frame alone."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from protocols.realtime.driver import Driver, pcm
from realtime_omni_protocols.realtime import commands

VECTORS = Path(__file__).resolve().parents[3] / "protocols" / "vectors" / "realtime"
CONVERSATIONS = json.loads((VECTORS / "conversations.json").read_text(encoding="utf-8"))
REFUSED = json.loads((VECTORS / "refused.json").read_text(encoding="utf-8"))
FACTS = {kind.__name__: kind for kind in commands.Fact.__args__}


def fill(value: Any, names: dict[str, str]) -> Any:
    """``$name`` replaced by what it stands for."""
    if isinstance(value, dict):
        return {key: fill(member, names) for key, member in value.items()}
    if isinstance(value, list):
        return [fill(member, names) for member in value]
    return names[value] if isinstance(value, str) and value.startswith("$") else value


def match(expected: Any, actual: Any, names: dict[str, str], path: str = "$") -> None:
    """``expected`` has the members that matter; lists are whole; a ``$name`` stands for one value everywhere."""
    if isinstance(expected, str) and expected.startswith("$"):
        assert actual == names.setdefault(expected, actual), path
    elif isinstance(expected, dict):
        if "delta_bytes" in expected:
            expected = dict(expected)
            assert len(base64.b64decode(actual["delta"])) == expected.pop("delta_bytes")
        for key, member in expected.items():
            assert key in actual, f"{path}.{key}"
            match(member, actual[key], names, f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), f"{path}: {actual}"
        for index, member in enumerate(expected):
            match(member, actual[index], names, f"{path}[{index}]")
    else:
        assert actual == expected, path


def fact_of(value: dict[str, Any]) -> commands.Fact:
    name = "".join(word.title() for word in value.pop("type").split("_"))
    if "audio_ms" in value:
        value["audio"] = pcm(value.pop("audio_ms"))
    made = FACTS[name](**value)
    assert dataclasses.is_dataclass(made)
    return made


@pytest.mark.parametrize("vector", CONVERSATIONS, ids=lambda vector: vector["name"])
def test_a_conversation(vector: dict[str, Any]) -> None:
    driver, names = Driver(), dict[str, str]()
    for step in vector["steps"]:
        if "open" in step:
            events = driver.first
        elif "client" in step:
            sent = fill(step["client"], names)
            events = driver.send(sent.pop("type"), **sent)
        else:
            events = driver.apply(fact_of(fill(step["fact"], names)))
        assert [event["type"] for event in events] == [event["type"] for event in step["server"]], step
        match(step["server"], events, names)


@pytest.mark.parametrize("vector", REFUSED, ids=lambda vector: vector["name"])
def test_a_refused_frame(vector: dict[str, Any]) -> None:
    driver = Driver()
    (event,) = driver.take(driver.side.receive(vector["wire"]))
    assert event["error"]["code"] == vector["expect"]["code"]
    assert event["error"]["param"] == vector["expect"]["param"]
    assert not driver.commands
