"""A session over the wire, against a fake manager on a manual clock."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from realtime_omni.errors import ErrorCode, TickError
from realtime_omni.server.hub import WorldHub
from realtime_omni.session.values import Chunk
from server.fake_values import FakeNotice
from server.fakes import FakeManager
from server.wire import Client, eventually, make_hub


async def walk(client: Client, manager: FakeManager, blocks: int) -> None:
    """Receive blocks as a player does: acknowledge, and let the media clock run."""
    for _ in range(blocks):
        await client.block()
        client.ack()
        await eventually(client.transport.inbound.empty)
        manager.clock.advance(0.3)


async def test_a_session_starts_and_its_first_block_follows_with_a_key_frame(
    manager: FakeManager, hub: WorldHub
) -> None:
    client = Client(hub)
    started = await client.start(seed=5, id="a")
    assert (started.seq, started.re, started.seed, started.width) == (1, "a", 5, 16)
    assert started.limits.max_pending_events == 4
    chunk, frames = await client.block()
    assert (chunk.epoch, chunk.chunk_index, chunk.first_frame, chunk.frames) == (0, 0, 0, 3)
    assert [payload[0] for _, payload in frames] == [0, 11, 22]  # the fake's pixels: 11 per frame
    assert frames[0][0].key


async def test_an_event_is_accepted_then_applied_right_before_its_chunk(manager: FakeManager, hub: WorldHub) -> None:
    manager.hold()
    client = Client(hub)
    await client.start()
    await manager.tick_started.wait()
    client.press(3, id="e3")
    accepted = await client.until("event.accepted")
    assert (accepted.event_id, accepted.status, accepted.pending, accepted.re) == (3, "accepted", 1, "e3")
    manager.release()
    first, _ = await client.block()
    assert first.applied_event_ids == ()  # the block that was running when it came
    client.ack()
    manager.clock.advance(1)
    applied = await client.until("event.applied")
    following = await client.receive()
    assert applied.event_ids == (3,)
    assert following.applied_event_ids == (3,)
    assert following.seq == applied.seq + 1
    assert applied.first_frame == following.first_frame == 3
    header, _ = await client.receive()
    assert header.applied_event_id == 3


@pytest.mark.parametrize(
    ("asked", "told"), [("png", "one of h264, jpeg, rgb24, latent"), ("latent", "ask for h264, jpeg or rgb24")]
)
async def test_a_format_that_there_is_not_is_told_with_those_that_there_are(
    manager: FakeManager, hub: WorldHub, asked: str, told: str
) -> None:
    pixels = tuple(spec for spec in manager.info.artifacts if spec.representation == "decoded")
    object.__setattr__(manager.info, "artifacts", pixels)
    client = Client(hub)
    await client.until("hello")
    client.send("session.start", format=asked)
    error = await client.until("error")
    assert error.code == "unsupported_format"
    assert error.message.endswith(told)


@pytest.mark.parametrize(
    ("fields", "code", "path"),
    [
        ({"prompt": "nonsense", "controls": None}, "prompt_unknown", "$.prompt"),
        ({"controls": [{"track": " ", "schema": "x", "data": {}}]}, "invalid_argument", "$.track"),
        ({"controls": []}, "bad_message", "$.controls"),
        ({"prompt": "x", "surprise": 1}, "bad_message", "$.surprise"),
    ],
)
async def test_a_refused_event_names_code_path_and_event_and_changes_nothing(
    hub: WorldHub, fields: dict[str, object], code: str, path: str
) -> None:
    client = Client(hub)
    await client.start()
    client.press(1, id="x", **fields)
    error = await client.until("error")
    assert (error.code, error.path, error.fatal) == (code, path, False)
    client.press(1)
    assert (await client.until("event.accepted")).status == "accepted"


async def test_stale_conflicting_duplicate_and_surplus_events_have_their_own_answers(
    manager: FakeManager, hub: WorldHub
) -> None:
    manager.hold()
    client = Client(hub)
    await client.start()
    client.press(5)
    await client.until("event.accepted")
    client.press(5)
    assert (await client.until("event.accepted")).status == "duplicate"
    client.press(5, prompt="a blue room")
    assert (await client.until("error")).code == "event_conflict"
    client.press(4)
    stale = await client.until("error")
    assert (stale.code, stale.event_id) == ("stale", 4)
    for event_id in (6, 7, 8):
        client.press(event_id)
        await client.until("event.accepted")
    client.press(9)
    assert (await client.until("error")).code == "queue_full"


async def test_credit_stops_generation_after_one_block_of_lead(manager: FakeManager, hub: WorldHub) -> None:
    client = Client(hub)
    await client.start()
    await client.block()
    manager.clock.advance(10)
    await client.block()  # 3 generated, 0 shown: one more block of lead
    manager.clock.advance(10)
    await eventually(lambda: manager.clock.next_wake is not None)
    assert manager.ticks_started == 2
    client.displayed = 3
    client.ack()
    await client.block()
    manager.clock.advance(10)
    await eventually(lambda: manager.clock.next_wake is not None)
    assert manager.ticks_started == 3


async def test_a_paced_block_starts_no_earlier_than_its_media_time(manager: FakeManager, hub: WorldHub) -> None:
    client = Client(hub)
    await client.start()
    await walk(client, manager, 20)
    await client.block()
    client.ack()
    await eventually(client.transport.inbound.empty)
    record = next(iter(hub.sessions))
    start_at = record.pacer.start_at(record.stream.generated)
    assert start_at is not None
    assert start_at > manager.clock.now_s()
    assert manager.ticks_started == 21
    manager.clock.advance(start_at - manager.clock.now_s())
    await client.block()


async def test_on_demand_sessions_yield_a_block_per_next(manager: FakeManager, hub: WorldHub) -> None:
    client = Client(hub)
    await client.start(cadence="on_demand")
    client.send("ping", t=1)
    await client.until("pong")
    assert manager.ticks_started == 0
    for index in range(3):
        client.send("session.next")
        chunk, _ = await client.block()
        assert chunk.chunk_index == index
        client.ack()
    for _ in range(5):
        client.send("session.next", id="n")
    client.send("session.next", id="too many")
    # Some may be served while the others arrive; more than four outstanding are refused.
    manager.clock.advance(1)
    await client.block()


async def test_pause_holds_and_play_goes_on(manager: FakeManager, hub: WorldHub) -> None:
    client = Client(hub)
    await client.start()
    await client.block()
    client.send("session.pause", id="p")
    assert (await client.until("session.paused")).re == "p"
    client.ack()
    manager.clock.advance(100)
    await eventually(client.transport.inbound.empty)
    assert manager.ticks_started == 1
    client.send("session.resume_play")
    await client.until("session.playing")
    chunk, _ = await client.block()
    assert chunk.chunk_index == 1


async def test_reset_begins_an_epoch_discards_waiting_events_and_starts_with_a_key_frame(
    manager: FakeManager, hub: WorldHub
) -> None:
    manager.hold()
    client = Client(hub)
    await client.start(format="h264")
    await manager.tick_started.wait()
    client.press(1)
    await client.until("event.accepted")
    client.send("session.reset", id="r", seed=9, prompt="a blue room")
    discarded = await client.until("event.discarded")
    assert (discarded.event_ids, discarded.reason) == ((1,), "reset")
    done = await client.until("session.reset_done")
    assert (done.epoch, done.seed, done.prompt, done.re) == (1, 9, "a blue room", "r")
    manager.release()
    chunk, frames = await client.block()
    assert (chunk.epoch, chunk.chunk_index, chunk.first_frame) == (1, 0, 0)
    assert [header.key for header, _ in frames] == [True, False, False]
    client.press(1)
    assert (await client.until("event.accepted")).status == "duplicate"


async def test_a_refused_reset_leaves_the_session_as_it_was(hub: WorldHub) -> None:
    client = Client(hub)
    await client.start()
    await client.block()
    client.send("session.reset", prompt="nonsense", id="r")
    error = await client.until("error")
    assert (error.code, error.path, error.re) == ("prompt_unknown", "$.prompt", "r")
    client.ack()
    hub.manager.clock.advance(1)  # type: ignore[attr-defined]
    chunk, _ = await client.block()
    assert (chunk.epoch, chunk.chunk_index) == (0, 1)


async def test_abort_names_the_chunk_and_the_same_chunk_follows(manager: FakeManager, hub: WorldHub) -> None:
    manager.hold()
    client = Client(hub)
    await client.start()
    await manager.tick_started.wait()
    client.send("session.abort", id="a")
    aborted = await client.until("chunk.aborted")
    assert (aborted.chunk_index, aborted.re) == (0, "a")
    manager.release()
    chunk, _ = await client.block()
    assert chunk.chunk_index == 0


async def test_an_abort_with_nothing_running_says_null(manager: FakeManager, hub: WorldHub) -> None:
    client = Client(hub)
    await client.start(cadence="on_demand")
    client.send("session.abort")
    assert (await client.until("chunk.aborted")).chunk_index is None


async def test_a_failed_tick_offers_remedies_and_rollback_runs_the_chunk_again(
    manager: FakeManager, hub: WorldHub
) -> None:
    manager.failures.append(TickError("the decoder failed"))
    client = Client(hub)
    await client.start()
    failed = await client.until("session.failed")
    assert (failed.code, failed.chunk_index) == ("tick_failed", 0)
    assert failed.can == ("rollback", "reset", "close")
    client.press(1)
    assert (await client.until("error")).code == "session_failed"
    client.send("session.rollback", id="b")
    recovered = await client.until("session.recovered")
    assert (recovered.chunk_index, recovered.re) == (0, "b")
    chunk, _ = await client.block()
    assert chunk.chunk_index == 0


async def test_a_chunk_whose_history_could_not_be_written_comes_before_the_failure(
    manager: FakeManager, hub: WorldHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's answer and the notice of a failed clean pass may reach the event loop together."""
    client = Client(hub)
    await client.start(session_id="s")
    await client.block()
    session = manager.live["s"]
    plain = session.committed_chunk

    async def committed_chunk(outputs: Sequence[str] | None = None) -> Chunk:
        chunk = await plain(outputs)
        monkeypatch.undo()
        session.state = "failed"
        session.notify(FakeNotice("failed", code="tick_failed"))
        return chunk

    monkeypatch.setattr(session, "committed_chunk", committed_chunk)
    client.ack()
    manager.clock.advance(1)
    assert (await client.block())[0].chunk_index == 1
    assert (await client.until("session.failed")).chunk_index == 2
    client.send("session.rollback")
    await client.until("session.recovered")
    client.ack()
    assert (await client.block())[0].chunk_index == 2
    assert len(client.of("session.failed")) == 1


