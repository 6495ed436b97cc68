"""Bytes of the policy protocol: what openpi-client writes, what the four dialects mean, and what never comes in.

Expected bytes are typed by hand from the msgpack specification and from what openpi-client 0.1.2 was seen to write; msgpack and
msgpack-numpy are independent writers of the same format.
"""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
import pytest

from realtime_omni_protocols.openpi import EncodedImage, PolicyCode, PolicyError, pack, unpack
from realtime_omni_protocols.openpi.arrays import on_map, plain_array
from realtime_omni_protocols.openpi.reader import MAX_DEPTH, MAX_ITEMS, Reader, Shortcut

SIX = bytes(range(24))
GOLDEN_ARRAY = (
    b"\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x18" + SIX + b"\xc4\x05dtype\xa3<f4\xc4\x05shape\x92\x02\x03"
)
GOLDEN_SCALAR = b"\x83\xc4\x0d__npgeneric__\xc3\xc4\x04data\xcb" + struct.pack(">d", 1.5) + b"\xc4\x05dtype\xa3<f4"


def six() -> np.ndarray[Any, Any]:
    return np.frombuffer(SIX, "<f4").reshape(2, 3)


def refused(frame: bytes) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        unpack(frame)
    assert "Traceback" not in str(caught.value)
    return caught.value


# ---- writing


def test_an_array_is_written_byte_for_byte_as_openpi_client_writes_it() -> None:
    assert pack(six()) == GOLDEN_ARRAY
    assert pack(np.float32(1.5)) == GOLDEN_SCALAR


def test_what_is_no_numpy_value_is_written_as_msgpack_writes_it() -> None:
    value = {"a": [1, -1, 2**63, -(2**63), 1.5, None, True, "text", b"bytes"], "b": {"c": (1, 2)}, "long": "x" * 300}
    assert pack(value) == msgpack.packb(value)


def test_float64_and_text_scalars_are_a_float_and_a_text() -> None:
    assert pack(np.float64(1.5)) == b"\xcb" + struct.pack(">d", 1.5)
    assert pack(np.str_("ab")) == b"\xa2ab"


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3), ">f4"),
        np.array(2.5, np.float16),
        np.arange(12).reshape(3, 4).T,
        np.arange(10, dtype=">i2")[::2],
        np.array(["ab", "ä"]),
        np.array([b"ab", b""]),
        np.array([True, False]),
        np.frombuffer(bytes(range(8)), np.uint8).reshape(2, 4),
    ],
    ids=lambda array: f"{array.dtype.str}{list(array.shape)}",
)
def test_an_array_comes_back_as_it_was(array: np.ndarray[Any, Any]) -> None:
    made = unpack(pack(array))
    assert isinstance(made, np.ndarray)
    assert made.dtype == array.dtype
    assert made.shape == array.shape
    assert made.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "value",
    [np.array([object()]), np.zeros(2, "c16"), np.zeros(1, "V4"), np.zeros(1, "M8[s]"), object(), {1: 2}, {b"k": 1}],
    ids=["object", "complex", "void", "time", "class", "int key", "binary key"],
)
def test_what_no_reader_takes_is_not_written(value: object) -> None:
    with pytest.raises(TypeError):
        pack(value)


def test_nothing_is_nested_beyond_the_limit() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert unpack(pack(deep)) == deep
    with pytest.raises(ValueError, match="nested"):
        pack([deep])
    assert refused(msgpack.packb([deep])).code is PolicyCode.LIMIT_EXCEEDED


# ---- the four dialects

