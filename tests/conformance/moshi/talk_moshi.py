"""Kyutai's command-line client, unmodified, with a sound card of our own: python talk_moshi.py ws://HOST:PORT.

The `moshi` package is entered below its `__init__`, which would import torch; `sounddevice` is replaced by a card that
plays a script to the microphone and records the speaker. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np

RATE, FRAME = 24_000, 1920
TONE = (0.3 * np.sin(2 * np.pi * 220 * np.arange(FRAME) / RATE)).astype(np.float32)
SCRIPT = [0] * 6 + [1] * 10 + [0] * 25 + [1] * 10 + [0] * 25
PLAYED: list[np.ndarray] = []
DONE = threading.Event()


class Stream:
    """A thread that calls back every 80 ms."""

    def __init__(self, *, blocksize: int, callback, **_: object) -> None:
        assert blocksize == FRAME
        self.callback, self.running = callback, True

    def __enter__(self) -> Stream:
        threading.Thread(target=self.run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.running = False

    def run(self) -> None:
        began, count = time.monotonic(), 0
        while self.running:
            self.frame(count)
            count += 1
            time.sleep(max(0.0, began + count * FRAME / RATE - time.monotonic()))


class InputStream(Stream):
    def frame(self, count: int) -> None:
        if count >= len(SCRIPT):
            DONE.set()
            return
        self.callback((TONE * SCRIPT[count])[:, None], FRAME, None, None)


class OutputStream(Stream):
    def frame(self, count: int) -> None:
        played = np.zeros((FRAME, 1), np.float32)
        self.callback(played, FRAME, None, None)
        PLAYED.append(played[:, 0])


sounddevice = types.ModuleType("sounddevice")
sounddevice.InputStream, sounddevice.OutputStream = InputStream, OutputStream
sys.modules["sounddevice"] = sounddevice
spec = importlib.util.find_spec("moshi")
package = types.ModuleType("moshi")
package.__path__ = list(spec.submodule_search_locations)
sys.modules["moshi"] = package

from moshi import client  # noqa: E402


class Printer(client.RawPrinter):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.logs, self.lags = [], [], 0

    def print_token(self, token: str) -> None:
        self.tokens.append(token)

    def log(self, level: str, msg: str) -> None:
        self.logs.append(f"{level}: {msg}")

    def print_lag(self) -> None:
        self.lags += 1

    def print_header(self) -> None:
        pass

    def print_pending(self) -> None:
        pass


async def main(url: str) -> dict:
    printer = Printer()
    running = asyncio.create_task(client.run(printer, argparse.Namespace(url=url)))
    waiting = asyncio.create_task(asyncio.to_thread(DONE.wait))
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    played = np.concatenate(PLAYED)
    loud = np.abs(played.reshape(-1, FRAME)).max(axis=1) > 0.03
    return {
        "client": str(Path(client.__file__).name),
        "text": "".join(printer.tokens),
        "logs": printer.logs,
        "lags": printer.lags,
        "frames": len(loud),
        "loud": int(loud.sum()),
        "heard_after_frame": int(np.argmax(loud)),
    }


print(json.dumps(asyncio.run(main(sys.argv[1]))))
