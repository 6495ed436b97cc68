"""The rules of :func:`check_model` for duplex models: what a frame sounds like, what is told, what a cancel does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from realtime_omni.duplex.spec import DuplexSpec
from realtime_omni.engine import commands as c
from realtime_omni.errors import ArgumentError
from realtime_omni.session.frame import Cancel, Configure, Directive, Frame, Respond, Say, Tool, ToolResult
from realtime_omni.session.signals import ResponseEnded, Signal, Speaking
from realtime_omni.session.values import Chunk, SessionId
from realtime_omni.testing.grammar import SignalGrammar
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.lab import Lab, Skip, array
from realtime_omni.testing.observing import hearing

FRAMES = 45
"""Four turns of what is heard, and a little: answers come, are talked over, and end."""
QUIET_S = 20.0
"""Within which a response to one request begins and can be cancelled."""


def _duplex(lab: Lab) -> DuplexSpec:
    assert lab.spec.duplex is not None
    return lab.spec.duplex


def _hear(engine: InlineEngine, frame: Frame) -> Chunk:
    chunk = engine.ask(c.Next(ticket=0, session_id=SessionId("a"), frame=frame))
    assert isinstance(chunk, Chunk)
    return chunk


def _silence(duplex: DuplexSpec, *directives: Directive) -> Frame:
    return Frame(np.zeros(duplex.input_samples, np.float32), directives)


def _request(duplex: DuplexSpec, name: str) -> Directive:
    """Raises Skip."""
    if duplex.says:
        return Say(name, "one two three four five six seven eight")
    if duplex.takes_requests:
        return Respond(name)
    raise Skip("the model cannot be asked to speak")


def _shape(lab: Lab) -> str | None:
    """A duplex tick is one frame of sound, whatever was heard."""
    duplex = _duplex(lab)
    assert lab.spec.frames_per_block == 1, "a tick is one frame: frames_per_block must be 1"
    assert abs(lab.spec.fps - 1000 / duplex.frame_ms) < 1e-9, "fps is not 1000 / frame_ms"
    engine = lab.engine("a")
    for number in range(FRAMES):
        audio = array(_hear(engine, hearing(duplex, number)).artifacts[lab.spec.primary].data)
        assert audio.shape == (1, duplex.output_samples), f"frame {number} has shape {audio.shape}"
        assert np.isfinite(audio).all(), f"frame {number} is not finite"
        assert np.abs(audio).max() <= 1, f"frame {number} is louder than 1"
    return f"{FRAMES} frames of {duplex.frame_ms:g} ms"


def _grammar(lab: Lab) -> str | None:
    """Duplex signals keep their grammar."""
    duplex = _duplex(lab)
    engine, grammar = lab.engine("a"), SignalGrammar()
    for number in range(FRAMES):
        start_ms = number * duplex.frame_ms
        grammar.take(_hear(engine, hearing(duplex, number)).signals, start_ms, start_ms + duplex.frame_ms)
    return f"{len(grammar.utterances)} utterances, {len(grammar.responses)} responses"


def _cancel(lab: Lab) -> str | None:
    """A cancelled response is silent at once, and ends in the same tick."""
    duplex = _duplex(lab)
    request = _request(duplex, "x")
    engine = lab.engine("a")
    signals: list[Signal] = list(_hear(engine, _silence(duplex, request)).signals)
    waited_ms = 0.0
    while not any(isinstance(s, Speaking) for s in signals):
        assert waited_ms < QUIET_S * 1000, "it was asked to speak and does not"
        assert not any(isinstance(s, ResponseEnded) for s in signals), "the response ended without a sound"
        signals += _hear(engine, _silence(duplex)).signals
        waited_ms += duplex.frame_ms
    chunk = _hear(engine, _silence(duplex, Cancel()))
    ends = [s for s in chunk.signals if isinstance(s, ResponseEnded)]
    assert [(s.response, s.reason) for s in ends] == [("x", "cancelled")], f"the cancel ended {ends}"
    assert not any(isinstance(s, Speaking) for s in chunk.signals), "it speaks in the frame that cancels it"
    assert not array(chunk.artifacts[lab.spec.primary].data).any(), "the frame that cancels it is not silent"
    return None


def _withdrawal(lab: Lab) -> str | None:
    """A response that waits and is cancelled by name is told as started and ended, and the one before it has its turn."""
    duplex = _duplex(lab)
    engine, grammar, signals = lab.engine("a"), SignalGrammar(), list[Signal]()
    asked = _silence(duplex, _request(duplex, "x"), _request(duplex, "y"))
    frames = [asked, _silence(duplex, Cancel("y")), *[_silence(duplex)] * int(QUIET_S * 1000 / duplex.frame_ms)]
    for number, frame in enumerate(frames):
        told = _hear(engine, frame).signals
        grammar.take(told, number * duplex.frame_ms, (number + 1) * duplex.frame_ms)
        signals += told
        if number and any(isinstance(s, Speaking) and s.response == "x" for s in signals):
            break
    else:
        raise AssertionError("the one that was asked for first does not speak")
    assert [s.reason for s in signals if isinstance(s, ResponseEnded) and s.response == "y"] == ["cancelled"]
    return None


def _refusals(lab: Lab) -> str | None:
    """A frame that the declaration does not admit is refused, and nothing has happened."""
    duplex = _duplex(lab)
    engine, control = lab.engine("a"), lab.engine("a")
    wrong = [Frame(np.zeros(duplex.input_samples + 1, np.float32)), _silence(duplex, Configure(voice="no such voice"))]
    if not duplex.takes_tools:
        wrong += [_silence(duplex, d) for d in (ToolResult("x", "y"), Configure(tools=(Tool("t"),)))]
    if not duplex.says:
        wrong.append(_silence(duplex, Say("x", "y")))
    if not duplex.takes_requests:
        wrong.append(_silence(duplex, Respond("x")))
    for frame in wrong:
        try:
            _hear(engine, frame)
        except ArgumentError:
            continue
        raise AssertionError(f"accepted: {frame.audio.size} samples, {frame.directives}")
    for number in range(2):
        lab.same(_hear(engine, hearing(duplex, number)), _hear(control, hearing(duplex, number)), "after refusals")
    return f"{len(wrong)} frames"


DUPLEX_RULES: tuple[Callable[[Lab], str | None], ...] = (_shape, _grammar, _cancel, _withdrawal, _refusals)
