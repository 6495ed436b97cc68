"""A client believes nothing: whatever a server says out of place is a violation, and nothing changes by it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from protocols.make_vectors import ACCEPTED, APPLIED, CHUNK, CLOSED, HELLO, STARTED
from protocols.pair import Pair
from protocols.test_fuzz import FRAMES, TEXTS, mutate
from realtime_omni_protocols.errors import LocalError, WireCode, WireError
from realtime_omni_protocols.world import ChunkDone, Frame, FrameHeader, WireState, WorldClientSide, pack_frame
from realtime_omni_protocols.world_messages import Control


def say(client: WorldClientSide, message: dict[str, Any], **changes: Any) -> None:
    client.receive_text(json.dumps(message | changes))


def playing() -> WorldClientSide:
    client = WorldClientSide()
    client.connection_made()
    say(client, HELLO)
    client.start(format="rgb24")
    say(client, STARTED)
    return client


def chunk(seq: int, **changes: Any) -> dict[str, Any]:
    return CHUNK | {"seq": seq, "chunk_index": 0, "first_frame": 0, "applied_event_ids": []} | changes


def frame(seq: int, index: int, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "format": "rgb24",
        "key": True,
        "last": index == 2,
        "index": index,
        "seq": seq,
        "epoch": 0,
        "chunk_index": 0,
        "frame": index,
        "pts_ms": 0,
        "payload_bytes": 1,
    }
    return pack_frame(FrameHeader(**(fields | changes)), b"x")


def test_a_whole_chunk_in_order() -> None:
    client = playing()
    say(client, chunk(2))
    kinds = [type(a) for index in range(3) for a in client.receive_binary(frame(3 + index, index))]
    assert kinds == [Frame, Frame, Frame, ChunkDone]
    assert (client.last_seq, client.next_frame, client.next_chunk) == (5, 3, 1)
    client.check()


@pytest.mark.parametrize(
    ("message", "changes", "path"),
    [
        (HELLO, {}, "$.type"),
        (STARTED, {"seq": 2}, "$.type"),
        (CLOSED, {"seq": 5}, "$.seq"),
        (chunk(3), {}, "$.seq"),
        (chunk(2), {"chunk_index": 1}, "$.chunk_index"),
        (chunk(2), {"first_frame": 3}, "$.chunk_index"),
        (chunk(2), {"epoch": 1}, "$.chunk_index"),
        (chunk(2), {"applied_event_ids": [0]}, "$.applied_event_ids"),
        (ACCEPTED, {"seq": 2}, "$.event_id"),
        (APPLIED, {"seq": 2}, "$.event_ids"),
        ({"type": "event.discarded", "seq": 2, "event_ids": [9], "reason": "reset"}, {}, "$.event_ids"),
        ({"type": "session.reset_done", "seq": 2, "epoch": 2, "prompt": None, "seed": 0}, {}, "$.epoch"),
        ({"type": "session.recovered", "seq": 2, "chunk_index": 0}, {}, "$.type"),
    ],
)
def test_what_a_server_may_not_say_now(message: dict[str, Any], changes: dict[str, Any], path: str) -> None:
    client = playing()
    with pytest.raises(WireError) as caught:
        say(client, message, **changes)
    assert (caught.value.code, caught.value.path) == (WireCode.BAD_MESSAGE, path)
    assert client.last_seq == 1


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (frame(4, 0), "$.seq"),
        (frame(3, 1, frame=1), "$.index"),
        (frame(3, 0, frame=1), "$.index"),
        (frame(3, 0, epoch=1), "$.index"),
        (frame(3, 0, chunk_index=1), "$.index"),
        (frame(3, 0, last=True), "$.flags"),
    ],
)
def test_a_frame_out_of_place(data: bytes, path: str) -> None:
    client = playing()
    say(client, chunk(2))
    with pytest.raises(WireError) as caught:
        client.receive_binary(data)
    assert caught.value.path == path
    assert client.last_seq == 2


def test_a_frame_without_a_chunk_and_a_message_inside_of_one() -> None:
    client = playing()
    with pytest.raises(WireError):
        client.receive_binary(frame(2, 0))
    say(client, chunk(2))
    say(client, {"type": "pong", "server_ms": 1})  # a connection message may come in between
    with pytest.raises(WireError):
        say(client, {"type": "session.paused", "seq": 3})


def test_a_session_may_not_end_with_events_without_receipt() -> None:
    client = playing()
    client.event(prompt="x")
    say(client, ACCEPTED, seq=2)
    with pytest.raises(WireError):
        say(client, CLOSED, seq=3)


def test_a_replay_that_begins_elsewhere_is_refused() -> None:
    for changes in ({"replayed_from": 3}, {"epoch": 1}, {"next_frame": 1}):
        client = playing()
        client.connection_lost()
        client.connection_made()
        say(client, HELLO)
        client.resume()
        message = {
            "type": "session.resumed",
            "session_id": "8d1f",
            "resume_token": "n",
            "replayed_from": 2,
            "state": "playing",
            "epoch": 0,
            "next_frame": 0,
            "next_event_id": 0,
            "format": "rgb24",
            "codec": None,
        }
        with pytest.raises(WireError):
            say(client, message, **changes)
        say(client, message)
        assert client.state is WireState.PLAYING


def test_our_own_mistakes_are_told_before_anything_is_sent() -> None:
    client = playing()
    with pytest.raises(LocalError):
        client.start(format="rgb24")
    with pytest.raises(LocalError):
        client.rollback()
    with pytest.raises(WireError) as caught:
        client.event(prompt="")
    assert caught.value.path == "$.prompt"
    with pytest.raises(WireError):
        client.event(controls=[Control(track="", schema="s", data={})])
    with pytest.raises(WireError):
        client.event()
    assert client.next_event_id == 0
    assert client.waiting_events == 0
    fresh = WorldClientSide()
    with pytest.raises(LocalError):
        fresh.resume()
    with pytest.raises(LocalError):
        fresh.event(prompt="x")


def test_a_taken_over_client_does_not_resume() -> None:
    pair = Pair()
    pair.start()
    assert pair.side is not None
    pair.to_client.append(pair.side.send(pair.side.taken_over()))
    pair.settle()
    assert not pair.client.connection_lost()


def test_a_client_under_fuzz_raises_nothing_but_coded_errors() -> None:
    rng = random.Random(3)
    for _ in range(3_000):
        client = playing()
        for _ in range(3):
            try:
                if rng.random() < 0.5:
                    client.receive_binary(mutate(rng.choice(FRAMES), rng))
                else:
                    client.receive_text(mutate(rng.choice(TEXTS), rng))
            except WireError:
                pass
            client.check()


def test_a_rule_between_fields_is_a_coded_error_when_a_value_is_built_by_hand() -> None:
    with pytest.raises(WireError) as caught:
        Control(track="t", schema="s", data={"a b)": {"`": [0, 2**60]}})
    assert (caught.value.code, caught.value.path) == (WireCode.BAD_MESSAGE, '$.data["a b)"]["`"][1]')
