"""Whatever bytes arrive, a parser answers with a value or a coded error, and in bounded time."""

from __future__ import annotations

import json
import random
import time

import pytest

from protocols.make_vectors import FILES, TARGET
from protocols.repeats import written_out
from realtime_omni_protocols import envelope
from realtime_omni_protocols.envelope import MAX_NUMBER_CHARS
from realtime_omni_protocols.errors import WireError
from realtime_omni_protocols.world import Reply, WorldServerSide, parse_client, parse_server, unpack_frame
from realtime_omni_protocols.world_messages import ErrorMessage

SEEDS = [written_out(v) for name in sorted(FILES) for v in json.loads((TARGET / name).read_text(encoding="utf-8"))]
TEXTS = [v["wire"].encode() for v in SEEDS if v["kind"] == "text" and "wire" in v and len(v["wire"]) < 4_000]
FRAMES = [bytes.fromhex(v["wire"]) for v in SEEDS if v["kind"] == "binary"]
TOKENS = [
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"null",
    b"true",
    b"1e999",
    b"-0",
    b"\\ud800",
    b"\xff",
    b"\x00",
    b"9" * 30,
]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A few random edits: cut, copy, swap, insert a token, flip bits."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(result))
        kind = rng.randrange(5)
        if kind == 0:
            del result[at : at + rng.randint(1, 9)]
        elif kind == 1:
            result[at:at] = rng.choice(TOKENS)
        elif kind == 2:
            result[at:at] = result[at : at + rng.randint(1, 40)]
        elif kind == 3 and result:
            result[at % len(result)] ^= 1 << rng.randrange(8)
        else:
            result[at:at] = rng.randbytes(rng.randint(1, 6))
    return bytes(result)


def assert_coded(error: WireError) -> None:
    assert error.message
    assert "Traceback" not in error.message
    assert error.path is None or error.path.startswith("$")


@pytest.mark.parametrize("seed", range(4))
def test_20000_mutations_of_valid_messages_never_raise_anything_else(seed: int) -> None:
    """5,000 per seed and per kind of reader: a server's, a client's, the frame reader."""
    rng = random.Random(seed)
    parsed = refused = 0
    for _ in range(5_000):
        text = mutate(rng.choice(TEXTS), rng)
        as_text = text.decode("utf-8", "surrogateescape") if rng.random() < 0.5 else text
        for read in (parse_client, parse_server):
            try:
                read(as_text)
                parsed += 1
            except WireError as error:
                assert_coded(error)
                refused += 1
        try:
            unpack_frame(mutate(rng.choice(FRAMES), rng))
            parsed += 1
        except WireError as error:
            assert_coded(error)
            refused += 1
    assert parsed > 50  # the mutations are not all hopeless
    assert refused > 1_000


TWICE = (
    b'{"type":"ping","t":1,"t":2}',
    b'{"type":"ping","id":"a:b","t":1}',
    b'{"type":"ping","id":"\\":","id":"x"}',
    b'{"type":"ping","ty\\u0070e":"ping"}',
    b'{"type":"ping","t":1' + b"0" * MAX_NUMBER_CHARS + b"}",
)


def test_a_message_that_is_spared_the_scan_is_one_in_which_it_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    texts = [*TWICE, *TEXTS, *(mutate(rng.choice(TEXTS), rng) for _ in range(4_000))]

    def outcome(text: bytes) -> str:
        try:
            return repr(parse_client(text))
        except WireError as error:
            return f"{error.code} {error.path} {error.message} {error.re} {error.event_id}"

    short = [outcome(text) for text in texts]
    monkeypatch.setattr(envelope, "_is_plain", lambda text: False)
    assert short == [outcome(text) for text in texts]


def test_random_bytes_are_refused() -> None:
    rng = random.Random(7)
    for _ in range(5_000):
        data = rng.randbytes(rng.randint(0, 200))
        for read in (parse_client, parse_server):
            with pytest.raises(WireError):
                read(data)
        with pytest.raises(WireError):
            unpack_frame(data)


def test_a_server_under_fuzz_answers_and_stays_consistent() -> None:
    """The machine never raises, and answers with at most one reply per message; a fatal one is its last."""
    rng = random.Random(11)
    for _ in range(500):
        side = WorldServerSide(server="x/1", models=("m",), now=0.0)
        side.send(side.hello())
        over = False
        for _ in range(10):
            data = mutate(rng.choice(TEXTS), rng)
            commands = side.receive_binary(data, 0.0) if rng.random() < 0.1 else side.receive_text(data, 0.0)
            assert not over or commands == []
            for command in commands:
                if isinstance(command, Reply):
                    side.send(command.message)
                    over = over or (isinstance(command.message, ErrorMessage) and command.message.fatal)


HOSTILE = {
    "65,000 open arrays": b"[" * 65_000,
    "65,000 open objects": b'{"a":' * 13_000,
    "a string that never ends, full of escaped quotes": b'{"type":"' + b'\\"' * 32_000,
    "backslashes": b'"' + b"\\" * 65_001,
    "quotes": b'"' * 65_001,
    "an integer of 65,000 digits": b'{"type":"ping","t":' + b"7" * 65_000 + b"}",
    "a float of 65,000 digits": b'{"type":"ping","t":0.' + b"7" * 65_000 + b"}",
    "an exponent of 65,000 digits": b'{"type":"ping","t":1e' + b"7" * 65_000 + b"}",
    "20,000 different keys": b"{" + b",".join(b'"k%d":1' % i for i in range(7_000)) + b"}",
    "the same key 7,000 times": b"{" + b",".join(b'"key":1' for _ in range(7_000)) + b"}",
    "objects full of twice the same key": b'{"a":[' + b",".join(b'{"k":1,"k":2}' for _ in range(4_000)) + b"]}",
    "white space": b" " * 65_000,
    "a key of 60,000 characters": b'{"type":"ping","' + b"k" * 60_000 + b'":1}',
    "zero bytes": b"\x00" * 65_000,
    "surrogates": b'{"type":"ping","id":"' + b"\\ud83c" * 10_000 + b'"}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_in_bounded_time(name: str) -> None:
    """64 KiB each. The bound is generous, and far below anything quadratic."""
    started = time.process_time()
    for read in (parse_client, parse_server):
        with pytest.raises(WireError) as caught:
            read(HOSTILE[name])
        assert_coded(caught.value)
        assert len(caught.value.message) <= 200
        assert len(caught.value.path or "") <= 2_000
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize("filler", [b"[", b"a", b'\\"', b"\xff", b'{"k":', b'","', b"1,", b"{},"])
@pytest.mark.parametrize("head", [b'"', b"", b"["])
def test_four_megabytes_of_anything_are_refused_in_bounded_time(head: bytes, filler: bytes) -> None:
    text = b'{"type":"session.start","format":"jpeg","image":' + head + filler * ((4 << 20) // len(filler))
    started = time.process_time()
    with pytest.raises(WireError):
        parse_client(text[: 4 << 20])
    assert time.process_time() - started < 1.0


def test_more_than_four_megabytes_are_too_large() -> None:
    with pytest.raises(WireError) as caught:
        parse_client(b"x" * ((4 << 20) + 1))
    assert caught.value.code.value == "message_too_large"