BODY = {"data": SIX, "shape": [2, 3]}
DIALECTS = {
    "openpi": {b"__ndarray__": True, b"data": SIX, b"dtype": "<f4", b"shape": [2, 3]},
    "msgpack-numpy": {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [2, 3], b"data": SIX},
    "msgpack-numpy without kind": {b"nd": True, b"type": "<f4", b"shape": [2, 3], b"data": SIX},
    "vllm-native, text keys": {"nd": True, "type": "<f4", "kind": "f", "shape": [2, 3], "data": SIX},
    "vllm-native, binary keys": {b"nd": True, b"type": b"<f4", b"kind": b"f", b"shape": [2, 3], b"data": SIX},
    "str-keyed": {"__ndarray__": True, "data": SIX, "dtype": "<f4", "shape": [2, 3]},
    "str-keyed raw picture": {"__image__": True, "format": "raw", "data": SIX, "dtype": "<f4", "shape": [2, 3]},
}
SCALARS = {
    "openpi": {b"__npgeneric__": True, b"data": 1.5, b"dtype": "<f4"},
    "msgpack-numpy": {b"nd": False, b"type": "<f4", b"data": struct.pack("<f", 1.5)},
    "vllm-native": {"nd": False, "type": "<f4", "kind": "f", "data": struct.pack("<f", 1.5)},
    "big-endian": {b"nd": False, b"type": ">f4", b"data": struct.pack(">f", 1.5)},
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_of_an_array_is_read(dialect: str) -> None:
    made = unpack(msgpack.packb({"deep": [DIALECTS[dialect]]}))
    assert isinstance(made, dict)
    np.testing.assert_array_equal(made["deep"][0], six())


@pytest.mark.parametrize("dialect", SCALARS)
def test_every_dialect_of_a_scalar_is_read(dialect: str) -> None:
    made = unpack(msgpack.packb(SCALARS[dialect]))
    assert isinstance(made, np.float32)
    assert made == 1.5


def test_what_msgpack_numpy_itself_writes_is_read() -> None:
    value = {"image": np.arange(12, dtype=np.uint8).reshape(2, 2, 3), "step": np.int64(-3), "flag": np.bool_(True)}
    made = unpack(msgpack_numpy.packb(value))
    assert isinstance(made, dict)
    np.testing.assert_array_equal(made["image"], value["image"])
    assert (made["step"], made["flag"]) == (-3, True)


def test_an_encoded_picture_stays_encoded_and_is_not_copied() -> None:
    frame = msgpack.packb({"top": {"__image__": True, "format": "png", "data": b"\x89PNG...", "shape": [2, 2, 3]}})
    picture = unpack(frame)["top"]  # type: ignore[index]
    assert isinstance(picture, EncodedImage)
    assert (picture.format, bytes(picture.data), picture.shape) == ("png", b"\x89PNG...", (2, 2, 3))
    assert picture.data.obj is frame


def test_a_picture_is_a_read_only_view_of_the_frame() -> None:
    image = unpack(pack({"image": np.zeros((4, 4, 3), np.uint8)}))["image"]  # type: ignore[index]
    assert not image.flags.writeable
    assert not image.flags.owndata


# ---- what never comes in


def nd(**changes: object) -> bytes:
    """An openpi array map with some members changed; None removes one."""
    members = {"__ndarray__": True, "data": SIX, "dtype": "<f4", "shape": [2, 3]} | changes
    return msgpack.packb({name.encode(): value for name, value in members.items() if value is not None})


@pytest.mark.parametrize(
    "dtype",
    [
        *("|O", "O", "O8", "<O8", b"|O", "object", "|V4", "V4", "<c16", "<M8[s]", "<m8"),
        *("f4,f4", "i4, (2,2)f8", "(2,3)<f4", [["a", "<f4"]], "float32", "<f16", "=f4", "<f4\0"),
        *("|U0", "<U99999999999", "", 7, None),
    ],
    ids=repr,
)
def test_only_plain_dtypes_come_in(dtype: object) -> None:
    members = {b"__ndarray__": True, b"data": bytes(8), b"dtype": dtype, b"shape": [1]}
    assert refused(msgpack.packb(members)).code is PolicyCode.DTYPE_REFUSED


def test_the_object_array_that_crashes_other_readers_is_refused() -> None:
    """With dtype |O the eight bytes would be a pointer of the sender's choice."""
    frame = msgpack.packb({b"__ndarray__": True, b"data": b"\x41" * 8, b"dtype": "|O", b"shape": [1]})
    assert refused(frame).code is PolicyCode.DTYPE_REFUSED


def test_pickled_objects_records_and_complex_numbers_of_msgpack_numpy_are_refused() -> None:
    for value in (np.array([{"a": 1}], object), np.zeros(2, [("a", "<f4")]), np.zeros(2, "c8"), 3 + 4j):
        assert refused(msgpack_numpy.packb({"state": value})).code is PolicyCode.DTYPE_REFUSED


@pytest.mark.parametrize(
    "frame",
    [
        nd(shape=[-1]),
        nd(shape=[2, 2]),
        nd(shape=[2, 4]),
        nd(shape=[2.0, 3]),
        nd(shape=[True, 6]),
        nd(shape=6),
        nd(shape=None),
        nd(data=None),
        nd(data="text"),
        nd(data=[1, 2]),
        nd(data=SIX + b"\0"),
        nd(data=SIX[:-1]),
        nd(data=b"", shape=[0] + [1] * 8),
        nd(data=b"", shape=[0, 2**40]),
        nd(data=b"", shape=[0, *[2**31] * 7]),
        nd(shape=[2**31, 2**31]),
        nd(extra=1),
        nd(__ndarray__=False),
        nd(__ndarray__=1),
        msgpack.packb({"nd": 1, "type": "<f4", "data": SIX, "shape": [2, 3]}),
        msgpack.packb({"nd": True, "type": "<f4", "kind": "i", "data": SIX, "shape": [2, 3]}),
        msgpack.packb({"nd": True, "type": "<f4", "kind": "ff", "data": SIX, "shape": [2, 3]}),
        msgpack.packb({"nd": False, "type": "<f4", "data": SIX}),
        msgpack.packb({"nd": False, "type": "<f4", "data": SIX[:4], "shape": []}),
        msgpack.packb({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}),
        msgpack.packb({b"__npgeneric__": True, b"data": "1", b"dtype": "<f4"}),
        msgpack.packb({b"__npgeneric__": True, b"data": True, b"dtype": "<f4"}),
        msgpack.packb({b"__npgeneric__": True, b"data": 1, b"dtype": "|b1"}),
        msgpack.packb({"nd": False, "type": ">U1", "data": b"\x00\x11\x00\x00"}),
        msgpack.packb({"nd": False, "type": "<U2", "data": b"a\0\0\0\xff\xdf\0\0"}),
    ],
    ids=lambda frame: frame.hex()[-40:],
)
def test_bytes_dtype_and_shape_must_fit_exactly(frame: bytes) -> None:
    assert refused(frame).code is PolicyCode.BAD_ARRAY


def test_a_float16_scalar_out_of_range_is_infinite_and_left_to_the_contract() -> None:
    made = unpack(msgpack.packb({b"__npgeneric__": True, b"data": 1e300, b"dtype": "<f2"}))
    assert isinstance(made, np.float16)
    assert math.isinf(made)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"", "bad_frame"),
        (b"\xc1", "bad_frame"),
        (b"\x01\x02", "bad_frame"),
        (b"\xd4\x01\x00", "bad_frame"),  # an extension
        (b"\xa2\xff\xfe", "bad_frame"),  # not UTF-8
        (b"\xa3\xed\xa0\x80", "bad_frame"),  # a surrogate
        (b"\xdb\xff\xff\xff\xff", "limit_exceeded"),
        (b"\xc6\xff\xff\xff\xff", "bad_frame"),
        (b"\xdd\xff\xff\xff\xff", "bad_frame"),
        (b"\xdf\xff\xff\xff\xff", "bad_frame"),
        (b"\x81\x01\x01", "bad_frame"),  # a number as key
        (b"\x81\xc4\x01a\x01", "bad_frame"),  # a binary key of no array
        (b"\x82\xa1a\x01\xa1a\x02", "key_duplicate"),
        (b"\x82\xa1a\x01\xc4\x01a\x02", "key_duplicate"),
        (b"\x91" * 1000 + b"\x01", "limit_exceeded"),
        (b"\xdc\xff\xff" + b"\x01" * 65535, "limit_exceeded"),
        (b"\x81\xd9\xff" + b"k" * 255 + b"\xc1", "bad_frame"),
        (b"\x81\xda\x01\x2c" + b"k" * 300 + b"\x01", "limit_exceeded"),
    ],
    ids=lambda value: value.hex()[:24] if isinstance(value, bytes) else value,
)
def test_a_malformed_frame_is_refused_with_its_code(frame: bytes, code: str) -> None:
    assert refused(frame).code == code


