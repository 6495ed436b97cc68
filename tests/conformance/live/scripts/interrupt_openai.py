"""AsyncOpenAI.live against our server: interrupted, two turns, a function, a lost connection: interrupt_openai.py BASE_URL.

The puppet's third line calls the function. Prints what happened, in JSON."""

import asyncio
import json
import sys

from openai import AsyncOpenAI
from talk_openai import SILENCE, TONE, Talk

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a town.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}
COUNT = "say one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen and so on"


async def silent_until(talk: Talk, done) -> None:
    for _ in range(100):
        if done():
            return
        await talk.send(SILENCE, 1)
    raise TimeoutError(talk.transcript)


async def turn(talk: Talk, answer: str) -> None:
    await talk.send(TONE, 10)
    await silent_until(talk, lambda: talk.transcript.endswith(answer))


async def main(base_url: str) -> dict:
    client = AsyncOpenAI(api_key="-", base_url=base_url)
    result = {}
    async with client.live.connect() as connection:
        talk = Talk(connection)
        history = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": COUNT}]}]
        delegation = {"type": "responses", "responses": {"model": "backend", "tools": [WEATHER]}}
        session = {"model": "gpt-live-1", "input": history, "store": True, "delegation": delegation}
        await connection.session.start(session=session)
        started = await talk.wait("session.started")
        await talk.send(SILENCE, 3)
        await connection.session.commentary.append(content="Greet them.", delegation_id=None)
        await talk.send(SILENCE, 12)
        await turn(talk, "I hear you.")
        await turn(talk, "Please go on.")
        await talk.send(TONE, 10)

        def calls() -> list:
            return [
                e.event["item"] for e in talk.of("response.event") if e.event["type"] == "response.output_item.done"
            ]

        await silent_until(talk, calls)
        (call,) = calls()
        result["call"] = [call["name"], json.loads(call["arguments"])]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "It is sunny."}
        await connection.response.item.create(item=output)
        await connection.response.create()
        await silent_until(talk, lambda: talk.transcript.endswith("sunny."))
        result["said"] = talk.transcript
        result["errors"] = [event.error.code for event in talk.of("error")]
    talk.reader.cancel()  # the connection is gone, and nobody has said session.close

    async with client.live.forks.connect(session_id=started.session.id) as again:
        fork = Talk(again)
        await again.session.start(session={})
        await fork.wait("session.started")
        await turn(fork, "And then?")
        result["again"] = fork.transcript
        await again.session.close()
        result["closed"] = (await fork.wait("session.closed")).reason
        result["errors"] += [event.error.code for event in fork.of("error")]
    return result


print(json.dumps(asyncio.run(main(sys.argv[1]))))
