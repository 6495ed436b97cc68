"""The JSON schema beside the spec is current, and says of every vector what the machine does."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from protocols.realtime.driver import Driver
from protocols.realtime.test_vectors import CONVERSATIONS, REFUSED, fact_of, fill
from realtime_omni_protocols import docs
from realtime_omni_protocols.realtime.client_events import AnyClientEvent
from realtime_omni_protocols.realtime.server_events import ServerEvent

TEXT = docs.REALTIME_SCHEMA.read_text(encoding="utf-8")
SCHEMA = json.loads(TEXT)


def validator(name: str) -> Any:
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]})


CLIENT, SERVER = validator("ClientEvent"), validator("ServerEvent")


def test_the_schema_is_current() -> None:
    assert docs.realtime_schema_text() == TEXT, "run python -m realtime_omni_protocols.docs"
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(("name", "union"), [("ClientEvent", AnyClientEvent), ("ServerEvent", ServerEvent)])
def test_every_event_is_in_it(name: str, union: Any) -> None:
    kinds = {ref["$ref"].rpartition("/")[2] for ref in SCHEMA["$defs"][name]["anyOf"]}
    assert kinds == {kind.__name__ for kind in union.__args__}


@pytest.mark.parametrize("vector", CONVERSATIONS, ids=lambda vector: vector["name"])
def test_what_a_conversation_sends_is_valid(vector: dict[str, Any]) -> None:
    driver, names = Driver(), dict[str, str]()
    for event in driver.first:
        SERVER.validate(event)
    for step in vector["steps"]:
        if "client" in step:
            sent = fill(step["client"], names)
            CLIENT.validate(sent)
            events = driver.send(sent.pop("type"), **sent)
        elif "fact" in step:
            events = driver.apply(fact_of(fill(step["fact"], names)))
        else:
            events = driver.first
        for event, expected in zip(events, step["server"], strict=True):
            SERVER.validate(event)
            learn(expected, event, names)


def learn(expected: Any, actual: Any, names: dict[str, str]) -> None:
    """What each ``$name`` of a vector stands for."""
    if isinstance(expected, str) and expected.startswith("$"):
        names.setdefault(expected, actual)
    elif isinstance(expected, dict):
        for key in expected.keys() & (actual.keys() if isinstance(actual, dict) else ()):
            learn(expected[key], actual[key], names)
    elif isinstance(expected, list):
        for one, other in zip(expected, actual, strict=True):
            learn(one, other, names)


@pytest.mark.parametrize("vector", REFUSED, ids=lambda vector: vector["name"])
def test_a_frame_that_is_refused_for_its_form_is_not_valid(vector: dict[str, Any]) -> None:
    try:
        value = json.loads(vector["wire"])
    except (ValueError, RecursionError):
        pytest.skip("no JSON, for a machine that reads as deep as ours")
    assert CLIENT.is_valid(value) is (vector["name"] in BEYOND_SCHEMA)


BEYOND_SCHEMA = frozenset(
    {
        # what a `session.update` holds: it is merged into the session before it is checked
        "another kind of session",
        "both modalities",
        "a voice nobody has",
        "a speed beyond the range",
        "turn detection of no kind",
        "a tool without a name",
        "a tool nested too deep",
        "a number no double holds",
        # rules between fields, and with what is there
        "a picture",
        "audio without a transcript",
        "speech of an assistant",
        "a reference to nothing",
    }
)
"""Refused for what the schema does not say."""
