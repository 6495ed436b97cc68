"""Voice endpoints over the puppet in memory: time moves one frame at a time, when a test says so."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realtime_omni.call import Calls
from realtime_omni.config import load
from realtime_omni.manager import SessionManager
from realtime_omni.server.live import LiveHub, Origin
from realtime_omni.server.settings import ServerSettings
from realtime_omni.server.transport import TransportLost
from realtime_omni.server.voice import VoiceHub
from server.manual_clock import ManualClock

FRAME_S = 0.08
LIVENESS_S = 10.0


def speech(frames: int, rate: int = 24_000) -> NDArray[np.float32]:
    """A tone: what the puppet takes for speech. Float32 [N]."""
    count = round(frames * FRAME_S * rate)
    return (0.3 * np.sin(2 * np.pi * 220 * np.arange(count) / rate)).astype(np.float32)


def pcm(samples: NDArray[np.float32]) -> bytes:
    return (np.rint(samples * 32768)).astype("<i2").tobytes()


def is_loud(data: bytes) -> bool:
    return bool(data) and int(np.abs(np.frombuffer(data, "<i2").astype(int)).max()) > 300


class VoiceTransport:
    """One WebSocket in memory. ``stuck``: the peer takes nothing."""

    def __init__(self) -> None:
        self.inbound: asyncio.Queue[str | bytes | None] = asyncio.Queue()
        self.take: Callable[[str | bytes], bool] | None = None
        self.sent: list[Any] = []
        self.closed: tuple[int, str] | None = None
        self.flowing = asyncio.Event()
        self.flowing.set()

    def put(self, frames: Sequence[str | bytes]) -> bool:
        if not self.flowing.is_set() or self.closed is not None:
            return False
        self.sent += frames
        return True

    def listen(self, take: Callable[[str | bytes], bool]) -> None:
        self.take = take

    def arrive(self, frame: str | bytes) -> None:
        """From the peer."""
        if self.take is None or not self.inbound.empty() or not self.take(frame):
            self.inbound.put_nowait(frame)

    async def receive(self) -> str | bytes:
        frame = await self.inbound.get()
        if frame is None:
            raise TransportLost
        return frame

    async def send(self, *frames: str | bytes) -> None:
        await self.flowing.wait()
        if self.closed is not None:
            raise TransportLost
        self.sent += frames

    async def close(self, code: int, reason: str) -> None:
        self.closed = self.closed or (int(code), reason)
        self.inbound.put_nowait(None)

    def drop(self) -> None:
        """The peer is gone."""
        self.inbound.put_nowait(None)


class LiveClient(VoiceTransport):
    """A client of the Live protocol on such a socket."""

    def say(self, kind: str, **fields: Any) -> None:
        self.arrive(json.dumps({"type": kind, **fields}))

    def append(self, data: bytes) -> None:
        self.say("session.input_audio.append", audio=base64.b64encode(data).decode())

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(frame) for frame in self.sent]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    @property
    def kinds(self) -> list[str]:
        """Without audio."""
        audio = ("session.output_audio.delta", "session.input_audio.append")
        return [event["type"] for event in self.events if event["type"] not in audio]

    @property
    def audio(self) -> list[bytes]:
        return [base64.b64decode(event["delta"]) for event in self.of("session.output_audio.delta")]

    @property
    def loud(self) -> str:
        """One letter per delta: what is heard, and silence."""
        return "".join(".x"[is_loud(data)] for data in self.audio)

    @property
    def transcript(self) -> str:
        return "".join(event["delta"] for event in self.of("session.output_transcript.delta"))


class VoiceServer:
    """A manager, its calls and the hubs, on a manual clock."""

    def __init__(self, manager: SessionManager, calls: Calls, clock: ManualClock, **settings: Any) -> None:
        self.manager, self.calls, self.clock = manager, calls, clock
        self.voice = VoiceHub(calls, "puppet", ServerSettings(**settings), clock=clock)
        self.live = LiveHub(self.voice)
        self._serving: list[asyncio.Task[None]] = []

    def connect(self, origin: Origin | None = None) -> LiveClient:
        client = LiveClient()
        self.serve(self.live.serve(client, origin))
        return client

    def attach(self, session_id: str) -> LiveClient:
        client = LiveClient()
        session = self.live.find(session_id)
        self.serve(self.live.serve_sideband(client, session, *session.attach(client)))
        return client

    def serve(self, connection: Any) -> None:
        self._serving.append(asyncio.ensure_future(connection))

    async def start(self, origin: Origin | None = None, **session: Any) -> LiveClient:
        """A client whose session has started."""
        client = self.connect(origin)
        client.say("session.start", session=session if origin is not None else {"model": "puppet", **session})
        await self.until(lambda: bool(client.sent))
        assert client.events[0]["type"] == "session.started", client.events
        return client

    async def until(self, done: Any) -> None:
        """The loop runs until it is so; time stands still."""
        async with asyncio.timeout(LIVENESS_S):
            while not done():
                await asyncio.sleep(0)

    async def tick(self, count: int = 1) -> None:
        """Time moves by frames."""
        for _ in range(count):
            await self.rest()
            self.clock.advance(FRAME_S)
            self.calls.pulse(self.clock.now_s())
            await self.rest()

    async def rest(self) -> None:
        """Nothing is under way any more: every frame is settled, told and written."""
        async with asyncio.timeout(LIVENESS_S):
            while waiting := [f for call in self.calls._calls.values() for f in (*call._futures, call._mending) if f]:
                await asyncio.wait(waiting)
                await asyncio.sleep(0)  # what the answer sets going
        for _ in range(20):
            await asyncio.sleep(0)

    async def talk(self, client: LiveClient, sound: NDArray[np.float32], rate: int = 24_000, encode: Any = pcm) -> None:
        """The client sends this in real time, a frame a time."""
        size = round(FRAME_S * rate)
        for start in range(0, len(sound), size):
            client.append(encode(sound[start : start + size]))
            await self.tick()

    async def hush(self, client: LiveClient, frames: int) -> None:
        await self.talk(client, np.zeros(round(frames * FRAME_S * 24_000), np.float32))

    async def gone(self) -> None:
        async with asyncio.timeout(LIVENESS_S):
            await asyncio.gather(*self._serving)


@asynccontextmanager
async def voice_server(*overrides: str, **settings: Any) -> AsyncIterator[VoiceServer]:
    """Every test ends with no task, call or session left."""
    before, clock = asyncio.all_tasks(), ManualClock()
    manager = SessionManager(config=load("puppet", {}, list(overrides)), clock=clock)
    async with manager, Calls(manager, clocked=False) as calls:
        server = VoiceServer(manager, calls, clock, **settings)
        yield server
        await server.voice.shutdown(LIVENESS_S)
        await server.gone()
        assert len(calls) == 0
        assert server.voice.connections == 0
        assert not manager.sessions()
    assert asyncio.all_tasks() - before <= {asyncio.current_task()}
