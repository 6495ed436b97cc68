"""A call with the embedded voice that a test holds, frame by frame."""

import numpy as np

from models.voice.stand_ins import voice
from realtime_omni.engine import commands as c
from realtime_omni.session.frame import Frame
from realtime_omni.session.signals import OutputText
from realtime_omni.testing.grammar import SignalGrammar
from realtime_omni.testing.inline import InlineEngine

FRAME_MS, SAMPLES = 40, 640


class Talk:
    """One call. ``signals`` are all that were told, ``audio`` all that sounded."""

    def __init__(self, model=None, name="a"):
        self.name = name
        self.model = model or voice()
        self.engine = InlineEngine(self.model, dtype="float32", rewind_blocks=8)
        self.engine.create(name)
        self.grammar = SignalGrammar()
        self.signals = []
        self.audio = np.zeros(0, np.float32)
        self.frames = 0
        self._rest = np.zeros(0, np.float32)

    def frame(self, audio=None, *directives):
        """One frame; returns what it told."""
        audio = np.zeros(SAMPLES, np.float32) if audio is None else audio
        chunk = self.engine.ask(c.Next(ticket=0, session_id=self.name, frame=Frame(audio, directives)))
        self.grammar.take(chunk.signals, self.frames * FRAME_MS, (self.frames + 1) * FRAME_MS)
        self.frames += 1
        self.signals += chunk.signals
        self.audio = np.concatenate((self.audio, chunk.artifacts["speech"].data[0]))
        return list(chunk.signals)

    def hear(self, audio, *directives):
        """Sound of any length, filled up with silence to whole frames."""
        audio = np.pad(audio, (0, -len(audio) % SAMPLES))
        told = []
        for number, part in enumerate(audio.reshape(-1, SAMPLES)):
            told += self.frame(part, *(directives if number == 0 else ()))
        return told

    def wait(self, ms):
        return self.hear(np.zeros(int(ms * 16), np.float32))

    def tell(self, *directives):
        return self.frame(None, *directives)

    def until(self, kind, most_ms=20_000):
        """Silence until such a signal is told; returns it."""
        for _ in range(most_ms // FRAME_MS):
            for signal in self.frame():
                if isinstance(signal, kind):
                    return signal
        raise AssertionError(f"no {kind.__name__} in {most_ms} ms")

    def said(self):
        """What was told of each response, by id."""
        texts = {}
        for s in self.signals:
            if isinstance(s, OutputText):
                texts[s.response] = texts.get(s.response, "") + s.text
        return texts

    def of(self, *kinds):
        return [s for s in self.signals if isinstance(s, kinds)]

    @property
    def facts(self):
        return self.engine.runner.resident(self.name).state.facts
