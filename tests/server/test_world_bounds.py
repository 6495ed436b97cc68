"""What a bad or slow client can cost: a bounded amount, and nothing to anybody else."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest

from realtime_omni.media import EncodedFrame
from realtime_omni.server.hub import WorldHub
from realtime_omni.server.outbox import MAX_BATCHES
from server.fakes import FakeManager
from server.wire import Client, eventually, make_hub

MALFORMED: list[str | bytes] = [
    "",
    "{",
    "null",
    "[]",
    '"x"',
    "NaN",
    '{"type": 5}',
    '{"type": "session.unheard_of"}',
    '{"type": "session.event"}',
    '{"type": "session.event", "event_id": true, "prompt": "x"}',
    '{"type": "session.event", "event_id": 1e3, "prompt": "x"}',
    '{"type": "session.event", "event_id": -1, "prompt": "x"}',
    '{"type": "session.event", "event_id": 1, "prompt": "\\ud800"}',
    '{"type": "session.event", "event_id": 1, "event_id": 2, "prompt": "x"}',
    '{"type": "session.ack", "seq": 1e999, "displayed": 0, "epoch": 0}',
    '{"type": "session.ack", "seq": 999999, "displayed": 0, "epoch": 0}',
    '{"type": "session.ack", "seq": 0, "displayed": 999999, "epoch": 0}',
    '{"type": "session.ack", "seq": 0, "displayed": 0, "epoch": 7}',
    '{"type": "session.start", "format": "rgb24"}',
    '{"type": "session.resume", "session_id": "s", "resume_token": "x", "last_seq": 0}',
    '{"type": "session.rollback"}',
    '{"type": "session.next"}',
    '{"type": "hello"}',
    "[" * 10_000,
    '{"a":' * 5_000,
    "\x00" * 100,
    b"",
    b"\x52\x4f" + b"\xff" * 46,
    b"\xff" * 1000,
]


async def test_malformed_messages_are_answered_and_the_session_is_unharmed(manager: FakeManager, hub: WorldHub) -> None:
    client = Client(hub)
    await client.start()
    await client.block()
    for index, data in enumerate(MALFORMED):
        client.send_raw(data)
        error = await client.until("error")
        assert not error.fatal, data
        assert "Traceback" not in error.message
        client.press(index, prompt=None)
        assert (await client.until("event.accepted")).status == "accepted"
        client.ack()
        manager.clock.advance(1)
        await client.until("event.applied")
    record = next(iter(hub.sessions))
    record.stream.check()


async def test_random_bytes_never_end_a_session(manager: FakeManager, hub: WorldHub) -> None:
    random = np.random.default_rng(7)
    client = Client(hub)
    await client.start()
    template = json.dumps({"type": "session.event", "event_id": 3, "prompt": "x", "controls": [{"track": "c"}]})
    for _ in range(200):
        text = list(template)
        for position in random.integers(0, len(text), 3):
            text[position] = chr(int(random.integers(32, 127)))
        client.send_raw("".join(text))
        manager.clock.advance(0.05)
    client.send("ping", id="end")
    while (await client.until("pong")).re != "end":
        pass
    assert not client.task.done()


async def test_a_message_beyond_the_limit_ends_the_connection_but_not_the_session(
    manager: FakeManager, hub: WorldHub
) -> None:
    client = Client(hub)
    await client.start(session_id="s")
    controls = [{"track": f"t{i}", "schema": "x", "data": {"text": "y" * 5_000}} for i in range(16)]
    client.send("session.event", event_id=1, controls=controls)
    assert (await client.end())[0] == 1009
    assert client.terminal.code == "message_too_large"
    again = Client(hub)
    await again.resume("s", client.token, 1)


async def test_too_many_events_are_refused_and_a_flood_ends_the_connection(manager: FakeManager) -> None:
    hub = make_hub(manager, max_events_per_s=2.0, max_messages_per_s=20.0)
    client = Client(hub)
    assert (await client.start(session_id="s")).limits.max_events_per_s == 2
    for event_id in range(3):
        client.press(event_id)
    refused = await client.until("error")
    assert (refused.code, refused.event_id, refused.fatal) == ("rate_limited", 2, False)
    manager.clock.advance(1)
    client.press(2)
    await client.until("event.accepted")
    for _ in range(40):
        client.send("ping")
    assert (await client.end())[0] == 4429
    assert "s" in manager.live
    await hub.shutdown(5)
    hub.close()


async def test_a_reader_that_stops_reading_costs_a_bounded_amount(manager: FakeManager, hub: WorldHub) -> None:
    """The socket is full; the client still sends events and acks. Media is bounded by credit, receipts by the outbox."""
    client = Client(hub)
    await client.start(session_id="s")
    await client.block()
    connection = next(iter(hub.connections))
    record = connection.record
    assert record is not None
    client.transport.flowing.clear()
    for event_id in range(500):
        client.press(event_id % 4)
        manager.clock.advance(0.05)
        await asyncio.sleep(0)
    await eventually(lambda: len(connection.sender.outbox) >= MAX_BATCHES)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert connection.sender.outbox.peak <= MAX_BATCHES + 8
    assert client.transport.inbound.qsize() > 300  # the reader stopped reading
    assert manager.ticks_started <= 2
    assert record.stream.statistics().entries <= record.stream.limits.max_entries
    other = Client(hub)
    await other.start()
    await other.block()
    client.transport.flowing.set()
    await client.until("event.accepted", event_id=3)


async def test_encoding_does_not_block_the_control_plane(manager: FakeManager, hub: WorldHub) -> None:
    """While a block sits in the encoder, a ping is answered and an event is accepted by the session."""
    client = Client(hub)
    await client.start()
    connection = next(iter(hub.connections))
    lane = connection.sender.lane
    assert lane is not None
    await client.block()
    busy, go_on = threading.Event(), threading.Event()
    encode = lane._encoder.encode

    def slow(frame: np.ndarray) -> tuple[bytes, bool]:
        busy.set()
        assert go_on.wait(10)
        return encode(frame)

    lane._encoder.encode = slow  # type: ignore[method-assign]
    lane._encoder.is_quick = False  # type: ignore[misc]  # as of H.264, and of any encoder with large frames
    client.ack()
    manager.clock.advance(1)
    await asyncio.to_thread(busy.wait, 10)
    client.send("ping", t=4.5)
    assert (await client.until("pong")).t == 4.5
    client.press(1)
    session = next(iter(manager.live.values()))
    await eventually(lambda: session.pending_event_count == 1)
    other = Client(hub)
    await other.start(format="latent")
    go_on.set()
    await client.block()


async def test_an_encoder_that_breaks_ends_the_connection_with_an_id_and_the_session_can_be_resumed(
    manager: FakeManager, hub: WorldHub, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client(hub)
    await client.start(session_id="s")
    await client.block()
    connection = next(iter(hub.connections))

    def broken(*_: object, **__: object) -> list[EncodedFrame]:
        raise RuntimeError("encoder at /opt/secret broke")

    assert connection.sender.lane is not None
    connection.sender.lane.encode_now = broken  # type: ignore[method-assign]
    client.ack()
    manager.clock.advance(1)
    assert (await client.end())[0] == 4500
    assert client.terminal.code == "internal"
    assert "secret" not in client.terminal.message
    assert client.terminal.message.split()[-1] in caplog.text
    again = Client(hub)
    await again.resume("s", client.token, client.last_seq)
    await again.block()


async def test_a_long_log_is_written_beside_the_event_loop(manager: FakeManager, hub: WorldHub) -> None:
    client = Client(hub)
    await client.start(session_id="s")
    threads = []

    class Log:
        def to_json(self) -> str:
            threads.append(threading.current_thread())
            return "{}"

    async def log() -> Log:
        return Log()

    manager.live["s"].log = log  # type: ignore[attr-defined]
    client.send("session.log", id="l")
    assert (await client.until("session.logged", re="l")).log == "e30="
    assert threads
    assert threads != [threading.main_thread()]
