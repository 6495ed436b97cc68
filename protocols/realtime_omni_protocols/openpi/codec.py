"""A frame to values and back: `unpack` reads every dialect, `pack` writes openpi's, byte for byte.

Owns: the two functions every end of the protocol uses.  Must not know: rows, sessions, observations.
What `unpack` returns: None, bool, int, float, str, `memoryview` (binary data), numpy scalars and arrays,
`EncodedImage`, lists, and dicts with text keys. Arrays are **read-only views of the frame** (copy before writing); only
an array whose numbers lie across word boundaries in the frame is a copy. The frame stays in memory as long as one of
its arrays does.
"""

from __future__ import annotations

import msgspec
import numpy as np

from .arrays import EncodedImage, marker_map, on_map, plain_array
from .errors import PolicyCode, PolicyError
from .reader import MAX_DEPTH, Reader

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A float32 observation of three 1080p cameras is 75 MB; uint8 ones are 19 MB, and nobody should send the former."""

_AS_THEY_ARE = frozenset({type(None), bool, int, float, str, bytes, msgspec.Raw})
_encoder = msgspec.msgpack.Encoder()


def unpack(frame: bytes, max_bytes: int = MAX_FRAME_BYTES) -> object:
    """The value of one frame.

    Raises:
        PolicyError: ``too_large``, ``limit_exceeded``, ``bad_frame``, ``bad_array``, ``dtype_refused``, ``key_duplicate`` or
        ``image_invalid``,
            with the path of the value.
    """
    if len(frame) > max_bytes:
        raise PolicyError(PolicyCode.TOO_LARGE, f"the message is larger than {max_bytes} bytes")
    return Reader(frame, on_map, plain_array).read()


def pack(value: object) -> bytes:
    """One frame in the openpi dialect: the bytes that openpi-client 0.1.2 writes for the same value.

    Raises:
        TypeError: a type or dtype that cannot be sent. ValueError: nested too deeply. OverflowError: a number beyond 64
        bits.
    """
    return _encoder.encode(_plain(value, 0))


def _plain(value: object, depth: int) -> object:
    """The value in types that msgspec writes as msgpack-python does."""
    if type(value) in _AS_THEY_ARE:
        return value
    # np.float64 and np.str_ are a float and a str to that client, and leave it as such; bool is an int, and both stay.
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, msgspec.Raw):
        return value  # encoded already
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value) if isinstance(value, np.bytes_) else value
    if isinstance(value, np.ndarray | np.generic):
        return marker_map(value)
    if depth >= MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {_key(key): _plain(member, depth + 1) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member, depth + 1) for member in value]
    if isinstance(value, EncodedImage):
        return {"__image__": True, "format": value.format, "data": value.data}
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key is text, not {type(key).__name__}")
    return str(key)
