"""The four alternating rows, both ends: handshake, reply, reset, error, and whose turn it is."""

from __future__ import annotations

from typing import Any

import msgpack
import msgpack_numpy
import msgspec
import numpy as np
import pytest

from protocols.openpi.make_vectors import GOOD
from protocols.openpi.test_observations import CONTRACT
from realtime_omni_protocols.errors import LocalError
from realtime_omni_protocols.openpi import (
    PATH,
    ActionField,
    Close,
    Infer,
    PolicyClientSide,
    PolicyClose,
    PolicyCode,
    PolicyError,
    PolicyServerError,
    PolicyServerSide,
    Reset,
    Row,
    Send,
    Turn,
    choose_row,
    pack,
    unpack,
)

ACTIONS = np.arange(6, dtype=np.float32).reshape(2, 3)
TIMING = {"queue": 0.5, "infer_ms": 3.0}
ENDPOINT_ROWS = [Row.ROBOARENA, Row.DREAMZERO]


def served(row: Row) -> tuple[PolicyServerSide, PolicyClientSide]:
    server, client = PolicyServerSide(row, CONTRACT), PolicyClientSide(row)
    client.handshake(server.hello().data)
    return server, client


def request(server: PolicyServerSide, **members: object) -> Any:
    (command,) = server.receive(msgpack.packb(GOOD | members))
    return command


def answer(server: PolicyServerSide) -> Any:
    (output,) = server.answer(server.encode(ACTIONS), TIMING)
    assert isinstance(output, Send)
    return output.data


@pytest.mark.parametrize(
    ("path", "reply", "row"),
    [
        (PATH, None, Row.BARE),
        ("/", None, Row.OPENPI),
        (PATH, "openpi", Row.OPENPI),
        (PATH, "roboarena", Row.ROBOARENA),
        (PATH, "dreamzero", Row.DREAMZERO),
        ("/", "bare", Row.BARE),
        (PATH, "json", None),
        (PATH, "", None),
    ],
)
def test_where_a_client_connects_decides_its_row(path: str, reply: str | None, row: Row | None) -> None:
    assert choose_row(path, reply) is row


@pytest.mark.req("AC-36")
@pytest.mark.parametrize("row", [Row.BARE, Row.OPENPI])
def test_the_handshake_is_the_deployments_map(row: Row) -> None:
    hello = PolicyServerSide(row, CONTRACT).hello()
    assert msgpack.unpackb(hello.data) == {  # type: ignore[arg-type]
        "image_resolution": [224, 224],
        "action_horizon": 2,
        "action_dim": 3,
        "max_cameras": 4,
    }


@pytest.mark.parametrize("row", ENDPOINT_ROWS)
def test_roboarenas_handshake_has_its_six_fields_and_no_other(row: Row) -> None:
    assert msgpack.unpackb(PolicyServerSide(row, CONTRACT).hello().data) == {  # type: ignore[arg-type]
        "image_resolution": [224, 224],
        "needs_wrist_camera": True,
        "n_external_cameras": 1,
        "needs_stereo_camera": False,
        "needs_session_id": False,
        "action_space": "joint_position",
    }


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Row.BARE, ACTIONS),
        (Row.DREAMZERO, ACTIONS),
        (Row.ROBOARENA, {"actions": ACTIONS}),
        (Row.OPENPI, {"actions": ACTIONS, "policy_timing": {"infer_ms": 3.0}, "server_timing": TIMING}),
    ],
)
def test_each_row_has_its_reply(row: Row, expected: Any) -> None:
    server, client = served(row)
    assert server.receive(client.infer(unpack(msgpack.packb(GOOD))))[0].seed is None  # type: ignore[union-attr,arg-type]
    wire = answer(server)
    assert wire == pack(expected)
    received = client.receive(wire)
    assert received is not None
    np.testing.assert_array_equal(received["actions"], ACTIONS)  # type: ignore[arg-type]


