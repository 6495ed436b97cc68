"""One connection of a server: handshake, refusals, rates, the terminal message."""

from __future__ import annotations

import pytest

from protocols.pair import Pair
from realtime_omni_protocols.errors import CloseCode, LocalError, WireCode
from realtime_omni_protocols.world import Close, Command, Reply, ServerLimits, WireState, WorldServerSide, close_code
from realtime_omni_protocols.world_messages import (
    ErrorMessage,
    Pong,
    SessionAck,
    SessionClosed,
    SessionEvent,
    SessionResumed,
    SessionStart,
    parse_server,
)


def fresh(now: float = 0.0, **limits: float) -> WorldServerSide:
    side = WorldServerSide(server="x/1", models=("m",), limits=ServerLimits(**limits), now=now)  # type: ignore[arg-type]
    side.send(side.hello())
    return side


def started() -> tuple[Pair, WorldServerSide]:
    pair = Pair()
    pair.start()
    assert pair.side is not None
    return pair, pair.side


def error_of(commands: list[Command]) -> ErrorMessage:
    reply = commands[0]
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, ErrorMessage)
    return reply.message


def test_hello_is_first() -> None:
    side = WorldServerSide(server="x/1", models=("m",), now=0.0)
    with pytest.raises(LocalError):
        side.send(Pong(server_ms=0))
    assert parse_server(side.send(side.hello())) == side.hello()
    with pytest.raises(LocalError):
        side.send(side.hello())


def test_the_handshake_times_out_with_4408_unless_a_start_came() -> None:
    side = fresh(now=100.0)
    assert side.deadline() == 110.0
    assert side.handle_timeout(109.9) == []
    error, close = side.handle_timeout(110.0)
    assert error_of([error]).code is WireCode.HANDSHAKE_TIMEOUT
    assert close == Close(CloseCode.TIMEOUT, "handshake_timeout")
    assert side.handle_timeout(111.0) == []
    other = fresh(now=100.0)
    other.receive_text('{"type":"session.start","format":"jpeg"}', 101.0)
    assert other.deadline() is None


def test_a_ping_does_not_stop_the_handshake_clock() -> None:
    side = fresh()
    assert side.receive_text('{"type":"ping","t":5,"id":"p"}', 1.5) == [Reply(Pong(t=5.0, server_ms=1500.0, re="p"))]
    assert side.deadline() == 10.0


@pytest.mark.parametrize("text", ["{", '{"type":"session.next"}', '{"type":"session.close"}', '{"type":"nonsense"}'])
def test_a_bad_message_before_a_session_is_fatal(text: str) -> None:
    side = fresh()
    commands = side.receive_text(text, 0.0)
    error = error_of(commands)
    assert (error.code, error.fatal) == (WireCode.BAD_MESSAGE, True)
    assert commands[1] == Close(CloseCode.BAD_MESSAGE, "bad_message")
    assert side.receive_text('{"type":"ping"}', 0.0) == []
    side.send(error)
    assert side.state is WireState.CLOSED
    assert close_code(error) is CloseCode.BAD_MESSAGE


def test_an_unknown_format_may_be_tried_again() -> None:
    side = fresh()
    error = error_of(side.receive_text('{"type":"session.start","format":"webp","id":"1"}', 0.0))
    assert (error.code, error.fatal, error.re, error.path) == (WireCode.UNSUPPORTED_FORMAT, False, "1", "$.format")
    assert isinstance(side.receive_text('{"type":"session.start","format":"jpeg"}', 0.0)[0], SessionStart)


def test_a_refused_start_leaves_the_connection_open_for_another() -> None:
    side = fresh()
    [start] = side.receive_text('{"type":"session.start","format":"jpeg","model":"none","id":"a"}', 0.0)
    assert isinstance(start, SessionStart)
    error_text = side.send(side.refuse(start, WireCode.MODEL_UNKNOWN, "no such model", path="$.model"))
    assert '"re":"a"' in error_text
    assert side.state is WireState.OPEN
    [again] = side.receive_text('{"type":"session.start","format":"jpeg"}', 0.0)
    assert isinstance(again, SessionStart)


def test_only_ping_is_allowed_while_starting() -> None:
    side = fresh()
    side.receive_text('{"type":"session.start","format":"jpeg"}', 0.0)
    error = error_of(side.receive_text('{"type":"session.event","event_id":0,"prompt":"x"}', 0.0))
    assert (error.code, error.fatal, error.event_id) == (WireCode.SESSION_STATE, False, 0)
    assert side.state is WireState.STARTING


