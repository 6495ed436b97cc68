"""What is generated beside the specs is current, and the closed lists agree with the text and with the server."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from protocols.make_vectors import CLIENT_BAD, CLIENT_GOOD, SERVER_TEXT
from protocols.repeats import written_out
from realtime_omni.errors import ErrorCode
from realtime_omni_protocols import docs
from realtime_omni_protocols.errors import CloseCode, WireCode
from realtime_omni_protocols.world_messages import message_type, parse_client, parse_server
from realtime_omni_protocols.world_table import TABLE, WireState

SPEC = docs.SPEC.read_text(encoding="utf-8")
SCHEMA = json.loads(docs.SCHEMA.read_text(encoding="utf-8"))
# What a JSON schema cannot say: rules between fields, inside of data, and on the text itself.
BEYOND_SCHEMA = {
    "start with picture and start",
    "event with neither prompt nor controls",
    "control data nested 17 levels",
    "control data with an integer above 2^53",
    "control data above 16 KiB",
    "event id 1.0",  # for a JSON schema 1.0 is an integer
    "event applied with ids out of order",
    "event applied with an id twice",
    "taken over with a number",
    "closed without a number",
}


def test_the_state_table_in_the_spec_is_current() -> None:
    assert docs.spec_with_table(SPEC) == SPEC, "run python -m realtime_omni_protocols.docs"


def test_the_schema_is_current() -> None:
    assert docs.SCHEMA.read_text(encoding="utf-8") == docs.schema_text(), "run python -m realtime_omni_protocols.docs"


def validator(direction: str) -> Any:
    name = "ClientMessage" if direction == "c2s" else "ServerMessage"
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]})


@pytest.mark.parametrize("direction", ["c2s", "s2c"])
def test_the_schema_and_the_vectors_agree(direction: str) -> None:
    check = validator(direction)
    for vector in map(written_out, [*CLIENT_GOOD, *CLIENT_BAD, *SERVER_TEXT]):
        if vector["direction"] != direction or "wire" not in vector:
            continue
        try:
            value = json.loads(vector["wire"])
        except (ValueError, RecursionError):
            continue
        if "message" in vector["expect"]:
            check.validate(value)
        elif vector["expect"]["error"]["path"] not in ("$", "$.t") and vector["name"] not in BEYOND_SCHEMA:
            twice = vector["wire"].count('"' + vector["expect"]["error"]["path"].rpartition(".")[2] + '"') > 1
            newline = vector["name"].endswith("a newline")  # ECMA and Python read `$` differently before a newline
            assert twice or newline or not check.is_valid(value), vector["name"]


def test_the_codes_are_those_of_the_text() -> None:
    section = SPEC.split("## 8. Error codes")[1].split("The list is closed.")[0]
    assert re.findall(r"`([a-z_]+)`", section) == [code.value for code in WireCode]


def test_the_close_codes_are_those_of_the_text() -> None:
    section = SPEC.split("| close code | after |")[1].split("Authentication happens")[0]
    assert [int(n) for n in re.findall(r"^\| (\d{4}) \|", section, re.MULTILINE)] == [int(code) for code in CloseCode]


def test_in_process_codes_that_can_reach_the_wire_have_the_same_string() -> None:
    internal = {
        ErrorCode.INVALID_CONFIG,
        ErrorCode.METADATA_MISMATCH,
        ErrorCode.ARTIFACT,
        ErrorCode.CLEANUP_FAILED,
        ErrorCode.BACKEND_UNAVAILABLE,
        ErrorCode.STATE_TOO_LARGE,
        ErrorCode.SUPERSEDED,  # of observations: the world protocol has none
        *(code for code in ErrorCode if code.startswith("snapshot_")),
    }
    for code in ErrorCode:
        if code not in internal:
            assert WireCode(code.value).value == code.value


def test_every_message_of_the_text_is_in_the_table_and_the_other_way_round() -> None:
    tables = SPEC.split("## 2. Client messages")[1].split("¹ `session.resumed`")[0]
    named = set(re.findall(r"`((?:session|event|chunk)\.[a-z_]+|chunk|hello|ping|pong|error)`", tables))
    assert named == {message_type(message) for _, message in TABLE}
    assert {state for state, _ in TABLE} | set(TABLE.values()) == set(WireState)


def test_the_conversation_of_the_text_is_valid() -> None:
    """Lines that are cut with an ellipsis in a list of fields are skipped; tokens are written short."""
    lines = re.findall(r"^([SC]) (\{.*\})$", SPEC.split("## 11. A conversation")[1], re.MULTILINE)
    whole = [(who, text.replace("…", "")) for who, text in lines if ", …" not in text]
    assert len(whole) >= 8
    for who, text in whole:
        (parse_server if who == "S" else parse_client)(text)


def test_nothing_leaves_the_closed_state() -> None:
    assert not [state for state, _ in TABLE if state is WireState.CLOSED]
