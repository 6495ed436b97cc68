"""What one connection still has to send, in order and bounded; and the sender that encodes and writes it.

Owns the queue, the connection's encoder lane and the order of everything written. Numbered entries arrive raw; the sender
encodes them when their turn comes, so a cancelled connection loses nothing that the session's stream does not still hold.
Where nothing has to be waited for (a small picture, a socket with room), a block is written the moment it is queued, and
what waits before it with it, in one piece: a task's turn and a second write cost more than such a block. The rest is the
task's.
Invariant: ``WorldServerSide`` sees every message at the moment it is written, under one lock, so its state is the wire's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class _Written(NamedTuple):
    """A block as it was written. ``took_s``: the encoding with the wait for a thread, ``worked_s`` without."""

    encoded: list[EncodedFrame]
    took_s: float
    worked_s: float
    batch: Batch


@dataclass(frozen=True, slots=True)
class Stamped:
    """Messages that the wire machine has seen, and for which the socket had no room."""

    messages: list[str | bytes]


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong where no task was that could raise it."""

    error: Exception


Item = Batch | AnyServerMessage | Close | Stamped | Fault


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
        self.add(item)
        self.wake()

    def add(self, item: Item) -> None:
        """:meth:`put` without waking the consumer: whoever calls it sees to the item soon."""
        if self._sealed:
            return
        self._items.append(item)
        self.peak = max(self.peak, len(self._items))
        if len(self._items) >= self._bound:
            self._room.clear()

    def wake(self) -> None:
        """The consumer looks."""
        if self._items:
            self._filled.set()

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
        return self.pop()

    def put_first(self, item: Item) -> None:
        """In front of everything, also of the last words."""
        self._items.appendleft(item)
        self.wake()

    def pop(self) -> Item:
        """The oldest item."""
        item = self._items.popleft()
        if self.has_room:
            self._room.set()
        return item

    @property
    def has_room(self) -> bool:
        """Whether the queue is below its bound."""
        return len(self._items) < self._bound

    @property
    def first(self) -> Item | None:
        """The oldest item, which stays."""
        return self._items[0] if self._items else None

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
        self._busy = self._flushing = self._closed = False

    def use(self, lane: EncodeLane, format_name: Format) -> None:
        """The encoder for this connection's media; its first frame is a key frame."""
        self.lane, self.format, self._want_key = lane, format_name, True

    def close(self) -> None:
        self._closed = True
        if self.lane is not None:
            self.lane.close()

    def put(self, item: Batch | AnyServerMessage) -> None:
        """Queue behind everything queued before. A block leaves now if it can, and what waits before it with it; anything
        else in the loop's next round, or with the block that comes until then."""
        self.outbox.add(item)
        if isinstance(item, Batch) and item.sent is not None:
            self._flush()
        elif not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def run(self) -> None:
        """Until the last word is written. Raises ConnectionEnded or TransportLost."""
        while True:
            item = await self.outbox.get()
            self._busy = True
            match item:
                case Batch():
                    await self._send_batch(item)
                case Close(code=code, reason=reason):
                    await self._transport.close(int(code), reason)
                    raise ConnectionEnded
                case Stamped(messages=messages):
                    async with self._lock:
                        await self._transport.send(*messages)
                case Fault(error=error):
                    raise error
                case _:
                    await self._send_message(item)
            self._busy = False

    async def send_now(self, message: AnyServerMessage) -> None:
        """Send an unnumbered answer past the queue, even while a block is being encoded."""
        await self._send_message(message)

    # -- at once -------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Write, in one piece, what waits: up to the first item that has to wait for something. That is the task's."""
        self._flushing = False
        if self._closed or self._busy or self._lock.locked():
            self.outbox.wake()
            return
        messages: list[str | bytes] = []
        blocks: list[_Written] = []
        try:
            while (item := self.outbox.first) is not None and self._is_quick(item):
                self.outbox.pop()
                messages += self._made(item, blocks)
        except Exception as error:  # ours; the caller is a callback of the engine's answer, or the driver of a block
            self.outbox.put_first(Fault(error))
        if messages and not self._transport.put(messages):
            self.outbox.put_first(Stamped(messages))
        self._account(blocks)
        self.outbox.wake()

    def _is_quick(self, item: Item) -> bool:
        """Nothing has to be waited for, and the connection goes on behind it."""
        if not isinstance(item, Batch):
            return not isinstance(item, Close | Stamped | Fault) and close_code(item) is None
        if item.replay or item.fill is not None:
            return False
        media: list[object] = []
        for entry in item.entries:
            if isinstance(entry, FrameEntry):
                media.append(entry.media)
            elif close_code(entry.message) is not None:
                return False
        return not media or (self.lane is not None and self.lane.is_quick(_arrays(media)))

    def _made(self, item: Item, blocks: list[_Written]) -> list[str | bytes]:
        """The wire's messages of an item for which :meth:`_is_quick` holds, and its blocks; nothing when the connection is
        over."""
        if self._side.state is WireState.CLOSED:
            return []
        if not isinstance(item, Batch):
            assert not isinstance(item, Close | Stamped | Fault)
            return [self._side.send(item)]
        messages: list[str | bytes] = []
        for ahead, head, frames in self._blocks(item.entries):
            if not frames:
                messages += map(self._side.send, ahead)
                continue
            assert self.lane is not None
            begun = time.perf_counter()
            encoded = self.lane.encode_now(_arrays([frame.media for frame in frames]), key=self._want_key)
            took_s = time.perf_counter() - begun
            messages += self._stamped(ahead, head, frames, encoded, took_s, item)
            blocks.append(_Written(encoded, took_s, self.lane.worked_s, item))
        return messages

    # -- with waiting --------------------------------------------------------------------------------------------------

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
        for ahead, head, frames in self._blocks(batch.entries):
            if not frames:
                await self._send_messages(ahead)
                continue
            await self._send_block(ahead, head, frames, batch)
            if batch.replay:
                await asyncio.sleep(0)  # a replay may be long, and small frames are encoded on this very loop

    async def _send_block(
        self, ahead: Sequence[AnyServerMessage], head: Chunk | None, frames: list[FrameEntry], batch: Batch
    ) -> None:
        """Encode, then hand everything to the transport in one piece: a block costs one write."""
        assert self.lane is not None
        begun = time.perf_counter()
        encoded = await self.lane.encode(_arrays([frame.media for frame in frames]), key=self._want_key)
        took_s = time.perf_counter() - begun
        async with self._lock:
            if self._side.state is WireState.CLOSED:
                return
            worked_s = self.lane.worked_s
            await self._transport.send(*self._stamped(ahead, head, frames, encoded, took_s, batch))
        self._account([_Written(encoded, took_s, worked_s, batch)])

    # -- both ----------------------------------------------------------------------------------------------------------

    def _blocks(self, entries: Sequence[Entry]) -> Iterator[_Block]:
        """What leaves in one piece: control messages, then a chunk and its frames."""
        ahead: list[AnyServerMessage] = []
        index = 0
        while index < len(entries):
            entry = entries[index]
            if isinstance(entry, ControlEntry) and not isinstance(entry.message, Chunk):
                self._want_key |= isinstance(entry.message, SessionResetDone | SessionRewound)
                ahead.append(entry.message)
                index += 1
                continue
            head = entry.message if isinstance(entry, ControlEntry) and isinstance(entry.message, Chunk) else None
            index += head is not None
            frames: list[FrameEntry] = []
            while index < len(entries) and isinstance(frame := entries[index], FrameEntry):
                frames.append(frame)
                index += 1
            yield ahead, head, frames
            ahead = []
        if ahead:
            yield ahead, None, []

    def _stamped(
        self,
        ahead: Sequence[AnyServerMessage],
        head: Chunk | None,
        frames: list[FrameEntry],
        encoded: list[EncodedFrame],
        took_s: float,
        batch: Batch,
    ) -> list[str | bytes]:
        """The wire's messages of a block that is encoded and about to be written."""
        self._want_key = False
        if batch.sent is not None:
            batch.sent()
        messages: list[str | bytes] = [self._side.send(message) for message in ahead]
        if head is not None:
            timings = replace(head.timings_ms, encode=round(took_s * 1000, 3))
            messages.append(self._side.send(replace(head, timings_ms=timings)))
        for entry, (payload, is_key) in zip(frames, encoded, strict=True):
            header = entry.header(format=self.format, key=is_key, payload_bytes=len(payload), replay=batch.replay)
            messages.append(self._side.send_frame(header, payload))
        return messages

    def _account(self, blocks: Sequence[_Written]) -> None:
        """Count blocks that were just written, and what they waited for beside the model and the encoder."""
        written_s, metrics, name = time.perf_counter(), self._metrics, self.format
        for block in blocks:
            metrics.observe("encode_seconds", block.took_s, format=name)
            metrics.count("frames_total", len(block.encoded), format=name)
            metrics.count("media_bytes_total", sum([len(frame.payload) for frame in block.encoded]), format=name)
            since_s = block.batch.since_s
            if since_s is not None:
                waited_s = written_s - since_s - block.batch.model_s - block.worked_s
                metrics.observe("control_plane_seconds", max(0.0, waited_s))


_Block = tuple[list[AnyServerMessage], Chunk | None, list[FrameEntry]]


def _arrays(media: Sequence[object]) -> list[npt.NDArray[np.generic]]:
    return [item for item in media if isinstance(item, np.ndarray)]
