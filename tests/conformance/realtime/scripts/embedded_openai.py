"""Run in the environment of openai.lock: the SDK, OpenAI Agents and LiveKit, each greeted by a server whose answers nobody
knows beforehand; the SDK speaks to it too, with the server's own voice. Prints one JSON object."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from typing import Any

import livekit_realtime
import openai_agents
import openai_sdk
from agents.realtime import RealtimeAgent, RealtimeRunner
from livekit.plugins import openai
from openai import AsyncOpenAI
from sound import silence

URL = sys.argv[1]
HELLO = "Hello! Please tell me one thing that you like."
WAIT_S = 60


async def sdk() -> dict[str, Any]:
    async with AsyncOpenAI(api_key="a key", base_url=URL + "/v1").realtime.connect(model="any") as connection:
        talk = openai_sdk.Conversation(connection, wait_s=WAIT_S)
        transcription: Any = {"audio": {"input": {"transcription": {"model": "any"}}}}
        await connection.session.update(session={"type": "realtime", **transcription})
        greeting = await talk.ask(HELLO)
        deltas = [event.delta for event in talk.events if event.type == "response.output_audio.delta"]
        voice = b"".join(base64.b64decode(delta) for delta in deltas)
        since = len(talk.events)
        await talk.speak(voice[: 48 * 3000], silence(2500))
        heard = await talk.until("conversation.item.input_audio_transcription.completed", since)
        answer = (await talk.until("response.done", since)).response
        return {
            "greeting": openai_sdk.said(greeting),
            "ms": len(voice) / 48,
            "heard": heard.transcript,
            "answer": openai_sdk.said(answer),
        }


async def agents() -> dict[str, Any]:
    config: Any = {"url": URL.replace("http", "ws") + "/v1/realtime?model=any", "api_key": "a key"}
    async with await RealtimeRunner(RealtimeAgent(name="host")).run(model_config=config) as session:
        talk = openai_agents.Talk(session, wait_s=WAIT_S)
        listener = asyncio.create_task(talk.listen())
        await talk.ask(HELLO)
        await asyncio.sleep(0.3)
        listener.cancel()
        return {"greeting": talk.said()[0], "ms": talk.audio / 48, "errors": talk.errors}


async def livekit() -> dict[str, Any]:
    model = openai.realtime.RealtimeModel(base_url=URL + "/v1", api_key="a key", model="any")
    session = model.session()
    talk = livekit_realtime.Talk(session, wait_s=WAIT_S)
    greeting = await talk.reply(HELLO)
    await session.aclose()
    await model.aclose()
    return {"greeting": greeting["text"], "ms": greeting["ms"], "errors": talk.errors}


async def main() -> None:
    print(json.dumps({"sdk": await sdk(), "agents": await agents(), "livekit": await livekit()}))


if __name__ == "__main__":
    asyncio.run(main())
