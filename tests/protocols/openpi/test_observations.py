"""Observations against the contract: good ones arrive complete, bad ones get their code on every row they concern."""

from __future__ import annotations

import json
import re
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest

from protocols.openpi.make_vectors import FILES, GOOD, GOOD_STATE, SPEC, TARGET, TOP, picture, render, spec_with_table
from protocols.repeats import written_out
from realtime_omni_protocols.openpi import (
    Camera,
    Close,
    EncodedImage,
    Image,
    Infer,
    ObservationReader,
    PolicyCode,
    PolicyContract,
    PolicyError,
    PolicyServerSide,
    Row,
    Send,
    StateField,
    StreamServerSide,
    pack,
    unpack,
)
from realtime_omni_protocols.openpi.stream_messages import ErrorMessage, Observe, Start, encode, parse_server


def load(name: str) -> Any:
    return json.loads((TARGET / name).read_text(encoding="utf-8"))


CONTRACT = msgspec.convert(load("contract.json"), PolicyContract)
READER = ObservationReader(CONTRACT)
GOOD_VECTORS = load("observations.json")
BAD_VECTORS = [written_out(vector) for vector in load("bad_observations.json")]
WITH_ENDPOINTS = (Row.ROBOARENA, Row.DREAMZERO)
ROWS = {"all": tuple(Row), "alternating": tuple(Row), "roboarena, dreamzero": WITH_ENDPOINTS}


def wire_of(vector: dict[str, Any]) -> str | bytes:
    return str(vector["wire"]) if "wire" in vector else bytes.fromhex(vector["wire_hex"])


def no_picture(_: EncodedImage) -> Image:
    raise PolicyError(PolicyCode.IMAGE_INVALID, "the picture cannot be read")


def test_what_is_missing_is_named_as_it_is_to_be_sent() -> None:
    cameras = (Camera(name="top", keys=("top", "cam_high"), height=480, width=640, max_frames=4),)
    states = (StateField(name="joints", keys=("j",), dim=7),)
    reader = ObservationReader(msgspec.structs.replace(CONTRACT, cameras=cameras, state=states))
    with pytest.raises(PolicyError, match=re.escape("send uint8 [1 to 4, 480, 640, 3] as 'top' or 'cam_high'")):
        reader.read({"prompt": "go"}, no_picture)
    with pytest.raises(PolicyError, match="joints is missing; send 7 floats as 'j'"):
        reader.read({"prompt": "go", "top": np.zeros((480, 640, 3), np.uint8)}, no_picture)


def judge(message: dict[str, object]) -> None:
    """What a server does with an observation; the pictures of the vectors cannot be decoded."""
    READER.read(message, no_picture)


def name_of(vector: dict[str, Any]) -> str:
    return str(vector["name"])


def test_the_files_and_the_table_are_what_the_script_writes() -> None:
    for name, value in FILES.items():
        assert (TARGET / name).read_text(encoding="utf-8") == render(value), name
    assert SPEC.read_text(encoding="utf-8") == spec_with_table(SPEC.read_text(encoding="utf-8"))


def test_there_are_many_bad_observations_each_with_a_known_code() -> None:
    assert len(BAD_VECTORS) >= 60
    assert len({name_of(vector) for vector in BAD_VECTORS}) == len(BAD_VECTORS)
    assert {vector["expect"]["code"] for vector in BAD_VECTORS} <= set(PolicyCode)


@pytest.mark.req("AC-37")
@pytest.mark.parametrize("vector", GOOD_VECTORS, ids=name_of)
def test_a_good_observation_arrives_complete(vector: dict[str, Any]) -> None:
    message = unpack(bytes.fromhex(vector["wire_hex"]))
    assert isinstance(message, dict)
    seen = READER.read(message)
    assert list(seen.images) == ["top", "wrist", "left", "stack"]
    assert [name for name, image in seen.images.items() if image is None] == ["wrist", "left", "stack"]
    top = seen.images["top"]
    assert top is not None
    assert (top.shape, top.dtype) == ((2, 4, 3), np.uint8)
    assert np.unique(top).tolist() == [vector["expect"]["pixel"]]
    assert seen.state.dtype == np.float32
    assert seen.state.tolist() == vector["expect"]["state"] == GOOD_STATE
    assert seen.prompt == vector["expect"]["prompt"]


