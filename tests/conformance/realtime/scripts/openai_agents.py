"""Run in the environment of openai.lock: an agent of OpenAI Agents with a function, spoken and written to, and interrupted.

Prints one JSON object. Any event that its strict validator refuses is an error here.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agents import function_tool
from agents.realtime import RealtimeAgent, RealtimeRunner
from sound import in_real_time, silence, tone

CALLS: list[str] = []


@function_tool
def weather(town: str) -> str:
    """The weather in a town."""
    CALLS.append(town)
    return f"It is sunny in {town}."


class Talk:
    def __init__(self, session: Any, wait_s: float = 20) -> None:
        self.wait_s = wait_s
        self.session = session
        self.kinds: list[str] = []
        self.errors: list[str] = []
        self.audio = 0
        self.history: list[Any] = []
        self.changed = asyncio.Event()

    async def listen(self) -> None:
        async for event in self.session:
            self.kinds.append(event.type)
            if event.type == "audio":
                self.audio += len(event.audio.data)
            if event.type == "error":
                self.errors.append(str(event.error))
            if event.type == "raw_model_event" and event.data.type in ("exception", "error"):
                self.errors.append(str(event.data))
            if event.type == "history_updated":
                self.history = event.history
            self.changed.set()

    async def until(self, done: Any) -> None:
        async with asyncio.timeout(self.wait_s):
            while not done():
                self.changed.clear()
                await self.changed.wait()

    def turns_ended(self) -> int:
        return self.kinds.count("agent_end")

    async def ask(self, text: str) -> None:
        ended = self.turns_ended()
        await self.session.send_message(text)
        await self.until(lambda: self.turns_ended() > ended)

    async def speak(self, *sounds: bytes) -> None:
        async for packet in in_real_time(b"".join(sounds)):
            await self.session.send_audio(packet)

    def said(self) -> list[str]:
        items = [item for item in self.history if item.type == "message" and item.role == "assistant"]
        return [part.transcript or "" for item in items for part in item.content if part.type == "audio"]


async def main() -> None:
    agent = RealtimeAgent(name="host", instructions="Be kind.", tools=[weather])
    config = {"url": sys.argv[1].replace("http", "ws") + "/v1/realtime?model=gpt-realtime", "api_key": "a key"}
    async with await RealtimeRunner(agent).run(model_config=config) as session:
        talk = Talk(session)
        listener = asyncio.create_task(talk.listen())
        await talk.ask("say Good evening.")
        greeted_bytes = talk.audio
        for _ in range(2):
            ended = talk.turns_ended()
            await talk.speak(tone(600), silence(700))
            await talk.until(lambda ended=ended: talk.turns_ended() > ended)
        await session.send_message("say one two three four five six seven eight nine ten")
        before = talk.audio
        await talk.until(lambda: talk.audio > before + 48 * 500)
        ended = talk.turns_ended()
        await talk.speak(tone(500), silence(700))
        await talk.until(lambda: "audio_interrupted" in talk.kinds and talk.turns_ended() > ended + 1)
        interrupted = talk.said()[-2]
        await session.send_message('call weather {"town": "Bonn"}')
        await talk.until(lambda: any("sunny" in line for line in talk.said()))
        await session.interrupt()
        await asyncio.sleep(0.3)
        listener.cancel()
        found = {
            "said": talk.said(),
            "greeted_ms": greeted_bytes / 48,
            "interrupted": interrupted,
            "called": CALLS,
            "tool_events": [kind for kind in talk.kinds if kind.startswith("tool_")],
            "errors": talk.errors,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
