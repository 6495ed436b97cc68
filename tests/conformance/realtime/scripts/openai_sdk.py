"""Run in the environment of openai.lock: whole conversations through the OpenAI SDK, as its documentation uses it.

Prints one JSON object: what was seen in each of them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from typing import Any

from openai import AsyncOpenAI
from sound import in_real_time, silence, tone

Seen = dict[str, Any]


class Conversation:
    def __init__(self, connection: Any, wait_s: float = 20) -> None:
        self.wait_s = wait_s
        self.connection = connection
        self.events: list[Any] = []
        self.audio: dict[str, int] = {}
        """Bytes by item."""

    async def until(self, kind: str, since: int | None = None) -> Any:
        """The next event of a kind (of those after number ``since``)."""
        for event in self.events[len(self.events) if since is None else since :]:
            if event.type == kind:
                return event
        async with asyncio.timeout(self.wait_s):
            while True:
                event = await self.connection.recv()
                self.events.append(event)
                if event.type == "error":
                    raise RuntimeError(event)
                if event.type == "response.output_audio.delta":
                    data = len(base64.b64decode(event.delta))
                    self.audio[event.item_id] = self.audio.get(event.item_id, 0) + data
                if event.type == kind:
                    return event

    async def ask(self, text: str, **response: Any) -> Any:
        """A text of the user, and the whole answer."""
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        await self.connection.conversation.item.create(item=item)
        await self.connection.response.create(response=response)
        return (await self.until("response.done")).response

    async def speak(self, *sounds: bytes) -> None:
        async for packet in in_real_time(b"".join(sounds)):
            await self.connection.input_audio_buffer.append(audio=base64.b64encode(packet).decode())


def said(response: Any) -> str:
    part = response.output[0].content[0]
    return part.transcript or part.text or ""


async def greet(talk: Conversation) -> Seen:
    response = await talk.ask("say Good evening.", metadata={"n": "1"})
    item_id = response.output[0].id
    return {
        "said": said(response),
        "metadata": response.metadata,
        "ms": talk.audio[item_id] / 48,
        "status": response.status,
    }


async def two_turns(talk: Conversation) -> Seen:
    await talk.connection.session.update(
        session={"type": "realtime", "audio": {"input": {"transcription": {"model": "whisper-1"}}}}
    )
    await talk.until("session.updated")
    lines, heard = [], []
    for _ in range(2):
        since = len(talk.events)
        await talk.speak(tone(600), silence(700))
        lines.append(said((await talk.until("response.done", since)).response))
        kind = "conversation.item.input_audio_transcription.completed"
        heard.append((await talk.until(kind, since)).transcript)
    return {"said": lines, "heard": heard}


async def barge_in(talk: Conversation) -> Seen:
    """The user speaks while the assistant does, and heard 400 ms of it."""
    detection = {"type": "server_vad", "create_response": False}
    await talk.connection.session.update(
        session={"type": "realtime", "audio": {"input": {"turn_detection": detection}}}
    )
    await talk.until("session.updated")
    item = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "say one two three four five six seven"}],
    }
    await talk.connection.conversation.item.create(item=item)
    await talk.connection.response.create()
    item_id = (await talk.until("response.output_item.added")).item.id
    while talk.audio.get(item_id, 0) < 48 * 700:
        await talk.until("response.output_audio.delta")
    since = len(talk.events)
    await talk.speak(tone(500))
    done = (await talk.until("response.done", since)).response
    await talk.connection.conversation.item.truncate(item_id=item_id, content_index=0, audio_end_ms=400)
    truncated = await talk.until("conversation.item.truncated")
    await talk.speak(silence(700))
    await talk.until("input_audio_buffer.committed")
    repeated = await talk.ask("repeat")
    await talk.connection.conversation.item.retrieve(item_id=item_id)
    kept = (await talk.until("conversation.item.retrieved")).item
    return {
        "status": done.status,
        "reason": done.status_details.reason,
        "item_status": done.output[0].status,
        "truncated_ms": truncated.audio_end_ms,
        "kept": kept.content[0].transcript,
        "repeated": said(repeated),
    }


async def cancel_and_create(talk: Conversation) -> Seen:
    item = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "say one two three four five"}],
    }
    await talk.connection.conversation.item.create(item=item)
    await talk.connection.response.create()
    await talk.until("response.output_audio.delta")
    await talk.connection.response.cancel()
    await talk.connection.response.create(response={"metadata": {"n": "2"}})
    first = (await talk.until("response.done")).response
    second = (await talk.until("response.done")).response
    return {"first": first.status, "second": second.status, "metadata": second.metadata}


async def tool(talk: Conversation) -> Seen:
    function = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    await talk.connection.session.update(session={"type": "realtime", "tools": [function]})
    await talk.until("session.updated")
    response = await talk.ask('call weather {"town": "Bonn"}')
    call = response.output[0]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It is sunny."}
    await talk.connection.conversation.item.create(item=output)
    await talk.connection.response.create()
    answer = (await talk.until("response.done")).response
    return {"name": call.name, "arguments": call.arguments, "said": said(answer)}


async def text(talk: Conversation) -> Seen:
    response = await talk.ask("say In writing.", output_modalities=["text"])
    return {"text": response.output[0].content[0].text, "audio": sum(talk.audio.values())}


async def by_hand(talk: Conversation) -> Seen:
    """The client finds the turns itself."""
    await talk.connection.session.update(session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
    await talk.until("session.updated")
    await talk.speak(tone(400))
    await talk.connection.input_audio_buffer.commit()
    committed = await talk.until("input_audio_buffer.committed")
    await talk.connection.response.create()
    response = (await talk.until("response.done")).response
    kinds = [event.type for event in talk.events]
    return {
        "committed": bool(committed.item_id),
        "said": said(response),
        "detected": "input_audio_buffer.speech_started" in kinds,
    }


async def g711(talk: Conversation) -> Seen:
    await talk.connection.session.update(
        session={"type": "realtime", "audio": {"output": {"format": {"type": "audio/pcmu"}}}}
    )
    await talk.until("session.updated")
    response = await talk.ask("say Good evening.")
    return {"ms": talk.audio[response.output[0].id] / 8}


async def main() -> None:
    client = AsyncOpenAI(api_key="a key", base_url=sys.argv[1] + "/v1")
    found: Seen = {}
    for scene in (greet, two_turns, barge_in, cancel_and_create, tool, text, by_hand, g711):
        async with client.realtime.connect(model="gpt-realtime") as connection:  # each reconnects
            talk = Conversation(connection)
            first = await connection.recv()
            assert first.type == "session.created", first
            found[scene.__name__] = await scene(talk)
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
