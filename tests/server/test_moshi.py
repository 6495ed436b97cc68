"""Moshi connections with the puppet: Ogg/Opus both ways, text, and the ends of a call."""

from __future__ import annotations

import asyncio
import random
import struct

import numpy as np
import pytest
import sphn
from numpy.typing import NDArray

from realtime_omni.server.moshi import MoshiConnection, OpusIn
from realtime_omni_protocols.moshi import MoshiError, MoshiOptions
from server.voices import FRAME_S, VoiceServer, VoiceTransport, speech, voice_server


class MoshiClient(VoiceTransport):
    """What kyutai's client does: an Opus writer and reader of its own, one frame of 80 ms a time."""

    def __init__(self) -> None:
        super().__init__()
        self._writer = sphn.OpusStreamWriter(24_000)
        self._reader = sphn.OpusStreamReader(24_000)

    def speak(self, samples: NDArray[np.float32]) -> None:
        data = self._writer.append_pcm(samples)
        if data:
            self.inbound.put_nowait(b"\x01" + data)

    def kinds(self) -> list[int]:
        return [frame[0] for frame in self.sent]

    def heard(self) -> NDArray[np.float32]:
        parts = [self._reader.append_bytes(frame[1:]) for frame in self.sent if frame[0] == 1]
        return np.concatenate(parts)

    @property
    def text(self) -> str:
        return b"".join(frame[1:] for frame in self.sent if frame[0] == 2).decode()


async def connect(server: VoiceServer, **options: object) -> MoshiClient:
    client = MoshiClient()
    server.serve(MoshiConnection(server.voice, client, MoshiOptions(**options)).run())  # type: ignore[arg-type]
    await server.until(lambda: bool(client.sent))
    return client


async def talk(server: VoiceServer, client: MoshiClient, samples: NDArray[np.float32]) -> None:
    for start in range(0, len(samples), 1920):
        client.speak(samples[start : start + 1920])
        await server.tick()


def silence(frames: int) -> NDArray[np.float32]:
    return np.zeros(frames * 1920, np.float32)


@pytest.mark.parametrize("rate", [24_000, 16_000])
async def test_a_conversation_in_opus(rate: int) -> None:
    async with voice_server(f"options.input_rate_hz={rate}", f"options.output_rate_hz={rate}") as server:
        client = await connect(server)
        assert client.sent[0] == b"\x00", "the handshake is first"
        await talk(server, client, speech(10))
        await talk(server, client, silence(25))
        assert client.text == "I hear you."
        heard = client.heard()
        assert abs(len(heard) / 24_000 - 35 * FRAME_S) <= 3 * FRAME_S
        assert np.abs(heard).max() > 0.05
        client.drop()
        await server.gone()
        assert len(server.calls) == 0


async def test_text_comes_with_the_tick_in_which_it_sounds() -> None:
    async with voice_server("options.greeting=One two three.") as server:
        client = await connect(server)
        await talk(server, client, silence(20))
        assert client.text == "One two three."
        kinds = client.kinds()
        assert kinds.count(2) == 3
        assert kinds.index(2) < kinds.index(1, kinds.index(2))


async def test_what_a_client_sent_before_the_handshake_is_heard() -> None:
    async with voice_server() as server:
        client = MoshiClient()
        for start in range(0, 1920 * 10, 1920):
            client.speak(speech(10)[start : start + 1920])
        server.serve(MoshiConnection(server.voice, client, MoshiOptions()).run())
        await server.until(lambda: bool(client.sent))
        await server.tick(12)
        await talk(server, client, silence(20))
        assert client.text == "I hear you."


async def test_other_messages_are_discarded() -> None:
    async with voice_server() as server:
        client = await connect(server)
        for frame in (b"", b"\x03\x01", b"\x04{}", b"\x06", b"\xff", "text", b"\x02hi"):
            client.inbound.put_nowait(frame)
        await talk(server, client, silence(3))
        assert set(client.kinds()) == {0, 1}
        assert client.closed is None


async def test_what_is_no_opus_ends_the_connection_with_a_word() -> None:
    async with voice_server() as server:
        client = await connect(server)
        client.inbound.put_nowait(b"\x01" + b"RIFF" * 100)
        await server.gone()
        assert client.sent[-1] == b"\x05audio_invalid: this is no Ogg/Opus stream"
        assert client.closed == (1007, "audio_invalid")


def ogg_page(number: int, serial: bytes, packets: list[bytes]) -> bytes:
    """RFC 3533, with its checksum: CRC-32, polynomial 0x04c11db7, not reflected, from 0."""
    lengths = bytes(len(packet) for packet in packets)
    head = b"OggS\0\0" + struct.pack("<q", 960 * number) + serial + struct.pack("<I", number) + b"\0\0\0\0"
    page = head + bytes([len(lengths)]) + lengths + b"".join(packets)
    check = 0
    for byte in page:
        check ^= byte << 24
        for _ in range(8):
            check = (check << 1 ^ 0x04C11DB7 if check & 1 << 31 else check << 1) & 0xFFFFFFFF
    return page[:22] + struct.pack("<I", check) + page[26:]


