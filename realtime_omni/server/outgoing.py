"""What one socket of a voice still has to take: frames in order, bounded, written at once where there is room.

Owns the order of everything that is written to one socket. Whoever produces sound waits for `room` before it reads on, so a
slow client makes its session's journal drop sound and not this queue grow; answers to commands never wait, and a client
that sends commands and takes nothing is cut off at the bound.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from realtime_omni.server.outbox import ConnectionEnded
from realtime_omni.server.transport import TransportLost

Frame: TypeAlias = str | bytes
MAX_WAITING_BYTES = 4 * 1024 * 1024
ROOM_BYTES = 64 * 1024
"""More than this waits: no sound is added. About a second of PCM16 at 24 kHz in base64."""


class PromptTransport(Protocol):
    """An accepted WebSocket that can be written to without waiting, where there is room."""

    def put(self, frames: Sequence[Frame]) -> bool:
        """Write now; False, and nothing is written, when that would wait."""
        ...

    def listen(self, take: Callable[[Frame], bool]) -> None:
        """See :meth:`.transport.Transport.listen`."""
        ...

    async def receive(self) -> Frame: ...
    async def send(self, *frames: Frame) -> None: ...
    async def close(self, code: int, reason: str) -> None: ...


class Outgoing:
    """One socket. Run :meth:`run` in a task beside the one that reads."""

    def __init__(self, transport: PromptTransport) -> None:
        self._transport = transport
        self._frames: deque[Frame] = deque()
        self._bytes = 0
        self._writing = self._overrun = False
        self._last: tuple[int, str] | None = None
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def put(self, frame: Frame) -> None:
        """Behind everything before it; nothing after :meth:`close`. When too much waits, :meth:`run` gives up."""
        if self._last is not None or self._overrun:
            return
        if not self._writing and not self._frames and self._transport.put((frame,)):
            return
        self._frames.append(frame)
        self._bytes += len(frame)
        self._overrun = self._bytes > MAX_WAITING_BYTES
        if self._bytes > ROOM_BYTES:
            self._room.clear()
        self._filled.set()

    def close(self, code: int, reason: str) -> None:
        """Behind everything before it, the connection ends."""
        if self._last is None:
            self._last = (code, reason)
            self._filled.set()

    @property
    def has_room(self) -> bool:
        """Whether more sound may be added now."""
        return self._room.is_set()

    async def room(self) -> None:
        """Returns when more sound may be added."""
        await self._room.wait()

    async def run(self) -> None:
        """Write to the end. Raises ConnectionEnded after the close, TransportLost."""
        while True:
            await self._filled.wait()
            while self._frames:
                if self._overrun:
                    raise TransportLost
                frame = self._frames.popleft()
                self._writing = True
                await self._transport.send(frame)
                self._writing = False
                self._bytes -= len(frame)
                if self._bytes <= ROOM_BYTES:
                    self._room.set()
            if self._last is not None:
                await self._transport.close(*self._last)
                raise ConnectionEnded
            self._filled.clear()


__all__ = ["Outgoing", "PromptTransport"]
