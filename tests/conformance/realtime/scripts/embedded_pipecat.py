"""Run in the environment of pipecat.lock: Pipecat is greeted by a server whose answers nobody knows beforehand."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pipecat_realtime
from loguru import logger
from pipecat.frames.frames import ErrorFrame, LLMRunFrame


async def greet(worker: Any, _: Any, ear: pipecat_realtime.Ear) -> dict[str, Any]:
    await worker.queue_frame(LLMRunFrame())
    await ear.answers(1)
    errors = [frame.error for frame in ear.of(ErrorFrame)]
    return {"greeting": ear.text(), "ms": ear.audio_ms(), "errors": errors}


async def main() -> None:
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    pipecat_realtime.WAIT_S = 60
    print(json.dumps(await pipecat_realtime.run("Hello! Please tell me one thing that you like.", greet, local=False)))


if __name__ == "__main__":
    asyncio.run(main())