def test_a_lying_count_reserves_no_memory() -> None:
    """A reader that believes headers would allocate a list of 16 million elements for each of these."""
    assert refused(b"\xdd\x00\xff\xff\xff" * 8 + bytes(100)).code is PolicyCode.BAD_FRAME
    assert refused(b"\xdc\xff\xff" * 8 + bytes(70_000)).code is PolicyCode.LIMIT_EXCEEDED
    assert MAX_ITEMS < 65_536


def test_an_error_says_where() -> None:
    frame = msgpack.packb({"images": [{"top": DIALECTS["openpi"] | {b"dtype": "|O"}}]})
    assert refused(frame).path == "$.images[0].top"
    odd = refused(msgpack.packb({"observation/image": {b"x": 1}}))
    assert odd.path == '$["observation/image"]'


def test_a_frame_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(PolicyError) as caught:
        unpack(bytes(11), 10)
    assert caught.value.code is PolicyCode.TOO_LARGE


def outcome(frame: bytes, shortcut: Shortcut) -> object:
    """The value, with its arrays as plain facts, or the code and path of the refusal."""

    def plain(value: object) -> object:
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes(), value.flags.writeable, value.flags.aligned
        if isinstance(value, dict):
            return {key: plain(member) for key, member in value.items()}
        if isinstance(value, list):
            return [plain(member) for member in value]
        return repr(value)

    try:
        return plain(Reader(frame, on_map, shortcut).read())
    except PolicyError as error:
        return error.code, error.path


def test_an_array_is_the_same_the_short_way_and_value_by_value() -> None:
    chance = random.Random(5)
    arrays = [
        np.arange(12, dtype=np.uint8).reshape(2, 2, 3),
        np.arange(300, dtype="<f4").reshape(300, 1),
        np.arange(70_000, dtype=np.uint8).reshape(1, 70_000),
        np.arange(5, dtype=">f8"),
        np.array([True, False]),
        np.zeros((0, 3), np.int16),
        np.float32(1.5),
        np.array("left tray"),
    ]
    for depth in range(MAX_DEPTH + 2):
        frame = b"\x81\xa1a" * depth + pack(arrays[1])
        assert outcome(frame, plain_array) == outcome(frame, lambda *_: None)
    frames = [pack({"a": array, "b": [array, "x"], "c": 1}) for array in arrays]
    taken = 0
    for number in range(6_000):
        cut = bytearray(frames[number % len(frames)])
        for _ in range(chance.randint(0, 2)):
            cut[chance.randrange(min(len(cut), 120))] = chance.choice([0, 1, 3, 0x80, 0x92, 0xC4, 0xCD, 0xCE, 0xFF])
        short = outcome(bytes(cut), plain_array)
        assert short == outcome(bytes(cut), lambda *_: None)
        taken += isinstance(short, dict)
    assert 1_000 < taken < 5_500  # many are good, many are not
