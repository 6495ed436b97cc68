"""Marker maps to numpy values: the four dialects of "numpy inside msgpack" that robot clients speak.

Owns: the dialects, the dtypes that may come in, the exact fit of bytes, dtype and shape.  Must not know: observations.
Invariants: an array's memory was in the frame before the array exists; object, void, complex and time dtypes never come
in (an object array made of a peer's bytes is a list of pointers of the peer's choice); nothing here can reach pickle.
"""

from __future__ import annotations

import math
import re
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from .errors import PolicyCode, PolicyError

MAX_NDIM = 8
MAX_DIM = 2**31
"""Also bounds shapes of arrays without elements."""

Array: TypeAlias = npt.NDArray[Any]

# Exactly the numpy array-protocol strings that are plain numbers or plain text; never np.dtype() on anything else.
_NUMBER = re.compile(r"[<>|]?(?:b1|[iu][1248]|f[248])")
_TEXT = re.compile(r"[<>|]?[US][1-9][0-9]{0,4}")
_KIND_BYTE = re.compile(r"[biufUS]?")

# The members of an openpi array's map, in its packer's order, around the data and before the dimensions.
_PLAIN_HEAD = re.compile(rb"\xc4\x0b__ndarray__\xc3\xc4\x04data(?:\xc4(.)|\xc5(..)|\xc6(....))", re.DOTALL)
_PLAIN_TAIL = re.compile(rb"\xc4\x05dtype\xa3([<>|](?:b1|[iu][1248]|f[248]))\xc4\x05shape([\x91-\x98])")
_DIM_WIDTH = {0xCC: 1, 0xCD: 2, 0xCE: 4}


class EncodedImage(Struct, frozen=True):
    """A PNG or JPEG file inside a frame (a view into it), not decoded yet. ``shape`` is what the sender says it
    holds."""

    format: str
    data: memoryview
    shape: tuple[int, ...] | None = None


def on_map(members: dict[str, object], binary: bool) -> object:
    """A finished map: an array, a scalar or an encoded picture where its markers say so, else the map itself."""
    if "__ndarray__" in members:
        return _array(_only(members, "__ndarray__", "data", "dtype", "shape"), "dtype")
    if "__npgeneric__" in members:
        return _native_scalar(_only(members, "__npgeneric__", "data", "dtype"))
    if "nd" in members:
        return _nd(members)
    if "__image__" in members:
        return _image(members)
    if "complex" in members and binary:
        raise PolicyError(PolicyCode.DTYPE_REFUSED, "complex numbers are not accepted")
    if binary:
        raise PolicyError(PolicyCode.BAD_FRAME, "a key is binary, but this is no array")
    return members


