"""What `WorldSessionStream` hands out: entries of the numbered stream, limits, counts.

Owns: these frozen values.  Must not know: how they are made or sent.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import TypeAlias

from msgspec import Struct

from .world_frames import FrameHeader
from .world_messages import AnySessionMessage, Format, SessionResumed
from .world_table import WireState


class StreamLimits(Struct, frozen=True, kw_only=True):
    """``max_entries`` and ``max_bytes`` (of media) bound what an unacknowledging client can make us keep; past either the
    oldest is forgotten (then a resume from before it is refused). A healthy client acknowledges within a block or two, so
    1,024 entries are hundreds of blocks; 128 MiB are a hundred raw frames of 480 x 832."""

    max_entries: int = 1_024
    max_bytes: int = 128 << 20
    stall_timeout_s: float = 60.0
    grace_s: float = 30.0


class Standing(Struct, frozen=True):
    """Where the session stood after an entry: what `session.resumed` tells."""

    state: WireState
    epoch: int
    next_frame: int


class ControlEntry(Struct, frozen=True, kw_only=True):
    seq: int
    message: AnySessionMessage
    after: Standing


class FrameEntry(Struct, frozen=True, kw_only=True):
    """One binary frame. ``frame`` is its (first) video frame, ``media`` whatever the server wants to keep of it."""

    seq: int
    epoch: int
    chunk_index: int
    index: int
    last: bool
    frame: int
    applied_event_id: int | None
    pts_ms: int
    media: object
    after: Standing

    @property
    def media_bytes(self) -> int:
        """How much ``media`` holds: an array's ``nbytes``, or the length of bytes."""
        nbytes = getattr(self.media, "nbytes", None)
        return int(nbytes) if nbytes is not None else len(self.media) if isinstance(self.media, Sized) else 0

    def header(
        self,
        *,
        format: Format,  # noqa: A002 (the wire's name)
        key: bool,
        payload_bytes: int,
        replay: bool = False,
    ) -> FrameHeader:
        return FrameHeader(
            format=format,
            key=key,
            last=self.last,
            replay=replay,
            index=self.index,
            seq=self.seq,
            epoch=self.epoch,
            chunk_index=self.chunk_index,
            frame=self.frame,
            applied_event_id=self.applied_event_id,
            pts_ms=self.pts_ms,
            payload_bytes=payload_bytes,
        )


Entry: TypeAlias = ControlEntry | FrameEntry


class ResumePlan(Struct, frozen=True):
    """Send ``resumed`` first, then the entries, then whatever is emitted next."""

    resumed: SessionResumed
    entries: tuple[Entry, ...]


class StreamStatistics(Struct, frozen=True, kw_only=True):
    state: str
    last_seq: int
    acked_seq: int
    entries: int
    entries_peak: int
    media_bytes: int
    forgotten: int
    epoch: int
    generated: int
    displayed: int
    asks: int
    open_events: int
    events_accepted: int
    events_applied: int
    events_discarded: int
    chunks: int
    resumes: int
