"""Pipecat's OpenAILiveLLMService against our server: interrupted, two turns, connected anew; or one question:
interrupt_pipecat.py BASE_URL [FILE], FILE: PCM16 at 24 kHz. Prints one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from loguru import logger
from talk_pipecat import run, tone

COUNT = "say one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen and so on"


async def main(*questions: bytes) -> None:
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    if questions:
        print(json.dumps(await run("Hello.", 7.0, *questions)))
        return
    print(json.dumps(await run(COUNT, 2.4, tone(1000), tone(1000), again=True)))


asyncio.run(main(*(Path(file).read_bytes() for file in sys.argv[2:])))
