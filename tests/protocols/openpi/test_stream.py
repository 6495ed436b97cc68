"""Our streaming subprotocol, both ends: newest wins, epochs fence, one answer per observation, resume."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import msgpack
import numpy as np
import pytest

from protocols.openpi.test_observations import CONTRACT
from realtime_omni_protocols.errors import LocalError
from realtime_omni_protocols.openpi import (
    Attach,
    BeginReset,
    Close,
    End,
    Open,
    PolicyCode,
    PolicyError,
    Send,
    StreamClientSide,
    StreamServerSide,
    StreamState,
    pack,
    unpack,
)
from realtime_omni_protocols.openpi.stream_messages import (
    ActionChunk,
    Closed,
    ErrorMessage,
    Hello,
    Observe,
    Pong,
    ResetDone,
    Resumed,
    Started,
    Superseded,
    encode,
    parse_server,
)

ACTIONS = np.arange(6, dtype=np.float32).reshape(2, 3)
OBSERVATION = {"prompt": "go", "state": np.zeros(3, np.float32)}


def live() -> tuple[StreamServerSide, StreamClientSide]:
    server, client = StreamServerSide(CONTRACT, server="test/1", now=0.0), StreamClientSide()
    assert isinstance(client.receive(server.hello().data), Hello)
    assert isinstance(server.receive(client.start(), 0.0)[0], Open)
    assert isinstance(client.receive(server.started("id", "token", 30.0).data), Started)
    return server, client


def says(outputs: list[Any]) -> list[Any]:
    return [parse_server(output.data) for output in outputs if isinstance(output, Send)]


def observe(server: StreamServerSide, client: StreamClientSide, tick: int = 0) -> list[Any]:
    return server.receive(client.observe(OBSERVATION, tick), 0.0)


def test_an_observation_is_answered_by_its_number_and_tick() -> None:
    server, client = live()
    assert observe(server, client, tick=40) == []
    work = server.take()
    assert work is not None
    np.testing.assert_array_equal(work.observation["state"], np.zeros(3))
    (output,) = server.chunk(work, ACTIONS, {"infer_ms": 2.0}, valid_from=1, delay_used=1)
    chunk = client.receive(output.data)  # type: ignore[union-attr]
    assert isinstance(chunk, ActionChunk)
    assert (chunk.seq, chunk.epoch, chunk.start_tick, chunk.valid_from, chunk.delay_used) == (1, 0, 40, 1, 1)
    np.testing.assert_array_equal(chunk.actions, ACTIONS)


def test_the_greeting_carries_contract_and_metadata() -> None:
    server = StreamServerSide(CONTRACT, server="test/1", now=0.0)
    (hello,) = says([server.hello()])
    assert hello.metadata["action_horizon"] == 2
    assert hello.contract["cameras"][0] == {
        "name": "top",
        "keys": [],
        "rule": "required",
        "height": None,
        "width": None,
        "max_frames": 1,
    }
    assert "handshake" not in hello.contract


def test_messages_are_plain_msgpack_maps() -> None:
    frame = msgpack.packb({"type": "observation", "seq": 1, "epoch": 0, "tick": 3, "observation": {"prompt": "go"}})
    server, _ = live()
    assert server.receive(frame, 0.0) == []
    assert server.take() == Observe(seq=1, epoch=0, tick=3, observation={"prompt": "go"})
    assert unpack(encode(Observe(seq=1, epoch=0, tick=3, observation={"prompt": "go"}))) == unpack(frame)


def test_the_newest_observation_wins_and_the_others_hear_of_it() -> None:
    server, client = live()
    observe(server, client)
    first = server.take()
    assert first is not None
    assert observe(server, client) == []
    (superseded,) = says(observe(server, client))
    assert superseded == Superseded(seq=2, by=3)
    assert server.take() is None, "one at a time"
    assert len(server.chunk(first, ACTIONS, {})) == 1, "what was begun is finished"
    newest = server.take()
    assert newest is not None
    assert newest.seq == 3


def test_a_reset_fences_what_is_in_work_and_voids_what_waits() -> None:
    server, client = live()
    observe(server, client)
    work = server.take()
    assert work is not None
    observe(server, client)
    assert server.receive(client.reset(), 0.0) == [BeginReset(1)]
    assert server.take() is None
    assert server.chunk(work, ACTIONS, {}) == []
    (done,) = says([server.reset_done()])
    assert client.receive(encode(done)) == ResetDone(epoch=1)
    assert server.take() is None
    assert server.statistics().fenced == 1
    observe(server, client)
    assert server.take() is not None


def test_a_late_chunk_of_an_old_epoch_does_not_come_out_at_the_client() -> None:
    server, client = live()
    observe(server, client)
    work = server.take()
    assert work is not None
    late = says(server.chunk(work, ACTIONS, {}))
    client.reset()  # crosses the chunk on the wire
    assert client.receive(encode(late[0])) is None
    assert client.statistics().late == 1


def test_an_observation_of_an_old_epoch_or_number_is_stale() -> None:
    server, _ = live()
    assert server.receive(encode(Observe(seq=5, epoch=0, tick=0, observation={})), 0.0) == []
    for message in (
        Observe(seq=5, epoch=0, tick=0, observation={}),
        Observe(seq=4, epoch=0, tick=0, observation={}),
        Observe(seq=6, epoch=1, tick=0, observation={}),
    ):
        (error,) = says(server.receive(encode(message), 0.0))
        assert (error.code, error.seq) == ("stale", message.seq)


def test_an_error_concerns_one_observation() -> None:
    server, client = live()
    observe(server, client)
    work = server.take()
    assert work is not None
    with pytest.raises(PolicyError):
        server.chunk(work, ACTIONS[:1], {})
    (output,) = server.fail(work, PolicyError(PolicyCode.POLICY_FAILED, "error 12ab"))
    error = client.receive(output.data)  # type: ignore[union-attr]
    assert error == ErrorMessage(code="policy_failed", message="error 12ab", path="$", seq=1)
    observe(server, client)
    assert server.take() is not None


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"type": "observation", "seq": 0, "epoch": 0, "tick": 0, "observation": {}}, "bad_message"),
        ({"type": "observation", "seq": True, "epoch": 0, "tick": 0, "observation": {}}, "bad_message"),
        ({"type": "observation", "seq": 1, "epoch": 0, "tick": -1, "observation": {}}, "bad_message"),
        ({"type": "observation", "seq": 1, "epoch": 0, "tick": 0, "observation": []}, "bad_message"),
        ({"type": "observation", "seq": 1, "epoch": 0, "tick": 0}, "bad_message"),
        ({"type": "observation", "seq": 1, "epoch": 0, "tick": 0, "observation": {}, "x": 1}, "bad_message"),
        ({"type": "start"}, "session_state"),
        ({"type": "resume", "session_id": "a", "resume_token": "b"}, "session_state"),
        ({"type": "chunk"}, "bad_message"),
        ({"seq": 1}, "bad_message"),
        ([], "bad_message"),
    ],
    ids=str,
)
def test_a_bad_message_is_refused_and_nothing_is_lost(message: object, code: str) -> None:
    server, client = live()
    (error,) = says(server.receive(msgpack.packb(message), 0.0))
    assert (error.code, error.fatal) == (code, False)
    observe(server, client)
    assert server.take() is not None


def test_a_message_over_the_cap_is_the_end() -> None:
    server = StreamServerSide(CONTRACT, server="t", now=0.0, max_bytes=1000)
    server.hello()
    frame, close = server.receive(bytes(1001), 0.0)
    assert says([frame])[0].fatal
    assert close == Close(1009, "too_large")  # type: ignore[arg-type]
    assert server.receive(b"anything", 0.0) == []


def test_who_never_starts_is_timed_out() -> None:
    server = StreamServerSide(CONTRACT, server="t", now=100.0, handshake_timeout_s=10.0)
    server.hello()
    assert server.deadline() == 110.0
    assert server.handle_timeout(109.9) == []
    frame, close = server.handle_timeout(110.0)
    assert says([frame])[0].code == "handshake_timeout"
    assert isinstance(close, Close)
    assert close.code == 4408
    assert live()[0].deadline() is None


def test_a_refused_start_may_be_tried_again() -> None:
    server, client = StreamServerSide(CONTRACT, server="t", now=0.0), StreamClientSide()
    client.receive(server.hello().data)
    server.receive(client.start(), 0.0)
    client.receive(server.refuse_start(PolicyError(PolicyCode.CAPACITY, "no free session")).data)
    assert isinstance(server.receive(client.start(), 0.0)[0], Open)


def test_close_and_ping() -> None:
    server, client = live()
    (pong,) = says(server.receive(client.ping(7.0), 2.0))
    assert client.receive(encode(pong)) == Pong(server_ms=2000.0, t=7.0)
    assert server.receive(client.close(), 0.0) == [End()]
    frame, close = server.closed("client")
    assert client.receive(frame.data) == Closed(reason="client")  # type: ignore[union-attr]
    assert close == Close(1000, "client")  # type: ignore[arg-type]
    assert client.state is server.state is StreamState.CLOSED


# ---- resume


def test_a_session_goes_on_over_another_connection() -> None:
    server, client = live()
    observe(server, client)
    assert client.disconnected()
    again = StreamServerSide(CONTRACT, server="test/1", now=1.0)
    client.receive(again.hello().data)
    (attach,) = again.receive(client.start(), 1.0)
    assert isinstance(attach, Attach)
    assert (attach.message.session_id, attach.message.resume_token) == ("id", "token")
    client.receive(again.resumed("next token", server.epoch, server.last_seq).data)
    assert observe(again, client) == []
    work = again.take()
    assert work is not None
    assert work.seq == 2


def test_a_reset_whose_connection_broke_is_owed_unless_the_server_saw_it() -> None:
    for saw, owes in ((False, True), (True, False)):
        server, client = live()
        frame = client.reset()
        if saw:
            server.receive(frame, 0.0)
        client.disconnected()
        again = StreamServerSide(CONTRACT, server="t", now=1.0)
        client.receive(again.hello().data)
        again.receive(client.start(), 1.0)
        assert isinstance(client.receive(again.resumed("t2", server.epoch, 0).data), Resumed)
        assert client.owes_reset is owes


def test_a_closed_session_is_not_resumed() -> None:
    _, client = live()
    client.close()
    assert not client.disconnected()


# ---- the client trusts no server


@pytest.mark.parametrize(
    "changes",
    [
        *({"seq": 9}, {"actions": [[0.0]]}, {"actions": ACTIONS.astype("f8")}, {"actions": ACTIONS * np.nan}),
        *({"actions": ACTIONS[0]}, {"valid_from": 3}, {"start_tick": -1}, {"type": "chonk"}),
    ],
    ids=str,
)
def test_a_chunk_that_breaks_the_protocol_never_comes_out(changes: dict[str, Any]) -> None:
    server, client = live()
    observe(server, client)
    chunk = {"type": "chunk", "seq": 1, "epoch": 0, "start_tick": 0, "valid_from": 0, "delay_used": 0}
    with pytest.raises(PolicyError):
        client.receive(pack(chunk | {"actions": ACTIONS, "timing": {}} | changes))


def test_the_shell_cannot_answer_what_is_not_in_work() -> None:
    server, client = live()
    observe(server, client)
    work = server.take()
    assert work is not None
    server.chunk(work, ACTIONS, {})
    with pytest.raises(LocalError):
        server.chunk(work, ACTIONS, {})


@pytest.mark.parametrize("seed", range(30))
def test_random_interleavings_answer_every_observation_once(seed: int) -> None:
    """Two ends and two queues of frames in flight. Faults this test was seen to find: no fence, a reset that keeps the
    waiting observation, an observation that waits on while it is in work, one that is replaced without a word."""
    rng = random.Random(seed)
    server, client = live()
    up: deque[bytes] = deque()
    down: deque[bytes] = deque()
    work: Observe | None = None
    resetting = False
    sent: dict[int, int] = {}
    begun: set[int] = set()
    answers: dict[int, list[str]] = {}

    def take() -> Observe | None:
        taken = server.take()
        assert taken is None or (taken.epoch == server.epoch and taken.seq not in begun)
        if taken is not None:
            begun.add(taken.seq)
        return taken

    def say(outputs: list[Any]) -> None:
        for output in outputs:
            message = parse_server(output.data)
            assert not isinstance(message, ActionChunk) or message.epoch == server.epoch
            down.append(output.data)

    def deliver() -> None:
        message = client.receive(down.popleft())
        if isinstance(message, ActionChunk):
            assert message.epoch == client.epoch
        if isinstance(message, ActionChunk | Superseded | ErrorMessage):
            assert message.seq is not None
            answers.setdefault(message.seq, []).append(type(message).__name__)

    for step in range(400):
        choice = rng.choice(("observe", "observe", "reset", "up", "up", "down", "down", "work", "work", "finish"))
        if choice == "observe" and client.state is StreamState.LIVE and step < 350:
            up.append(client.observe({"prompt": str(step)}, step))
            sent[client.seq] = client.epoch
        elif choice == "reset" and client.state is StreamState.LIVE and rng.random() < 0.2:
            up.append(client.reset())
        elif choice == "up" and up:
            for command in server.receive(up.popleft(), 0.0):
                if isinstance(command, BeginReset):
                    resetting = True
                elif isinstance(command, Send):
                    down.append(command.data)  # type: ignore[arg-type]
        elif choice == "down" and down:
            deliver()
        elif choice == "work" and work is None:
            work = take()
        elif choice == "finish" and work is not None:
            done, work = work, None
            say(server.chunk(done, ACTIONS, {}) if rng.random() < 0.8 else server.fail(done, _FAULT))
        elif choice == "finish" and resetting:
            resetting = False
            down.append(server.reset_done().data)  # type: ignore[arg-type]
    while up or down or work is not None or resetting or (work := take()) is not None:
        if up:
            for command in server.receive(up.popleft(), 0.0):
                resetting |= isinstance(command, BeginReset)
                down.extend([command.data] if isinstance(command, Send) else [])  # type: ignore[list-item]
        elif work is not None:
            say(server.chunk(work, ACTIONS, {}))
            work = None
        elif resetting:
            resetting = False
            down.append(server.reset_done().data)  # type: ignore[arg-type]
        else:
            deliver()
    assert all(len(kinds) == 1 for kinds in answers.values())
    current = {seq for seq, epoch in sent.items() if epoch == client.epoch}
    assert current <= answers.keys()
    assert server.epoch == client.epoch


_FAULT = PolicyError(PolicyCode.POLICY_FAILED, "error 1")