async def test_messages_that_mean_nothing_are_read_at_a_pace_too() -> None:
    async with voice_server(max_messages_per_s=10.0) as server:
        client = await connect(server)
        for _ in range(40):
            client.inbound.put_nowait(b"\x06")
        await server.rest()
        assert client.inbound.qsize() == 29
        for _ in range(40):
            server.clock.advance(0.1)
            await server.rest()
        assert client.inbound.empty()
        assert client.closed is None


async def test_hours_of_silence_in_a_few_bytes_are_read_in_their_time() -> None:
    """A packet of one byte is 20 ms of sound: what is far ahead of time waits, undecoded."""
    async with voice_server() as server:
        client = await connect(server)
        client.speak(speech(1))  # begins with the headers
        opened = client.inbound._queue[0]  # type: ignore[attr-defined]
        serial = opened[1 + 14 : 1 + 18]
        pages = [ogg_page(number, serial, [b"\xf8"] * 100) for number in range(3, 33)]  # a minute
        client.inbound.put_nowait(b"\x01" + b"".join(pages))
        client.speak(speech(1))
        await server.tick()
        intake = next(iter(server.calls._calls.values())).duplex.intake
        assert 10 <= intake.statistics.written / intake.rate_hz < 14, "more was decoded than is about due"
        for _ in range(60):
            server.clock.advance(1)
            await server.rest()
        assert intake.statistics.written / intake.rate_hz >= 60
        assert client.closed is None
        await talk(server, client, speech(4))


async def test_max_steps_ends_the_call() -> None:
    async with voice_server() as server:
        client = await connect(server, max_steps=5)
        await talk(server, client, silence(8))
        await server.gone()
        assert client.closed == (1000, "expired")
        assert client.kinds().count(1) == 5


@pytest.mark.parametrize(("options", "code"), [({"voice": "NATF2"}, "voice_invalid"), ({}, "capacity")])
async def test_a_call_that_cannot_be_is_refused(options: dict[str, object], code: str) -> None:
    async with voice_server("session.max_sessions=1") as server:
        first = await connect(server)
        client = await connect(server, **options)
        await server.until(lambda: client.closed is not None)
        assert client.sent[0].startswith(b"\x05" + code.encode())
        first.drop()


async def test_instructions_and_voice_reach_the_model() -> None:
    async with voice_server("options.voices=[tones, NATF2]") as server:
        client = await connect(server, voice="NATF2", text="You are Ann.")
        await talk(server, client, silence(2))
        assert client.kinds()[0] == 0
        assert client.closed is None


async def test_a_session_expires() -> None:
    async with voice_server() as server:
        server.voice.max_session_s = 60.0
        client = await connect(server)
        server.clock.advance(60.1)
        await server.gone()
        assert client.closed == (1000, "expired")


async def test_a_server_that_stops_says_so() -> None:
    async with voice_server() as server:
        client = await connect(server)
        await server.voice.shutdown(5)
        await server.gone()
        assert client.closed == (1001, "shutdown")


def test_no_bytes_break_the_reader() -> None:
    """Pages that are cut, changed and repeated: samples come out, or the coded refusal."""
    writer = sphn.OpusStreamWriter(24_000)
    good = b"".join(writer.append_pcm(speech(10)[i : i + 1920]) for i in range(0, 19_200, 1920))
    rng = random.Random(1)
    refused = 0
    for _ in range(300):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at : at + rng.randrange(200)]
                case 2:
                    data[at:at] = data[: rng.randrange(200)]
                case 3:
                    data[at:at] = bytes(rng.randrange(50))
        reader = OpusIn(24_000)
        try:
            for start in range(0, len(data), 333):
                assert reader.feed(bytes(data[start : start + 333])).dtype == np.float32
        except MoshiError:
            refused += 1
    assert 0 < refused < 300


async def test_a_connection_that_is_cancelled_anywhere_leaves_nothing() -> None:
    async with voice_server() as server:
        for turns in range(60):
            client = MoshiClient()
            serving = asyncio.create_task(MoshiConnection(server.voice, client, MoshiOptions(max_steps=1)).run())
            client.speak(speech(1))
            for _ in range(turns):
                await asyncio.sleep(0)
            serving.cancel()
            await asyncio.wait([serving], timeout=10)
            assert serving.done()
            await server.until(lambda: not server.voice._closing)
            assert len(server.calls) == 0, turns
