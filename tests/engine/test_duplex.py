"""Duplex sessions in the engine: frames in order, one batch for all, and everything that a session of values can do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from realtime_omni.engine import commands as c
from realtime_omni.engine.entry import MAX_WAITERS
from realtime_omni.errors import ArgumentError, CapacityError, TickError
from realtime_omni.models.null.model import NullWorld
from realtime_omni.models.puppet.model import Puppet, PuppetOptions
from realtime_omni.session.frame import Directive, Frame, Say
from realtime_omni.session.signals import ResponseEnded, ResponseStarted, Speaking
from realtime_omni.session.values import Chunk, SessionId
from realtime_omni.testing.faults import inject
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.observing import hearing

A, B = SessionId("a"), SessionId("b")
SILENCE = np.zeros(640, np.float32)


def engine(*names: SessionId, **settings: Any) -> InlineEngine:
    made = InlineEngine(Puppet(PuppetOptions(input_rate_hz=8000, output_rate_hz=8000)), rewind_blocks=8, **settings)
    for name in names or (A,):
        made.create(name)
    return made


def feed(inline: InlineEngine, *directives: Directive, session: SessionId = A, audio: np.ndarray = SILENCE) -> int:
    return inline.send(c.Next(ticket=0, session_id=session, frame=Frame(audio, directives)))


def sound(chunk: Chunk) -> np.ndarray:
    return np.asarray(chunk.artifacts["speech"].data[0])


def play(inline: InlineEngine, frames: range, session: SessionId = A) -> list[Chunk]:
    duplex = inline.runner.spec.duplex
    assert duplex is not None
    return [inline.ask(c.Next(ticket=0, session_id=session, frame=hearing(duplex, n))) for n in frames]


def same(one: list[Chunk], two: list[Chunk]) -> None:
    for a, b in zip(one, two, strict=True):
        assert (a.chunk_index, a.signals) == (b.chunk_index, b.signals)
        np.testing.assert_array_equal(sound(a), sound(b))


def test_frames_wait_in_order_and_none_is_left_out() -> None:
    inline = engine()
    tickets = [feed(inline, Say(f"r{n}", "hi")) for n in range(4)]
    inline.rest()
    chunks = [inline.result(t) for t in tickets]
    assert [chunk.chunk_index for chunk in chunks] == [0, 1, 2, 3]
    assert chunks[0].signals[0] == ResponseStarted("r0")


@pytest.mark.req("AC-41")
def test_all_sessions_that_are_due_share_one_batch_and_get_their_own_frames() -> None:
    names = tuple(SessionId(f"s{n}") for n in range(6))
    inline = engine(*names, sessions=6, max_batch=6)
    tickets = {name: feed(inline, Say(f"of-{name}", "one two"), session=name) for name in names[:3]}
    tickets |= {name: feed(inline, session=name) for name in names[3:]}
    inline.cycle()
    assert inline.engine.counters.ticks_settled == 1
    for name, ticket in tickets.items():
        chunk = inline.result(ticket)
        assert chunk.metadata.session_id == name
        assert chunk.timings.batch_size == 6
        speaking = [s.response for s in chunk.signals if isinstance(s, Speaking)]
        assert speaking == ([f"of-{name}"] if name in names[:3] else [])
        assert bool(sound(chunk).any()) == bool(speaking)


def test_more_frames_than_may_wait_are_refused() -> None:
    inline = engine()
    tickets = [feed(inline) for _ in range(MAX_WAITERS + 1)]
    inline.rest()
    assert isinstance(inline.error(tickets[-1]), CapacityError)
    assert all(inline.error(t) is None for t in tickets[:-1])


def test_a_frame_that_the_model_does_not_take_is_refused_and_the_next_has_its_number() -> None:
    inline = engine()
    with pytest.raises(ArgumentError) as refused:
        inline.ask(c.Next(ticket=0, session_id=A, frame=Frame(np.zeros(3, np.float32))))
    assert refused.value.path == "audio"
    with pytest.raises(ArgumentError) as missing:
        inline.ask(c.Next(ticket=0, session_id=A))
    assert missing.value.path == "frame"
    assert inline.result(_settled(inline, feed(inline))).chunk_index == 0


def test_a_world_takes_no_frames() -> None:
    inline = InlineEngine(NullWorld())
    inline.create(A)
    with pytest.raises(ArgumentError) as refused:
        inline.ask(c.Next(ticket=0, session_id=A, frame=Frame(SILENCE)))
    assert refused.value.path == "frame"


def test_a_rewind_goes_back_to_what_was_heard_and_on_from_there() -> None:
    inline, control = engine(), engine()
    play(inline, range(6))
    expected = play(control, range(10))
    inline.rewind(A, 3)
    same(play(inline, range(3, 10)), expected[3:])


def test_a_fork_and_a_restored_session_go_on_like_the_first() -> None:
    inline = engine(sessions=3)
    play(inline, range(5))
    inline.fork(A, B)
    inline.restore(inline.snapshot(A), "saved")
    expected = play(inline, range(5, 20))
    same(play(inline, range(5, 20), B), expected)
    same(play(inline, range(5, 20), SessionId("saved")), expected)


def test_a_frame_that_failed_runs_again_as_if_nothing_had_happened() -> None:
    inline, control = engine(), engine()
    expected = play(control, range(4))
    play(inline, range(2))
    with inject(inline, "sync"), pytest.raises(TickError):
        play(inline, range(2, 3))
    inline.rollback(A)
    same(play(inline, range(2, 4)), expected[2:])


def test_a_response_ends_in_the_frame_in_which_its_sound_does() -> None:
    inline = engine()
    chunks = [inline.result(_settled(inline, feed(inline, *d))) for d in ((Say("r", "hi"),), (), ())]
    assert [any(isinstance(s, ResponseEnded) for s in chunk.signals) for chunk in chunks] == [False, True, False]
    assert [bool(sound(chunk).any()) for chunk in chunks] == [True, True, False]


def _settled(inline: InlineEngine, ticket: int) -> int:
    inline.rest()
    return ticket
