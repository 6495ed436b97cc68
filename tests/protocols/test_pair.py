"""Both machines against each other under random use, with the wire cut at any point.

Faults that were put in on purpose, each found by a test of this folder: a replay that starts one entry late; a client that
forgets the chunk it was in; an ack that forgets the whole buffer; events lost with a connection not sent again; the epoch or
the counters not raised by a reset; the terminal message sent twice; open events left at the close; a resume that tells the
present instead of the standing as of ``last_seq``, or leaves the new connection in another state than it names; a rewind that
keeps the old credit; a client that counts from 0 after a rewind; a branch that stands at frame 0, or whose ids begin below its
parent's.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocols.pair import Pair
from realtime_omni_protocols.errors import LocalError, WireCode
from realtime_omni_protocols.world import WireState, WorldSessionStream
from realtime_omni_protocols.world_messages import (
    ErrorMessage,
    EventAccepted,
    EventDiscarded,
    SessionClosed,
    SessionResumed,
    SessionRewound,
)

LIVE = (WireState.PLAYING, WireState.PAUSED, WireState.FAILED)


MOST_PAIRS = 3


class WorldUnderRandomUse(RuleBasedStateMachine):
    """A user, an engine and a bad network; a session and its branches, of which the rules act on one at a time."""

    pair: Pair
    pairs: list[Pair]

    @initialize(cadence=st.sampled_from(["paced", "on_demand"]))
    def begin(self, cadence: str) -> None:
        self.pair = Pair(cadence=cadence)  # type: ignore[arg-type]
        self.pair.start()
        self.pairs = [self.pair]

    @rule(number=st.integers(0, MOST_PAIRS - 1))
    def look_at_another(self, number: int) -> None:
        self.pair = self.pairs[number % len(self.pairs)]

    @precondition(lambda self: self.pair.forks and len(self.pairs) < MOST_PAIRS)
    @rule()
    def open_a_branch(self) -> None:
        self.pair = self.pair.branch()
        self.pairs.append(self.pair)
        self.pair.reconnect()

    @property
    def live(self) -> bool:
        return self.pair.client.state in LIVE

    # the user
    @rule(prompt=st.sampled_from(["a", "b"]))
    def event(self, prompt: str) -> None:
        if self.pair.client.state in (*LIVE[:2], WireState.CLOSED) and self.pair.client.can_resume:
            self.pair.event(prompt)

    @rule(back=st.integers(-1, 4))
    def rewind(self, back: int) -> None:
        if self.live:
            self.pair.to_server.append(self.pair.client.rewind(max(0, self.pair.client.next_chunk - back)))

    @rule()
    def fork(self) -> None:
        if self.live:
            self.pair.to_server.append(self.pair.client.fork())

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
        for pair in self.pairs:
            assert pair.received == pair.generated[: len(pair.received)]
            assert len(set(pair.receipts)) == len(pair.receipts)
            pair.check()

    def teardown(self) -> None:
        """Let everything arrive, close, and count."""
        for pair in getattr(self, "pairs", ()):
            self.finish(pair)

    def finish(self, pair: Pair) -> None:
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
        assert [m.chunk_index for m in pair.messages if isinstance(m, SessionRewound)] == pair.rewound
        assert [f.session_id for f in pair.forks] == list(pair.branches), "a branch that its client does not know of"


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


@pytest.mark.parametrize("lost", range(24))
def test_a_cut_at_every_point_of_a_rewind_changes_nothing(lost: int) -> None:
    pair = Pair()
    pair.start()
    for _ in range(2):
        pair.tick()
        pair.settle()
        pair.to_server.append(pair.client.ack(pair.client.next_frame, pair.client.epoch))
    pair.event("left")
    pair.to_server.append(pair.client.rewind(1))
    pair.deliver_to_server()
    pair.check()
    assert pair.stream is not None
    assert pair.stream.displayed == pair.stream.generated == 3, "nothing is outstanding"
    pair.tick()
    pair.tick()
    pair.cut(lost)
    pair.reconnect()
    pair.settle()
    assert pair.received == pair.generated
    assert pair.receipts == pair.discarded == [0]
    assert pair.chunks == [(0, 0), (0, 1), (1, 1), (1, 2)]
    assert [m.reason for m in pair.messages if isinstance(m, EventDiscarded)] == ["rewind"]
    first = next(key for key in pair.received if key[0] == 1)
    assert first[1:3] == (1, 3), "the epoch goes on at the frame that the rewind went back to"


def test_a_rewind_that_is_refused_changes_nothing() -> None:
    pair = Pair()
    pair.start()
    for index in (5, 0):
        if index == 0:
            for _ in range(4):
                pair.tick()
                pair.settle()
                pair.to_server.append(pair.client.ack(pair.client.next_frame, 0))
                pair.settle()
        before = pair.stream.statistics()  # type: ignore[union-attr]
        pair.to_server.append(pair.client.rewind(index))
        pair.settle()
        assert pair.stream.statistics() == before  # type: ignore[union-attr]
        assert isinstance(pair.messages[-1], ErrorMessage)
        assert (pair.messages[-1].code, pair.messages[-1].re) == (WireCode.NOT_RETAINED, pair.client.last_id)
    assert pair.client.oldest_rewind == 2


@pytest.mark.parametrize("lost", range(4))
def test_a_branch_is_opened_by_an_ordinary_resume_whatever_was_lost(lost: int) -> None:
    pair = Pair()
    pair.start()
    pair.event("left")
    pair.tick()
    pair.settle()
    pair.event("not inherited")
    pair.to_server.append(pair.client.fork())
    pair.deliver_to_server()
    pair.cut(lost)
    pair.reconnect()
    twin = pair.branch()
    assert twin.client.started is not None
    assert (twin.client.started.session_id, twin.client.next_event_id) == (twin.session_id, 2)
    twin.reconnect()
    assert twin.client.state is WireState.PLAYING
    assert (twin.client.next_chunk, twin.client.next_frame) == (1, 3)
    twin.event("right")
    twin.settle()
    pair.tick()
    twin.tick()
    pair.settle()
    twin.settle()
    assert (pair.applied, twin.applied) == ([0, 1], [2])
    assert (pair.chunks, twin.chunks) == ([(0, 0), (0, 1)], [(0, 1)])
    for each in (pair, twin):
        each.close("client")
        each.settle()
        each.check()


def test_a_branch_uses_no_id_that_its_parent_has_used() -> None:
    pair = Pair()
    pair.start()
    pair.to_server.append(pair.client.fork())
    pair.event("the server hears of this after the fork")
    pair.settle()
    assert pair.forks[0].next_event_id == 0
    assert pair.branch().event("another") == 1


def test_a_branch_of_a_branch_has_numbers_of_its_own() -> None:
    pair = Pair()
    pair.start()
    pairs = [pair]
    for _ in range(3):
        pairs[-1].to_server.append(pairs[-1].client.fork())
        pairs[-1].settle()
        pairs.append(pairs[-1].branch())
        pairs[-1].reconnect()
        pairs[-1].tick()
        pairs[-1].settle()
    assert [p.client.next_chunk for p in pairs] == [0, 1, 2, 3]
    assert len({p.session_id for p in pairs}) == 4