async def test_a_rollback_whose_answer_was_lost_can_be_repeated(manager: FakeManager, hub: WorldHub) -> None:
    manager.failures.append(TickError("broken"))
    client = Client(hub)
    await client.start(session_id="s")
    await client.until("session.failed")
    await manager.live["s"].rollback()  # what the lost request did
    client.send("session.rollback")
    assert (await client.until("session.recovered")).chunk_index == 0
    await client.block()


async def test_the_end_of_the_horizon_can_be_left_by_a_reset(manager: FakeManager, hub: WorldHub) -> None:
    manager.failures.append(TickError("the horizon is reached", code=ErrorCode.HORIZON))
    client = Client(hub)
    await client.start()
    assert (await client.until("session.failed")).code == "horizon"
    client.send("session.reset")
    assert (await client.until("session.reset_done")).epoch == 1
    await client.block()


async def test_our_own_bug_is_told_as_an_id_and_nothing_else(
    manager: FakeManager, hub: WorldHub, caplog: pytest.LogCaptureFixture
) -> None:
    manager.failures.append(ValueError("/etc/secret/path in a traceback"))
    client = Client(hub)
    await client.start()
    failed = await client.until("session.failed")
    assert failed.code == "internal"
    assert "secret" not in failed.message
    assert failed.message.split()[-1] in caplog.text


