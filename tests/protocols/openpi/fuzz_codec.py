"""Feeds mutated frames to the decoder: ``python fuzz_codec.py COUNT SEED``. Prints what it saw as one JSON line.

Run in a process of its own, so that a crash of the interpreter is an exit code and its memory can be measured.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from collections import Counter

import msgpack
import msgpack_numpy
import numpy as np

from realtime_omni_protocols.openpi import PolicyError, pack, unpack

IMAGE = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 3)
OBSERVATION = {
    "observation/image": IMAGE,
    "observation/state": np.linspace(0, 1, 8, dtype=np.float32),
    "scalar": np.int16(7),
    "prompt": "pick up the cube",
    "nested": {"list": [1, -5, 2.5, None, True, "é"]},
}
SEEDS = [
    pack(OBSERVATION),
    msgpack_numpy.packb(OBSERVATION),
    msgpack.packb({"a": {"__ndarray__": True, "data": bytes(8), "dtype": "<f4", "shape": [2]}}),
    msgpack.packb({"a": {"nd": True, "type": "<f4", "kind": "f", "data": bytes(8), "shape": [2]}}),
    msgpack.packb({"a": {"__image__": True, "format": "png", "data": bytes(8), "shape": [2, 2, 3]}}),
    msgpack.packb({b"__ndarray__": True, b"data": bytes(16), b"dtype": "|O", b"shape": [2]}),
]
TOKENS = [b"|O", b"|V8", b"<f4", b"<f8", b">u2", b"\xc3", b"\xc0", b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff"]
TOKENS += [
    b"\xc6\x00\xff\xff\xff",
    b"\xdb\x00\x01\x00\x00",
    b"\x91" * 30,
    b"\x81\xa1a" * 20,
    b"\xcf" + b"\xff" * 8,
    b"\xff",
]
TOKENS += [b"\xc4\x05shape", b"\xc4\x0b__ndarray__", b"\x92\x00\xcf\x00\x00\x00\x01\x00\x00\x00\x00"]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A few random edits: cut, copy, insert a token, flip a bit, another byte."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(result)) if result else 0
        kind = rng.randrange(6)
        if kind == 0:
            del result[at : at + rng.randint(1, 9)]
        elif kind == 1:
            result[at:at] = rng.choice(TOKENS)
        elif kind == 2:
            token = rng.choice(TOKENS)
            result[at : at + len(token)] = token
        elif kind == 3:
            result[at:at] = result[at : at + rng.randint(1, 40)]
        elif kind == 4 and result:
            result[at] ^= 1 << rng.randrange(8)
        elif result:
            result[at] = rng.randrange(256)
    return bytes(result)


def touch(value: object) -> None:
    """Read every element: a pointer that came from the wire would crash here."""
    if isinstance(value, np.ndarray):
        value.tolist()
        assert value.dtype.kind in "biufUS"
    elif isinstance(value, dict):
        for member in value.values():
            touch(member)
    elif isinstance(value, list):
        for member in value:
            touch(member)


def resident_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(count: int, seed: int) -> None:
    rng = random.Random(seed)
    codes: Counter[str] = Counter()
    warm = 0
    for index in range(count):
        try:
            touch(unpack(mutate(rng.choice(SEEDS), rng)))
            codes["accepted"] += 1
        except PolicyError as error:
            codes[error.code.value] += 1
        if index == count // 10:
            warm = resident_kib()
    print(json.dumps({"codes": codes, "grown_kib": resident_kib() - warm}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
