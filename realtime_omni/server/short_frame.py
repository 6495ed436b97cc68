"""A short message on its way in: read where it lies, when it came whole.

A block of a world comes with three messages of fifty bytes; websockets' parser, which can stop after every byte, takes ten
calls for each. Owns nothing. Must not know sockets; every frame that is not short, whole and text is websockets' business.
"""

from __future__ import annotations

try:
    from websockets.speedups import apply_mask
except ImportError:  # built without its C part
    from websockets.utils import apply_mask

_WHOLE_TEXT, _MASKED = 0x81, 0x80
_ONE_BYTE, _TWO_BYTES = 125, 126
"""A length up to 125 stands in the head; 126 says that it follows in two bytes (RFC 6455, 5.2)."""


def read_short(data: bytes, at: int, most_bytes: int) -> tuple[bytes, int] | None:
    """The payload of the frame that begins at ``at`` and where the next one would; None when that is no business of ours, or
    its message has more than ``most_bytes`` bytes."""
    end = len(data)
    if end - at < 6 or data[at] != _WHOLE_TEXT or data[at + 1] < _MASKED:
        return None
    size, at = data[at + 1] - _MASKED, at + 2
    if size > _ONE_BYTE:
        if size != _TWO_BYTES:
            return None
        size, at = int.from_bytes(data[at : at + 2], "big"), at + 2
        if size < _TWO_BYTES:
            return None  # not the shortest form: websockets says what it thinks of it
    begin, stop = at + 4, at + 4 + size
    if stop > end or size > most_bytes:
        return None
    return apply_mask(data[begin:stop], data[at:begin]), stop


__all__ = ["read_short"]
