"""A long message on its way in: unmasked piece by piece as it comes, and put together once.

websockets gathers a frame in a buffer that grows, cuts it out, and unmasks the copy, the last two after its last byte came: a
robot's 450 kB of pictures are moved twice more than they need be. Owns one unfinished frame. Must not know sockets; every
frame that is not long, whole and binary is websockets' own business.
"""

from __future__ import annotations

import struct

try:
    from websockets.speedups import apply_mask
except ImportError:  # built without its C part
    from websockets.utils import apply_mask

LONG_BYTES = 65_536
"""From here on a frame's length has eight bytes (RFC 6455, 5.2)."""
_HEAD = struct.Struct("!BBQ4s")
_WHOLE_BINARY, _MASKED_64 = 0x82, 0xFF


class LongFrame:
    """Feed it with :meth:`take` until :attr:`done`."""

    def __init__(self, size: int, mask: bytes) -> None:
        self._left = size
        self._mask = mask
        self._pieces: list[bytes] = []

    @classmethod
    def begin(cls, data: bytes, most_bytes: int) -> tuple[LongFrame, memoryview] | None:
        """The frame whose head ``data`` begins with, and what follows the head; None when that is no business of ours, or its
        message has more than ``most_bytes`` bytes."""
        if len(data) < _HEAD.size or data[0] != _WHOLE_BINARY or data[1] != _MASKED_64:
            return None
        _, _, size, mask = _HEAD.unpack_from(data)
        if not LONG_BYTES <= size <= most_bytes:
            return None
        return cls(size, mask), memoryview(data)[_HEAD.size :]

    @property
    def done(self) -> bool:
        return not self._left

    def take(self, data: memoryview) -> memoryview:
        """Take in what belongs to the frame; returns the rest."""
        part = data[: self._left]
        self._left -= len(part)
        pieces = self._pieces
        pieces.append(apply_mask(part, self._mask))
        turn = len(part) % 4
        self._mask = self._mask[turn:] + self._mask[:turn]
        while len(pieces) > 1 and len(pieces[-1]) >= len(pieces[-2]):  # so that many small ones stay few
            pieces[-2:] = [pieces[-2] + pieces[-1]]
        return data[len(part) :]

    def message(self) -> bytes:
        """The message, once it is done."""
        return b"".join(self._pieces)


__all__ = ["LONG_BYTES", "LongFrame"]
