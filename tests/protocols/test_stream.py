"""The numbered stream of a session: credit, acks, the replay buffer, receipts, deadlines."""

from __future__ import annotations

import pytest

from protocols.pair import LIMITS
from realtime_omni_protocols.errors import LocalError, WireCode, WireError
from realtime_omni_protocols.world import ControlEntry, FrameEntry, StreamLimits, WireState, WorldSessionStream
from realtime_omni_protocols.world_entries import Entry
from realtime_omni_protocols.world_messages import (
    Cadence,
    Chunk,
    EventApplied,
    EventDiscarded,
    KvUse,
    SessionAck,
    SessionClosed,
    Timings,
)

TIMINGS, KV = Timings(tick=1, encode=1, wait=1), KvUse(pages_used=0, pages_total=0)


def make(cadence: Cadence = "paced", lead: int | None = None, **limits: float) -> WorldSessionStream:
    stream = WorldSessionStream(
        session_id="s",
        fps=20,
        frames_per_block=3,
        lead_frames=lead,
        cadence=cadence,
        limits=StreamLimits(**limits),  # type: ignore[arg-type]
        now=0.0,
    )
    stream.started(
        resume_token="first",
        model="m",
        prompt=None,
        seed=1,
        format="rgb24",
        codec=None,
        width=1,
        height=1,
        limits=LIMITS,
    )
    return stream


def block(stream: WorldSessionStream, now: float = 0.0, ids: tuple[int, ...] = ()) -> list[Entry]:
    return stream.chunk(
        now,
        chunk_index=stream.next_chunk,
        media=["a", "b", "c"],
        applied_event_ids=ids,
        prompt=None,
        timings_ms=TIMINGS,
        kv=KV,
    )


def ack(stream: WorldSessionStream, seq: int, displayed: int, now: float = 0.0, epoch: int = 0) -> bool:
    return stream.acknowledge(SessionAck(seq=seq, displayed=displayed, epoch=epoch), now)


def test_a_block_is_its_receipts_its_chunk_and_its_frames_in_this_order() -> None:
    stream = make()
    stream.event_accepted(4, pending=1)
    entries = block(stream, ids=(4,))
    assert [entry.seq for entry in entries] == [3, 4, 5, 6, 7]
    applied, chunk = entries[0], entries[1]
    assert isinstance(applied, ControlEntry)
    assert isinstance(chunk, ControlEntry)
    assert applied.message == EventApplied(seq=3, event_ids=(4,), chunk_index=0, first_frame=0)
    assert isinstance(chunk.message, Chunk)
    frames = [entry for entry in entries if isinstance(entry, FrameEntry)]
    assert [(f.index, f.last, f.frame, f.applied_event_id, f.pts_ms, f.media) for f in frames] == [
        (0, False, 0, 4, 0, "a"),
        (1, False, 1, 4, 50, "b"),
        (2, True, 2, 4, 100, "c"),
    ]


def test_credit_is_generated_minus_displayed_at_most_the_lead() -> None:
    stream = make()  # lead is one block: 3 frames
    block(stream)
    assert stream.credit_open()  # 3 - 0 <= 3
    block(stream)
    assert not stream.credit_open()  # 6 - 0 > 3
    assert not stream.may_start_block()
    assert not ack(stream, 5, 2) or not stream.credit_open()  # 6 - 2 > 3
    assert ack(stream, 5, 3)
    assert stream.credit_open()


def test_a_lead_of_zero_waits_for_the_last_frame() -> None:
    stream = make(lead=0)
    block(stream)
    ack(stream, 0, 2)
    assert not stream.credit_open()
    ack(stream, 0, 3)
    assert stream.credit_open()


def test_on_demand_needs_an_ask_and_bounds_them() -> None:
    stream = make("on_demand")
    assert not stream.may_start_block()
    for _ in range(4):
        stream.ask()
    with pytest.raises(WireError) as caught:
        stream.ask()
    assert caught.value.code is WireCode.QUEUE_FULL
    block(stream)
    assert stream.asks == 3
    assert stream.may_start_block()
    stream.chunk_aborted(1)
    stream.chunk_aborted(None)
    assert stream.asks == 2
    with pytest.raises(WireError):
        make().ask()


