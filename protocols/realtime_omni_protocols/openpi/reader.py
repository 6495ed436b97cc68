"""msgpack from untrusted bytes: one bounded pass over the buffer.

Owns: the grammar of msgpack, its limits, duplicate keys, and the path of whatever is wrong.  Must not know: numpy,
messages.
Invariants: no claim of the sender (a length, a count, a depth) is believed before the bytes for it were seen; binary
data is a view into the buffer, never a copy; the result is a value or `PolicyError`, in time linear in the size of the
buffer.

Own code because the general readers allocate what a header claims (a nest of arrays that each claim a million elements
takes gigabytes), copy every picture, keep the last of two equal keys, and cannot say where an error was. An observation
has some forty values, so Python is fast enough here. Writing needs none of that and is left to msgspec.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from typing import TypeAlias

from .errors import PolicyCode, PolicyError

MAX_DEPTH = 16
"""Nesting of maps and arrays; a GR00T observation needs 5."""
MAX_ITEMS = 16_384
"""Values in one frame, keys included. Numbers travel as arrays, so an observation has about 40."""
MAX_STRING_BYTES = 64 * 1024

MapHook: TypeAlias = Callable[[dict[str, object], bool], object]
"""Makes a value of a finished map: (members, whether a key was binary). Its errors get their path here."""
Shortcut: TypeAlias = Callable[[bytes, int], tuple[object, int, int] | None]
"""Reads a map of four members, two levels deep at most, that begin here, at once: (its value, where it ends, how many values
that are). None: it is to be read in the ordinary way."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# Lead byte -> the number that follows.
_NUMBERS = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}
_BINARY_SIZE = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_STRING_SIZE = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_SHORT_KEYS = frozenset({0xC4, 0xD9})
"""Leads of a binary or text key with one byte of length."""
_ARRAY_SIZE = {0xDC: 2, 0xDD: 4}
_MAP_SIZE = {0xDE: 2, 0xDF: 4}
_CONSTANTS: dict[int, bool | None] = {0xC0: None, 0xC2: False, 0xC3: True}


def child_path(path: str, key: str) -> str:
    """The path of a member; an odd key is quoted and cut, so that a hostile one cannot fill a log line."""
    if _PLAIN_KEY.fullmatch(key):
        return f"{path}.{key}"
    return f"{path}[{json.dumps(key[:64])}]"


