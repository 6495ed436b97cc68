"""LiveKit's GPTLiveModel, without a room, against our server: python talk_livekit.py BASE_URL."""

import asyncio
import json
import math
import os
import sys
import time

import aiohttp
import numpy as np
from livekit import rtc
from livekit.agents import llm
from livekit.plugins import openai

os.environ.setdefault("OPENAI_API_KEY", "-")


@llm.function_tool
async def weather(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


async def use_a_tool(http: aiohttp.ClientSession, base_url: str) -> dict:
    """What AgentSession does with a call: run the function, add its output to the conversation."""
    texts, calls = [], asyncio.Queue()
    model = openai.realtime.GPTLiveModel(base_url=base_url, http_session=http)
    session = model.session()
    session.on("transcript_delta", lambda event: texts.append(event.text))
    session.on("function_call", calls.put_nowait)
    context = llm.ChatContext.empty()
    context.add_message(role="user", content='call weather {"city":"Rome"}')
    await session._update_session(instructions="Be brief.", chat_ctx=context, tools=[weather])
    silence = rtc.AudioFrame(bytes(4800), 24_000, 1, 2400)

    async def be_silent() -> None:
        while True:
            session.push_audio(silence)
            await asyncio.sleep(0.1)

    silent = asyncio.create_task(be_silent())
    session.append_commentary("Go.")
    call = await asyncio.wait_for(calls.get(), 10)
    said = await weather(**json.loads(call.arguments))
    output = llm.FunctionCallOutput(call_id=call.call_id, name=call.name, output=said, is_error=False)
    await session._append_items([output])
    async with asyncio.timeout(10):
        while "".join(texts).strip() != said:
            await asyncio.sleep(0.1)
    silent.cancel()
    await session.aclose()
    return {"called": call.name, "said": "".join(texts)}


async def main(base_url: str) -> dict:
    texts, heard, errors, sent = [], [], [], 0
    async with aiohttp.ClientSession() as http:
        model = openai.realtime.GPTLiveModel(delegation="client", base_url=base_url, http_session=http)
        session = model.session()
        session.on("transcript_delta", lambda event: texts.append(event.text))
        session.on("input_audio_transcription_completed", lambda event: heard.append(event.transcript))
        session.on("error", lambda event: errors.append(str(event)))
        await session._update_session(instructions="Be brief.")
        samples = 0

        async def listen() -> None:
            nonlocal samples
            async for frame in session.audio_stream:
                samples += frame.frame.samples_per_channel

        listening = asyncio.create_task(listen())
        tone = (9000 * np.sin(np.arange(480) * 2 * math.pi * 220 / 24_000)).astype("<i2").tobytes()

        async def push(data: bytes, seconds: float) -> None:
            nonlocal sent
            began = time.monotonic()
            for number in range(int(seconds * 50)):
                session.push_audio(rtc.AudioFrame(data, 24_000, 1, 480))
                sent += 480
                await asyncio.sleep(max(0.0, began + (number + 1) / 50 - time.monotonic()))

        await push(bytes(960), 1.0)
        session.append_commentary("Greet them.")
        await push(bytes(960), 2.0)
        greeting = "".join(texts)
        await push(tone, 1.0)
        await push(bytes(960), 2.0)
        answer = "".join(texts)[len(greeting) :]
        session_id = session.session_id
        await session.aclose()
        listening.cancel()
        tools = await use_a_tool(http, base_url)
    return {
        "greeting": greeting,
        "answer": answer,
        "heard": heard[-1] if heard else None,
        "sent_s": sent / 24_000,
        "received_s": samples / 24_000,
        "session": bool(session_id),
        "errors": errors,
        "tools": tools,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