def test_old_acks_change_nothing_and_impossible_ones_are_refused() -> None:
    stream = make()
    block(stream)
    assert ack(stream, 5, 3)
    assert not ack(stream, 2, 1)
    assert (stream.acked_seq, stream.displayed) == (5, 3)
    for seq, displayed, epoch, path in ((6, 3, 0, "$.seq"), (5, 4, 0, "$.displayed"), (5, 0, 1, "$.epoch")):
        with pytest.raises(WireError) as caught:
            ack(stream, seq, displayed, epoch=epoch)
        assert (caught.value.code, caught.value.path) == (WireCode.INVALID_ARGUMENT, path)
    stream.check()


def test_a_chunk_shown_to_its_end_has_arrived_whatever_seq_says() -> None:
    stream = make()
    block(stream)  # seq 2..5
    block(stream)  # seq 6..9
    ack(stream, 0, 4)
    assert stream.acked_seq == 5  # not 7: frame 3 was shown, but its chunk is not complete


def test_an_ack_of_an_old_epoch_counts_only_its_seq() -> None:
    stream = make()
    block(stream)
    stream.reset_done(prompt=None, seed=1)
    block(stream)
    assert not ack(stream, 3, 3, epoch=0)
    assert (stream.acked_seq, stream.displayed) == (5, 0)  # the first epoch's chunk was shown to its end


def test_replay_is_everything_after_the_number() -> None:
    stream = make()
    block(stream)
    assert [entry.seq for entry in stream.replay_after(3)] == [4, 5]
    assert stream.replay_after(5) == ()
    for wrong in (0, 6):
        with pytest.raises(WireError) as caught:
            stream.replay_after(wrong)
        assert (caught.value.code, caught.value.path) == (WireCode.RESUME_REFUSED, "$.last_seq")
    ack(stream, 4, 0)
    with pytest.raises(WireError):
        stream.replay_after(3)


def test_the_buffer_is_bounded_and_what_was_forgotten_is_refused() -> None:
    stream = make(max_entries=10)
    for _ in range(20):
        stream.paused()
        stream.playing(0.0)
    assert stream.statistics().entries == 10
    assert stream.statistics().forgotten == 31
    with pytest.raises(WireError):
        stream.replay_after(30)
    assert len(stream.replay_after(31)) == 10
    stream.check()


def test_the_media_that_is_kept_is_bounded_in_bytes_too() -> None:
    stream = make(max_bytes=250)
    for number in range(4):  # a client that resets again and again and acknowledges nothing
        stream.chunk(
            0.0,
            chunk_index=0,
            media=[bytes(40), memoryview(bytes(40)), bytes(40)],
            applied_event_ids=(),
            prompt=None,
            timings_ms=TIMINGS,
            kv=KV,
        )
        stream.reset_done(prompt=None, seed=number)
    statistics = stream.statistics()
    assert statistics.media_bytes == 240
    assert statistics.entries == 11  # a reset, and two blocks of a message, three frames and a reset
    with pytest.raises(WireError):
        stream.replay_after(statistics.last_seq - 12)
    assert len(stream.replay_after(statistics.last_seq - 11)) == 11
    stream.check()
    ack(stream, statistics.last_seq, 0)
    assert stream.statistics().media_bytes == 0


def test_resume_tells_the_standing_as_of_the_number_and_rotates_the_token() -> None:
    stream = make()
    block(stream)
    stream.event_accepted(7, pending=1)
    stream.failed(code=WireCode.TICK_FAILED, message="x", chunk_index=1, can=("reset",))
    stream.reset_done(prompt=None, seed=1)
    stream.detach(5.0)
    plan = stream.resume(4, resume_token="second", format="jpeg", codec=None, now=6.0)
    told = plan.resumed
    assert (told.replayed_from, told.state, told.epoch, told.next_frame, told.next_event_id) == (5, "playing", 0, 2, 8)
    assert [entry.seq for entry in plan.entries] == [5, 6, 7, 8]
    assert not stream.token_matches("first")
    assert stream.token_matches("second")
    later = stream.resume(7, resume_token="third", format="jpeg", codec=None, now=6.0).resumed
    assert (later.state, later.epoch, later.next_frame) == ("failed", 0, 3)


def test_a_refused_resume_changes_nothing() -> None:
    stream = make()
    block(stream)
    stream.detach(1.0)
    before = stream.statistics()
    with pytest.raises(WireError):
        stream.resume(99, resume_token="x", format="jpeg", codec=None, now=2.0)
    assert stream.statistics() == before
    assert stream.token_matches("first")
    assert not stream.attached


