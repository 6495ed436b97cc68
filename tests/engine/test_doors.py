"""The inbox and the outbox: bounded, counted, control first."""

from __future__ import annotations

import threading

import pytest

from realtime_omni.engine import commands as c
from realtime_omni.engine.inbox import CONTROL_FACTOR, Inbox
from realtime_omni.engine.outbox import Outbox
from realtime_omni.errors import CapacityError
from realtime_omni.session.values import EventId, SessionEvent, SessionId
from realtime_omni.testing.faults import at
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import TinyKVWorld


def work(ticket: int) -> c.Command:
    return c.Next(ticket=ticket, session_id=SessionId("a"))


def control(ticket: int) -> c.Command:
    return c.Abort(ticket=ticket, session_id=SessionId("a"))


def test_control_commands_are_taken_before_work_and_each_lane_keeps_its_order() -> None:
    inbox = Inbox(8)
    for command in (work(1), control(2), work(3), control(4)):
        inbox.put(command)
    assert [x.ticket for x in inbox.take()] == [2, 4, 1, 3]
    assert inbox.take() == []


def test_a_full_work_lane_refuses_work_and_still_takes_control_commands() -> None:
    inbox = Inbox(2)
    inbox.put(work(1))
    inbox.put(work(2))
    with pytest.raises(CapacityError) as refused:
        inbox.put(work(3))
    assert refused.value.code == "capacity"
    for ticket in range(2 * CONTROL_FACTOR):
        inbox.put(control(ticket))
    with pytest.raises(CapacityError):
        inbox.put(control(99))
    statistics = inbox.statistics()
    assert (statistics.depth, statistics.control_depth, statistics.refused) == (2, 2 * CONTROL_FACTOR, 2)
    assert statistics.high_water == 2 + 2 * CONTROL_FACTOR


def test_letting_a_session_go_is_never_refused_so_none_can_be_lost() -> None:
    inbox = Inbox(1)
    for ticket in range(CONTROL_FACTOR):
        inbox.put(control(ticket))
    with pytest.raises(CapacityError):
        inbox.put(control(99))
    inbox.put(c.Detach(ticket=100, session_id=SessionId("a"), grace_s=1.0))
    inbox.put(c.Close(ticket=101, session_id=SessionId("a")))
    assert [x.ticket for x in inbox.take()] == [*range(CONTROL_FACTOR), 100, 101]


def test_a_closed_inbox_hands_back_what_waits_and_refuses_the_rest() -> None:
    inbox = Inbox(2)
    inbox.put(work(1))
    assert [x.ticket for x in inbox.close()] == [1]
    with pytest.raises(CapacityError) as refused:
        inbox.put(control(2))
    assert refused.value.code == "shutdown"


def test_waiting_on_an_inbox_that_has_something_returns_at_once() -> None:
    inbox = Inbox(2)
    inbox.put(work(1))
    inbox.wait(None)
    inbox.take()
    inbox.wake()
    inbox.wait(None)  # woken before it waited
    inbox.close()
    inbox.wait(None)


def test_a_quiet_command_wakes_nobody_until_the_nudge(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, wakes = Inbox(2), []
    monkeypatch.setattr(inbox, "_ring", lambda: wakes.append(1))
    inbox.nudge()  # nothing waits
    inbox.put(work(1), quiet=True)
    assert wakes == []
    inbox.wait(None)  # whoever comes later sees it
    inbox.nudge()
    assert wakes == [1]
    inbox.take()
    inbox.nudge()
    assert wakes == [1]


@pytest.mark.parametrize("timeout_s", [None, 0.0, 2e-5])
def test_no_command_is_slept_through(timeout_s: float | None) -> None:
    """Two threads, and times that run out just when something comes."""
    inbox, count, taken = Inbox(4000), 4000, []

    def engine() -> None:
        while len(taken) < count:
            inbox.wait(timeout_s)
            taken.extend(command.ticket for command in inbox.take())

    thread = threading.Thread(target=engine, daemon=True)
    thread.start()
    for ticket in range(count):
        inbox.put(work(ticket))
    thread.join(30)
    assert taken == [*range(count)]
    inbox.wait(0.0)  # no ring is left over
    assert not inbox._asleep
    assert inbox._alarm.locked()


def test_the_outbox_wakes_once_per_filling_and_keeps_the_order() -> None:
    outbox, wakes = Outbox(), []
    outbox.put(c.Answer(ticket=0))
    outbox.bind(lambda: wakes.append(1))
    outbox.put(c.Answer(ticket=1))
    assert wakes == []  # it was not empty: whoever binds looks first
    assert [a.ticket for a in outbox.take()] == [0, 1]  # type: ignore[union-attr]
    outbox.put(c.Answer(ticket=2))
    outbox.put(c.Answer(ticket=3))
    assert wakes == [1]
    assert (outbox.statistics().depth, outbox.statistics().put, outbox.statistics().high_water) == (2, 4, 2)


def test_commands_carry_values_only() -> None:
    event = SessionEvent(EventId(0), prompt="red")
    with pytest.raises(AttributeError):
        c.Accept(ticket=1, session_id=SessionId("a"), event=event).ticket = 2  # type: ignore[misc]


def test_answers_that_belong_together_wake_their_reader_once() -> None:
    outbox, wakes = Outbox(), []
    outbox.bind(lambda: wakes.append(len(outbox.take())))
    with outbox.together():
        for ticket in (1, 2, 3):
            outbox.put(c.Answer(ticket=ticket))
        assert wakes == []
    assert wakes == [3]
    with outbox.together():
        pass
    outbox.put(c.Answer(ticket=4))
    assert wakes == [3, 1]


def test_a_brief_round_is_heard_once_and_a_long_one_speaks_at_its_next_checkpoint() -> None:
    inline = InlineEngine(TinyKVWorld())
    inline.create("a", seed=1)
    inline.next("a")  # this round was brief
    heard: list[list[str]] = []
    inline.outbox.bind(lambda: heard.append([type(answer.value).__name__ for answer in inline.outbox.take()]))  # type: ignore[union-attr]

    def ask(event_id: int) -> None:
        session_id = SessionId("a")
        inline.send(c.Accept(ticket=0, session_id=session_id, event=SessionEvent(EventId(event_id), prompt="red")))
        inline.send(c.Next(ticket=0, session_id=session_id))
        inline.cycle()

    ask(0)
    assert heard == [["EventAcceptance", "Chunk"]]
    with at(inline.engine, "forward:1", lambda: inline.clock.advance(1.0)):
        ask(1)
    assert heard[1:] == [["EventAcceptance"], ["Chunk"]], "a second is too long to wait for a receipt"
    ask(2)
    assert heard[3:] == [["EventAcceptance"], ["Chunk"]], "and so may the next be"
    ask(3)
    assert heard[5:] == [["EventAcceptance", "Chunk"]]