@pytest.mark.req("AC-38")
@pytest.mark.parametrize(
    ("vector", "row"),
    [(vector, row) for vector in BAD_VECTORS for row in ROWS[vector["rows"]]],
    ids=lambda value: name_of(value) if isinstance(value, dict) else value.value,
)
def test_a_bad_observation_is_answered_in_the_form_of_its_row(vector: dict[str, Any], row: Row) -> None:
    side = PolicyServerSide(row, CONTRACT)
    side.hello()
    wire = wire_of(vector)
    if isinstance(wire, bytes) and row in WITH_ENDPOINTS and vector["rows"] != "roboarena, dreamzero":
        wire = with_endpoint(wire)
    outputs = exchange(side, wire)
    code, path = vector["expect"]["code"], vector["expect"]["path"]
    error = outputs[0]
    assert isinstance(error, Send)
    if row is Row.BARE:
        assert isinstance(error.data, bytes)
        answer = unpack(error.data)
        assert isinstance(answer, dict)
        assert answer.keys() == {"type", "message", "code"}
        assert (answer["type"], answer["code"]) == ("error", code)
        assert path == "$" or path in answer["message"]
        assert len(outputs) == 1
        assert isinstance(exchange(side, good_frame(side.row))[0], Infer), "the next good observation is taken"
    else:
        assert isinstance(error.data, str), "a chunk broker would execute a binary frame"
        assert error.data.startswith(f"{code}: ")
        assert path == "$" or path in error.data
        assert outputs[1:] == [Close(outputs[1].code, code)]  # type: ignore[union-attr]
        assert outputs[1].code == 1011  # type: ignore[union-attr]


def with_endpoint(wire: bytes) -> bytes:
    """The frame with ``endpoint: infer`` in its map, where it is a small map of no array; else as it is."""
    if not wire or not 0x80 <= wire[0] < 0x8F or b"__ndarray__" in wire[:16]:
        return wire
    return bytes([wire[0] + 1]) + b"\xa8endpoint\xa5infer" + wire[1:]


def exchange(side: PolicyServerSide, wire: str | bytes) -> list[Any]:
    """What the server says to a frame, the observation judged; a good one is returned as the command it became."""
    commands: list[Any] = side.receive(wire)
    if not isinstance(commands[0], Infer):
        return commands
    try:
        judge(dict(commands[0].observation))
    except PolicyError as error:
        return list(side.fail(error))
    return commands


def good_frame(row: Row) -> bytes:
    named = {"endpoint": "infer"} if row in WITH_ENDPOINTS else {}
    packed: bytes = msgpack.packb(GOOD | named)
    return packed


@pytest.mark.parametrize("vector", [v for v in BAD_VECTORS if v["rows"] == "all"], ids=name_of)
def test_a_bad_observation_in_the_stream_costs_that_observation_only(vector: dict[str, Any]) -> None:
    side = StreamServerSide(CONTRACT, server="test/1", now=0.0)
    side.hello()
    side.receive(encode(Start()), 0.0)
    side.started("id", "token", 30.0)
    wire = wire_of(vector)
    try:
        observation = unpack(wire) if isinstance(wire, bytes) else None
    except PolicyError:
        observation = None
    if not isinstance(observation, dict):  # the frame itself is bad
        outputs: list[Any] = side.receive(wire, 0.0)
    else:
        assert side.receive(encode(Observe(seq=1, epoch=0, tick=0, observation=observation)), 0.0) == []
        work = side.take()
        assert work is not None
        with pytest.raises(PolicyError) as refused:
            judge(work.observation)
        outputs = list(side.fail(work, refused.value))
    assert len(outputs) == 1
    message = parse_server(outputs[0].data)
    assert isinstance(message, ErrorMessage)
    assert not message.fatal
    assert message.code == vector["expect"]["code"]
    assert message.seq == (1 if isinstance(observation, dict) else None)
    side.receive(encode(Observe(seq=2, epoch=0, tick=1, observation=dict(GOOD_MESSAGE))), 0.0)
    assert side.take() is not None


