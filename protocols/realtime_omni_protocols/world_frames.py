"""The 48-byte header of a binary frame (world.md section 4).

Owns: the byte layout and its strict check.  Must not know: sessions, codecs.
Invariant: `unpack_frame` returns a header whose every field is in range and whose payload length is the true one, or raises
`WireError`; ``unpack_frame(pack_frame(header, payload))`` is the same header and payload.
"""

from __future__ import annotations

import struct

from msgspec import Struct

from .envelope import MAX_SAFE_INT
from .errors import WireCode, WireError
from .world_messages import U32_MAX, Format

MAGIC = 0x4F52
VERSION = 1
HEADER_BYTES = 48
MAX_HEADER_BYTES = 1_024
"""A later header may be longer; a reader skips the rest, within reason."""
NO_EVENT = 2**64 - 1
FLAG_KEY, FLAG_LAST, FLAG_REPLAY = 1, 2, 4

_LAYOUT = struct.Struct("<HBBBBHQIIQQII")
assert _LAYOUT.size == HEADER_BYTES

FORMAT_NUMBERS: dict[Format, int] = {"h264": 1, "jpeg": 2, "rgb24": 3, "latent": 4}
FORMAT_NAMES: dict[int, Format] = {number: name for name, number in FORMAT_NUMBERS.items()}


class FrameHeader(Struct, frozen=True, kw_only=True):
    """What the header says. ``index`` counts binary frames in the chunk, ``frame`` video frames in the epoch."""

    format: Format
    key: bool
    last: bool
    index: int
    seq: int
    epoch: int
    chunk_index: int
    frame: int
    pts_ms: int
    payload_bytes: int
    applied_event_id: int | None = None
    replay: bool = False


def pack_frame(header: FrameHeader, payload: bytes | memoryview) -> bytes:
    """Header and payload as one message. ``ValueError`` when a value does not fit: that is the caller's bug."""
    if header.payload_bytes != len(payload):
        raise ValueError(f"payload_bytes is {header.payload_bytes}, the payload has {len(payload)}")
    flags = FLAG_KEY * header.key | FLAG_LAST * header.last | FLAG_REPLAY * header.replay
    event = NO_EVENT if header.applied_event_id is None else header.applied_event_id
    try:
        packed = _LAYOUT.pack(
            MAGIC,
            VERSION,
            FORMAT_NUMBERS[header.format],
            flags,
            header.index,
            HEADER_BYTES,
            header.seq,
            header.epoch,
            header.chunk_index,
            header.frame,
            event,
            header.pts_ms,
            header.payload_bytes,
        )
    except struct.error as error:
        raise ValueError(f"a header field is out of range: {error}") from None
    return packed + bytes(payload)


def unpack_frame(data: bytes | memoryview) -> tuple[FrameHeader, memoryview]:
    """Header and payload (a view, nothing is copied)."""
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise _refused("$", f"a frame has at least {HEADER_BYTES} bytes")
    magic, version, number, flags, index, header_bytes, seq, epoch, chunk, frame, event, pts, size = (
        _LAYOUT.unpack_from(view)
    )
    if magic != MAGIC:
        raise _refused("$.magic", "not a frame of this protocol")
    if version != VERSION:
        raise WireError(WireCode.UNSUPPORTED_VERSION, f"header version {version} is unknown", path="$.version")
    if number not in FORMAT_NAMES:
        raise WireError(WireCode.UNSUPPORTED_FORMAT, f"format {number} is unknown", path="$.format")
    if flags & ~(FLAG_KEY | FLAG_LAST | FLAG_REPLAY):
        raise _refused("$.flags", "a reserved flag is set")
    if not HEADER_BYTES <= header_bytes <= MAX_HEADER_BYTES:
        raise _refused("$.header_bytes", f"the header length is {HEADER_BYTES} to {MAX_HEADER_BYTES}")
    if not 1 <= seq <= MAX_SAFE_INT:
        raise _refused("$.seq", "seq is 1 to 2^53")
    if frame > MAX_SAFE_INT:
        raise _refused("$.frame", "the frame index is at most 2^53")
    if event != NO_EVENT and event > MAX_SAFE_INT:
        raise _refused("$.applied_event_id", "an event id is at most 2^53")
    if size == 0 or header_bytes + size != len(view):
        raise _refused("$.payload_bytes", "the payload length does not fit the message")
    header = FrameHeader(
        format=FORMAT_NAMES[number],
        key=bool(flags & FLAG_KEY),
        last=bool(flags & FLAG_LAST),
        replay=bool(flags & FLAG_REPLAY),
        index=index,
        seq=seq,
        epoch=epoch,
        chunk_index=chunk,
        frame=frame,
        pts_ms=pts,
        payload_bytes=size,
        applied_event_id=None if event == NO_EVENT else event,
    )
    return header, view[header_bytes:]


def pts_ms(frame: int, fps: float) -> int:
    """Presentation time of a frame, ms from the epoch's first frame, kept inside the header's 32 bits (49 days)."""
    return round(frame * 1000 / fps) & U32_MAX


def _refused(path: str, message: str) -> WireError:
    return WireError(WireCode.BAD_MESSAGE, message, path=path)
