"""The seams for voices that answer turn by turn, and for recurrent ones: tiny stand-ins keep every rule, and do what their kind
does."""

from __future__ import annotations

import numpy as np
import pytest

from realtime_omni.engine import commands as c
from realtime_omni.models.duplex import DuplexBase
from realtime_omni.session.frame import Cancel, Commit, Configure, Directive, Frame, Respond, Tool, ToolResult
from realtime_omni.session.signals import OutputText, ResponseEnded, ResponseStarted, Signal, ToolCall, TurnCommitted
from realtime_omni.session.values import Chunk, SessionId
from realtime_omni.testing.check_model import check_model
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.voices import TinyRecurrentVoice, TinyTurnCommit

VOICES = (TinyTurnCommit, TinyRecurrentVoice)


@pytest.mark.parametrize("voice", VOICES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_tiny_voice_keeps_the_model_contract(voice: type[DuplexBase], dtype: str) -> None:
    report = check_model(voice(), dtype=dtype)  # type: ignore[arg-type]
    assert report.passed, str(report)


def _hear(engine: InlineEngine, name: str, *directives: Directive, loudness: float = 0.0) -> Chunk:
    frame = Frame(np.full(640, loudness, np.float32), directives)
    chunk = engine.ask(c.Next(ticket=0, session_id=SessionId(name), frame=frame))
    assert isinstance(chunk, Chunk)
    return chunk


def _answer(engine: InlineEngine, name: str, request: str, *directives: Directive) -> str:
    signals: list[Signal] = list(_hear(engine, name, *directives, Respond(request)).signals)
    while not any(isinstance(s, ResponseEnded) for s in signals):
        signals += _hear(engine, name).signals
    return "".join(s.text for s in signals if isinstance(s, OutputText))


def test_an_answer_is_to_the_committed_turns_and_to_nothing_that_was_not() -> None:
    """Two calls that heard differently answer alike until one commits it; then they differ, and each repeats itself."""
    engine = InlineEngine(TinyTurnCommit())
    for name in ("a", "b", "c"):
        engine.create(name, seed=1)
    for name, loudness in (("a", 0.1), ("b", 0.3), ("c", 0.3)):
        _hear(engine, name, loudness=loudness)
    assert _answer(engine, "a", "x") == _answer(engine, "b", "x") == _answer(engine, "c", "x")
    told = _hear(engine, "a", Commit()).signals
    assert told == (TurnCommitted("heard-0", 0.0, told[0].end_ms),)  # type: ignore[union-attr]
    _hear(engine, "b", Commit())
    _hear(engine, "c", Commit())
    assert _answer(engine, "a", "y") != (said := _answer(engine, "b", "y"))
    assert said == _answer(engine, "c", "y")


def test_what_was_not_heard_of_a_cancelled_answer_is_not_read_again() -> None:
    """Cut after one frame, the conversation is the one in which no more was ever said."""
    engine = InlineEngine(TinyTurnCommit())
    engine.create("a", seed=1)
    _hear(engine, "a", Respond("x"))
    _hear(engine, "a")
    cut = _hear(engine, "a", Cancel("x", heard_ms=80.0))
    assert [type(s) for s in cut.signals] == [ResponseEnded]
    (turn,) = engine.state_of("a").turns
    assert (turn.id, len(turn.letters)) == ("x", 1)


def test_a_recurrent_voice_calls_its_tool_and_takes_the_answer_in_while_it_goes_on() -> None:
    engine = InlineEngine(TinyRecurrentVoice(), rewind_blocks=8)
    for name in ("a", "b"):
        engine.create(name, seed=2)
        _hear(engine, name, Configure(tools=(Tool("look"),)))
    calls: list[ToolCall] = []
    for number in range(200):
        for name in ("a", "b"):
            told = _hear(engine, name, loudness=number % 7 / 10).signals
            calls += [s for s in told if isinstance(s, ToolCall) and name == "a"]
        if calls:
            break
    assert calls[0].name == "look"
    same = engine.state_of("a").hidden.tolist() == engine.state_of("b").hidden.tolist()
    assert same, "two calls alike are one"
    _hear(engine, "a", ToolResult(calls[0].call_id, "it snows"))
    _hear(engine, "b")
    assert engine.state_of("a").hidden.tolist() != engine.state_of("b").hidden.tolist()


def test_a_recurrent_voice_goes_back_to_the_heard_frame_by_its_state_alone() -> None:
    engine = InlineEngine(TinyRecurrentVoice(), rewind_blocks=8)
    engine.create("a", seed=2)
    chunks = [_hear(engine, "a", loudness=0.1) for _ in range(9)]
    assert any(isinstance(s, ResponseStarted) for chunk in chunks for s in chunk.signals)
    engine.rewind("a", 4)
    for chunk in chunks[4:]:
        again = _hear(engine, "a", loudness=0.1)
        assert again.signals == chunk.signals
        assert np.array_equal(again.artifacts["speech"].data, chunk.artifacts["speech"].data)
