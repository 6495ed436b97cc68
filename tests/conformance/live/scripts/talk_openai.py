"""`openai`'s AsyncOpenAI.live against our server: python talk_openai.py BASE_URL. Prints what happened, in JSON."""

import array
import asyncio
import base64
import json
import math
import sys
import time

from openai import AsyncOpenAI

RATE = 24_000
SILENCE, TONE = bytes(4800), array.array("h", (int(9000 * math.sin(i * 0.0576)) for i in range(2400))).tobytes()


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Talk:
    """One connection: sends 100 ms at a time in real time, keeps what comes."""

    def __init__(self, connection) -> None:
        self.connection, self.events, self.heard = connection, [], 0
        self.arrived = asyncio.Condition()
        self.reader = asyncio.create_task(self.read())

    async def read(self) -> None:
        async for event in self.connection:
            async with self.arrived:
                self.events.append(event)
                if event.type == "session.output_audio.delta":
                    self.heard += len(base64.b64decode(event.delta)) // 2
                self.arrived.notify_all()

    def of(self, kind: str) -> list:
        return [event for event in self.events if event.type == kind]

    @property
    def transcript(self) -> str:
        return "".join(event.delta for event in self.of("session.output_transcript.delta"))

    async def wait(self, kind: str, count: int = 1):
        async with asyncio.timeout(10), self.arrived:
            await self.arrived.wait_for(lambda: len(self.of(kind)) >= count)
        return self.of(kind)[-1]

    async def send(self, sound: bytes, count: int) -> None:
        began = time.monotonic()
        for number in range(count):
            await self.connection.session.input_audio.append(audio=encode(sound))
            await asyncio.sleep(max(0.0, began + (number + 1) / 10 - time.monotonic()))


async def main(base_url: str) -> dict:
    client = AsyncOpenAI(api_key="-", base_url=base_url)
    result = {}
    async with client.live.connect() as connection:
        talk = Talk(connection)
        history = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "say Hello there."}]}]
        session = {"model": "gpt-live-1", "instructions": "Be brief.", "input": history, "store": True}
        await connection.session.start(session=session, event_id="start")
        started = await talk.wait("session.started")
        result["started"] = started.client_event_id
        await talk.send(SILENCE, 3)
        await connection.session.commentary.append(content="Greet them.", delegation_id=None, event_id="greet")
        await talk.send(SILENCE, 15)
        result["ack"] = (await talk.wait("session.commentary.appended")).client_event_id
        result["greeting"] = talk.transcript
        await talk.send(TONE, 10)
        await talk.send(SILENCE, 20)
        result["two_turns"] = talk.transcript

        async with client.live.sideband.connect(session_id=started.session.id) as attached:
            side = Talk(attached)
            await talk.send(SILENCE, 3)
            await attached.session.input_audio.mute(event_id="mute")
            await side.wait("session.input_audio.muted")
            await talk.send(TONE, 10)
            await talk.send(SILENCE, 15)
            result["sideband"] = {
                "reflected_input": len(side.of("session.input_audio.append")),
                "timed": all(e.end_ms - e.start_ms == 80 for e in side.of("session.output_audio.delta")),
            }
            await attached.session.input_audio.unmute()
            await side.wait("session.input_audio.unmuted")
        result["muted"] = talk.transcript

        await connection.session.output_audio.fixture.play(audio=encode(TONE * 3), event_id="fixture")
        await talk.send(SILENCE, 6)
        result["fixture"] = (await talk.wait("session.output_audio.fixture.played")).client_event_id

        async with client.live.forks.connect(session_id=started.session.id) as forked:
            fork = Talk(forked)
            await forked.session.start(session={})
            await fork.wait("session.started")
            await fork.send(TONE, 10)
            await fork.send(SILENCE, 20)
            result["fork"] = fork.transcript
            await forked.session.close()
            await fork.wait("session.closed")

        await connection.session.update(session={"delegation": {"type": "client", "acknowledgement_delay_ms": 9}})
        updated = await talk.wait("session.updated")
        result["updated"] = updated.session.delegation.acknowledgement_delay_ms
        await connection.session.close(event_id="close")
        closed = await talk.wait("session.closed")
        result["closed"] = [closed.reason, closed.client_event_id]
        result["seconds"], result["heard_s"] = closed.usage.seconds, talk.heard / RATE
        result["errors"] = [event.error.code for event in talk.of("error")]
        await talk.reader
    return result


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