class Reader:
    """Reads one value from ``data``; ``on_map`` turns maps into what they mean, ``shortcut`` those that it knows by sight."""

    def __init__(self, data: bytes, on_map: MapHook, shortcut: Shortcut) -> None:
        self._data = data
        self._view = memoryview(data)
        self._size = len(data)
        self._at = 0
        self._items = 0
        self._on_map = on_map
        self._shortcut = shortcut
        self._steps: list[str | int] = []
        """Keys and indices from the root to the value being read; whatever goes wrong is there."""

    def read(self) -> object:
        """The one value that fills the buffer."""
        try:
            value = self._value()
        except PolicyError as error:
            raise PolicyError(error.code, error.message, self._path()) from None
        except IndexError:  # a lead byte beyond the end
            raise PolicyError(PolicyCode.BAD_FRAME, "the message ends too early", self._path()) from None
        if self._at != self._size:
            raise PolicyError(PolicyCode.BAD_FRAME, f"{self._size - self._at} bytes follow the message")
        return value

    def _path(self) -> str:
        path = "$"
        for step in self._steps:
            path = f"{path}[{step}]" if isinstance(step, int) else child_path(path, step)
        return path

    def _value(self) -> object:
        lead = self._data[self._at]
        self._at += 1
        if lead < 0x80:
            return lead
        if lead >= 0xE0:
            return lead - 0x100
        if lead < 0x90:
            return self._map(lead & 0x0F)
        if lead < 0xA0:
            return self._array(lead & 0x0F)
        if lead < 0xC0:
            return self._string(lead & 0x1F)
        if lead in _CONSTANTS:
            return _CONSTANTS[lead]
        if (number := _NUMBERS.get(lead)) is not None:
            value: int | float = number.unpack(self._take(number.size))[0]
            return value
        if (width := _BINARY_SIZE.get(lead)) is not None:
            return self._take(self._length(width))
        if (width := _STRING_SIZE.get(lead)) is not None:
            return self._string(self._length(width))
        if (width := _ARRAY_SIZE.get(lead)) is not None:
            return self._array(self._length(width))
        if (width := _MAP_SIZE.get(lead)) is not None:
            return self._map(self._length(width))
        raise PolicyError(PolicyCode.BAD_FRAME, "msgpack extension types are not part of this protocol")

    def _take(self, size: int) -> memoryview:
        end = self._at + size
        if end > self._size:
            raise PolicyError(PolicyCode.BAD_FRAME, "the message ends too early")
        taken = self._view[self._at : end]
        self._at = end
        return taken

    def _length(self, width: int) -> int:
        return int.from_bytes(self._take(width), "big")

    def _string(self, size: int) -> str:
        if size > MAX_STRING_BYTES:
            raise PolicyError(PolicyCode.LIMIT_EXCEEDED, f"a text is longer than {MAX_STRING_BYTES} bytes")
        try:
            return str(self._take(size), "utf-8")
        except UnicodeDecodeError:
            raise PolicyError(PolicyCode.BAD_FRAME, "a text is not valid UTF-8") from None

    def _enter(self, count: int) -> None:
        """Admit the ``count`` values of a container. Each takes at least a byte, so a count beyond what is left is a lie."""
        if len(self._steps) >= MAX_DEPTH:
            raise PolicyError(PolicyCode.LIMIT_EXCEEDED, f"nested deeper than {MAX_DEPTH} levels")
        if count > self._size - self._at:
            raise PolicyError(PolicyCode.BAD_FRAME, "the message ends too early")
        self._items += count
        if self._items > MAX_ITEMS:
            raise PolicyError(PolicyCode.LIMIT_EXCEEDED, f"more than {MAX_ITEMS} values; send numbers as arrays")

    def _array(self, count: int) -> list[object]:
        self._enter(count)
        values = []
        for index in range(count):
            self._steps.append(index)
            values.append(self._value())
            self._steps.pop()
        return values

    def _map(self, count: int) -> object:
        if count == 4 and len(self._steps) < MAX_DEPTH - 1:
            known = self._shortcut(self._data, self._at)
            if known is not None and self._items + known[2] <= MAX_ITEMS:
                value, self._at, items = known
                self._items += items
                return value
        self._enter(2 * count)
        members: dict[str, object] = {}
        any_binary = False
        for _ in range(count):
            key, binary = self._key()
            any_binary |= binary
            self._steps.append(key)
            if key in members:
                raise PolicyError(PolicyCode.KEY_DUPLICATE, "this key comes twice")
            members[key] = self._value()
            self._steps.pop()
        return self._on_map(members, any_binary)

    def _key(self) -> tuple[str, bool]:
        """A key, and whether it was binary."""
        lead, start = self._data[self._at], self._at + 1
        if 0xA0 <= lead < 0xC0:
            size = lead & 0x1F
        elif lead in _SHORT_KEYS:
            size = self._data[start]
            start += 1
        elif lead in _STRING_SIZE or lead in _BINARY_SIZE:
            raise PolicyError(PolicyCode.LIMIT_EXCEEDED, "a key is longer than 255 bytes")
        else:
            raise PolicyError(PolicyCode.BAD_FRAME, "a key is not text")
        self._at = start + size
        if self._at > self._size:
            raise PolicyError(PolicyCode.BAD_FRAME, "the message ends too early")
        try:
            return self._data[start : self._at].decode(), lead == 0xC4
        except UnicodeDecodeError:
            raise PolicyError(PolicyCode.BAD_FRAME, "a key is not valid UTF-8") from None
