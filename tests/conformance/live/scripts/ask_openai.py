"""One spoken question through AsyncOpenAI.live: python ask_openai.py BASE_URL FILE. Prints what was heard and said, in JSON.

FILE: PCM16 at 24 kHz.
"""

import asyncio
import base64
import json
import pathlib
import sys
import time

from openai import AsyncOpenAI

PACKET = 4800


async def main(base_url: str, question: bytes) -> dict:
    client = AsyncOpenAI(api_key="-", base_url=base_url)
    heard, said, answered = [], [], asyncio.Event()
    async with client.live.connect() as connection:

        async def listen() -> None:
            async for event in connection:
                match event.type:
                    case "session.input_transcript.delta":
                        heard.append(event.delta)
                    case "session.output_transcript.delta":
                        said.append(event.delta)
                        if said[-1].rstrip().endswith((".", "!", "?")):
                            answered.set()

        await connection.session.start(session={"model": "gpt-live-1", "instructions": "Be brief."})
        listening = asyncio.create_task(listen())
        sound = bytes(24_000) + question + bytes(48_000 * 20)
        began = time.monotonic()
        for start in range(0, len(sound), PACKET):
            await connection.session.input_audio.append(audio=base64.b64encode(sound[start : start + PACKET]).decode())
            await asyncio.sleep(max(0.0, began + (start + PACKET) / 48_000 - time.monotonic()))
            if answered.is_set():
                break
        await connection.session.close()
        await listening
    return {"heard": "".join(heard), "said": "".join(said)}


print(json.dumps(asyncio.run(main(sys.argv[1], pathlib.Path(sys.argv[2]).read_bytes()))))
