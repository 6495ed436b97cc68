"""A server that wants to hurt its client: pictures that are bombs, latents that lie, addresses that are none."""

from __future__ import annotations

import asyncio
import io
import struct
import warnings

import numpy as np
import pytest
from PIL import Image

from client.test_world_link import RAW, Script
from protocols.make_vectors import HELLO
from realtime_omni_client import ConnectError, ConnectionLostError, ProtocolViolation, StartOptions, WorldClient
from realtime_omni_client.media import latent, make_decoder


def jpeg(width: int, height: int) -> bytes:
    """A small JPEG whose header claims another size."""
    out = io.BytesIO()
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(out, "JPEG")
    data = bytearray(out.getvalue())
    at = data.index(b"\xff\xc0") + 5  # start of frame: length, precision, height, width
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize(("width", "height"), [(12_000, 12_000), (65_000, 65_000), (17, 16)])
def test_a_jpeg_of_another_size_is_refused_before_it_is_decoded(
    width: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("pixels were decoded")

    decoder = make_decoder("jpeg", 16, 16)
    assert decoder is not None
    data = memoryview(jpeg(width, height))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", never)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with pytest.raises(ProtocolViolation):
            decoder.decode(data)


@pytest.mark.parametrize(
    ("payload", "shape"),
    [(b"\0", (1,)), (b"\0\0\0", (1,)), (b"\0\0", (2**14,) * 8), (b"\0" * 6, (2, 2)), (b"\0\0", (2,))],
)
def test_a_latent_that_does_not_fit_its_shape_is_a_violation(payload: bytes, shape: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolViolation):
        latent(memoryview(payload), shape)


@pytest.mark.parametrize("payload", [b"\0", b"\0\0\0\1", b"\0\0\0\1\x67" + b"\xff" * 64, bytes(range(256))])
def test_garbage_instead_of_h264_is_a_violation(payload: bytes) -> None:
    decoder = make_decoder("h264", 16, 16)
    assert decoder is not None
    with pytest.raises(ProtocolViolation):
        decoder.decode(memoryview(payload))


async def test_an_address_that_is_none_is_a_connect_error() -> None:
    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: ws://[::\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(redirect, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        for url in (f"ws://127.0.0.1:{port}", "ws://[::"):
            with pytest.raises(ConnectError):
                async with WorldClient.connect(url, format="rgb24", timeout_s=10):
                    pass


async def test_a_server_that_never_answers_an_event_does_not_hang_its_client() -> None:
    silent = Script(HELLO, RAW)

    async def connector() -> Script:
        return silent

    world = WorldClient(connector, StartOptions(format="rgb24"))
    async with world:
        world._timeout_s = 0.1  # of answers; starting may take a busy machine longer
        with pytest.raises(ConnectionLostError, match="in time"):
            async with asyncio.timeout(10):
                await world.hold({"w"})
    assert [line["type"] for line in silent.sent][:2] == ["session.start", "session.event"]