@pytest.mark.parametrize(
    ("fields", "code", "path"),
    [
        ({"model": "other"}, "model_unknown", "$.model"),
        ({"prompt": "nonsense"}, "prompt_unknown", "$.prompt"),
        ({"lead_frames": 13}, "invalid_argument", "$.lead_frames"),
        ({"image": "AAAA"}, "image_invalid", "$.image"),
        ({"format": "gif"}, "unsupported_format", "$.format"),
        ({"fps": 0}, "bad_message", "$.fps"),
    ],
)
async def test_a_refused_start_creates_nothing(
    manager: FakeManager, hub: WorldHub, fields: dict[str, object], code: str, path: str
) -> None:
    client = Client(hub)
    await client.until("hello")
    client.send("session.start", **({"format": "rgb24"} | fields))
    error = await client.until("error")
    assert (error.code, error.path) == (code, path)
    assert not manager.live
    if not error.fatal:
        client.send("session.start", format="rgb24")
        await client.until("session.started")


async def test_a_picture_reaches_the_model_as_pixels(manager: FakeManager, hub: WorldHub) -> None:
    out = io.BytesIO()
    Image.new("RGB", (6, 4), (9, 8, 7)).save(out, "PNG")
    client = Client(hub)
    await client.start(image=base64.b64encode(out.getvalue()).decode())
    assert manager.images[0].shape == (4, 6, 3)
    assert manager.images[0][0, 0].tolist() == [9, 8, 7]


