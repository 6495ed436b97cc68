"""The golden vectors hold for the parsers, and for the two machines that sit on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocols.make_vectors import FILES, TARGET, render
from protocols.repeats import written_out
from realtime_omni_protocols.errors import WireError
from realtime_omni_protocols.world import Reply, WorldServerSide, parse_client, parse_server, unpack_frame
from realtime_omni_protocols.world_messages import ErrorMessage

VECTORS = [written_out(v) for name in sorted(FILES) for v in json.loads((TARGET / name).read_text(encoding="utf-8"))]


def names(vector: dict[str, Any]) -> str:
    return f"{vector['direction']}: {vector['name']}"


def wire_of(vector: dict[str, Any]) -> str | bytes:
    if vector["kind"] == "binary":
        return bytes.fromhex(vector["wire"])
    return bytes.fromhex(vector["wire_hex"]) if "wire_hex" in vector else str(vector["wire"])


def parse(vector: dict[str, Any]) -> dict[str, Any]:
    """What the package makes of it, in the form of the vectors."""
    wire = wire_of(vector)
    try:
        if vector["kind"] == "binary":
            assert isinstance(wire, bytes)
            header, payload = unpack_frame(wire)
            return {"header": msgspec.to_builtins(header), "payload": payload.hex()}
        message = parse_client(wire) if vector["direction"] == "c2s" else parse_server(wire)
        return {"message": json.loads(msgspec.json.encode(message))}
    except WireError as error:
        return {"error": {"code": error.code.value, "path": error.path}}


def test_the_files_are_what_the_script_writes() -> None:
    for name, vectors in FILES.items():
        assert (TARGET / name).read_text(encoding="utf-8") == render(vectors), name


def test_there_are_many_and_every_name_is_unique() -> None:
    keys = [names(vector) for vector in VECTORS]
    assert len(VECTORS) >= 60
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("vector", VECTORS, ids=names)
def test_vector(vector: dict[str, Any]) -> None:
    assert parse(vector) == vector["expect"]


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["kind"] == "text" and "message" in v["expect"]], ids=names)
def test_what_parses_is_encoded_to_the_same_value(vector: dict[str, Any]) -> None:
    read = parse_client if vector["direction"] == "c2s" else parse_server
    message = read(wire_of(vector))
    assert read(msgspec.json.encode(message)) == message


@pytest.mark.parametrize(
    "vector", [v for v in VECTORS if v["direction"] == "c2s" and "error" in v["expect"]], ids=names
)
def test_a_server_answers_a_refused_message_with_its_error_and_never_raises(vector: dict[str, Any]) -> None:
    side = WorldServerSide(server="test/1", models=("m",), now=0.0)
    side.send(side.hello())
    commands = side.receive_text(wire_of(vector), 0.0)
    reply = commands[0]
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, ErrorMessage)
    expected = vector["expect"]["error"]
    assert (reply.message.code.value, reply.message.path) == (expected["code"], expected["path"])
    assert "Traceback" not in reply.message.message
    assert Path(__file__).parent.name not in (reply.message.path or "")
