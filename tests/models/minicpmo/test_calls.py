"""Tiny MiniCPM-os as calls: several at once, each its own; one interrupted by speech, as the weights would not yield; and the
whole way over Realtime's and Live's messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from call.test_call import Line
from models.minicpmo.tiny import checkpoint, recipe
from realtime_omni.call import Calls
from realtime_omni.duplex.outputs import DuplexOptions, Interrupted, Tick
from realtime_omni.manager import SessionManager
from realtime_omni.models import catalog
from realtime_omni.session.frame import Respond
from realtime_omni.session.signals import ResponseEnded, ResponseStarted, SpeechStarted
from server.manual_clock import ManualClock
from server.test_realtime import Client, Json, connect
from server.voices import VoiceServer, is_loud

FRAMES = 4
OPTIONS = DuplexOptions(pace="free", idle="hold")
LISTENING = DuplexOptions(pace="free", idle="hold", overlap="listen_only")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As drawn, its turns go on and on: nobody but the server stops it."""
    return checkpoint(tmp_path_factory.mktemp("minicpm") / "tiny")


def _noise(call: int, frame: int) -> NDArray[np.float32]:
    return np.random.default_rng((call, frame)).normal(0, 0.1, 16_000).astype(np.float32)


def _heard(line: Line) -> list[NDArray[np.float32]]:
    return [output.audio for output in line.outputs if isinstance(output, Tick)]


@pytest.mark.req("AC-41")
async def test_calls_of_one_batch_hear_and_say_what_they_would_alone(folder: Path) -> None:
    config = recipe(folder)
    model = catalog.build(config)

    async def converse(seeds: list[int]) -> list[Line]:
        async with SessionManager(model, config) as manager, Calls(manager, clocked=False) as calls:
            lines = [Line(calls, await calls.open(LISTENING, seed=seed)) for seed in seeds]
            for line, seed in zip(lines, seeds, strict=True):
                line.call.direct(Respond("asked"))
                line.call.append(np.concatenate([_noise(seed, frame) for frame in range(FRAMES)]))
            while min(len(_heard(line)) for line in lines) < FRAMES:
                calls.pulse(calls.now_s())
                await asyncio.sleep(0)
                for line in lines:
                    line.read()
            return lines

    together = await converse([1, 2])
    for line, seed in zip(together, (1, 2), strict=True):
        (alone,) = await converse([seed])
        assert line.text == alone.text != ""
        for one, two in zip(_heard(line)[:FRAMES], _heard(alone)[:FRAMES], strict=True):
            assert np.abs(one - two).max() <= 1e-5
    assert together[0].text != together[1].text


@pytest.mark.req("AC-42")
async def test_speech_interrupts_a_model_that_does_not_yield(folder: Path) -> None:
    """It is rewound to the second that was heard, its response has ended, and the call goes on in the same session."""
    config = recipe(folder)
    async with SessionManager(catalog.build(config), config) as manager, Calls(manager, clocked=False) as calls:
        line = Line(calls, await calls.open(OPTIONS, seed=4))
        quiet = np.zeros(16_000, np.float32)
        await line.frame(Respond("asked"), audio=quiet)
        await line.until(lambda s: isinstance(s, ResponseStarted), audio=quiet)
        for _ in range(2):
            await line.frame(audio=quiet)
        assert line.call.duplex.response == "asked"
        told = await line.frame(audio=_noise(4, 0))
        assert any(isinstance(signal, SpeechStarted) for signal in told)
        await line.settle()
        line.read()
        (cut,) = [o for o in line.outputs if isinstance(o, Interrupted)]
        assert (cut.response, cut.ended, cut.reason) == ("asked", ("asked",), "turn_detected")
        assert line.call.duplex.settled_frames == 5
        assert not any(isinstance(s, ResponseEnded) for o in line.outputs if isinstance(o, Tick) for s in o.signals)
        again = await line.until(lambda s: isinstance(s, ResponseStarted), audio=quiet)
        assert isinstance(again, ResponseStarted)
        assert again.response != "asked"


# ---------------------------------------------------------------------- over the wire


@asynccontextmanager
async def server_of(folder: Path) -> AsyncIterator[VoiceServer]:
    config, clock = recipe(folder), ManualClock()
    async with (
        SessionManager(catalog.build(config), config, clock=clock) as manager,
        Calls(manager, clocked=False) as calls,
    ):
        server = VoiceServer(manager, calls, clock)
        yield server
        await server.voice.shutdown(10)
        await server.gone()


def _tone(seconds: float) -> NDArray[np.float32]:
    return (0.3 * np.sin(np.arange(round(seconds * 24_000)) * 0.1)).astype(np.float32)


async def _interrupted(server: VoiceServer, client: Client) -> Json:
    """The first response that the user's tone comes into. Which it is depends on the second that the request falls into; one
    that the model ends in the same second is not interrupted."""
    for _ in range(4):
        spoken = await _until_it_speaks(server, client)
        await server.talk(client, _tone(1.0))  # type: ignore[arg-type]
        await server.hush(client, 13 * 2)  # type: ignore[arg-type]
        cut: Json = next(response for response in client.responses if response["id"] == spoken)
        if cut["status"] != "completed":
            return cut
    pytest.fail("nothing is interrupted")


async def _until_it_speaks(server: VoiceServer, client: Client) -> str:
    """The response whose sound is under way."""
    for _ in range(12):
        await server.hush(client, 13)  # type: ignore[arg-type]
        ended = {response["id"] for response in client.responses}
        for event in client.of("response.output_audio.delta")[-1:]:
            if event["response_id"] not in ended and is_loud(client.sound(event["item_id"])):
                return str(event["response_id"])
    pytest.fail("it says nothing")


@pytest.mark.req("AC-41")
@pytest.mark.parametrize("duplex", [False, True])
async def test_a_realtime_client_is_greeted_interrupts_and_goes_on(folder: Path, duplex: bool) -> None:
    """Greeted by request alone; server_vad with interrupt_response cuts the answer; the model begins
    another by itself."""
    async with server_of(folder) as server:
        client = await connect(server, duplex=duplex)
        client.update(instructions="Be kind.", audio={"input": {"turn_detection": {"type": "server_vad"}}})
        client.say("response.create")
        cut = await _interrupted(server, client)
        assert (cut["status"], cut["status_details"]["reason"]) == ("cancelled", "turn_detected")
        assert client.of("input_audio_buffer.speech_started")
        await server.hush(client, 13 * 3)  # type: ignore[arg-type]
        assert len({event["response"]["id"] for event in client.of("response.created")}) >= 2
        assert any(event["delta"] for event in client.of("response.output_audio_transcript.delta"))
        assert not client.of("error")
        if duplex:
            client.say("session.close")
        else:
            client.drop()
        await server.gone()


@pytest.mark.req("AC-41")
async def test_a_live_client_hears_as_much_as_it_sends(folder: Path) -> None:
    async with server_of(folder) as server:
        client = await server.start(instructions="Be kind.")
        await server.talk(client, _tone(2.0))
        await server.hush(client, 13 * 4)
        out = sum(len(data) // 2 for data in client.audio)
        assert 4 * 24_000 <= out <= 7 * 24_000
        assert client.transcript
        assert "x" in client.loud
        client.say("session.close", event_id="bye")
        await server.gone()
        assert json.loads(client.sent[-1])["type"] == "session.closed"