def test_the_bare_reply_is_the_openpi_clients_array_byte_for_byte() -> None:
    server, _ = served(Row.BARE)
    request(server)
    assert answer(server) == msgpack.packb(
        {b"__ndarray__": True, b"data": ACTIONS.tobytes(), b"dtype": "<f4", b"shape": (2, 3)}
    )


def test_named_chunks_have_a_batch_axis_and_keep_their_order() -> None:
    fields = (ActionField("arm", 2), ActionField("hand", 1))
    contract = msgspec.structs.replace(CONTRACT, action=msgspec.structs.replace(CONTRACT.action, fields=fields))
    server = PolicyServerSide(Row.BARE, contract)
    server.hello()
    request(server)
    named = unpack(answer(server))
    assert isinstance(named, dict)
    assert {name: chunk.shape for name, chunk in named.items()} == {"arm": (1, 2, 2), "hand": (1, 2, 1)}
    np.testing.assert_array_equal(named["hand"][0, :, 0], [2, 5])


def test_stock_decoders_see_numbers_they_know() -> None:
    """A client with PyPI's msgpack-numpy cannot read the reply as an array, and must be able to tell."""
    server, _ = served(Row.BARE)
    request(server)
    assert b"__ndarray__" in msgpack_numpy.unpackb(answer(server))


@pytest.mark.parametrize(("row", "then"), [(Row.BARE, Row.DREAMZERO), (Row.OPENPI, Row.ROBOARENA)])
def test_a_request_with_an_endpoint_makes_the_connection_a_roboarena_one(row: Row, then: Row) -> None:
    server, _ = served(row)
    command = request(server, endpoint="infer")
    assert isinstance(command, Infer)
    assert "endpoint" not in command.observation
    assert server.row is then
    assert answer(server) == pack(ACTIONS if then is Row.DREAMZERO else {"actions": ACTIONS})
    assert server.receive(msgpack.packb({"endpoint": "reset"})) == [Reset()]
    assert server.reset_done() == [Send("reset successful")]


@pytest.mark.parametrize("row", ENDPOINT_ROWS)
def test_a_reset_is_answered_with_roboarenas_text_which_is_no_error(row: Row) -> None:
    server, client = served(row)
    assert server.receive(client.reset()) == [Reset()]
    (output,) = server.reset_done()
    assert isinstance(output, Send)
    assert client.receive(output.data) is None
    assert server.statistics().resets == 1


def test_rows_without_a_reset_say_so_at_the_client() -> None:
    _, client = served(Row.OPENPI)
    with pytest.raises(LocalError, match="no reset"):
        client.reset()


# ---- errors


@pytest.mark.req("AC-38")
def test_on_the_bare_row_an_error_is_a_coded_map_and_the_next_request_succeeds() -> None:
    server, client = served(Row.BARE)
    server.receive(client.infer({"prompt": "x"}))
    (output,) = server.fail(PolicyError(PolicyCode.CAMERA_MISSING, "the camera top is missing", "$.top"))
    assert isinstance(output, Send)
    expected = {"type": "error", "message": "$.top: the camera top is missing", "code": "camera_missing"}
    assert output.data == msgpack.packb(expected)
    with pytest.raises(PolicyServerError) as refused:
        client.receive(output.data)
    assert (refused.value.code, refused.value.open) == ("camera_missing", True)
    assert isinstance(request(server), Infer)


@pytest.mark.parametrize("row", [Row.OPENPI, Row.ROBOARENA, Row.DREAMZERO])
def test_elsewhere_an_error_is_text_and_the_end(row: Row) -> None:
    server, client = served(row)
    server.receive(client.infer({"prompt": "x"}))
    output, close = server.fail(PolicyError(PolicyCode.CAMERA_MISSING, "the camera top is missing", "$.top"))
    assert output == Send("camera_missing: $.top: the camera top is missing", PolicyCode.CAMERA_MISSING)
    assert close == Close(1011, "camera_missing")  # type: ignore[arg-type]
    with pytest.raises(PolicyServerError) as refused:
        client.receive(output.data)
    assert (refused.value.code, refused.value.open) == ("camera_missing", False)
    assert client.turn is server.turn is Turn.CLOSED
    with pytest.raises(LocalError):
        server.receive(b"")


