"""A duplex session and a puppet without an engine between them: the model's states by frame number, and an independent account
of what a reader may be told."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from realtime_omni.duplex.journal import Lost
from realtime_omni.duplex.outputs import DuplexOptions, Ended, Interrupted, Tick
from realtime_omni.duplex.session import DuplexSession, Feed
from realtime_omni.models.base import SessionSetup
from realtime_omni.models.puppet.model import Puppet, PuppetOptions
from realtime_omni.models.puppet.scene import Scene
from realtime_omni.models.puppet.state import PuppetState
from realtime_omni.session.frame import Frame
from realtime_omni.session.signals import ResponseEnded, ResponseStarted, Signal
from realtime_omni.session.values import SessionId
from realtime_omni.testing.grammar import SignalGrammar

RATE = 8000
FRAME_MS = 80.0
FRAME = 640
LOUD = np.full(FRAME, 0.3, np.float32)
QUIET = np.zeros(FRAME, np.float32)


class Puppeteer:
    """Everything in one thread, on a clock that the test moves; nothing happens by itself."""

    def __init__(self, options: DuplexOptions | None = None, **how: Any) -> None:
        self.puppet = Puppet(PuppetOptions(input_rate_hz=RATE, output_rate_hz=RATE, **how))
        assert self.puppet.spec.duplex is not None
        self.now_s = 0.0
        self.session = DuplexSession(
            self.puppet.spec.duplex, options if options is not None else DuplexOptions(pace="free"), now_s=0.0
        )
        self.states: list[PuppetState] = [self.puppet.open(SessionSetup(SessionId("a"), None, 0))]
        """Before frame 0, 1, …; the last is the present one."""
        self.fed: deque[Feed] = deque()
        self.reader = Reader(self.session)

    @property
    def oldest(self) -> int:
        """The first frame that the model can be taken back to."""
        return max(0, len(self.states) - 26)

    def step(self, frame: Frame) -> tuple[np.ndarray, tuple[Signal, ...]]:
        """One tick of the model."""
        assert self.puppet.spec.duplex is not None
        number = len(self.states) - 1
        scene = Scene(self.states[-1], number * FRAME_MS, self.puppet.options, self.puppet.spec.duplex)
        for directive in frame.directives:
            scene.obey(directive)
        scene.listen(frame)
        sound = scene.speak()
        self.states.append(scene.state)
        return np.zeros(FRAME, np.float32) if sound is None else sound, tuple(scene.signals)

    def pulse(self, seconds: float = 0.08) -> int:
        """Time passes, and what is due is handed to the model, which does not answer yet."""
        self.now_s += seconds
        feeds = self.session.due(self.now_s)
        self.fed.extend(feeds)
        return len(feeds)

    def settle(self) -> None:
        """The model answers the oldest frame."""
        feed = self.fed.popleft()
        assert feed.number == len(self.states) - 1, f"frame {feed.number} came in place of {len(self.states) - 1}"
        audio, signals = self.step(feed.frame)
        self.follow(self.session.settled(feed, audio, signals, self.now_s, self.oldest))

    def fail(self) -> None:
        """The model fails on the oldest frame, and with it on all that wait behind it."""
        self.fed.clear()
        self.session.recover(len(self.states) - 1)

    def interrupt(self, heard_ms: float | None = None) -> None:
        self.follow(self.session.interrupt(self.now_s, heard_ms=heard_ms, oldest_rewind=self.oldest))

    def follow(self, rewind_to: int | None) -> None:
        """What a call does: the frames that the engine has are waited for, then it goes back."""
        if rewind_to is None:
            return
        for feed in self.fed:
            self.step(feed.frame)
        self.fed.clear()
        assert rewind_to >= self.oldest, "further back than the model remembers"
        del self.states[rewind_to + 1 :]

    def run(self, frames: int = 1, audio: np.ndarray | None = None) -> None:
        """So many frames of sound, one after the other, each answered at once."""
        for _ in range(frames):
            self.session.append(QUIET if audio is None else audio, self.now_s)
            self.pulse()
            while self.fed:
                self.settle()
                while not self.fed and self.session.flying == 0 and self.pulse(0.0):
                    pass

    def drain(self) -> None:
        """Everything that is under way ends; silence, until nobody speaks."""
        for _ in range(400):
            self.run()
            self.reader.read()
            if self.session.response is None and not self.session._requested:
                return
        raise AssertionError("the response never ended")


class Reader:
    """Reads everything, and holds it against the rules."""

    def __init__(self, session: DuplexSession) -> None:
        self.session = session
        self.cursor = 0
        self.grammar = SignalGrammar()
        self.ticks: list[Tick] = []
        self.interruptions: list[Interrupted] = []
        self.ended: dict[str, str] = {}
        """How each response ended."""
        self.began: set[str] = set()
        self.last: str | None = None
        self._number = -1

    def read(self, most: int | None = None) -> None:
        while most is None or most > 0:
            found = self.session.read(self.cursor, 1)
            if not found:
                return
            ((self.cursor, output),) = found
            most = None if most is None else most - 1
            assert self.last is None, "something came after the end"
            match output:
                case Tick():
                    self._tick(output)
                case Interrupted():
                    self._interrupted(output)
                case Ended():
                    self.last = output.reason
                case Lost():
                    raise AssertionError("outputs were lost to a reader that keeps up")
                case _:
                    pass

    def _tick(self, tick: Tick) -> None:
        assert tick.number > self._number, f"frame {tick.number} was told behind {self._number}"
        self._number = tick.number
        assert (tick.start_ms, tick.end_ms) == (tick.number * FRAME_MS, (tick.number + 1) * FRAME_MS)
        if tick.epoch < self.session.epoch:
            assert not tick.audio.any(), f"frame {tick.number} of epoch {tick.epoch} sounds in {self.session.epoch}"
        assert tick.response is not None or not tick.audio.any(), "there is sound of nobody"
        started = [s.response for s in tick.signals if isinstance(s, ResponseStarted)]
        self.began.update(started)
        for signal in tick.signals:
            if isinstance(signal, ResponseEnded):
                self._end(signal.response, signal.reason)
        self.grammar.take(tick.signals, tick.start_ms, tick.end_ms)
        self.ticks.append(tick)

    def _interrupted(self, output: Interrupted) -> None:
        self.interruptions.append(output)
        if output.response is not None:
            assert output.response in self.began, "a response was interrupted that nobody heard of"
        for response in output.ended:
            self._end(response, "interrupted")
            if self.grammar.running == response:
                self.grammar.running = None

    def _end(self, response: str, how: str) -> None:
        assert response not in self.ended, f"response {response!r} ended twice: {self.ended[response]}, {how}"
        self.ended[response] = how