def test_every_event_gets_exactly_one_terminal_receipt() -> None:
    stream = make()
    stream.event_accepted(0, pending=1)
    stream.event_accepted(5, pending=2)
    with pytest.raises(LocalError):
        stream.event_accepted(5, pending=3)
    block(stream, ids=(0,))
    with pytest.raises(LocalError):
        block(stream, ids=(0,))
    with pytest.raises(LocalError):
        stream.event_discarded((1,))
    discarded, closed = stream.closed("operator")
    assert isinstance(discarded, ControlEntry)
    assert isinstance(closed, ControlEntry)
    assert discarded.message == EventDiscarded(seq=discarded.seq, event_ids=(5,), reason="closed")
    assert isinstance(closed.message, SessionClosed)
    stream.check()
    with pytest.raises(LocalError):
        stream.closed("operator")


def test_a_refused_chunk_leaves_the_stream_as_it_was() -> None:
    stream = make()
    stream.event_accepted(0, pending=1)
    before = stream.statistics()
    for wrong in (
        {"chunk_index": 1, "media": ["a"]},
        {"chunk_index": 0, "media": []},
        {"chunk_index": 0, "media": ["a"] * 256},
    ):
        with pytest.raises(LocalError):
            stream.chunk(0.0, applied_event_ids=(0,), prompt=None, timings_ms=TIMINGS, kv=KV, **wrong)  # type: ignore[arg-type]
    stream.failed(code=WireCode.INTERNAL, message="", chunk_index=0, can=())
    with pytest.raises(LocalError):
        block(stream, ids=(0,))
    assert stream.statistics().open_events == before.open_events == 1
    assert stream.statistics().last_seq == before.last_seq + 1


def test_reset_begins_an_epoch_and_a_refused_reset_does_not() -> None:
    stream = make()
    block(stream)
    stream.reset_done(prompt="p", seed=2)
    assert (stream.epoch, stream.generated, stream.displayed, stream.next_chunk) == (1, 0, 0, 0)
    stream.closed("client")
    with pytest.raises(LocalError):
        stream.reset_done(prompt="p", seed=2)
    assert stream.epoch == 1


def test_latents_are_one_frame_that_counts_for_many() -> None:
    stream = make()
    entries = stream.chunk(
        0.0,
        chunk_index=0,
        media=["latent"],
        prompt=None,
        timings_ms=TIMINGS,
        kv=KV,
        latent_shape=(16, 3, 8, 8),
        latent_frames=12,
    )
    frame = entries[-1]
    assert isinstance(frame, FrameEntry)
    assert (frame.last, frame.frame, stream.generated) == (True, 0, 12)
    with pytest.raises(LocalError):
        stream.chunk(
            0.0,
            chunk_index=1,
            media=["a", "b"],
            prompt=None,
            timings_ms=TIMINGS,
            kv=KV,
            latent_shape=(1,),
            latent_frames=3,
        )


def test_the_stall_clock_runs_only_while_a_playing_client_owes_frames() -> None:
    stream = make(stall_timeout_s=60)
    assert stream.stall_deadline() is None
    block(stream, now=10.0)
    assert stream.stall_deadline() == 70.0
    block(stream, now=20.0)
    assert stream.stall_deadline() == 70.0
    ack(stream, 5, 0, now=30.0)
    assert stream.stall_deadline() == 70.0  # arriving is not showing
    ack(stream, 5, 1, now=40.0)
    assert stream.stall_deadline() == 100.0
    stream.paused()
    assert stream.stall_deadline() is None
    stream.playing(50.0)
    assert stream.stall_deadline() == 110.0
    stream.detach(55.0)
    assert stream.stall_deadline() is None
    ack(stream, 9, 6, now=60.0)


def test_the_grace_runs_from_the_first_detach() -> None:
    stream = make(grace_s=30)
    assert stream.grace_deadline() is None
    stream.detach(100.0)
    stream.detach(110.0)
    assert stream.grace_deadline() == 130.0
    assert not stream.may_start_block()
    stream.resume(1, resume_token="x", format="rgb24", codec=None, now=120.0)
    assert stream.grace_deadline() is None
    stream.detach(130.0)
    stream.closed("detached_expired")
    assert stream.grace_deadline() is None
    with pytest.raises(WireError) as caught:
        stream.resume(1, resume_token="y", format="rgb24", codec=None, now=131.0)
    assert caught.value.code is WireCode.SESSION_GONE
    assert stream.state is WireState.CLOSED