def test_after_the_start_a_bad_message_costs_nothing_but_itself() -> None:
    _, side = started()
    error = error_of(side.receive_text('{"type":"session.event","event_id":4,"id":"e","prompt":7}', 0.0))
    assert (error.code, error.fatal, error.event_id, error.re, error.path) == (
        WireCode.BAD_MESSAGE,
        False,
        4,
        "e",
        "$.prompt",
    )
    assert isinstance(side.receive_text('{"type":"session.event","event_id":4,"prompt":"x"}', 0.0)[0], SessionEvent)
    assert error_of(side.receive_binary(b"x", 0.0)).code is WireCode.BAD_MESSAGE
    side.check()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"type":"session.start","format":"jpeg"}', WireCode.SESSION_EXISTS),
        ('{"type":"session.resume","session_id":"s","resume_token":"t","last_seq":1}', WireCode.SESSION_EXISTS),
        ('{"type":"session.rollback"}', WireCode.SESSION_STATE),
        ('{"type":"session.next"}', WireCode.SESSION_STATE),
        ('{"type":"session.ack","seq":2,"displayed":0,"epoch":0}', WireCode.INVALID_ARGUMENT),
        ('{"type":"session.ack","seq":1,"displayed":1,"epoch":0}', WireCode.INVALID_ARGUMENT),
        ('{"type":"session.ack","seq":1,"displayed":0,"epoch":1}', WireCode.INVALID_ARGUMENT),
    ],
)
def test_what_a_playing_session_refuses(text: str, code: WireCode) -> None:
    pair, side = started()
    before = side.state
    assert error_of(side.receive_text(text, 0.0)).code is code
    assert side.state is before
    pair.check()


def test_a_failed_session_refuses_events_and_takes_rollback() -> None:
    pair, side = started()
    pair.fail()
    assert (
        error_of(side.receive_text('{"type":"session.event","event_id":0,"prompt":"x"}', 0.0)).code
        is WireCode.SESSION_FAILED
    )
    assert not isinstance(side.receive_text('{"type":"session.rollback"}', 0.0)[0], Reply)


def test_after_close_everything_but_acks_is_gone() -> None:
    _, side = started()
    side.receive_text('{"type":"session.close"}', 0.0)
    assert error_of(side.receive_text('{"type":"session.pause"}', 0.0)).code is WireCode.SESSION_GONE
    assert isinstance(side.receive_text('{"type":"session.ack","seq":1,"displayed":0,"epoch":0}', 0.0)[0], SessionAck)


def test_events_over_the_rate_are_refused_and_not_accepted() -> None:
    pair, _ = started()
    side = fresh(max_events_per_s=5.0)
    side.receive_text('{"type":"session.start","format":"rgb24"}', 0.0)
    pair.side = side
    pair.serve(SessionStart(format="rgb24"))
    answers = [side.receive_text(f'{{"type":"session.event","event_id":{i},"prompt":"x"}}', 0.0)[0] for i in range(7)]
    assert [isinstance(answer, SessionEvent) for answer in answers] == [True] * 5 + [False] * 2
    late = error_of([answers[6]])
    assert (late.code, late.fatal, late.event_id) == (WireCode.RATE_LIMITED, False, 6)
    assert isinstance(side.receive_text('{"type":"session.event","event_id":7,"prompt":"x"}', 0.2)[0], SessionEvent)
    assert side.statistics().rate_limited == 2


def test_a_flood_ends_with_4429_and_one_error() -> None:
    side = fresh(max_messages_per_s=10.0)
    commands = [command for _ in range(50) for command in side.receive_text('{"type":"ping"}', 0.0)]
    assert [type(c) for c in commands[:10]] == [Reply] * 10
    assert error_of(commands[10:]).fatal
    assert commands[11:] == [Close(CloseCode.RATE, "rate_limited")]


def test_a_clock_that_stands_still_or_jumps_back_gives_no_tokens() -> None:
    side = fresh(now=10.0, max_messages_per_s=2.0)
    for now in (10.0, 5.0, 9.0):
        last = side.receive_text('{"type":"ping"}', now)
    assert error_of(last).code is WireCode.RATE_LIMITED


def test_a_taken_over_connection_ends_without_a_number() -> None:
    _, side = started()
    message = side.taken_over()
    assert parse_server(side.send(message)) == SessionClosed(reason="taken_over")
    assert close_code(message) is CloseCode.TAKEN_OVER
    assert not side.owes_terminal


@pytest.mark.parametrize(
    ("reason", "code"),
    [("client", 1000), ("operator", 1000), ("failed", 1000), ("shutdown", 1001), ("stalled", 4408), ("evicted", 4410)],
)
def test_close_codes(reason: str, code: int) -> None:
    assert close_code(SessionClosed(reason=reason, seq=1)) == code  # type: ignore[arg-type]


@pytest.mark.parametrize("state", ["playing", "paused", "failed"])
def test_a_resumed_connection_begins_in_the_state_it_names(state: str) -> None:
    pair, _ = started()
    pair.settle()
    if state == "paused":
        pair.to_server.append(pair.client.pause())
    if state == "failed":
        pair.fail()
    pair.settle()
    pair.cut(0)
    pair.reconnect()
    assert pair.side is not None
    assert pair.side.state.value == pair.client.state.value == state
    assert isinstance(pair.messages[-1], SessionResumed)


def test_seq_cannot_jump_and_frames_need_their_chunk() -> None:
    pair, side = started()
    assert pair.stream is not None
    skipped = pair.stream.paused()
    second = pair.stream.playing(0.0)
    with pytest.raises(LocalError, match="does not follow"):
        side.send(second.message)
    side.send(skipped.message)
    side.send(second.message)
    pair.tick()
    frames = [entry for entry in pair.stream.replay_after(3) if hasattr(entry, "media")]
    with pytest.raises(LocalError):
        side.send_frame(frames[0].header(format="rgb24", key=True, payload_bytes=1), b"x")