@pytest.mark.parametrize("row", list(Row))
def test_a_message_over_the_size_cap_ends_with_1009(row: Row) -> None:
    server = PolicyServerSide(row, CONTRACT, max_bytes=100)
    server.hello()
    frame, close = server.receive(bytes(101))
    assert isinstance(frame, Send)
    assert isinstance(frame.data, str) is (row is not Row.BARE)
    assert close == Close(1009, "too_large")  # type: ignore[arg-type]


@pytest.mark.parametrize("row", list(Row))
def test_actions_out_of_contract_become_an_error(row: Row) -> None:
    server, _ = served(row)
    request(server, endpoint="infer")
    with pytest.raises(PolicyError) as refused:
        server.encode(np.full((2, 3), np.nan))
    assert refused.value.code is PolicyCode.BAD_ACTION
    assert isinstance(server.fail(refused.value)[0], Send)


def test_a_foreign_servers_traceback_is_an_error_without_a_code() -> None:
    _, client = served(Row.OPENPI)
    client.infer({})
    with pytest.raises(PolicyServerError, match="KeyError: 'state'") as refused:
        client.receive("Traceback (most recent call last):\n  File ...\nKeyError: 'state'")
    assert refused.value.code is None


@pytest.mark.parametrize("frame", [b"\xc1", pack([1]), pack("actions"), pack({"state": 1})], ids=repr)
def test_what_is_no_answer_is_a_violation(frame: bytes) -> None:
    _, client = served(Row.OPENPI)
    client.infer({})
    with pytest.raises(PolicyError):
        client.receive(frame)
    assert client.turn is Turn.CLOSED


# ---- turns and labels


def test_one_request_one_answer() -> None:
    server, client = served(Row.BARE)
    with pytest.raises(LocalError):
        server.answer(b"", {})
    with pytest.raises(LocalError):
        server.fail(PolicyError(PolicyCode.INTERNAL, "x"))
    with pytest.raises(LocalError):
        server.reset_done()
    with pytest.raises(LocalError):
        server.hello()
    request(server)
    with pytest.raises(LocalError):
        request(server)
    client.infer({})
    with pytest.raises(LocalError):
        client.infer({})


def test_another_label_is_another_session_and_no_label_stays_in_the_current_one() -> None:
    server, _ = served(Row.BARE)
    switched = []
    for label in (None, "a", "a", None, "b", "a"):
        members = {} if label is None else {"session_id": label}
        switched.append(request(server, **members).switched)
        answer(server)
    assert switched == [False, False, False, False, True, True]


def test_seed_and_steps_are_read_and_taken_out() -> None:
    server, _ = served(Row.BARE)
    command = request(server, seed=5, sampling_params={"num_inference_steps": 4}, session_id="x")
    assert (command.seed, command.steps) == (5, 4)
    assert command.observation.keys() == GOOD.keys()


def test_a_shutdown_ends_every_connection_and_answers_who_waits() -> None:
    stopping = PolicyError(PolicyCode.SHUTDOWN, "the server stops")
    for row in Row:
        server, _ = served(row)
        assert server.end(stopping, PolicyClose.SHUTDOWN) == [Close(PolicyClose.SHUTDOWN, "shutdown")]
        assert server.end(stopping, PolicyClose.SHUTDOWN) == []
    server, _ = served(Row.OPENPI)
    request(server)
    assert server.end(stopping, PolicyClose.SHUTDOWN)[0] == Send("shutdown: the server stops", PolicyCode.SHUTDOWN)
