"""Both machines against each other under random use, with the wire cut at any point.

Faults that were put in on purpose, each found by a test of this folder: a replay that starts one entry late; a client that
forgets the chunk it was in; an ack that forgets the whole buffer; events lost with a connection not sent again; the epoch or
the counters not raised by a reset; the terminal message sent twice; open events left at the close; a resume that tells the
present instead of the standing as of ``last_seq``, or leaves the new connection in another state than it names.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocols.pair import Pair
from realtime_omni_protocols.errors import LocalError, WireCode
from realtime_omni_protocols.world import WireState, WorldSessionStream
from realtime_omni_protocols.world_messages import ErrorMessage, EventAccepted, SessionClosed, SessionResumed

LIVE = (WireState.PLAYING, WireState.PAUSED, WireState.FAILED)


class WorldUnderRandomUse(RuleBasedStateMachine):
    """A user, an engine and a bad network."""

    pair: Pair

    @initialize(cadence=st.sampled_from(["paced", "on_demand"]))
    def begin(self, cadence: str) -> None:
        self.pair = Pair(cadence=cadence)  # type: ignore[arg-type]
        self.pair.start()

    @property
    def live(self) -> bool:
        return self.pair.client.state in LIVE

    # the user
    @rule(prompt=st.sampled_from(["a", "b"]))
    def event(self, prompt: str) -> None:
        if self.pair.client.state in (*LIVE[:2], WireState.CLOSED) and self.pair.client.can_resume:
            self.pair.event(prompt)

    @rule(what=st.sampled_from(["pause", "resume_play", "reset", "abort", "ping"]))
    def command(self, what: str) -> None:
        if self.pair.client.state in LIVE[:2]:
            self.pair.to_server.append(getattr(self.pair.client, what)())

    @rule()
    def ask(self) -> None:
        client = self.pair.client
        if client.state is WireState.PLAYING and self.pair.cadence == "on_demand" and client.asks < 4:
            self.pair.to_server.append(client.ask())

    @rule(back=st.integers(0, 4))
    def acknowledge(self, back: int) -> None:
        client = self.pair.client
        if self.live:
            self.pair.to_server.append(client.ack(max(0, client.next_frame - back), client.epoch))

    @rule(what=st.sampled_from(["rollback", "reset"]))
    def recover(self, what: str) -> None:
        if self.pair.client.state is WireState.FAILED:
            self.pair.to_server.append(getattr(self.pair.client, what)())

    # the engine
    @rule()
    def tick(self) -> None:
        self.pair.tick()

    @rule()
    def fail(self) -> None:
        self.pair.fail()

    # the network
    @rule(count=st.integers(1, 5))
    def arrive_at_server(self, count: int) -> None:
        self.pair.deliver_to_server(count)

    @rule(count=st.integers(1, 7))
    def arrive_at_client(self, count: int) -> None:
        self.pair.deliver_to_client(count)

    @precondition(lambda self: self.pair.side is not None)
    @rule(lost=st.integers(0, 12))
    def cut(self, lost: int) -> None:
        self.pair.cut(lost)

    @precondition(lambda self: self.pair.side is not None)
    @rule(lost=st.integers(0, 12), processed=st.integers(0, 5))
    def take_over(self, lost: int, processed: int) -> None:
        if self.pair.client.can_resume:
            self.pair.reconnect_unnoticed(lost, processed)

    @precondition(lambda self: self.pair.side is None)
    @rule()
    def reconnect(self) -> None:
        if self.pair.client.can_resume:
            self.pair.reconnect()

    @invariant()
    def nothing_is_lost_and_nothing_twice(self) -> None:
        pair = self.pair
        assert pair.received == pair.generated[: len(pair.received)]
        assert len(set(pair.receipts)) == len(pair.receipts)
        pair.check()

    def teardown(self) -> None:
        """Let everything arrive, close, and count."""
        if not hasattr(self, "pair"):
            return
        pair = self.pair
        if pair.side is None:
            pair.reconnect()
        pair.settle()
        pair.close("operator")
        pair.settle()
        pair.check()
        assert pair.received == pair.generated
        assert sorted(pair.receipts) == sorted(pair.applied + pair.discarded)
        assert pair.client.waiting_events == 0
        assert pair.terminals == 1
        assert isinstance(pair.messages[-1], SessionClosed)


TestRandomUse = WorldUnderRandomUse.TestCase
TestRandomUse.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("lost", range(16))
def test_a_cut_at_every_point_of_two_blocks_changes_nothing(lost: int) -> None:
    pair = Pair()
    pair.start()
    pair.event("left")
    pair.deliver_to_server()
    pair.tick()
    pair.tick()
    pair.cut(lost)
    pair.reconnect()
    pair.settle()
    assert pair.received == pair.generated
    assert pair.receipts == pair.applied == [0]
    assert pair.client.statistics().events_applied == 1


def test_an_event_lost_on_the_way_is_sent_again() -> None:
    pair = Pair()
    pair.start()
    pair.event("left")
    pair.cut()
    pair.reconnect()
    pair.tick()
    pair.settle()
    assert pair.receipts == [0]
    assert [m.status for m in pair.messages if isinstance(m, EventAccepted)] == ["accepted"]


def test_an_event_whose_receipt_was_lost_is_a_duplicate_and_acts_once() -> None:
    pair = Pair()
    pair.start()
    pair.event("left")
    pair.deliver_to_server()
    pair.cut()
    pair.reconnect()
    pair.tick()
    pair.settle()
    assert pair.receipts == pair.applied == [0]
    # The replay brings the first receipt after the repetition left: then the repetition is answered as a duplicate.
    assert [m.status for m in pair.messages if isinstance(m, EventAccepted)] == ["accepted", "duplicate"]


def test_a_refusal_that_was_lost_comes_again_as_stale() -> None:
    pair = Pair()
    pair.start()
    for number in range(4):  # the queue holds three: event 3 is refused
        pair.event(f"p{number}")
    pair.deliver_to_server()
    pair.tick()  # room again
    pair.event("later")  # event 4 is accepted, so 3 is below the highest accepted id
    pair.deliver_to_server()
    pair.cut()
    pair.reconnect()
    pair.tick()
    pair.settle()
    pair.check()
    assert pair.receipts == pair.applied == [0, 1, 2, 4]
    assert [(m.code, m.event_id) for m in pair.messages if isinstance(m, ErrorMessage)] == [(WireCode.STALE, 3)]


def test_a_wrong_token_and_a_forgotten_number_are_refused_and_the_connection_lives() -> None:
    pair = Pair()
    pair.start()
    pair.tick()
    pair.settle()
    pair.cut()
    pair.connect()
    pair.settle()
    good = pair.client._token
    pair.client._token = "wrong"
    pair.to_server.append(pair.client.resume())
    pair.settle()
    pair.client._token = good
    pair.client.last_seq += 5
    pair.to_server.append(pair.client.resume())
    pair.settle()
    pair.client.last_seq -= 5
    pair.to_server.append(pair.client.resume())
    pair.settle()
    codes = [m.code for m in pair.messages if isinstance(m, ErrorMessage)]
    assert codes == [WireCode.SESSION_NOT_FOUND, WireCode.RESUME_REFUSED]
    assert isinstance(pair.messages[-1], SessionResumed)
    assert pair.client.state is WireState.PLAYING


def test_nothing_can_follow_the_terminal_message() -> None:
    pair = Pair()
    pair.start()
    pair.close("client")
    pair.settle()
    stream, side = pair.stream, pair.side
    assert isinstance(stream, WorldSessionStream)
    assert side is not None
    with pytest.raises(LocalError):
        stream.closed("client")
    with pytest.raises(LocalError):
        stream.paused()
    with pytest.raises(LocalError):
        side.send(side.taken_over())
    assert side.receive_text('{"type":"ping"}', 0.0) == []
