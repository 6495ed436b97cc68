"""Whatever a peer sends, a machine answers with commands or a coded error, and a client gives up in order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from protocols.openpi.fuzz_codec import mutate
from protocols.openpi.test_observations import CONTRACT, GOOD_VECTORS, READER, load
from realtime_omni_protocols.openpi import (
    Close,
    EncodedImage,
    Image,
    Infer,
    PolicyClientSide,
    PolicyCode,
    PolicyError,
    PolicyServerError,
    PolicyServerSide,
    Reset,
    Row,
    Send,
    StreamClientSide,
    StreamServerSide,
    Turn,
    pack,
    unpack,
)
from realtime_omni_protocols.openpi.stream_messages import Observe, Start, encode

GOOD = [bytes.fromhex(vector["wire_hex"]) for vector in GOOD_VECTORS]
STREAM = [(vector["direction"], bytes.fromhex(vector["wire_hex"])) for vector in load("stream.json")]
COUNT = 3_000


def unreadable(_: EncodedImage) -> Image:
    raise PolicyError(PolicyCode.IMAGE_INVALID, "the picture cannot be read")


@pytest.mark.parametrize("row", list(Row))
def test_a_server_answers_every_frame_in_its_rows_form(row: Row) -> None:
    rng = random.Random(row.value)
    accepted = 0
    for _ in range(COUNT):
        side = PolicyServerSide(row, CONTRACT)
        side.hello()
        (first, *rest) = side.receive(mutate(rng.choice(GOOD), rng))
        if isinstance(first, Infer):
            try:
                observation = READER.read(first.observation, unreadable)
                assert np.isfinite(observation.state).all()
                accepted += 1
                continue
            except PolicyError as error:
                first, *rest = side.fail(error)
        if isinstance(first, Reset):
            continue
        assert isinstance(first, Send)
        if isinstance(first.data, str):
            assert isinstance(rest[0], Close)
            assert side.turn is Turn.CLOSED
        else:
            assert unpack(first.data).keys() == {"type", "message", "code"}  # type: ignore[union-attr]
            assert not rest
    if row in (Row.BARE, Row.OPENPI):
        assert accepted > COUNT / 100, "the mutations never left an observation whole"


def test_a_stream_server_survives_every_frame() -> None:
    rng = random.Random(1)
    side = StreamServerSide(CONTRACT, server="t", now=0.0)
    side.hello()
    side.receive(encode(Start()), 0.0)
    side.started("id", "token", 30.0)
    frames = [frame for direction, frame in STREAM if direction == "c2s"]
    frames = [frame for frame in frames if b"reset" not in frame and b"close" not in frame]
    for number in range(COUNT // 3):
        for command in side.receive(mutate(rng.choice(frames), rng), 0.0):
            assert isinstance(command, Send)
        work = side.take()
        if work is not None:
            side.fail(work, PolicyError(PolicyCode.POLICY_FAILED, "error 1"))
        seq = max(side.last_seq, number) + 1
        if seq < 2**53:
            side.receive(encode(Observe(seq=seq, epoch=0, tick=0, observation={})), 0.0)
            work = side.take()
            assert work is not None
            side.chunk(work, np.zeros((2, 3), np.float32), {})


def test_a_stream_client_gives_up_with_a_coded_error_or_goes_on() -> None:
    rng = random.Random(2)
    frames = [frame for direction, frame in STREAM if direction == "s2c"]
    for _ in range(COUNT // 3):
        side = StreamClientSide()
        hello = StreamServerSide(CONTRACT, server="t", now=0.0)
        side.receive(hello.hello().data)
        side.start()
        for _ in range(3):
            try:
                side.receive(mutate(rng.choice(frames), rng))
            except PolicyError:
                break


def test_an_error_text_of_any_server_is_raised_whatever_it_holds() -> None:
    rng = random.Random(3)
    for _ in range(500):
        side = PolicyClientSide()
        side.handshake(pack({}))
        side.infer({})
        text = "".join(chr(rng.choice((58, 32, 65, 0x1F600, 10))) for _ in range(rng.randrange(20)))
        with pytest.raises(PolicyServerError):
            side.receive(text)
