"""Parts of a voice without weights: functions of their input that a test can read. The conversation around them is real.

The user "speaks" by the loudness of a hum: each level is a sentence, and some are unfinished.
"""

import numpy as np

from realtime_omni.models.voice.activity import WINDOW, Hearing
from realtime_omni.models.voice.lm.language import Draft
from realtime_omni.models.voice.model import EmbeddedVoice
from realtime_omni.models.voice.parts import Parts
from realtime_omni.models.voice.speech import RATE

SENTENCES = {
    0.1: "What is the capital of France?",
    0.2: "Turn left.",
    0.3: "I would like to",  # unfinished
    0.4: "What is two plus two?",
    0.5: "Stop.",
    0.6: "Please repeat that.",
    0.7: "Set a timer for two seconds.",
    0.9: "Step,",  # stop
    0.8: "♪",  # what a recogniser makes of noise
}
UNFINISHED = frozenset({0.3})
ANSWER = "I heard that, my friend. You said: "
SAMPLES_A_LETTER = RATE // 20


def level(audio):
    loud = np.abs(audio[np.abs(audio) > 0.01])
    return round(float(np.median(loud)), 1) if len(loud) else 0.0


def hum(loudness, ms):
    """float32 at 16 kHz: the sign alternates, so that no sample is silent."""
    n = int(ms * 16)
    return np.where(np.arange(n) % 80 < 40, loudness, -loudness).astype(np.float32)


class Activity:
    def hear(self, before, audio):
        after, heard = [], []
        for state, sound in zip(before, audio, strict=True):
            waiting = np.concatenate((state.waiting, sound))
            whole = len(waiting) // WINDOW
            heard.append(tuple(float(np.abs(w).max() > 0.05) for w in waiting[: whole * WINDOW].reshape(-1, WINDOW)))
            after.append(Hearing(state.recurrent, state.context, waiting[whole * WINDOW :].copy()))
        return after, heard


class Language:
    """Answers at once with what it was asked; ``reads`` counts turns. Tokens are letters."""

    context = 4000

    def __init__(self):
        self.reads = []
        self.dropped = []
        self.closed = False

    most_tokens = 60
    calls_tools = False

    def prompt(self, system, said, offer=None):
        return tuple(map(ord, f"[{system}]" + "".join(f"{t[0]}: {t[1]}\n" for t in said if isinstance(t, tuple))))

    def draft(self, prompt, limit=60, call=""):
        asked = "".join(map(chr, prompt)).rsplit("user: ", 1)[-1].strip()
        return Draft(ANSWER + asked, len(asked), True, False)

    def prepare(self, system, said):
        self.reads.append((system, tuple(said)))

    def watch(self, notice):
        pass  # an answer never grows

    def drop(self, prompt, call=""):
        self.dropped.append(prompt)

    def close(self):
        self.closed = True


def say(text):
    n = SAMPLES_A_LETTER * len(text) if any(c.isascii() and c.isalnum() for c in text) else 0
    return np.full(n, 0.25, np.float32)


def parts(**other):
    made = {
        "activity": Activity(),
        "finished": lambda audio: 0.01 if level(audio) in UNFINISHED else 0.9,
        "recognize": lambda audio: SENTENCES.get(level(audio), ""),
        "say": say,
        "language": Language(),
    }
    return Parts(**(made | other))


def voice(threads=0, **other):
    from datetime import datetime

    return EmbeddedVoice(parts(**other), threads=threads, now=lambda: datetime(2026, 11, 9, 15, 5))
