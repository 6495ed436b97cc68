"""LiveKit's GPTLiveModel against our server: interrupted, two turns, connected anew; or one question: interrupt_livekit.py
BASE_URL [FILE], FILE: PCM16 at 24 kHz. Prints what happened, in JSON."""

import asyncio
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "realtime" / "scripts"))

import aiohttp
from livekit import rtc
from livekit.agents import llm
from livekit.plugins import openai
from sound import RATE, in_real_time, silence, tone

os.environ.setdefault("OPENAI_API_KEY", "-")
COUNT = "say one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen and so on"


class Talk:
    """One session, and what it tells."""

    def __init__(self, model: openai.realtime.GPTLiveModel) -> None:
        self.session = model.session()
        self.texts, self.heard, self.errors, self.reconnected = [], [], [], 0
        self.session.on("transcript_delta", lambda event: self.texts.append(event.text))
        self.session.on("input_audio_transcription_completed", lambda event: self.heard.append(event.transcript))
        self.session.on("error", lambda event: self.errors.append(str(event)))
        self.session.on("session_reconnected", self._count)

    def _count(self, _: object) -> None:
        self.reconnected += 1

    async def send(self, *sounds: bytes) -> str:
        """What is said meanwhile."""
        before = len(self.texts)
        async for packet in in_real_time(b"".join(sounds)):
            self.session.push_audio(rtc.AudioFrame(packet, RATE, 1, len(packet) // 2))
        return "".join(self.texts[before:]).strip()


async def interrupted(http: aiohttp.ClientSession, base_url: str) -> dict:
    talk = Talk(openai.realtime.GPTLiveModel(base_url=base_url, http_session=http))
    context = llm.ChatContext.empty()
    context.add_message(role="user", content=COUNT)
    await talk.session._update_session(instructions="Be brief.", chat_ctx=context)
    await talk.send(silence(500))
    talk.session.append_commentary("Greet them.")
    greeted = await talk.send(silence(1300))
    turns = [await talk.send(tone(1000), silence(1800)) for _ in range(2)]
    await talk.session.aclose()
    return {"greeted": greeted, "turns": turns, "errors": talk.errors}


async def recycled(http: aiohttp.ClientSession, base_url: str) -> dict:
    """The model opens a connection of its own after four seconds."""
    talk = Talk(openai.realtime.GPTLiveModel(base_url=base_url, http_session=http, max_session_duration=4.0))
    await talk.session._update_session(instructions="Be brief.")
    await talk.send(silence(4500))
    after = talk.reconnected
    said = await talk.send(tone(600), silence(1500))
    await talk.session.aclose()
    return {"reconnected": after, "said": said, "errors": talk.errors}


async def asked(http: aiohttp.ClientSession, base_url: str, question: bytes) -> dict:
    talk = Talk(openai.realtime.GPTLiveModel(base_url=base_url, http_session=http))
    await talk.session._update_session(instructions="Be brief.")
    said = await talk.send(silence(500), question, silence(7000))
    await talk.session.aclose()
    return {"heard": " ".join(talk.heard), "said": said, "errors": talk.errors}


async def main(base_url: str, *questions: bytes) -> dict:
    async with aiohttp.ClientSession() as http:
        if questions:
            return await asked(http, base_url, questions[0])
        return {"talk": await interrupted(http, base_url), "recycled": await recycled(http, base_url)}


print(json.dumps(asyncio.run(main(sys.argv[1], *(pathlib.Path(file).read_bytes() for file in sys.argv[2:])))))
