"""The table of states: every cell, and the documentation made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from realtime_omni.errors import SessionGoneError, StateError
from realtime_omni.session.lifecycle import ALLOWED, TABLE, Lifecycle, SessionState, Trigger, render_markdown

DOCUMENT = Path(__file__).parents[2] / "protocols" / "sessions.md"
BEGIN, END = "<!-- lifecycle: begin -->\n", "<!-- lifecycle: end -->\n"

# Written by hand from the contract (rows A18-A21), not from the table: who may go where.
EDGES = {
    ("active", "tick failed", "failed"),
    ("active", "rewind", "active"),
    ("active", "reset", "resetting"),
    ("active", "close", "closing"),
    ("resetting", "reset done", "active"),
    ("resetting", "reset failed", "failed"),
    ("resetting", "close", "closing"),
    ("failed", "rollback", "active"),
    ("failed", "rewind", "active"),
    ("failed", "reset", "resetting"),
    ("failed", "close", "closing"),
    ("failed", "release failed", "cleanup_failed"),
    ("closing", "released", "closed"),
    ("closing", "release failed", "cleanup_failed"),
    ("cleanup_failed", "close", "closing"),
}


def in_state(state: SessionState) -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.state = state
    return lifecycle


@pytest.mark.parametrize("state", SessionState)
@pytest.mark.parametrize("trigger", Trigger)
def test_every_cell_of_the_table_moves_as_the_contract_says_or_refuses(state: SessionState, trigger: Trigger) -> None:
    targets = [target for source, by, target in EDGES if (source, by) == (state, trigger)]
    lifecycle = in_state(state)
    if targets:
        assert lifecycle.can(trigger)
        assert [str(lifecycle.move(trigger))] == targets
    else:
        assert not lifecycle.can(trigger)
        with pytest.raises(StateError):
            lifecycle.move(trigger)
        assert lifecycle.state is state


@pytest.mark.req("AC-13")
@pytest.mark.parametrize("call", sorted(set(ALLOWED) - {"close"}))
def test_a_tombstone_admits_nothing_but_close(call: str) -> None:
    with pytest.raises(StateError) as refused:
        in_state(SessionState.CLEANUP_FAILED).require(call)
    assert refused.value.code == "cleanup_failed"
    assert not isinstance(refused.value, SessionGoneError)


@pytest.mark.parametrize("call", sorted(set(ALLOWED) - {"close"}))
@pytest.mark.parametrize("state", [SessionState.CLOSING, SessionState.CLOSED])
def test_once_closing_has_begun_every_other_call_is_told_that_the_session_is_gone(
    call: str, state: SessionState
) -> None:
    with pytest.raises(SessionGoneError):
        in_state(state).require(call)


@pytest.mark.parametrize("state", SessionState)
def test_close_is_allowed_in_every_state(state: SessionState) -> None:
    in_state(state).require("close")


@pytest.mark.parametrize("call", ["accept_event", "next_chunk"])
def test_a_failed_session_takes_no_events_and_no_ticks(call: str) -> None:
    with pytest.raises(StateError) as refused:
        in_state(SessionState.FAILED).require(call)
    assert refused.value.code == "session_failed"


def test_a_closed_session_is_the_end() -> None:
    assert not [edge for edge in TABLE if edge[0] is SessionState.CLOSED]


def test_the_documentation_is_the_table() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    shown = text.split(BEGIN)[1].split(END)[0]
    assert shown == render_markdown(), "run: python -m realtime_omni.session.lifecycle (see protocols/sessions.md)"
