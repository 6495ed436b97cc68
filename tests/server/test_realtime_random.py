"""Whatever a client does with a puppet that speaks, is interrupted, calls and is told things at random: the grammar holds,
nothing of ours fails, and the last request is answered."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from server.test_realtime import Client, connect
from server.voices import VoiceServer, pcm, speech, voice_server

DETECTIONS = [
    None,
    {"type": "server_vad"},
    {"type": "semantic_vad", "eagerness": "high"},
    {"type": "server_vad", "interrupt_response": False},
    {"type": "server_vad", "create_response": False},
    {"type": "server_vad", "idle_timeout_ms": 300},
]
LINES = ["say one two three four five six", "say Yes.", "repeat", "call f {}", "hello", "say "]
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
RACES = {
    "response_cancel_not_active",
    "conversation_already_has_active_response",
    "input_audio_buffer_commit_empty",
    "invalid_tool_call_id",
    "item_delete_invalid_item_id",
    "item_truncate_invalid_item_id",
}
"""What a client that knows no state may be told."""


def act(client: Client, rng: random.Random) -> None:
    """One thing that a client does."""
    items = [event["item"]["id"] for event in client.of("conversation.item.added")]
    responses = [event["response"]["id"] for event in client.of("response.created")]
    deleted = {event["item_id"] for event in client.of("conversation.item.deleted")}
    calls = [event["call_id"] for event in client.of("response.function_call_arguments.done")]
    spoken = [
        event["item"]["id"]
        for event in client.of("response.output_item.added")
        if event["item"]["type"] == "message" and event["item"]["id"] in items and event["item"]["id"] not in deleted
    ]
    match rng.randrange(12):
        case 0:
            detection = rng.choice(DETECTIONS)
            client.update(
                audio={"input": {"turn_detection": detection, "transcription": rng.choice([None, {"model": "m"}])}}
            )
        case 1:
            client.update(tools=[TOOL], output_modalities=[rng.choice(["audio", "audio", "text"])])
        case 2 | 3:
            client.write(rng.choice(LINES))
            client.say("response.create", response={"metadata": {"n": str(rng.random())}})
        case 4:
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": rng.choice(LINES)}]}
            client.say("response.create", response={"conversation": "none", "input": [item]})
        case 5:
            client.say("response.cancel")
            if rng.random() < 0.5:
                client.say("response.create")
        case 6:
            if responses:
                client.say("response.cancel", response_id=rng.choice(responses))
        case 7:
            if spoken:
                ms = rng.choice([0, 100, 10**6])
                client.say("conversation.item.truncate", item_id=rng.choice(spoken), content_index=0, audio_end_ms=ms)
        case 8:
            left = [item for item in items if item not in deleted]
            if left:
                client.say("conversation.item.delete", item_id=rng.choice(left))
        case 9:
            client.say(f"input_audio_buffer.{rng.choice(['commit', 'clear'])}")
        case 10:
            client.say("output_audio_buffer.clear")
        case 11:
            if calls:
                output = {"type": "function_call_output", "call_id": rng.choice(calls), "output": "done"}
                client.say("conversation.item.create", item=output)


async def live(server: VoiceServer, client: Client, rng: random.Random) -> None:
    for _ in range(25):
        for _ in range(rng.randrange(3)):
            act(client, rng)
        sound = speech(1) if rng.random() < 0.6 else np.zeros(1920, np.float32)
        for _ in range(rng.randrange(4)):
            client.append(pcm(sound))
            await server.tick()
        await server.rest()
        assert client.closed is None


@pytest.mark.parametrize(
    "overrides", [(), ("options.yields=true",), ("options.rewinds=false",)], ids=["", "yields", "forgets"]
)
async def test_a_random_client(overrides: tuple[str, ...]) -> None:
    async with voice_server(*overrides) as server:
        for seed in range(8):
            rng = random.Random(seed)
            client = await connect(server)
            await live(server, client, rng)
            errors: list[Any] = [event["error"] for event in client.of("error")]
            assert {error["code"] for error in errors} <= RACES, errors
            client.update(audio={"input": {"turn_detection": None}}, output_modalities=["audio"])
            client.say("input_audio_buffer.clear")
            client.say("response.cancel")
            client.write("say The end.")
            client.say("response.create")
            await server.tick(30)
            assert client.said[-1] == "The end.", (seed, client.kinds[-30:])
            client.drop()
