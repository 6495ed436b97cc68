"""Talk over a voice, in process: what was heard is what it remembers.

    python examples/interrupt.py

The puppet says a line in tones, is interrupted by a second of a louder tone, and is then asked to repeat itself: it says
the words that were heard. No microphone, no weights; a real model in its place needs no other line.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from realtime_omni.call import Call, Calls
from realtime_omni.duplex.outputs import Interrupted, Tick
from realtime_omni.manager import SessionManager
from realtime_omni.session.frame import AddText, Configure, Respond, Say, Turns
from realtime_omni.session.signals import OutputText, ResponseEnded

LINE = "this is a long story that nobody will ever hear to its end"
BARGE_IN_MS = 1500.0


async def microphone(call: Call, until_ms: float) -> None:
    """Eighty milliseconds of sound at a time, at the pace of speech: silence, then a voice."""
    rate = call.spec.input_rate_hz
    voice = (0.3 * np.sin(2 * np.pi * 150 * np.arange(call.spec.input_samples) / rate)).astype(np.float32)
    while call.now_ms < until_ms:
        speaking = call.now_ms >= BARGE_IN_MS
        call.append(voice if speaking else np.zeros_like(voice))
        await asyncio.sleep(call.spec.frame_ms / 1000)


async def interrupt() -> tuple[float, str]:
    """How much of the line was heard, in ms, and what the voice says when it is asked to repeat it."""
    async with SessionManager.from_recipe("puppet") as manager, Calls(manager) as calls:
        call = await calls.open()
        call.direct(Configure(turns=Turns(respond=False)), Say("story", LINE))
        talking = asyncio.create_task(microphone(call, BARGE_IN_MS + 1000))
        heard_ms, said = 0.0, ""
        async for _, output in call.outputs():
            match output:
                case Interrupted():
                    heard_ms = output.heard_ms
                    await talking
                    call.direct(AddText("repeat"), Respond("again"))
                case Tick():
                    said += "".join(
                        s.text for s in output.signals if isinstance(s, OutputText) and s.response == "again"
                    )
                    if any(isinstance(s, ResponseEnded) and s.response == "again" for s in output.signals):
                        break
        return heard_ms, said


async def main() -> None:
    heard_ms, said = await interrupt()
    print(f"interrupted after {heard_ms / 1000:.1f} s of {LINE!r}")
    print(f"it remembers: {said!r}")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        sys.exit(130)
