"""What one connection still has to send, in order and bounded; and the sender that encodes and writes it.

Owns the queue, the connection's encoder lane and the order of everything written. Numbered entries arrive raw; the sender
encodes them when their turn comes, so a cancelled connection loses nothing that the session's stream does not still hold.
Invariant: ``WorldServerSide`` sees every message at the moment it is written, under one lock, so its state is the wire's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from realtime_omni.media import EncodedFrame, EncodeLane
from realtime_omni.server.metrics import Metrics
from realtime_omni.server.transport import Transport
from realtime_omni_protocols.world import Close, ControlEntry, Entry, FrameEntry, WireState, WorldServerSide, close_code
from realtime_omni_protocols.world_messages import AnyServerMessage, Chunk, Format, SessionResetDone, SessionRewound

MAX_BATCHES = 64
"""Past this the reader stops reading. Media is bounded by credit; this bounds receipts to a client that does not read."""


class ConnectionEnded(Exception):
    """Control flow: the last word was written, or the peer is gone. Ends the connection's task group."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries that leave together. ``sent`` is called once the media is encoded, right before it is written."""

    entries: tuple[Entry, ...]
    replay: bool = False
    sent: Callable[[], None] | None = None
    since_s: float | None = None
    """A block that is measured: when it could first have been begun (``time.perf_counter``)."""
    model_s: float = 0.0
    """How much of that time the model worked."""
    fill: Callable[[], None] | None = None
    """Waits, in a thread, for media that a device is still copying."""


Item = Batch | AnyServerMessage | Close


class Outbox:
    """A bounded queue with one consumer."""

    def __init__(self, bound: int = MAX_BATCHES) -> None:
        self._items: deque[Item] = deque()
        self._bound = bound
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._sealed = False
        self.peak = 0

    def put(self, item: Item) -> None:
        """Queue without waiting: what the session emits is never lost. Nothing is taken after :meth:`seal`."""
        if self._sealed:
            return
        self._items.append(item)
        self.peak = max(self.peak, len(self._items))
        self._filled.set()
        if len(self._items) >= self._bound:
            self._room.clear()

    def seal(self, last: Sequence[Item]) -> None:
        """Replace what is queued by the connection's last words."""
        self._items.clear()
        for item in last:
            self.put(item)
        self._sealed = True
        self._filled.set()

    async def room(self) -> None:
        """Wait until the queue is below its bound (the reader calls this before it takes the next message)."""
        await self._room.wait()

    async def get(self) -> Item:
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        item = self._items.popleft()
        if len(self._items) < self._bound:
            self._room.set()
        return item

    def __len__(self) -> int:
        return len(self._items)


class Sender:
    """Writes the outbox to the transport."""

    def __init__(self, transport: Transport, side: WorldServerSide, metrics: Metrics) -> None:
        self.outbox = Outbox()
        self.lane: EncodeLane | None = None
        self.format: Format = "jpeg"
        self._transport = transport
        self._side = side
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._want_key = True

    def use(self, lane: EncodeLane, format_name: Format) -> None:
        """The encoder for this connection's media; its first frame is a key frame."""
        self.lane, self.format, self._want_key = lane, format_name, True

    def close(self) -> None:
        if self.lane is not None:
            self.lane.close()

    async def run(self) -> None:
        """Until the last word is written. Raises ConnectionEnded or TransportLost."""
        while True:
            item = await self.outbox.get()
            match item:
                case Batch():
                    await self._send_batch(item)
                case Close(code=code, reason=reason):
                    await self._transport.close(int(code), reason)
                    raise ConnectionEnded
                case _:
                    await self._send_message(item)

    async def send_now(self, message: AnyServerMessage) -> None:
        """Send an unnumbered answer past the queue, even while a block is being encoded."""
        await self._send_message(message)

    async def _send_message(self, message: AnyServerMessage) -> None:
        await self._send_messages((message,))

    async def _send_messages(self, messages: Sequence[AnyServerMessage]) -> None:
        async with self._lock:
            if self._side.state is WireState.CLOSED:
                return
            await self._transport.send(*map(self._side.send, messages))
        code = close_code(messages[-1])
        if code is not None:
            await self._transport.close(int(code), "")
            raise ConnectionEnded

    async def _send_batch(self, batch: Batch) -> None:
        if batch.fill is not None:
            await asyncio.to_thread(batch.fill)
        index, entries = 0, batch.entries
        ahead: list[AnyServerMessage] = []
        while index < len(entries):
            entry = entries[index]
            if isinstance(entry, ControlEntry) and not isinstance(entry.message, Chunk):
                self._want_key |= isinstance(entry.message, SessionResetDone | SessionRewound)
                ahead.append(entry.message)
                index += 1
                continue
            head = entry.message if isinstance(entry, ControlEntry) else None
            frames: list[FrameEntry] = []
            index += head is not None
            while index < len(entries) and isinstance(frame := entries[index], FrameEntry):
                frames.append(frame)
                index += 1
            await self._send_block(ahead, head, frames, batch)
            ahead = []
            if batch.replay:
                await asyncio.sleep(0)  # a replay may be long, and small frames are encoded on this very loop
        if ahead:
            await self._send_messages(ahead)

    async def _send_block(
        self, ahead: Sequence[AnyServerMessage], head: Any, frames: list[FrameEntry], batch: Batch
    ) -> None:
        """Encode, then hand everything to the transport in one piece: a block costs one write."""
        begun = time.perf_counter()
        encoded = await self._encode([frame.media for frame in frames])
        took_s = time.perf_counter() - begun
        self._metrics.observe("encode_seconds", took_s, format=self.format)
        if batch.sent is not None:
            batch.sent()
        async with self._lock:
            if self._side.state is WireState.CLOSED:
                return
            messages: list[str | bytes] = [self._side.send(message) for message in ahead]
            if head is not None:
                timings = replace(head.timings_ms, encode=round(took_s * 1000, 3))
                messages.append(self._side.send(replace(head, timings_ms=timings)))
            for entry, (payload, is_key) in zip(frames, encoded, strict=True):
                header = entry.header(format=self.format, key=is_key, payload_bytes=len(payload), replay=batch.replay)
                messages.append(self._side.send_frame(header, payload))
            await self._transport.send(*messages)
        if batch.since_s is not None:
            assert self.lane is not None
            other_s = batch.model_s + self.lane.worked_s
            asyncio.get_running_loop().call_soon(self._measure, batch.since_s + other_s)  # behind the socket's write
        self._metrics.count("frames_total", len(frames), format=self.format)
        self._metrics.count("media_bytes_total", sum(len(frame.payload) for frame in encoded), format=self.format)

    def _measure(self, ideal_s: float) -> None:
        self._metrics.observe("control_plane_seconds", max(0.0, time.perf_counter() - ideal_s))

    async def _encode(self, media: Sequence[object]) -> list[EncodedFrame]:
        assert self.lane is not None
        arrays: list[npt.NDArray[np.generic]] = [item for item in media if isinstance(item, np.ndarray)]
        encoded = await self.lane.encode(arrays, key=self._want_key)
        self._want_key = False
        return encoded
