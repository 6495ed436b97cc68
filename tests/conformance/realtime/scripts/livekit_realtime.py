"""Run in the environment of openai.lock: LiveKit's Realtime model, without a room: greeted, spoken to, interrupted, a tool.

Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from livekit import rtc
from livekit.agents import llm
from livekit.plugins import openai
from sound import RATE, in_real_time, silence, tone


@llm.function_tool
async def weather(town: str) -> str:
    """The weather in a town."""
    return f"It is sunny in {town}."


async def heard(generation: llm.GenerationCreatedEvent) -> dict[str, Any]:
    """The whole of a generation: text, length of its sound, calls."""
    found: dict[str, Any] = {
        "text": "",
        "ms": 0.0,
        "calls": [],
        "id": None,
        "user_initiated": generation.user_initiated,
    }

    async def words(message: llm.MessageGeneration) -> None:
        async for text in message.text_stream:
            found["text"] += text

    async def sound(message: llm.MessageGeneration) -> None:
        async for frame in message.audio_stream:
            found["ms"] += frame.samples_per_channel * 1000 / frame.sample_rate

    async def messages() -> None:
        async for message in generation.message_stream:
            found["id"] = message.message_id
            await asyncio.gather(words(message), sound(message))

    async def calls() -> None:
        async for call in generation.function_stream:
            found["calls"].append(call)

    async with asyncio.timeout(60):
        await asyncio.gather(messages(), calls())
    return found


class Talk:
    def __init__(self, session: Any, wait_s: float = 20) -> None:
        self.wait_s = wait_s
        self.session = session
        self.generations: asyncio.Queue[Any] = asyncio.Queue()
        self.kinds: list[str] = []
        self.transcripts: list[str] = []
        self.errors: list[str] = []
        session.on("generation_created", self.generations.put_nowait)
        session.on("input_speech_started", lambda _: self.kinds.append("speech_started"))
        session.on("input_speech_stopped", lambda _: self.kinds.append("speech_stopped"))
        session.on("input_audio_transcription_completed", self._transcribed)
        session.on("error", lambda event: self.errors.append(str(event.error)))

    def _transcribed(self, event: Any) -> None:
        if event.is_final:
            self.transcripts.append(event.transcript)

    async def speak(self, *sounds: bytes) -> None:
        async for packet in in_real_time(b"".join(sounds)):
            self.session.push_audio(rtc.AudioFrame(packet, RATE, 1, len(packet) // 2))

    async def next(self) -> Any:
        async with asyncio.timeout(self.wait_s):
            return await self.generations.get()

    async def reply(self, text: str) -> dict[str, Any]:
        context = self.session.chat_ctx.copy()
        context.add_message(role="user", content=text)
        await self.session.update_chat_ctx(context)
        result = await heard(await self.session.generate_reply())
        await self.next()  # the same one, as an event
        return result


async def main() -> None:
    model = openai.realtime.RealtimeModel(base_url=sys.argv[1] + "/v1", api_key="a key", model="gpt-realtime")
    session = model.session()
    talk = Talk(session)
    await session.update_instructions("Be kind.")
    greeting = await talk.reply("say Good evening.")
    turns = []
    for _ in range(2):
        await talk.speak(tone(600), silence(700))
        turns.append(await heard(await talk.next()))
    await session.update_tools([weather])
    call = await talk.reply('call weather {"town": "Bonn"}')
    context = session.chat_ctx.copy()
    context.items.append(call["calls"][0])
    output = llm.FunctionCallOutput(call_id=call["calls"][0].call_id, name="weather", output="Sunny.", is_error=False)
    context.items.append(output)
    await session.update_chat_ctx(context)
    answer = await heard(await session.generate_reply())
    await talk.next()

    context = session.chat_ctx.copy()
    context.add_message(role="user", content="say one two three four five six seven eight nine ten")
    await session.update_chat_ctx(context)
    long = await session.generate_reply()
    await talk.next()
    reading = asyncio.create_task(heard(long))
    await asyncio.sleep(0.8)
    session.interrupt()
    cut = await reading
    session.truncate(message_id=cut["id"], modalities=["audio"], audio_end_ms=300)
    repeated = await talk.reply("repeat")
    await session.aclose()
    await model.aclose()
    print(
        json.dumps(
            {
                "greeting": {"text": greeting["text"], "ms": greeting["ms"], "asked": greeting["user_initiated"]},
                "turns": [turn["text"] for turn in turns],
                "kinds": talk.kinds,
                "transcripts": talk.transcripts,
                "call": [call["calls"][0].name, json.loads(call["calls"][0].arguments)],
                "answer": answer["text"],
                "cut": cut["text"],
                "repeated": repeated["text"],
                "errors": talk.errors,
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main())
