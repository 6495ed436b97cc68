"""The golden vectors of the policy protocol hold for the codec and for both ends of every row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protocols.openpi.test_observations import CONTRACT, READER, load, name_of
from realtime_omni_protocols.openpi import (
    Close,
    Infer,
    PolicyClientSide,
    PolicyError,
    PolicyServerError,
    PolicyServerSide,
    Reset,
    Row,
    Send,
    pack,
    unpack,
)
from realtime_omni_protocols.openpi.stream_messages import encode, parse_client, parse_server

ACTIONS = np.arange(6, dtype=np.float32).reshape(2, 3)
ARRAYS, STREAM, CONVERSATIONS = load("arrays.json"), load("stream.json"), load("conversations.json")


@pytest.mark.parametrize("vector", ARRAYS, ids=name_of)
def test_an_array_is_read_as_the_vector_says(vector: dict[str, Any]) -> None:
    made = unpack(bytes.fromhex(vector["wire_hex"]))
    assert isinstance(made, np.ndarray | np.generic)
    expect = vector["expect"]
    assert (made.dtype.str, list(made.shape), made.tobytes().hex()) == (expect["dtype"], expect["shape"], expect["hex"])


def test_a_writer_writes_the_first_of_them() -> None:
    assert pack(unpack(bytes.fromhex(ARRAYS[0]["wire_hex"]))).hex() == ARRAYS[0]["wire_hex"]


@pytest.mark.parametrize("vector", STREAM, ids=name_of)
def test_a_stream_message_is_read_as_the_vector_says(vector: dict[str, Any]) -> None:
    read = parse_client if vector["direction"] == "c2s" else parse_server
    wire = bytes.fromhex(vector["wire_hex"])
    if "code" in vector["expect"]:
        with pytest.raises(PolicyError) as refused:
            read(wire)
        assert refused.value.code == vector["expect"]["code"]
    else:
        message = read(wire)
        assert encode(message) == encode(read(encode(message)))
        assert unpack(encode(message)).keys() == unpack(wire).keys()  # type: ignore[union-attr]


@pytest.mark.parametrize("vector", CONVERSATIONS, ids=lambda vector: vector["row"])
def test_a_server_says_its_part_of_the_conversation(vector: dict[str, Any]) -> None:
    side = PolicyServerSide(Row(vector["row"]), CONTRACT)
    said: list[Any] = [side.hello()]
    for step in vector["steps"]:
        if "client_hex" in step:
            assert said == []
            said = respond(side, bytes.fromhex(step["client_hex"]))
        elif "close" in step:
            close = said.pop(0)
            assert isinstance(close, Close)
            assert close.code == step["close"]
        else:
            output = said.pop(0)
            assert isinstance(output, Send)
            assert same(output.data, step["server"] if "server" in step else bytes.fromhex(step["server_hex"]))
    assert said == []


def respond(side: PolicyServerSide, frame: bytes) -> list[Any]:
    (command,) = side.receive(frame)
    if isinstance(command, Reset):
        return list(side.reset_done())
    assert isinstance(command, Infer)
    try:
        READER.read(command.observation)
    except PolicyError as error:
        return list(side.fail(error))
    return list(side.answer(side.encode(ACTIONS), {"infer_ms": 3.0}))


def same(found: str | bytes, expected: str | bytes) -> bool:
    """Equal bytes, or equal but for times."""
    if found == expected:
        return True
    assert isinstance(found, bytes)
    answer, wanted = unpack(found), unpack(expected)  # type: ignore[arg-type]
    assert isinstance(answer, dict)
    assert isinstance(wanted, dict)
    assert list(answer) == list(wanted)
    assert answer["policy_timing"].keys() == wanted["policy_timing"].keys()
    assert answer["server_timing"].keys() == wanted["server_timing"].keys()
    return pack(answer["actions"]) == pack(wanted["actions"])


@pytest.mark.parametrize("vector", CONVERSATIONS, ids=lambda vector: vector["row"])
def test_a_client_understands_the_conversation(vector: dict[str, Any]) -> None:
    row = Row(vector["row"])
    side, steps = PolicyClientSide(row), list(vector["steps"])
    side.handshake(bytes.fromhex(steps.pop(0)["server_hex"]))
    answers: list[object] = []
    for step in steps:
        if "client_hex" in step:
            message = unpack(bytes.fromhex(step["client_hex"]))
            assert isinstance(message, dict)
            side.reset() if message.get("endpoint") == "reset" else side.infer(message)
        elif "close" not in step:
            answers.append(understood(side, step["server"] if "server" in step else bytes.fromhex(step["server_hex"])))
    expected = {
        Row.BARE: ["chunk", "state_value", "chunk"],
        Row.OPENPI: ["chunk", "state_value"],
        Row.ROBOARENA: ["chunk", "reset", "state_value"],
        Row.DREAMZERO: ["chunk", "reset", "state_value"],
    }
    assert answers == expected[row]


def understood(side: PolicyClientSide, frame: str | bytes) -> str:
    try:
        answer = side.receive(frame)
    except PolicyServerError as error:
        return str(error.code)
    if answer is None:
        return "reset"
    np.testing.assert_array_equal(answer["actions"], ACTIONS)  # type: ignore[arg-type]
    return "chunk"
