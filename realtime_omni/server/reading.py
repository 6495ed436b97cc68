"""How fast a connection is read, so that a flood of small messages waits in its own socket and not in everybody's turn.

Owns the count of one connection. Must not know a protocol. The world protocol has a rule of its own: its floods end.
"""

from __future__ import annotations

import asyncio

from realtime_omni.server.clock import Clock
from realtime_omni_protocols.world_server import TokenBucket


class ReadingPace:
    """How fast one connection is read. Who sends faster is read more slowly and loses nothing; its socket fills up."""

    def __init__(self, clock: Clock, messages_per_s: float) -> None:
        self._clock = clock
        self._bucket = TokenBucket(messages_per_s, clock.now_s())
        self._never = asyncio.Event()

    def admits(self) -> bool:
        """Whether a message may be acted upon now; if so, it is counted."""
        return self._bucket.take(1, self._clock.now_s())

    async def admit(self, messages: int = 1) -> None:
        """Returns when what was received, as so many messages, may be acted upon."""
        while not self._bucket.take(messages, self._clock.now_s()):
            await self._clock.wait(self._never, self._clock.now_s() + 1 / self._bucket.rate)


__all__ = ["ReadingPace"]