def plain_array(frame: bytes, at: int) -> tuple[Array, int, int] | None:
    """The array whose map's members begin at ``at`` exactly as openpi's client packs them; where they end, and how many values
    the frame spent on it. None: something is otherwise, and the ordinary way finds out what.

    Most of an observation is such arrays; two strokes for each take a quarter of the time of value after value."""
    if (head := _PLAIN_HEAD.match(frame, at)) is None:
        return None
    size, start = int.from_bytes(head[head.lastindex or 0], "big"), head.end()
    if (tail := _PLAIN_TAIL.match(frame, start + size)) is None:
        return None
    shape, at = [], tail.end()
    count = tail[2][0] & 0x0F
    try:
        for _ in range(count):
            lead, at = frame[at], at + 1
            if lead >= 0x80:
                width = _DIM_WIDTH[lead]
                lead, at = int.from_bytes(frame[at : at + width], "big"), at + width
            shape.append(lead)
    except (IndexError, KeyError):
        return None
    dtype = np.dtype(tail[1].decode())
    if not size or at > len(frame) or math.prod(shape) * dtype.itemsize != size or max(shape) > MAX_DIM:
        return None
    flat: Array = np.frombuffer(frame, dtype, size // dtype.itemsize, start)
    if not flat.flags.aligned:
        flat = flat.copy()
    return flat.reshape(shape), at, 8 + count


def _only(members: dict[str, object], marker: str, *names: str) -> dict[str, object]:
    """The members, when the marker is true and exactly these names are there."""
    if members[marker] is not True:
        raise _bad(f"{marker} is not true")
    if members.keys() != {marker, *names}:
        raise _bad(f"an array has exactly the members {', '.join((marker, *names))}")
    return members


def _nd(members: dict[str, object]) -> object:
    """The map of PyPI's msgpack-numpy, and the older vLLM-native one, which puts the dtype's kind into ``kind``."""
    marker, kind = members["nd"], _ascii(members.get("kind", ""))
    if kind in ("V", "O", "c", "M", "m"):
        raise PolicyError(PolicyCode.DTYPE_REFUSED, "objects, records, complex numbers and times are not accepted")
    if kind is None or not _KIND_BYTE.fullmatch(kind):
        raise _bad("the kind of this array is unknown")
    names = {"nd", "type", "data"} | ({"shape"} if marker is True else set())
    if not isinstance(marker, bool) or members.keys() - {"kind"} != names:
        raise _bad(f"an array has exactly the members {', '.join(sorted(names))}")
    dtype = _dtype(members["type"])
    if kind and kind != dtype.kind:
        raise _bad("kind and type of this array differ")
    if marker:
        return _array(members, "type")
    return _view(members["data"], dtype, ())[()]


def _array(members: dict[str, object], dtype_name: str) -> Array:
    return _view(members["data"], _dtype(members[dtype_name]), _shape(members["shape"]))


def _view(data: object, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """The bytes as an array: a read-only view of the frame, or an aligned copy where its numbers lie across words."""
    if not isinstance(data, memoryview):
        raise _bad("the data of an array is binary")
    expected = math.prod(shape) * dtype.itemsize
    if expected != data.nbytes:
        raise _bad(f"{data.nbytes} bytes of data, but dtype and shape need {expected}")
    if expected == 0:
        try:
            return np.empty(shape, dtype)
        except ValueError:
            raise _bad("the shape is too large") from None
    if dtype.kind == "U":
        _check_text(np.frombuffer(data, f"{dtype.byteorder}u4"))
    flat: Array = np.frombuffer(data, dtype)
    if not flat.flags.aligned:
        flat = flat.copy()
    return flat.reshape(shape)


def _check_text(codes: Array) -> None:
    """numpy takes any number for a character, and fails when somebody reads it."""
    if (codes > 0x10FFFF).any() or ((codes >= 0xD800) & (codes <= 0xDFFF)).any():
        raise _bad("this text has numbers in it that are no characters")


def _shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_NDIM:
        raise _bad(f"a shape is a list of at most {MAX_NDIM} numbers")
    dims = []
    for dim in value:
        if isinstance(dim, bool) or not isinstance(dim, int) or not 0 <= dim <= MAX_DIM:
            raise _bad("a dimension is a whole number from 0")
        dims.append(dim)
    return tuple(dims)


def _dtype(value: object) -> np.dtype[Any]:
    name = _ascii(value)
    if name is not None and (_NUMBER.fullmatch(name) or _TEXT.fullmatch(name)):
        return np.dtype(name)
    shown = f" {name[:20]!r}" if name is not None and name.isprintable() else ""
    raise PolicyError(
        PolicyCode.DTYPE_REFUSED,
        f"dtype{shown} is not accepted; send bool, integers up to 64 bits, float16 to float64, or text",
    )


def _native_scalar(members: dict[str, object]) -> object:
    """An openpi scalar: a plain msgpack value that fits its dtype."""
    dtype, value = _dtype(members["dtype"]), members["data"]
    if dtype.kind == "b" and isinstance(value, bool):
        return np.bool_(value)
    if dtype.kind in "iu" and isinstance(value, int) and not isinstance(value, bool):
        info = np.iinfo(dtype)
        if info.min <= value <= info.max:
            return dtype.type(value)
    if dtype.kind == "f" and isinstance(value, float | int) and not isinstance(value, bool):
        with np.errstate(over="ignore"):  # too large for a float16 is infinity, and refused where it must be finite
            return dtype.type(value)
    if dtype.kind == "U" and isinstance(value, str):
        return value
    if dtype.kind == "S" and isinstance(value, memoryview):
        return np.bytes_(bytes(value))
    raise _bad("this scalar's value does not fit its dtype")


def _image(members: dict[str, object]) -> Array | EncodedImage:
    if members["__image__"] is not True:
        raise _bad("__image__ is not true")
    kind = members.get("format")
    if kind == "raw":
        members = {name: value for name, value in members.items() if name not in ("__image__", "format")}
        return _array(_only({"__ndarray__": True, **members}, "__ndarray__", "data", "dtype", "shape"), "dtype")
    if kind not in ("png", "jpeg"):
        raise PolicyError(PolicyCode.IMAGE_INVALID, "a picture is png, jpeg or raw")
    data, shape = members.get("data"), members.get("shape")
    if not isinstance(data, memoryview) or members.keys() - {"shape"} != {"__image__", "format", "data"}:
        raise PolicyError(PolicyCode.IMAGE_INVALID, "a picture has a format, binary data and perhaps a shape")
    return EncodedImage(str(kind), data, None if shape is None else _shape(shape))


def sniff_image(data: memoryview) -> EncodedImage | None:
    """Bare bytes that begin as a PNG or JPEG file does."""
    if bytes(data[:8]) == b"\x89PNG\r\n\x1a\n":
        return EncodedImage("png", data)
    if bytes(data[:3]) == b"\xff\xd8\xff":
        return EncodedImage("jpeg", data)
    return None


def _ascii(value: object) -> str | None:
    """Text, also where a dialect sends it as binary."""
    if isinstance(value, memoryview) and value.nbytes <= 32:
        return str(value, "latin-1")
    return value if isinstance(value, str) else None


def _bad(message: str) -> PolicyError:
    return PolicyError(PolicyCode.BAD_ARRAY, message)


# ---- writing


def marker_map(value: Array | np.generic) -> dict[bytes, object]:
    """The openpi dialect's map of an array or scalar, members in that client's order.

    Raises:
        TypeError: a dtype that no dialect of ours may carry.
    """
    dtype = value.dtype
    if dtype.kind not in "biufUS":
        raise TypeError(f"dtype {dtype} cannot be sent")
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": dtype.str}
    plain = dtype.kind in "bu" and dtype.itemsize == 1 and value.flags.c_contiguous and value.size > 0
    data = value.data if plain else value.tobytes()
    return {b"__ndarray__": True, b"data": data, b"dtype": dtype.str, b"shape": list(value.shape)}
