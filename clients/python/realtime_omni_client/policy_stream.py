"""`PolicyStream`: a robot whose control loop never waits for its policy.

    async with PolicyStream.connect("ws://127.0.0.1:8000", control_hz=15) as robot:
        for tick in itertools.count():
            await robot.observe(look(), tick)            # the newest observation wins
            action = robot.actions.pop(tick)             # None: nothing planned yet, hold still
            ...

Owns: the background task that receives chunks, merges them and resumes a lost connection.  Must not know: the rules of
the wire (`StreamClientSide`), how chunks are merged (`ActionQueue`). One event loop, no threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Self

from realtime_omni_protocols.openpi import (
    STREAM_PROTOCOL,
    PolicyError,
    PolicyServerError,
    StreamClientSide,
    StreamState,
)
from realtime_omni_protocols.openpi.stream_messages import (
    ActionChunk,
    Closed,
    ErrorMessage,
    Hello,
    ResetDone,
    Resumed,
    Started,
)

from .actions import ActionQueue
from .errors import ConnectError, ConnectionLostError, ProtocolViolation, SessionClosedError, WorldError
from .link import Reconnect
from .policy import policy_url
from .transport import Connector, Transport, TransportClosedError, websocket_connector

MAX_EVENTS = 64
DEFAULT_RECONNECT = Reconnect()


class PolicyStream:
    """One session. Make it with `connect`, use it as an async context manager. ``actions`` is the robot's plan."""

    def __init__(
        self,
        connector: Connector,
        *,
        control_hz: float | None = None,
        session_id: str | None = None,
        reconnect: Reconnect = DEFAULT_RECONNECT,
        timeout_s: float = 30.0,
        rng: random.Random | None = None,
    ) -> None:
        self.actions = ActionQueue()
        self.side = StreamClientSide()
        self.metadata: Mapping[str, Any] = {}
        self._connector = connector
        self._control_hz = control_hz
        self._label = session_id
        self._reconnect = reconnect
        self._timeout_s = timeout_s
        self._rng = rng or random.Random()  # noqa: S311 (jitter, not a secret)
        self._transport: Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._events: deque[ActionChunk | PolicyServerError] = deque(maxlen=MAX_EVENTS)
        self._ended: Exception | None = None
        self._failures = 0

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        control_hz: float | None = None,
        session_id: str | None = None,
        api_key: str | None = None,
        reconnect: Reconnect = DEFAULT_RECONNECT,
        timeout_s: float = 30.0,
    ) -> PolicyStream:
        """A stream that is not connected yet; ``async with`` connects. ``url`` may leave out the path."""
        connector = websocket_connector(
            policy_url(url), api_key=api_key, open_timeout_s=timeout_s, protocol=STREAM_PROTOCOL
        )
        return cls(connector, control_hz=control_hz, session_id=session_id, reconnect=reconnect, timeout_s=timeout_s)

    async def __aenter__(self) -> Self:
        """Connect and start: `ConnectError`, `PolicyServerError` (no free session) or a live session."""
        self._task = asyncio.create_task(self._run(), name="realtime_omni policy stream")
        try:
            await self._wait(lambda: self.side.state is StreamState.LIVE)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- what a robot does

    async def observe(
        self,
        observation: Mapping[str, Any],
        tick: int,
        *,
        captured_ms: float | None = None,
        seed: int | None = None,
        steps: int | None = None,
        rtc: str | None = None,
    ) -> bool:
        """Send the newest observation; False when the connection is being resumed or a reset is under way (send the
        next). ``rtc``: how its chunk continues the one before, where ``metadata["rtc_modes"]`` offers a choice."""
        self._raise_if_ended()
        if self.side.state is not StreamState.LIVE or self._transport is None:
            return False
        frame = self.side.observe(
            observation, tick, captured_ms=captured_ms, consumed=self.actions.consumed, seed=seed, steps=steps, rtc=rtc
        )
        try:
            await self._transport.send(frame)
        except TransportClosedError:
            return False  # the background task resumes
        return True

    async def next_chunk(self) -> ActionChunk:
        """The next chunk (it is merged into ``actions`` already); the refusal of an observation is raised here."""
        while (chunk := self.poll_chunk()) is None:
            self._changed.clear()
            await self._changed.wait()
        return chunk

    def poll_chunk(self) -> ActionChunk | None:
        """As `next_chunk`, for a loop that does not wait: None when nothing has come since."""
        if not self._events:
            self._raise_if_ended()
            return None
        event = self._events.popleft()
        if isinstance(event, PolicyServerError):
            raise event
        return event

    async def reset(self) -> None:
        """A new episode. Nothing of the old one is executed from here on; returns when the server has dropped it
        too."""
        await self._wait(lambda: self.side.state is StreamState.LIVE)
        assert self._transport is not None
        frame = self.side.reset()
        epoch = self.side.epoch
        self.actions.reset(epoch)
        self._events.clear()
        with contextlib.suppress(TransportClosedError):  # then the resumed connection says it again
            await self._transport.send(frame)
        await self._wait(lambda: self.side.state is StreamState.LIVE and self.side.epoch >= epoch)

    async def close(self) -> None:
        """End the session and the connection. Harmless when repeated."""
        if self._ended is None and self._transport is not None and self.side.state is StreamState.LIVE:
            with contextlib.suppress(TransportClosedError, WorldError, TimeoutError, PolicyServerError):
                await self._transport.send(self.side.close())
                await self._wait(lambda: self._ended is not None)
        await self._stop()

    # ---- the background task

    async def _run(self) -> None:
        while True:
            try:
                self._transport = await self._connector()
                await self._talk(self._transport)
            except (TransportClosedError, ConnectError) as error:
                if self.side.session_id is None and isinstance(error, ConnectError):
                    self._end(error)
                    return
            except PolicyError as error:
                self._end(ProtocolViolation(str(error)))
                return
            except (WorldError, PolicyServerError) as error:
                self._end(error)
                return
            finally:
                await self._hang_up()
            if not self.side.disconnected() or self._failures >= self._reconnect.attempts:
                self._end(ConnectionLostError("the connection broke and the session could not be resumed"))
                return
            await asyncio.sleep(self._pause_s())
            self._failures += 1

    def _pause_s(self) -> float:
        most: float = min(self._reconnect.cap_s, self._reconnect.base_s * 2**self._failures)
        return self._rng.uniform(0, most)

    async def _talk(self, transport: Transport) -> None:
        while True:
            event = self.side.receive(await transport.receive())
            match event:
                case Hello():
                    self.metadata = event.metadata
                    await transport.send(self.side.start(self._label, self._control_hz))
                case Started() | Resumed():
                    self._failures = 0
                    if self.side.owes_reset:
                        await transport.send(self.side.reset())
                case ActionChunk():
                    self._merge(event)
                case ErrorMessage():
                    self._refused(event)
                case Closed(reason=reason):
                    raise SessionClosedError(reason)
                case ResetDone(epoch=epoch):
                    self.actions.reset(epoch)
                case _:
                    pass
            self._changed.set()

    def _merge(self, chunk: ActionChunk) -> None:
        self.actions.merge(
            chunk.actions,
            seq=chunk.seq,
            epoch=chunk.epoch,
            start_tick=chunk.start_tick,
            valid_from=chunk.valid_from,
        )
        self._events.append(chunk)

    def _refused(self, event: ErrorMessage) -> None:
        message = event.message if event.path in (None, "$") else f"{event.path}: {event.message}"
        error = PolicyServerError(message, event.code, open_=not event.fatal)
        if event.fatal or event.seq is None:
            raise error
        self._events.append(error)

    async def _hang_up(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            with contextlib.suppress(Exception):
                await transport.close()

    # ---- waiting and ending

    async def _wait(self, done: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                while not done():
                    self._raise_if_ended()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise ConnectionLostError("the server did not answer in time") from None

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _end(self, error: Exception) -> None:
        self._ended = self._ended or error
        self._changed.set()

    async def _stop(self) -> None:
        if self._task is not None:
            if self._ended is None:  # otherwise the task is only closing its socket, which it must be able to finish
                self._task.cancel()
            self._end(SessionClosedError("client"))
            await asyncio.wait([self._task])