GOOD_MESSAGE: dict[str, Any] = unpack(bytes.fromhex(GOOD_VECTORS[0]["wire_hex"]))  # type: ignore[assignment]


# ---- rules that no frame of the vectors shows


def test_an_encoded_picture_is_decoded_by_the_function_given() -> None:
    def decode(image: EncodedImage) -> Image:
        assert bytes(image.data).startswith(b"\xff\xd8\xff")
        return np.full((2, 4, 3), 9, np.uint8)

    for picture_ in ({"__image__": True, "format": "jpeg", "data": b"\xff\xd8\xff.."}, b"\xff\xd8\xff.."):
        message = unpack(pack(dict(GOOD_MESSAGE) | {TOP: picture_}))
        seen = READER.read(message, decode)  # type: ignore[arg-type]
        assert seen.images["top"] is not None
        assert seen.images["top"].max() == 9


def test_a_decoded_picture_that_is_not_what_was_said_is_refused() -> None:
    lying = EncodedImage("png", memoryview(b""), (8, 8, 3))
    with pytest.raises(PolicyError) as refused:
        READER.read(dict(GOOD_MESSAGE) | {TOP: lying}, lambda _: np.zeros((2, 4, 3), np.uint8))
    assert refused.value.code is PolicyCode.IMAGE_SHAPE


def test_a_stack_is_kept_where_the_camera_takes_one() -> None:
    stack = np.zeros((2, 2, 4, 3), np.uint8)
    seen = READER.read(dict(GOOD_MESSAGE) | {"observation.images.stack": stack})
    assert seen.images["stack"] is not None
    assert seen.images["stack"].shape == (2, 2, 4, 3)


@pytest.mark.req("AC-37")
def test_a_generic_deployment_takes_a_shorter_state_and_fills_it_with_zeros() -> None:
    contract = msgspec.structs.replace(
        CONTRACT, state=(StateField(dim=8, min_dim=1),), cameras=(Camera(name="top", rule="optional"),)
    )
    seen = ObservationReader(contract).read({"state": np.ones(5, np.float32), "prompt": "go"})
    assert seen.state.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert dict(seen.images) == {"top": None}


def test_a_default_prompt_acts_where_none_is_sent() -> None:
    contract = msgspec.structs.replace(CONTRACT, default_prompt="tidy up")
    message = {key: value for key, value in GOOD_MESSAGE.items() if key != "prompt"}
    assert ObservationReader(contract).read(message).prompt == "tidy up"


@pytest.mark.parametrize(
    "changes",
    [
        {"state_dim": 3},
        {"cameras": [{"name": "top"}, {"name": "top"}]},
        {"cameras": [{"name": "top", "keys": ["prompt"]}]},
        {"cameras": [{"name": "top", "rule": "maybe"}]},
        {"cameras": [{"name": "joint_position", "keys": ["other"]}]},
        {"action": {"horizon": 2, "dim": 3, "names": ["x"]}},
        {"action": {"horizon": 2, "dim": 3, "fields": [["arm", 2]]}},
        {"action": {"horizon": 0, "dim": 3}},
        {"colour": "red"},
    ],
    ids=str,
)
def test_a_contract_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((msgspec.ValidationError, ValueError)):
        msgspec.convert(load("contract.json") | changes, PolicyContract)


@pytest.mark.parametrize(
    "actions",
    [
        *(np.zeros((2, 4), np.float32), np.zeros((3, 3), np.float32), np.zeros((2, 3), np.int64), [[0.0] * 3] * 2),
        *(np.full((2, 3), np.nan, np.float32), np.full((2, 3), 1e300)),
    ],
    ids=lambda value: type(value).__name__ + str(getattr(value, "shape", "")),
)
def test_actions_out_of_contract_do_not_leave(actions: object) -> None:
    with pytest.raises(PolicyError) as refused:
        CONTRACT.check_actions(actions)
    assert refused.value.code is PolicyCode.BAD_ACTION


def test_picture_helper_is_what_the_wire_says() -> None:
    assert picture(1, 1, 3, fill=7)[b"data"] == b"\x07\x07\x07"  # type: ignore[index]
