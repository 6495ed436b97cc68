"""The client over an in-memory transport: broken servers, missing libraries, back-off."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from protocols.make_vectors import CHUNK, CLOSED, HELLO, RESUMED, STARTED
from realtime_omni_client import (
    ConnectError,
    ConnectionLostError,
    MediaUnavailableError,
    ProtocolViolation,
    Reconnect,
    SessionClosedError,
    StartOptions,
    WorldClient,
    WorldError,
)
from realtime_omni_client.media import latent, make_decoder
from realtime_omni_client.transport import TransportClosedError
from realtime_omni_protocols.world import FrameHeader, pack_frame

RAW = STARTED | {"format": "rgb24", "codec": None, "width": 1, "height": 1}
FIRST_CHUNK = CHUNK | {"seq": 2, "chunk_index": 0, "first_frame": 0, "frames": 1, "applied_event_ids": []}


class Script:
    """A transport whose server says what the test wrote, whatever the client says."""

    def __init__(self, *lines: dict[str, Any] | bytes, then: str = "hang") -> None:
        self.lines = list(lines)
        self.then = then
        self.sent: list[dict[str, Any]] = []
        self.closing = self.closed = False

    async def send(self, text: str) -> None:
        self.sent.append(json.loads(text))

    async def receive(self) -> str | bytes:
        await asyncio.sleep(0)
        if self.lines:
            line = self.lines.pop(0)
            return line if isinstance(line, bytes) else json.dumps(line)
        if self.then == "hang":
            await asyncio.Event().wait()
        raise TransportClosedError

    async def close(self) -> None:
        self.closing = True
        await asyncio.sleep(0.01)  # a real one waits for the server's half of the handshake
        self.closed = True


def client(*scripts: Script | Exception, attempts: int = 2, kind: str = "rgb24") -> WorldClient:
    waiting = list(scripts)

    async def connector() -> Script:
        script = waiting.pop(0) if waiting else ConnectError("nobody there")
        if isinstance(script, Exception):
            raise script
        return script

    options = StartOptions(format=kind)  # type: ignore[arg-type]
    return WorldClient(
        connector, options, reconnect=Reconnect(attempts, 0.001, 0.001), timeout_s=1.0, rng=random.Random(0)
    )


def picture(seq: int = 3, payload: bytes = b"\x01\x02\x03", kind: str = "rgb24") -> bytes:
    header = FrameHeader(
        format=kind,  # type: ignore[arg-type]
        key=True,
        last=True,
        index=0,
        seq=seq,
        epoch=0,
        chunk_index=0,
        frame=0,
        pts_ms=0,
        payload_bytes=len(payload),
    )
    return pack_frame(header, payload)


async def test_a_chunk_is_acknowledged_when_it_is_taken() -> None:
    script = Script(HELLO, RAW, FIRST_CHUNK, picture())
    async with client(script) as world:
        chunk = await world.next_chunk()
        assert chunk.frames.tolist() == [[[[1, 2, 3]]]]
        assert script.sent[-1] == {"type": "session.ack", "seq": 3, "displayed": 1, "epoch": 0}
        world._timeout_s = 0.05  # this server never answers the close
    assert script.closed


@pytest.mark.parametrize(
    "lines",
    [
        (FIRST_CHUNK | {"seq": 7},),
        (FIRST_CHUNK, picture(seq=9)),
        (FIRST_CHUNK, picture(payload=b"\x01")),
        (picture(),),
        ({"type": "what"},),
        (b"RO",),
    ],
)
async def test_a_server_that_breaks_the_protocol_is_given_up(lines: tuple[Any, ...]) -> None:
    script = Script(HELLO, RAW, *lines)
    async with client(script) as world:
        with pytest.raises(ProtocolViolation):
            await world.next_chunk()
    assert script.closed


@pytest.mark.parametrize("kind", ["jpeg", "h264"])
async def test_a_frame_that_cannot_be_decoded_is_a_violation(kind: str) -> None:
    started = STARTED | {"format": kind, "codec": "avc1.42C00A" if kind == "h264" else None}
    script = Script(HELLO, started, FIRST_CHUNK, picture(payload=b"\x00" * 40, kind=kind))
    async with client(script, kind=kind) as world:
        with pytest.raises(ProtocolViolation):
            await world.next_chunk()


async def test_a_silent_server_is_a_connect_error() -> None:
    world = client(Script())
    world._timeout_s = 0.05
    with pytest.raises(ConnectError, match="in time"):
        async with world:
            pass


async def test_a_drop_before_the_start_is_not_retried() -> None:
    with pytest.raises(ConnectionLostError, match="before the session had started"):
        async with client(Script(HELLO, then="drop")):
            pass


async def test_attempts_are_bounded_and_a_refused_key_ends_them() -> None:
    async with client(Script(HELLO, RAW, then="drop"), ConnectError("a"), ConnectError("b"), attempts=2) as world:
        with pytest.raises(ConnectionLostError, match="2 attempts"):
            await world.next_chunk()


async def test_a_server_that_resumes_and_drops_at_once_is_not_asked_forever() -> None:
    resumed = RESUMED | {"replayed_from": 2, "next_frame": 0, "format": "rgb24"}
    again = [Script(HELLO, resumed, then="drop") for _ in range(20)]
    async with client(Script(HELLO, RAW, then="drop"), *again, attempts=3) as world:
        with pytest.raises(ConnectionLostError, match="3 attempts"):
            await world.next_chunk()
        assert world.statistics().resumes == 3


async def test_whoever_waits_is_told_the_end() -> None:
    script = Script(HELLO, RAW)
    async with client(script) as world:
        waiting = [asyncio.create_task(world.next_chunk()), asyncio.create_task(world.send(prompt="x"))]
        await asyncio.sleep(0.01)
        world._live.end(SessionClosedError("shutdown"))
        for task in waiting:
            with pytest.raises(SessionClosedError):
                await task


async def test_a_server_that_closes_ends_the_iteration_with_its_reason() -> None:
    async with client(Script(HELLO, RAW, FIRST_CHUNK, picture(), CLOSED | {"seq": 4, "reason": "evicted"})) as world:
        assert (await world.next_chunk()).chunk_index == 0  # what had arrived is still handed out
        with pytest.raises(SessionClosedError, match="evicted"):
            await anext(aiter(world))


async def test_who_leaves_while_the_socket_is_being_closed_waits_until_it_is() -> None:
    script = Script(HELLO, RAW, CLOSED | {"seq": 2})
    async with client(script):
        while not script.closing:
            await asyncio.sleep(0)
    assert script.closed


async def test_latents_keep_their_shape() -> None:
    shape = [1, 2]
    chunk = FIRST_CHUNK | {"latent_shape": shape, "frames": 4}
    payload = np.array([1.5, -2.0], "<f2").tobytes()
    script = Script(HELLO, RAW | {"format": "latent"}, chunk, picture(payload=payload, kind="latent"))
    async with client(script, kind="latent") as world:
        got = await world.next_chunk()
        assert got.latents is not None
        assert got.latents.tolist() == [[1.5, -2.0]]
        assert (got.frame_count, got.frames.shape[0]) == (4, 0)
        world._timeout_s = 0.05
    with pytest.raises(ProtocolViolation):
        latent(memoryview(payload), (3,))


@pytest.mark.parametrize(("kind", "module", "name"), [("jpeg", "PIL", "pillow"), ("h264", "av", "av")])
def test_a_missing_library_is_named(kind: str, module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    make: Callable[[], object] = lambda: make_decoder(kind, 8, 8)  # type: ignore[arg-type]  # noqa: E731
    with pytest.raises(MediaUnavailableError, match=f"pip install {name}"):
        make()
    with pytest.raises(WorldError):
        WorldClient.connect("ws://127.0.0.1:1", format=kind)  # type: ignore[arg-type]
