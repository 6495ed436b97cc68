"""Short messages come in as they were sent, however the socket cuts them; what is odd is websockets' to judge."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from websockets.frames import Frame, Opcode

from realtime_omni.server.short_frame import read_short
from server.test_peer import Connected, connected

__all__ = ["connected"]
MOST = 1 << 20


def framed(data: bytes, opcode: Opcode = Opcode.TEXT, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65_535])
def test_a_whole_frame_is_read_and_what_follows_is_left(size: int) -> None:
    data = random.Random(size).randbytes(size)
    wire = b"before" + framed(data) + b"after"
    assert read_short(wire, 6, MOST) == (data, len(wire) - 5)
    assert read_short(wire[6:-6], 0, MOST) is None  # its last byte has not come


@pytest.mark.parametrize(
    "wire",
    [
        framed(b"bytes", Opcode.BINARY),
        framed(b"a part", fin=False),
        framed(b"?", Opcode.PING),
        framed(bytes(65_536)),
        Frame(Opcode.TEXT, b"not masked").serialize(mask=False),
        b"\xc1" + framed(b"compressed")[1:],
        bytes([0x81, 0xFE, 0, 5]) + framed(b"12345")[2:],  # a length in more bytes than it needs
        b"",
    ],
)
def test_everything_else_is_websockets_business(wire: bytes) -> None:
    assert read_short(wire, 0, MOST) is None


def test_a_message_that_is_too_large_is_websockets_to_refuse() -> None:
    assert read_short(framed(bytes(101)), 0, 100) is None


async def test_the_order_stays_however_the_bytes_are_cut(connected: Connected) -> None:
    chance = random.Random(5)
    sent: list[str] = []
    wire = b""
    for number in range(200):
        text = f"{number}" * chance.choice([1, 20, 60])
        sent.append(text)
        if chance.random() < 0.2:
            half = len(text) // 2
            wire += framed(text[:half].encode(), fin=False)
            wire += framed(b"!", Opcode.PING)
            wire += framed(text[half:].encode(), Opcode.CONT)
        else:
            wire += framed(text.encode())
    heard: list[str | bytes] = []

    def take(message: str | bytes) -> bool:
        heard.append(message)
        return True

    connected.peer.listen(take)
    cuts = sorted({0, len(wire), *(chance.randrange(len(wire)) for _ in range(150))})
    for begin, end in pairwise(cuts):
        connected.peer.data_received(wire[begin:end])
    assert heard == sent


async def test_text_that_is_none_ends_the_connection(connected: Connected) -> None:
    connected.peer.listen(lambda message: True)
    connected.peer.data_received(framed(b"\xff\xfe"))
    assert connected.peer.close_sent
