"""The grammar of signals (:mod:`realtime_omni.session.signals`), checked tick by tick."""

from __future__ import annotations

from itertools import zip_longest

from realtime_omni.session.signals import (
    InputTranscript,
    OutputText,
    ResponseEnded,
    ResponseStarted,
    Signal,
    Speaking,
    SpeechStarted,
    SpeechStopped,
    ToolCall,
    TurnCommitted,
    ends_at_once,
)


class SignalGrammar:
    """What one session may tell next. ``take`` raises AssertionError for what it may not."""

    def __init__(self) -> None:
        self.running: str | None = None
        self.responses: set[str] = set()
        self.ended: set[str] = set()
        self.utterances: set[str] = set()
        self._speech: str | None = None
        self._committed: set[str] = set()
        self._final: set[str] = set()

    def take(self, signals: tuple[Signal, ...], start_ms: float, end_ms: float) -> None:
        """The signals of one tick, which lasts from ``start_ms`` to ``end_ms``."""
        stopped: str | None = None
        speaking = 0
        for signal, following in zip_longest(signals, signals[1:]):
            match signal:
                case SpeechStarted():
                    assert self._speech is None, f"{signal}: the utterance before has not stopped"
                    assert signal.utterance not in self.utterances, f"{signal}: the name is taken"
                    assert signal.at_ms <= end_ms, f"{signal}: is to come"
                    self._speech = signal.utterance
                    self.utterances.add(signal.utterance)
                case SpeechStopped():
                    assert signal.utterance == self._speech, f"{signal}: it had not started"
                    self._speech, stopped = None, signal.utterance
                case TurnCommitted():
                    assert signal.utterance not in self._committed, f"{signal}: twice"
                    assert signal.start_ms <= signal.end_ms <= end_ms, f"{signal}: its times are out of order"
                    self._committed.add(signal.utterance)
                    self.utterances.add(signal.utterance)
                    if self._speech == signal.utterance:
                        self._speech = None
                    stopped = None if stopped == signal.utterance else stopped
                case InputTranscript():
                    assert signal.utterance in self.utterances, f"{signal}: no such utterance"
                    assert signal.utterance not in self._final, f"{signal}: after the final one"
                    if signal.final:
                        self._final.add(signal.utterance)
                case ResponseStarted() if ends_at_once(signal, following):
                    assert signal.response not in self.responses, f"{signal}: the name is taken"
                    self.responses.add(signal.response)
                case ResponseEnded() if signal.response in self.responses - self.ended - {self.running}:
                    self.ended.add(signal.response)
                case ResponseStarted():
                    assert self.running is None, f"{signal}: {self.running!r} has not ended"
                    assert signal.response not in self.responses, f"{signal}: the name is taken"
                    self.responses.add(signal.response)
                    self.running = signal.response
                case Speaking() | OutputText() | ToolCall():
                    assert signal.response == self.running, f"{signal}: it does not run"
                    speaking += isinstance(signal, Speaking)
                case ResponseEnded():
                    assert signal.response == self.running, f"{signal}: it does not run"
                    self.ended.add(signal.response)
                    self.running = None
                case _:
                    pass
        assert stopped is None, f"utterance {stopped!r} stopped and was not committed in the same tick"
        assert speaking <= 1, "two responses speak in one tick"
