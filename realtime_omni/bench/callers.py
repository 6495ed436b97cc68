"""The clients of ``bench duplex``: calls over real Live sockets, in a process of their own. Prints one JSON object.

Every caller sends 80 ms of sound every 80 ms: silence, and now and then its voice (a second of a tone, or a recording), after
the agent was silent (a turn) or while it speaks (a barge-in). What comes back must be one stream without a gap: as much
sound as was sent. A caller that finds something wrong says so, and the measurement is void.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import sys
import time
import wave
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import websockets

from realtime_omni.errors import ConfigError

RATE = 24_000
FRAME_MS = 80
FRAME_S = FRAME_MS / 1000
SAMPLES = RATE * FRAME_MS // 1000
VOICE_FRAMES = 12
"""One utterance: about a second."""
LOUD = 1e-3
"""-60 dBFS: what is quieter is silence."""
SPEECH = 0.0178
"""-35 dBFS: where speech in a recording begins and ends."""
PAUSE_PIECES = 4
"""So many silent pieces in a row are the end of what the agent says, and no pause in it."""
PACE_PIECES = 50
"""Four seconds."""
REST_FRAMES = 25
"""A caller is silent so long after the agent, before it speaks again."""


def _packet(audio: np.ndarray) -> str:
    data = base64.b64encode((audio * 32767).astype("<i2").tobytes()).decode()
    return json.dumps({"type": "session.input_audio.append", "audio": data})


SILENCE = _packet(np.zeros(SAMPLES))
HUM = [_packet(0.3 * np.sin(2 * np.pi * 150 * np.arange(SAMPLES) / RATE))] * VOICE_FRAMES


def recording(path: str) -> list[str]:
    """The packets of a WAV file: PCM16, mono, 24 kHz, from its first loud sample to its last. Raises ConfigError."""
    try:
        with wave.open(path, "rb") as file:
            form = (file.getnchannels(), file.getsampwidth(), file.getframerate())
            data = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise ConfigError(f"{path} is no WAV file: {getattr(error, 'strerror', None) or error}") from None
    if form != (1, 2, RATE):
        raise ConfigError(f"{path} is not 16 bit mono at {RATE} Hz")
    audio = np.frombuffer(data[: len(data) // 2 * 2], "<i2").astype(np.float32) / 32768
    loud = np.flatnonzero(np.abs(audio) > SPEECH)
    if not loud.size:
        raise ConfigError(f"{path} is silent")
    audio = audio[loud[0] : loud[-1] + 1]
    audio = np.pad(audio, (-audio.size % SAMPLES, 0))  # in front: the last sample ends the last packet
    return [_packet(part) for part in audio.reshape(-1, SAMPLES)]


@dataclass(slots=True)
class Record:
    """What one process measured; times in milliseconds."""

    lateness_ms: list[float] = field(default_factory=list)
    first_audio_ms: list[float] = field(default_factory=list)
    barge_in_stop_ms: list[float] = field(default_factory=list)
    turns: int = 0
    gaps: int = 0
    frames: int = 0
    wrong: list[str] = field(default_factory=list)


class Caller:
    """One call. ``lines``: packets of what it says, one of them at a time; without any it only listens."""

    def __init__(
        self, url: str, record: Record, number: int, frames: int, warm: int, lines: Sequence[list[str]] = ()
    ) -> None:
        self._url = url
        self._record = record
        self._random = random.Random(number)
        self._frames = frames
        self._warm = warm
        self._lines = lines
        self._arrivals: list[tuple[float, float]] = []
        """When each piece of sound came, and where it ends in the stream, in ms."""
        self._got_ms = 0.0
        self._sounds = False
        self._quiet = 0
        self._sounded_s = 0.0
        self._spoke_until_s: float | None = None
        """The last sample of the caller's turn, until it is answered."""
        self._barged_s: float | None = None

    async def run(self) -> None:
        try:
            await self._call()
        except* websockets.ConnectionClosed as closed:
            self._record.wrong.append(f"the server closed a call: {closed.exceptions[0]}")
        except* (websockets.WebSocketException, OSError) as refused:
            self._record.wrong.append(f"no call: {refused.exceptions[0]}")
        self._finish()

    async def _call(self) -> None:
        async with await websockets.connect(self._url, max_size=None, compression=None, ping_interval=None) as ws:
            await ws.send(json.dumps({"type": "session.start", "session": {"model": "puppet"}}))
            while json.loads(await ws.recv())["type"] != "session.started":
                pass
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(ws))
                await self._send(ws)
                await asyncio.sleep(4 * FRAME_S)
                await ws.send(json.dumps({"type": "session.close"}))

    async def _send(self, ws: Any) -> None:
        due_s = time.perf_counter() + self._random.random() * FRAME_S
        voice: list[str] = []
        rest = 0
        for _ in range(self._frames):
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            due_s += FRAME_S
            if self._lines and not voice:
                rest = 0 if self._sounds else rest + 1
                if rest > REST_FRAMES or (self._sounds and self._random.random() < 0.05):
                    voice, rest = list(self._random.choice(self._lines)), 0
                    self._barged_s = time.perf_counter() - FRAME_S if self._sounds else None
                    self._spoke_until_s = None
            if not voice:
                await ws.send(SILENCE)
                continue
            await ws.send(voice.pop(0))
            if not voice:
                self._spoke_until_s = time.perf_counter()
                self._record.turns += 1

    async def _read(self, ws: Any) -> None:
        async for text in ws:
            event = json.loads(text)
            kind = event["type"]
            if kind == "session.output_audio.delta":
                self._sound(base64.b64decode(event["delta"]), time.perf_counter())
            elif kind == "error":
                self._record.wrong.append(f"error: {event['error']}")
            elif kind == "session.closed":
                return

    def _sound(self, data: bytes, now_s: float) -> None:
        audio = np.frombuffer(data, "<i2").astype(np.float32) / 32768
        self._got_ms += audio.size * 1000 / RATE
        self._arrivals.append((now_s, self._got_ms))
        sounds = bool(np.abs(audio).max(initial=0) > LOUD)
        self._quiet = 0 if sounds else self._quiet + 1
        if sounds:
            self._sounded_s = now_s
            if self._spoke_until_s is not None:
                self._record.first_audio_ms.append((now_s - self._spoke_until_s) * 1000)
                self._spoke_until_s = None
        elif self._quiet == PAUSE_PIECES and self._barged_s is not None:
            self._record.barge_in_stop_ms.append(max(0.0, self._sounded_s - self._barged_s) * 1000)
            self._barged_s = None
        self._sounds = self._sounded_s > 0 and self._quiet < PAUSE_PIECES

    def _finish(self) -> None:
        """How late each piece was, measured against the one of the last seconds that came earliest for its place in the
        stream: a stream that has lost or gained a frame has another pace from then on."""
        record, steady = self._record, self._arrivals[self._warm :]
        record.frames += len(steady)
        if abs(self._got_ms - self._frames * FRAME_MS) > 6 * FRAME_MS:
            record.wrong.append(f"sent {self._frames * FRAME_MS} ms, got {self._got_ms:.0f} ms")
        if not steady:
            record.wrong.append("nothing came")
            return
        offsets_ms = [at_s * 1000 - position_ms for at_s, position_ms in steady]
        windows = (offsets_ms[max(0, n - PACE_PIECES) : n + 1] for n in range(len(offsets_ms)))
        record.lateness_ms += [window[-1] - min(window) for window in windows]
        record.gaps += sum(b[0] - a[0] > 2 * FRAME_S for a, b in pairwise(steady))


async def run(args: argparse.Namespace) -> Record:
    record = Record()
    lines = [recording(path) for path in args.speech] or ([HUM] if args.talk else [])
    callers = [Caller(args.url, record, args.seed + n, args.frames, args.warm, lines) for n in range(args.calls)]
    async with asyncio.TaskGroup() as group:
        for caller in callers:
            group.create_task(caller.run())
            await asyncio.sleep(FRAME_S / 8)
    return record


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--frames", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--talk", action="store_true")
    parser.add_argument("--speech", nargs="*", default=[])
    try:
        record = asyncio.run(run(parser.parse_args(argv)))
    except KeyboardInterrupt:  # the terminal tells it the whole group; the benchmark ends by its own
        return 130
    print(json.dumps(asdict(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
