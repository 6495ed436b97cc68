"""What one socket of a voice says: each message acted upon as it comes, and no faster than it may.

Owns the order in which messages are acted upon. The counterpart of :mod:`realtime_omni.server.outgoing`; must not know a
protocol.
"""

from __future__ import annotations

from collections.abc import Callable

from realtime_omni.server.outgoing import Frame, PromptTransport
from realtime_omni.server.reading import ReadingPace


class Incoming:
    """One socket; ``act`` is called with every message. Run :meth:`run` in a task of the connection.

    A message is acted upon where it comes in, without a task's turn. The task has those that came too fast, whatever follows
    them, and those of a connection that offers none."""

    def __init__(self, transport: PromptTransport, pace: ReadingPace, act: Callable[[Frame], None]) -> None:
        self._transport = transport
        self._pace = pace
        self._act = act
        self._behind = False
        self._fault: Exception | None = None

    async def run(self) -> None:
        """Until the peer is gone (TransportLost); or raises what ``act`` raised, and nothing is acted upon any more."""
        self._transport.listen(self._take)
        try:
            while True:
                frame = await self._transport.receive()
                self._behind = True
                if self._fault is not None:
                    raise self._fault
                await self._pace.admit()
                self._act(frame)
                self._behind = False
        finally:
            self._behind = True

    def _take(self, frame: Frame) -> bool:
        if self._behind or self._fault is not None or not self._pace.admits():
            return False
        try:
            self._act(frame)
        except Exception as fault:  # no task of ours is here: the one that now receives the frame raises it
            self._fault = fault
            return False
        return True


__all__ = ["Incoming"]
