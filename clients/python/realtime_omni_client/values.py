"""What a session hands to its user: chunks and receipts.

Owns: these values.  Must not know: sockets, codecs.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from realtime_omni_protocols.world_messages import KvUse, Timings


@dataclass(frozen=True, eq=False)
class WorldChunk:
    """One committed block.

    ``frames`` is uint8 [F, H, W, 3] (F is 0 for format latent, then ``latents`` is float16 of the server's shape).
    ``applied_event_ids`` are the events this chunk is the first to reflect.
    """

    epoch: int
    chunk_index: int
    first_frame: int
    frame_count: int
    frames: NDArray[np.uint8]
    latents: NDArray[np.float16] | None
    applied_event_ids: tuple[int, ...]
    prompt: str | None
    timings_ms: Timings
    kv: KvUse

    def __repr__(self) -> str:
        """Of pictures and latents what they are and how much, not the numbers."""
        shown = []
        for each in fields(self):
            value = getattr(self, each.name)
            short = isinstance(value, np.ndarray)
            text = f"<{value.dtype} {list(value.shape)}, {value.nbytes} bytes>" if short else repr(value)
            shown.append(f"{each.name}={text}")
        return f"WorldChunk({', '.join(shown)})"


@dataclass(frozen=True)
class Outcome:
    """The terminal receipt of an event: the chunk that reflects it, or the reason why none will."""

    event_id: int
    status: Literal["applied", "discarded"]
    chunk_index: int | None = None
    first_frame: int | None = None
    reason: str | None = None


@dataclass(frozen=True, eq=False)
class Receipt:
    """An accepted event. ``await receipt.outcome()`` for its terminal receipt."""

    event_id: int
    status: Literal["accepted", "duplicate", "discarded"]
    pending: int
    prompt: str | None
    _outcome: asyncio.Future[Outcome] = field(repr=False)

    async def outcome(self) -> Outcome:
        """When the event was applied or discarded. In an on-demand session that takes a `next_chunk` by somebody."""
        return await asyncio.shield(self._outcome)


@dataclass(frozen=True)
class ClientStatistics:
    """Counts of one client."""

    state: str
    connections: int
    resumes: int
    chunks: int
    frames: int
    replayed_frames: int
    bytes_received: int
    events_sent: int
    events_refused: int
    events_applied: int
    events_discarded: int
    events_waiting: int
    chunks_waiting: int
    chunks_dropped_by_reset: int
    notices_dropped: int
