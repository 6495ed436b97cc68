"""What the scripts send: tones, which the puppet takes for speech. Runs in every environment: the standard library only."""

from __future__ import annotations

import array
import asyncio
import math
from collections.abc import AsyncIterator

RATE = 24_000


def tone(ms: int) -> bytes:
    """PCM16 at 24 kHz."""
    count = RATE * ms // 1000
    return array.array("h", (int(9000 * math.sin(2 * math.pi * 220 * i / RATE)) for i in range(count))).tobytes()


def silence(ms: int) -> bytes:
    return bytes(RATE * ms // 1000 * 2)


async def in_real_time(sound: bytes, ms: int = 40) -> AsyncIterator[bytes]:
    """In packets, as a microphone gives it."""
    size = RATE * ms // 1000 * 2
    for start in range(0, len(sound), size):
        yield sound[start : start + size]
        await asyncio.sleep(ms / 1000)
