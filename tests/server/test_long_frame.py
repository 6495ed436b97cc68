"""Long messages come in as they were sent, however the socket cuts them, and only they go round websockets' buffers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode

from realtime_omni.server.long_frame import LONG_BYTES, LongFrame
from server.test_peer import Connected, connected

__all__ = ["connected"]
MOST = 1 << 20


def framed(data: bytes) -> bytes:
    return Frame(Opcode.BINARY, data).serialize(mask=True)


def pieces(data: bytes, chance: random.Random, most: int) -> Iterator[bytes]:
    while data:
        size = chance.randint(1, most)
        yield data[:size]
        data = data[size:]


@pytest.mark.parametrize("size", [LONG_BYTES, LONG_BYTES + 1, 450_003])
def test_however_it_is_cut_the_message_is_what_was_sent(size: int) -> None:
    chance = random.Random(size)
    sent = chance.randbytes(size)
    for most in (300, 5_000, 262_144):
        wire = framed(sent) + b"what follows"
        begun = LongFrame.begin(wire[:20], MOST)
        assert begun is not None
        frame, rest = begun
        left = frame.take(rest)
        for piece in pieces(wire[20:], chance, most):
            assert not left or frame.done
            left = memoryview(bytes(left) + piece) if frame.done else frame.take(memoryview(piece))
        assert frame.done
        assert (frame.message(), bytes(left)) == (sent, b"what follows")


def test_a_frame_in_single_bytes_is_held_in_few_pieces() -> None:
    wire = framed(bytes(LONG_BYTES))
    begun = LongFrame.begin(wire[:14], MOST)
    assert begun is not None
    most = 0
    for byte in wire[14:]:
        begun[0].take(memoryview(bytes([byte])))
        most = max(most, len(begun[0]._pieces))
    assert most <= 17  # the bits of its length


@pytest.mark.parametrize(
    "wire",
    [
        framed(bytes(LONG_BYTES - 1)),
        framed(bytes(MOST + 1))[:64],
        framed(bytes(LONG_BYTES))[:13],
        Frame(Opcode.TEXT, bytes(LONG_BYTES)).serialize(mask=True),
        Frame(Opcode.BINARY, bytes(LONG_BYTES), fin=False).serialize(mask=True),
        Frame(Opcode.BINARY, bytes(LONG_BYTES)).serialize(mask=False),
    ],
    ids=["short", "too large", "head incomplete", "text", "fragment", "not masked"],
)
def test_every_other_frame_is_left_alone(wire: bytes) -> None:
    assert LongFrame.begin(wire, MOST) is None


def listened(peer: Connected) -> list[str | bytes]:
    taken: list[str | bytes] = []
    peer.peer.listen(lambda message: taken.append(message) is None)
    return taken


@pytest.mark.parametrize("most", [9_000, 262_144])
async def test_long_short_and_control_frames_keep_their_order(connected: Connected, most: int) -> None:
    taken, chance = listened(connected), random.Random(most)
    client: ClientProtocol = connected.client
    messages: list[str | bytes] = []
    for number in range(6):
        messages += [f"note {number}", chance.randbytes(LONG_BYTES + number), b"%d" % number]
    for message in messages:
        if isinstance(message, str):
            client.send_text(message.encode())
            client.send_ping(b"still there?")
        else:
            client.send_binary(message)
    client.send_binary(b"one", fin=False)
    client.send_continuation(bytes(LONG_BYTES), fin=True)
    for piece in pieces(b"".join(client.data_to_send()), chance, most):
        connected.peer.data_received(piece)
    assert taken == [*messages, b"one" + bytes(LONG_BYTES)]
    assert [opcode for opcode, _ in connected.received()] == [Opcode.PONG] * 6


async def test_a_long_frame_passes_by_the_buffers(connected: Connected) -> None:
    taken, wire = listened(connected), framed(bytes(LONG_BYTES))
    connected.peer.data_received(wire[:50_000])
    assert not connected.peer.conn.reader.buffer
    connected.peer.data_received(wire[50_000:])
    assert taken == [bytes(LONG_BYTES)]


async def test_a_frame_above_the_limit_is_refused_at_its_head(connected: Connected) -> None:
    size = connected.peer.config.ws_max_size + 1
    connected.peer.data_received(b"\x82\xff" + size.to_bytes(8, "big") + b"mask" + bytes(100))
    (opcode, data), *_ = connected.received()
    assert (opcode, int.from_bytes(data[:2], "big")) == (Opcode.CLOSE, 1009)


async def test_what_still_comes_of_a_long_frame_after_the_close_is_dropped(connected: Connected) -> None:
    taken, wire = listened(connected), framed(bytes(LONG_BYTES))
    connected.peer.data_received(wire[:1000])
    await connected.peer.send({"type": "websocket.close", "code": 1000})
    connected.client.receive_data(b"".join(connected.socket.writes))
    connected.peer.data_received(wire[1000:] + b"".join(connected.client.data_to_send()))
    assert taken == []
    assert connected.peer.conn.close_rcvd is not None
