"""Sessions join and leave a policy's batch between two steps: in which order, and whatever else happens there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.stepwise import STEPS, Stepwise
from realtime_omni.engine import commands as c
from realtime_omni.engine.scheduler import Due, choose, joining
from realtime_omni.errors import AbortedError, OmniError, SessionGoneError, SupersededError, TickError
from realtime_omni.session.observation import Observation
from realtime_omni.session.values import Chunk, SessionId
from realtime_omni.testing.faults import inject
from realtime_omni.testing.inline import InlineEngine

PICTURE = np.zeros((4, 4, 3), np.uint8)
WHOLE = 1 + STEPS
"""Checkpoints of a session that is alone: its beginning and its steps."""


def engine(*sessions: str, **options: int) -> tuple[InlineEngine, Stepwise]:
    model = Stepwise()
    made = InlineEngine(model, **options)
    for session in sessions:
        made.create(session, seed=1)
    return made, model


def ask(
    inline: InlineEngine, session: str, state: float = 0.0, budget_s: float | None = None, steps: int | None = None
) -> int:
    seen = Observation({"base_0_rgb": PICTURE}, np.full(3, state, np.float32), budget_s=budget_s, steps=steps)
    return inline.send(c.Next(ticket=0, session_id=SessionId(session), observation=seen))


def first(chunk: Chunk) -> float:
    return float(chunk.artifacts["actions"].data[0, 0])


def test_a_cycle_is_one_checkpoint_and_the_chunk_comes_with_the_last_step() -> None:
    inline, _ = engine("a")
    ticket = ask(inline, "a", 7.0)
    inline.cycle(WHOLE)  # the generator's first piece leads to its first checkpoint
    assert not inline.answered(ticket)
    inline.cycle()
    assert first(inline.result(ticket)) == 7.0
    assert not inline.engine.has_work()


def test_who_comes_later_joins_at_the_next_checkpoint_and_shares_the_steps() -> None:
    inline, model = engine("a", "b")
    early = ask(inline, "a", 1.0)
    inline.cycle(3)
    late = ask(inline, "b", 2.0)
    inline.rest()
    assert (first(inline.result(early)), first(inline.result(late))) == (1.0, 2.0)
    assert model.pieces == [
        ("begin", ("a",)),
        ("step", ("a",)),
        ("begin", ("b",)),
        ("step", ("a", "b")),
        ("step", ("a", "b")),
        ("step", ("b",)),
    ]
    assert inline.result(late).timings.batch_size == 2


def test_who_is_done_is_answered_while_others_go_on() -> None:
    inline, _ = engine("a", "b")
    short, long = ask(inline, "a", 1.0, steps=1), ask(inline, "b", 2.0, steps=9)
    inline.cycle(3)
    assert first(inline.result(short)) == 1.0
    assert not inline.answered(long)
    again = ask(inline, "a", 3.0, steps=1)
    inline.cycle(4)
    assert first(inline.result(again)) == 3.0
    assert not inline.answered(long)
    inline.rest()
    assert first(inline.result(long)) == 2.0


def test_nobody_who_is_due_later_delays_an_urgent_session() -> None:
    """Not even by one piece: whoever comes while it flies is begun when it is done."""
    inline, model = engine("a", "b", "c")
    urgent = ask(inline, "a", 1.0, budget_s=0.05)
    inline.cycle(2)
    ask(inline, "b", 2.0)
    ask(inline, "c", 3.0, budget_s=0.5)
    inline.cycle(WHOLE - 1)
    assert first(inline.result(urgent)) == 1.0
    assert model.pieces == [("begin", ("a",)), *[("step", ("a",))] * STEPS]
    inline.rest()
    assert model.pieces[4] == ("begin", ("c", "b"))


def test_an_urgent_session_is_begun_at_the_next_checkpoint() -> None:
    inline, model = engine("a", "b")
    ask(inline, "a", 1.0, steps=20)
    inline.cycle(5)
    before = len(model.pieces)
    urgent = ask(inline, "b", 2.0, budget_s=0.05)
    inline.cycle(1 + WHOLE)
    assert first(inline.result(urgent)) == 2.0
    assert model.pieces[before:] == [("begin", ("b",)), *[("step", ("a", "b"))] * STEPS]


def test_the_recipe_gives_a_deadline_to_those_who_name_none() -> None:
    inline, model = engine("a", "b")
    inline.engine._desk._budget_s = 1.0
    ask(inline, "a", 1.0)
    inline.cycle(2)
    inline.advance(0.1)
    ask(inline, "b", 2.0)
    inline.rest()
    assert model.pieces[-1 - STEPS] == ("begin", ("b",))


def test_places_are_bounded() -> None:
    inline, model = engine("a", "b", "c", max_batch=2)
    tickets = [ask(inline, name, number) for number, name in enumerate("abc")]
    inline.cycle(WHOLE)
    assert all(set(served) <= {"a", "b"} for _, served in model.pieces)
    inline.rest()
    assert [first(inline.result(ticket)) for ticket in tickets] == [0.0, 1.0, 2.0]


def test_a_batch_that_never_ends_holds_nothing_of_those_who_left() -> None:
    inline, _ = engine("a", "b")
    for number in range(30):
        ask(inline, "ab"[number % 2], number)
        inline.cycle(2)
        flight = next(iter(inline.engine._flights), None)
        if flight is not None and flight.run is not None:
            held = (getattr(flight.run, name) for name in ("_planned", "_blocks", "_step_rows", "_results", "_extents"))
            assert all(len(one) <= 2 for one in held)
    inline.rest()
    assert inline.engine.counters.chunks_committed == 30 - len([e for e in inline.answers().values() if e.error])


# ---------------------------------------------------------------------- every command at every checkpoint


def close(inline: InlineEngine) -> int:
    return inline.send(c.Close(ticket=0, session_id=SessionId("a")))


def abort(inline: InlineEngine) -> int:
    return inline.send(c.Abort(ticket=0, session_id=SessionId("a")))


def reset(inline: InlineEngine) -> int:
    return inline.send(c.Reset(ticket=0, session_id=SessionId("a")))


def newer(inline: InlineEngine) -> int:
    return ask(inline, "a", 50.0)


def fault(inline: InlineEngine) -> int:
    inject(inline, f"forward:{1 + STEPS}", session_id="a")
    return 0


def breaks(inline: InlineEngine) -> int:
    inject(inline, "commit", session_id="a", times=None)
    return 0


WHAT: dict[Callable[[InlineEngine], int], type[Exception] | None] = {
    close: SessionGoneError,
    abort: AbortedError,
    reset: AbortedError,
    newer: None,
    fault: None,
    breaks: TickError,
}


@pytest.mark.parametrize("joins_at", range(WHOLE + 1))
@pytest.mark.parametrize("happens_at", range(WHOLE + 2))
@pytest.mark.parametrize("what", WHAT)
def test_whatever_happens_to_one_session_changes_no_other(
    what: Callable[[InlineEngine], int], happens_at: int, joins_at: int
) -> None:
    """Session a flies from the start, b joins at one checkpoint, something happens to a at another."""
    inline, _ = engine("a", "b")
    first_ticket = ask(inline, "a", 1.0)
    other = happened = None
    for checkpoint in range(WHOLE + 2):
        if checkpoint == joins_at:
            other = ask(inline, "b", 2.0)
        if checkpoint == happens_at:
            happened = what(inline)
        inline.cycle()
    inline.rest()
    assert other is not None
    assert happened is not None
    assert first(inline.result(other)) == 2.0
    error, expected = inline.error(first_ticket), WHAT[what]
    if error is None:
        assert first(inline.result(first_ticket)) == 1.0
    elif what is newer:
        assert isinstance(error, SupersededError)
    else:
        assert expected is not None
        assert isinstance(error, expected)
    if 0 < happens_at <= WHOLE and expected is not None:  # at 0 control commands overtake what they are about
        assert error is not None, "it happened before the chunk was committed"
    inline.engine.check()
    assert not inline.engine._flights
    if what not in (close, fault, breaks):
        assert first(inline.result(_then(inline))) == 9.0


def _then(inline: InlineEngine) -> int:
    ticket = ask(inline, "a", 9.0)
    inline.rest()
    return ticket


def test_a_batch_that_fails_as_a_whole_is_computed_row_by_row_and_nobody_joins_meanwhile() -> None:
    inline, model = engine("a", "b", "c")
    bad, good = ask(inline, "a", 1.0), ask(inline, "b", 2.0)
    inject(inline, "forward:2", session_id="a", times=None)
    inline.cycle(3)
    late = ask(inline, "c", 3.0)
    inline.rest()
    assert inline.error(bad) is not None
    assert (first(inline.result(good)), first(inline.result(late))) == (2.0, 3.0)
    assert inline.engine.counters.isolated_reruns == 2
    assert model.pieces[1:] == [
        ("begin", ("a",)),
        ("begin", ("b",)),
        *[("step", ("b",))] * STEPS,
        ("begin", ("c",)),
        *[("step", ("c",))] * STEPS,
    ]


def test_a_device_that_is_broken_ends_all_chunks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inline, _ = engine("a", "b")
    tickets = [ask(inline, "a"), ask(inline, "b")]
    monkeypatch.setattr(inline.engine.consumer, "is_sticky", lambda error: True)
    inject(inline, "forward:2", times=None)
    inline.rest()
    assert all(isinstance(inline.error(ticket), TickError) for ticket in tickets)


def test_what_a_session_joins_with_may_be_unusable_alone() -> None:
    """Its place cannot be had: it fails, and whoever joined with it does not."""
    inline, _ = engine("a", "b", "c")
    flying = ask(inline, "a", 1.0)
    inline.cycle(2)
    inner = inline.runner.book.plan_block

    def refuses(session: SessionId) -> object:
        if session == "b":
            raise RuntimeError("no place")
        return inner(session)

    inline.runner.book.plan_block = refuses  # type: ignore[method-assign,assignment]
    bad, good = ask(inline, "b", 2.0), ask(inline, "c", 3.0)
    inline.rest()
    assert inline.error(bad) is not None
    assert (first(inline.result(flying)), first(inline.result(good))) == (1.0, 3.0)


# ---------------------------------------------------------------------- the scheduler


def test_the_earliest_deadline_goes_first_and_arrival_breaks_ties() -> None:
    due = [Due("a", 1, due_s=9), Due("b", 2, due_s=3, urgent=True), Due("c", 3, due_s=9), Due("d", 4, due_s=5)]
    assert choose(due, 3) == ("b", "d", "a")


def test_who_joins_is_due_before_every_urgent_session_that_flies() -> None:
    flying = [Due("x", 1, due_s=5, urgent=True), Due("y", 2, due_s=1)]
    due = [Due("a", 3, due_s=4), Due("b", 4, due_s=6), Due("c", 5, due_s=3)]
    assert joining(due, flying, 8, 0) == ("c", "a")
    assert joining(due, flying, 3, 0) == ("c",)
    assert joining(due, flying, 2, 0) == ()
    assert joining(due, flying[1:], 8, 0) == ("c", "a", "b")


def test_a_deadline_that_is_past_keeps_nobody_out() -> None:
    flying = [Due("x", 1, due_s=5, urgent=True)]
    assert joining([Due("a", 2, due_s=9)], flying, 8, now_s=4.9) == ()
    assert joining([Due("a", 2, due_s=9)], flying, 8, now_s=5.0) == ("a",)


def test_a_robot_that_is_late_and_takes_many_steps_is_joined_by_the_others() -> None:
    inline, model = engine("a", "b")
    late = ask(inline, "a", 1.0, budget_s=0.1, steps=50)
    inline.cycle(2)
    other = ask(inline, "b", 2.0)
    inline.cycle(3)
    assert model.pieces[-1] == ("step", ("a",))  # in time still: nobody delays it
    inline.clock.advance(0.2)
    inline.cycle(STEPS + 2)
    assert first(inline.result(other)) == 2.0
    inline.rest()
    assert first(inline.result(late)) == 1.0


# ---------------------------------------------------------------------- anything in any order

NAMES = ("a", "b", "c")


class Robots(RuleBasedStateMachine):
    """Three robots on two places: commands and checkpoints in any order. Every chunk answers its own observation, every call
    is answered once, nothing is held in the end. Faults that it found when they were put in: a flying session that boards
    twice, a settled row that stays active, a row that leaves without its flight."""

    def __init__(self) -> None:
        super().__init__()
        self.inline, _ = engine(max_batch=2)
        self.asked: dict[int, float] = {}
        self.count = 0.0

    def _ready(self) -> Iterator[str]:
        return (name for name in NAMES if name in self.inline.engine.registry)

    @rule(name=st.sampled_from(NAMES), steps=st.integers(1, 4), budget_s=st.sampled_from((None, None, 0.1, 1.0)))
    def ask(self, name: str, steps: int, budget_s: float | None) -> None:
        if name not in self.inline.engine.registry:
            self.inline.create(name, seed=1)
        self.count += 1
        self.asked[ask(self.inline, name, self.count, budget_s, steps)] = self.count

    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from((c.Close, c.Abort, c.Reset, c.Rollback)))
    def command(self, name: str, kind: type[c.SessionCommand]) -> None:
        self.inline.send(kind(ticket=0, session_id=SessionId(name)))

    @rule(name=st.sampled_from(NAMES), point=st.sampled_from(("forward:1", "forward:2", "forward:3", "sync", "commit")))
    def fail(self, name: str, point: str) -> None:
        inject(self.inline, point, session_id=name)

    @rule(count=st.integers(1, 3), seconds=st.sampled_from((0.0, 0.05)))
    def cycle(self, count: int, seconds: float) -> None:
        self.inline.clock.advance(seconds)
        self.inline.cycle(count)

    @invariant()
    def holds(self) -> None:
        self.inline.engine.check()
        assert len(self.inline.engine._flights) <= 2
        for ticket, answer in self.inline.answers().items():
            if ticket in self.asked and answer.error is None:
                assert first(answer.value) == self.asked[ticket]
            assert answer.error is None or isinstance(answer.error, OmniError)

    def teardown(self) -> None:
        self.inline.rest()
        for name in tuple(self._ready()):
            self.inline.close(name)
        self.inline.rest()
        assert all(self.inline.answered(ticket) for ticket in self.asked)
        assert not self.inline.runner.book.sessions
        self.inline.engine.check()


TestRobots = Robots.TestCase
TestRobots.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
