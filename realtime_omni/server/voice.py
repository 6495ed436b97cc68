"""What the voice endpoints share: the calls of one server, and that each of them ends.

Owns the connections of every voice protocol and the calls that they opened, each of which is closed on every way out. Must not
know a wire or a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from realtime_omni.errors import CapacityError, OmniError
from realtime_omni.server.clock import Clock, LoopClock
from realtime_omni.server.codes import describe_error
from realtime_omni.server.metrics import Metrics
from realtime_omni.server.reading import ReadingPace
from realtime_omni.server.settings import ServerSettings

if TYPE_CHECKING:
    from realtime_omni.call import Call, Calls
    from realtime_omni.duplex.spec import DuplexSpec

_log = logging.getLogger(__name__)

VoiceProtocol: TypeAlias = Literal["live", "moshi", "realtime"]
MAX_SESSION_S = 24 * 3600.0
"""A call that is forgotten does not stay for ever; protocols that have a field for it say when it ends."""


class VoiceHub:
    """The voice endpoints of one server."""

    def __init__(
        self,
        calls: Calls,
        model: str,
        settings: ServerSettings,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
        max_session_s: float = MAX_SESSION_S,
    ) -> None:
        self.calls = calls
        self.model = model
        self.settings = settings
        self.metrics = metrics if metrics is not None else Metrics()
        self.clock = clock if clock is not None else LoopClock()
        self.max_session_s = max_session_s
        self.connections = 0
        self.stopped = asyncio.Event()
        self._closing: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def spec(self) -> DuplexSpec:
        return self.calls.spec

    @property
    def stopping(self) -> bool:
        return self.stopped.is_set()

    @property
    def full(self) -> bool:
        """No more connections."""
        return self.connections >= self.settings.max_connections

    def reading_pace(self) -> ReadingPace:
        """Of a new connection."""
        return ReadingPace(self.clock, self.settings.max_messages_per_s)

    @contextlib.contextmanager
    def connection(self, protocol: VoiceProtocol) -> Iterator[None]:
        """A connection is served inside."""
        self.connections += 1
        self._idle.clear()
        self.metrics.add("voice_connections", 1, protocol=protocol)
        try:
            yield
        finally:
            self.metrics.add("voice_connections", -1, protocol=protocol)
            self.connections -= 1
            if not self.connections:
                self._idle.set()

    async def opened(self, opening: Coroutine[Any, Any, Call]) -> Call:
        """The call that ``opening`` makes. Whoever is cancelled meanwhile leaves none behind. Raises OmniError."""
        if self.stopping:
            opening.close()
            raise CapacityError("the server stops")
        task = self.keep(opening)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.keep(self._abandon(task))
            raise

    async def _abandon(self, opening: asyncio.Task[Call]) -> None:
        with contextlib.suppress(Exception):  # whoever wanted the call would have been told
            await self._close(await opening, "client")

    async def release(self, call: Call, reason: str = "client") -> None:
        """Close the call, to the end even when the caller is cancelled."""
        await asyncio.shield(self.keep(self._close(call, reason)))

    async def _close(self, call: Call, reason: str) -> None:
        try:
            await call.close(reason)
        except OmniError as error:  # the engine keeps a tombstone and tries again
            describe_error(error, doing="close", session=call.id)

    def keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Work that goes to its end whatever becomes of its caller; :meth:`shutdown` waits for it."""
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def shutdown(self, timeout_s: float) -> None:
        """Say the last word on every connection and close every call, within a bound."""
        self.stopped.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                while self._closing:
                    await asyncio.wait(self._closing)
        except TimeoutError:
            _log.warning("shutdown: %d connections, %d calls are left", self.connections, len(self.calls))

    def close(self) -> None:
        """Nothing is held beyond `shutdown`."""


__all__ = ["MAX_SESSION_S", "VoiceHub", "VoiceProtocol"]