async def test_a_latent_session_sends_one_frame_per_chunk_with_its_shape(hub: WorldHub) -> None:
    client = Client(hub)
    await client.start(format="latent")
    chunk, frames = await client.block()
    assert (chunk.latent_shape, chunk.frames, len(frames)) == ((1, 4, 2, 2), 3, 1)
    assert frames[0][1] == b"\x00\x3c" * 16  # float16 one, little endian


async def test_two_sessions_do_not_share_anything(hub: WorldHub) -> None:
    one, two = Client(hub), Client(hub)
    await one.start(session_id="one")
    await two.start(session_id="two")
    await one.block()
    await two.block()
    two.send_raw("{")
    assert (await two.until("error")).code == "bad_message"
    await two.drop()
    one.press(1)
    assert (await one.until("event.accepted")).status == "accepted"
    third = Client(hub)
    await third.until("hello")
    third.send("session.start", format="rgb24", session_id="one")
    assert (await third.until("error")).code == "session_exists"


async def test_grace_zero_from_the_settings_is_announced(manager: FakeManager) -> None:
    hub = make_hub(manager, grace_s=0.0)
    client = Client(hub)
    assert (await client.start()).limits.grace_s == 0
    await hub.shutdown(5)
    hub.close()


async def test_media_that_a_device_still_copies_are_waited_for_where_they_leave(
    manager: FakeManager, hub: WorldHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next block has begun; what is sent are the pictures that came later."""
    client = Client(hub)
    await client.start(session_id="s")
    await client.block()
    plain, copied = manager.live["s"].committed_chunk, threading.Event()

    async def late_chunk(outputs: Sequence[str] | None = None) -> Chunk:
        monkeypatch.undo()
        chunk = await plain(outputs)
        frames = chunk.artifacts["frames"]
        there = np.zeros_like(frames.data)

        def ready() -> None:
            assert copied.wait(10)
            np.copyto(there, frames.data)

        return replace(chunk, artifacts={"frames": replace(frames, data=there, ready=ready)})

    monkeypatch.setattr(manager.live["s"], "committed_chunk", late_chunk)
    client.ack()
    manager.clock.advance(1)
    await eventually(lambda: manager.ticks_started == 3)
    assert len(client.of("chunk")) == 1
    copied.set()
    _, frames = await client.block()
    assert [payload[0] for _, payload in frames] == [33, 44, 55]
