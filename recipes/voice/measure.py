"""Talk with the embedded voice at the pace of speech, and measure it: ``python -m recipes.voice.measure [--json]``.

The user is another synthesiser (flite or espeak-ng) whose sound is appended in pieces of 20 ms as a microphone gives it. Every
question is asked when the voice has said its answer; then it is interrupted a few times.

- ``first_audio_ms``: from the end of the question's last 20 ms above -35 dBFS to the tick with the answer's first sound.
  Turns that the language model answered and those that a skill did are counted apart.
- ``barge_in_stop_ms``: from the beginning of the user's first 20 ms above -35 dBFS to the last sound of the interrupted answer.
- ``stages_ms``: of the language model's turns, from the same moment: when its work began and was done, in the pause that ended
  the turn (recognition, judgement, the prompt read, the first clause written, that clause spoken), and when the turn was over.
  Work is watched at its functions; what lies between two stages is waiting, mostly for the next frame.
- ``word_error_rate``: of what was recognised, letters and digits only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import soxr

from realtime_omni.bench.conditions import commit, hardware, software, summary
from realtime_omni.call import Call, Calls
from realtime_omni.duplex.outputs import Interrupted, Tick
from realtime_omni.manager import SessionManager
from realtime_omni.models.voice.endpoint import EndOfTurn
from realtime_omni.models.voice.lm.answers import Answer, Answerer
from realtime_omni.models.voice.recognizer import Recognizer
from realtime_omni.models.voice.speech import Synthesizer
from realtime_omni.session.signals import InputTranscript, OutputText, ResponseEnded, Speaking, TurnCommitted

RATE, PIECE = 16_000, 320
LOUD = 10 ** (-35 / 20)
QUESTIONS = tuple(
    f"{question}?"
    for question in (
        "What is the capital of France", "What do bees make", "What is the largest planet", "Who wrote Romeo and Juliet",
        "Where do penguins live", "What is your favorite color", "How do birds fly", "Why is the sky blue",
        "What is the capital of Italy", "Can you tell me a joke", "What is a good name for a dog", "How are you today",
        "What is the tallest mountain", "What do cows eat", "How does a car work", "What is the best season of the year",
        "Where does chocolate come from", "What is the fastest animal", "Do you like music", "What is an ocean",
        "Who invented the telephone", "What is the opposite of hot", "What should I cook for dinner", "Is the moon a planet",
        "What is the capital of Japan", "What is bread made of", "How do I stay healthy", "What is a computer",
        "What is the language of Brazil", "Where is the Eiffel Tower", "What sound does a cat make", "What is a rainbow",
        "What is the color of grass", "How long is a day", "What is the heart for", "What is snow made of",
        "Who was Albert Einstein", "What can I do when I am bored", "What is love", "How do fish breathe",
        "What is the capital of Spain", "What is a volcano", "Why do we sleep", "What is the biggest ocean",
        "What do bears do in winter", "What is a good book to read", "How do plants grow", "What is gold",
        "Where do kangaroos live", "What is the sun made of", "Can dogs swim", "What is a forest",
        "What is the first month of the year", "How do I learn to swim",
    )
)  # fmt: skip
SKILLS = (
    "What time is it?",
    "What is seven times eight?",
    "What is your name?",
    "What day is it today?",
    "Set a timer for one hour.",
)
LONG, STOP = "What can you do?", "Stop."
MOST_S = 30.0
WATCHED = {
    "recognised": (Recognizer, "__call__"),
    "judged": (EndOfTurn, "__call__"),
    "asked": (Answerer, "ask"),
    "token": (Answerer, "_take"),
    "spoken": (Synthesizer, "__call__"),
}
"""Functions of the parts whose calls are timed."""


@dataclass
class Watch:
    """When the watched functions began and returned, in any thread: (stage, began_s, ended_s), oldest first."""

    calls: list[tuple[str, float, float]] = field(default_factory=list)

    def put(self) -> None:
        """Around every function of :data:`WATCHED`, for the rest of the process."""
        for stage, (owner, name) in WATCHED.items():
            setattr(owner, name, self._timed(stage, getattr(owner, name)))

    def _timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.monotonic()
            result = function(*args, **kwargs)
            only_read = any(isinstance(value, Answer) and not value.limit for value in (*args, result))
            if not only_read:  # what the next question will begin with; no answer
                self.calls.append((stage, began_s, time.monotonic()))
            return result

        return timed

    def stages(self, end_s: float, sounds_s: float) -> dict[str, float]:
        """Milliseconds from ``end_s`` to what led to the sound at ``sounds_s``."""
        calls = [call for call in self.calls if call[2] <= sounds_s]
        at: dict[str, float] = {}

        def last(stage: str, before_s: float) -> tuple[float, float] | None:
            return next(((b, e) for s, b, e in reversed(calls) if s == stage and e <= before_s), None)

        asked = last("asked", sounds_s)
        spoken = None if asked is None else next(((b, e) for s, b, e in calls if s == "spoken" and b >= asked[1]), None)
        for stage in ("recognised", "judged"):
            if (found := last(stage, sounds_s)) is not None:
                at[f"{stage}_from"], at[stage] = found
        if spoken is not None and asked is not None:
            at["asked"] = asked[1]
            tokens = [e for s, _, e in calls if s == "token" and asked[1] <= e <= spoken[0]]
            if tokens:
                at["first_token"], at["clause"] = tokens[0], tokens[-1]
            at["spoken_from"], at["spoken"] = spoken
        return {stage: (moment - end_s) * 1000 for stage, moment in at.items()}


def speak(program: str, text: str, folder: Path) -> np.ndarray:
    """float32 at 16 kHz."""
    path = folder / "said.wav"
    command = ["flite", "-voice", "rms", "-t", text, "-o"] if program == "flite" else [program, text, "-w"]
    subprocess.run([*command, str(path)], check=True)
    with wave.open(str(path)) as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
        return soxr.resample(sound, file.getframerate(), RATE).astype(np.float32)


def loud_pieces(sound: np.ndarray) -> np.ndarray:
    pieces = sound[: len(sound) // PIECE * PIECE].reshape(-1, PIECE)
    return np.flatnonzero(np.sqrt((pieces**2).mean(1)) > LOUD)


@dataclass
class Ear:
    """What the user notices, with the time when it came."""

    first_s: float | None = None
    last_s: float | None = None
    over_s: float | None = None
    text: str = ""
    heard: str | None = None
    tokens: int = 0
    sounds: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, output: object) -> None:
        now_s = time.monotonic()
        if isinstance(output, Interrupted):
            self.done.set()
        if not isinstance(output, Tick):
            return
        for signal in output.signals:
            match signal:
                case Speaking():
                    self.first_s = now_s if self.first_s is None else self.first_s
                    self.sounds.set()
                    self.last_s = now_s
                case TurnCommitted():
                    self.over_s = now_s
                case OutputText():
                    self.text += signal.text
                case InputTranscript(final=True):
                    self.heard = signal.text
                case ResponseEnded():
                    self.tokens = signal.usage.output_text
                    self.done.set()


class User:
    """A microphone that never stops, and an ear."""

    def __init__(self, call: Call, program: str, folder: Path) -> None:
        self.ear = Ear()
        self._call = call
        self._program = program
        self._folder = folder
        self._waiting = np.zeros(0, np.float32)
        self._piece_s = 0.0

    async def microphone(self) -> None:
        began_s, pieces = time.monotonic(), 0
        while True:
            piece, self._waiting = self._waiting[:PIECE], self._waiting[PIECE:]
            self._piece_s = began_s + pieces * 0.02
            pieces += 1
            await asyncio.sleep(max(0.0, began_s + pieces * 0.02 - time.monotonic()))
            self._call.append(np.pad(piece, (0, PIECE - len(piece))))

    async def listen(self) -> None:
        async for _, output in self._call.outputs():
            self.ear.take(output)

    def say(self, text: str) -> tuple[float, float]:
        """When the first loud piece begins and the last one ends."""
        sound = speak(self._program, text, self._folder)
        loud = loud_pieces(sound)
        self._waiting = sound
        begins_s = self._piece_s + 0.02
        return begins_s + loud[0] * 0.02, begins_s + (loud[-1] + 1) * 0.02


async def converse(
    program: str, questions: Sequence[str], interruptions: int, overrides: list[str]
) -> dict[str, object]:
    waits: dict[str, list[float]] = {"model": [], "skill": []}
    stops: list[float] = []
    watch, stages = Watch(), dict[str, list[float]]()
    watch.put()
    wrong = words = unanswered = 0
    async with SessionManager.from_recipe("voice", overrides) as manager, Calls(manager) as calls:
        call = await calls.open()
        with tempfile.TemporaryDirectory() as folder:
            user = User(call, program, Path(folder))
            tasks = [asyncio.create_task(user.microphone()), asyncio.create_task(user.listen())]
            await asyncio.sleep(1)
            for question in questions:
                user.ear = ear = Ear()
                _, end_s = user.say(question)
                try:
                    await asyncio.wait_for(ear.done.wait(), MOST_S)
                except TimeoutError:
                    unanswered += 1
                wait_ms = None if ear.first_s is None else (ear.first_s - end_s) * 1000
                if wait_ms is not None:
                    waits["model" if ear.tokens else "skill"].append(wait_ms)
                if ear.first_s is not None and ear.over_s is not None and ear.tokens:
                    took = watch.stages(end_s, ear.first_s) | {"turn_over": (ear.over_s - end_s) * 1000}
                    for stage, at_ms in took.items():
                        stages.setdefault(stage, []).append(at_ms)
                wrong += edits(plain(question), plain(ear.heard or ""))
                words += len(plain(question))
                print(
                    f"{question}  heard: {ear.heard}  answer: {ear.text}  {wait_ms and round(wait_ms)} ms",
                    file=sys.stderr,
                )
                await asyncio.sleep(0.7)
            for _ in range(interruptions):
                user.ear = ear = Ear()
                user.say(LONG)
                await asyncio.wait_for(ear.sounds.wait(), MOST_S)
                await asyncio.sleep(1)
                begin_s, _ = user.say(STOP)
                await asyncio.wait_for(ear.done.wait(), MOST_S)
                stops.append((max(ear.last_s or 0.0, begin_s) - begin_s) * 1000)
                await asyncio.sleep(2)
            for task in tasks:
                task.cancel()
    return {
        "valid": not unanswered,
        "unanswered": unanswered,
        "first_audio_ms": {kind: summary(times, 0.5, 0.95) for kind, times in waits.items() if times},
        "stages_ms": {stage: summary(times, 0.5, 0.95) for stage, times in stages.items()},
        "barge_in_stop_ms": summary(stops, 0.5, 0.95) if stops else None,
        "word_error_rate": round(wrong / words, 3),
        "turns": {kind: len(times) for kind, times in waits.items()},
    }


def plain(text: str) -> list[str]:
    return re.sub(r"[^a-z0-9 ]", "", text.lower()).split()


def edits(want: list[str], got: list[str]) -> int:
    """Levenshtein's distance in words."""
    row = list(range(len(got) + 1))
    for i, a in enumerate(want, 1):
        row, before = [i], row
        for j, b in enumerate(got, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b)))
    return row[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--user", choices=("flite", "espeak-ng"), default="flite")
    parser.add_argument("--turns", type=int, default=50, help="questions for the language model")
    parser.add_argument("--skip", type=int, default=0, help="of them first, so that short runs can ask others")
    parser.add_argument("--skills", type=int, default=len(SKILLS), help="questions for the skills")
    parser.add_argument("--interruptions", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--json", action="store_true", help="the report on one line")
    args = parser.parse_args()
    questions = (*QUESTIONS[args.skip :][: args.turns], *SKILLS[: args.skills])
    load_before = os.getloadavg()[0]
    report = asyncio.run(converse(args.user, questions, args.interruptions, args.set))
    conditions = {"user": args.user, "load_before": load_before, "commit": commit(), **hardware(), **software()}
    print(json.dumps({"conditions": conditions, **report}, indent=None if args.json else 2))
    return 0 if report["valid"] else 1


if __name__ == "__main__":
    sys.exit(main())
