"""A robot's end of an in-memory WebSocket that a policy hub serves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

import numpy as np

from realtime_omni.server.openpi import PolicyHub
from realtime_omni.server.policy import PolicyRequest
from realtime_omni.server.settings import ServerSettings
from realtime_omni.testing.null_policy import NullPolicy
from realtime_omni_protocols.openpi import PolicyClientSide, Row, StreamClientSide
from realtime_omni_protocols.openpi.stream_messages import Closed, Hello, Resumed, Started
from server.manual_clock import ManualClock
from server.wire import LIVENESS_S, FakeTransport

E = TypeVar("E")


def observation(state: float = 0.5, **members: Any) -> dict[str, Any]:
    """A good observation of the null policy's contract; its chunk begins with ``state``."""
    image = np.zeros((8, 8, 3), np.uint8)
    return {
        "observation.images.base_0_rgb": image,
        "observation.images.left_wrist_0_rgb": image,
        "state": np.full(14, state, np.float32),
        "prompt": "pick up the cube",
    } | members


@contextlib.asynccontextmanager
async def hub_over(policy: NullPolicy, **fields: Any) -> AsyncIterator[PolicyHub]:
    """A hub; afterwards nothing is left: no task, no session."""
    before = asyncio.all_tasks()
    hub = PolicyHub(policy, ServerSettings(**fields), ManualClock())
    yield hub
    await hub.shutdown(5)
    assert not hub.connections
    assert not hub.live
    assert len(hub.streams) == 0
    assert policy.sessions == 0
    assert asyncio.all_tasks() - before <= {asyncio.current_task()}


class Gate:
    """Holds every inference until it is opened; counts who came and who was cancelled."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.arrived = asyncio.Event()
        self.cancelled = 0

    async def __call__(self, session_id: str, request: PolicyRequest) -> None:
        self.arrived.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class _Link:
    def __init__(self, hub: PolicyHub, row: Row | None) -> None:
        self.transport = FakeTransport()
        self.task = asyncio.create_task(hub.serve(self.transport, row))

    async def receive(self) -> str | bytes:
        async with asyncio.timeout(LIVENESS_S):
            frame = await self.transport.outbound.get()
        assert frame is not None, f"the server closed: {self.transport.closed}"
        return frame

    async def closed(self) -> tuple[int, str]:
        """The close frame, after whatever else was said."""
        async with asyncio.timeout(LIVENESS_S):
            while await self.transport.outbound.get() is not None:
                pass
            await self.task
        assert self.transport.closed is not None
        return self.transport.closed

    async def drop(self) -> None:
        self.transport.drop()
        async with asyncio.timeout(LIVENESS_S):
            await self.task


class Robot(_Link):
    """A client of an alternating row."""

    def __init__(self, hub: PolicyHub, row: Row = Row.BARE) -> None:
        super().__init__(hub, row)
        self.side = PolicyClientSide(row)

    async def connect(self) -> Mapping[str, object]:
        return self.side.handshake(await self.receive())

    def ask(self, message: Mapping[str, object]) -> None:
        self.transport.arrive(self.side.infer(message))

    async def answer(self) -> Any:
        return self.side.receive(await self.receive())

    async def infer(self, message: Mapping[str, object]) -> Any:
        self.ask(message)
        return await self.answer()

    async def reset(self) -> None:
        self.transport.arrive(self.side.reset())
        assert await self.answer() is None


class StreamRobot(_Link):
    """A client of our subprotocol."""

    def __init__(self, hub: PolicyHub, side: StreamClientSide | None = None) -> None:
        super().__init__(hub, None)
        self.side = side if side is not None else StreamClientSide()

    async def start(self) -> Started | Resumed:
        await self.until(Hello)
        self.say(self.side.start())
        event = self.side.receive(await self.receive())
        assert isinstance(event, Started | Resumed), event
        return event

    def say(self, frame: bytes) -> None:
        self.transport.arrive(frame)

    def observe(self, tick: int, **members: Any) -> None:
        self.say(self.side.observe(observation(float(tick)) | members, tick))

    async def until(self, kind: type[E]) -> E:
        while True:
            event = self.side.receive(await self.receive())
            if isinstance(event, kind):
                return event

    async def close(self) -> None:
        self.say(self.side.close())
        await self.until(Closed)
        assert (await self.closed())[0] == 1000


async def settle() -> None:
    """Let everything that can happen without a clock or a socket happen."""
    for _ in range(30):
        await asyncio.sleep(0)
