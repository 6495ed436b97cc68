"""A session that was saved, and restored elsewhere, goes on as if nothing had happened."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from realtime_omni.engine import commands as c
from realtime_omni.errors import CapacityError, ErrorCode, EventQueueFullError, OmniError, SessionGoneError, StateError
from realtime_omni.models.null.model import NullWorld
from realtime_omni.session.journal import EventLog
from realtime_omni.session.values import AcceptStatus, SessionId
from realtime_omni.snapshot.snapshot import Snapshot
from realtime_omni.testing.faults import at, inject
from realtime_omni.testing.inline import InlineEngine, small_config
from realtime_omni.testing.models import TinyKVWorld, move

SAVE = c.Save(ticket=0, session_id=SessionId("a"))
POINTS = ("forward:1", "forward:2", "forward:3", "decode", "sync", "commit")


def picture(engine: InlineEngine, name: str) -> bytes:
    data: bytes = engine.next(name).artifacts["frames"].data.tobytes()
    return data


def walk(engine: InlineEngine, name: str, chunks: int, first_event: int = 0) -> list[bytes]:
    """Chunks with events between them: prompts and controls."""
    out = []
    for number in range(chunks):
        engine.accept(
            name, first_event + number, prompt=("red", "green", "blue")[number % 3], controls=[move(number % 4)]
        )
        out.append(picture(engine, name))
    return out


def moved(snapshot: Snapshot) -> Snapshot:
    """Through bytes, as another process gets it."""
    return Snapshot.from_bytes(snapshot.to_bytes())


MODELS: dict[str, Any] = {
    "one branch": {},
    "two branches": {"branches": ("cond", "free")},
    "with a start block": {"prefill": True},
    "no sink": {"sink_frames": 0, "window_frames": 4},
    "thin": {"window_frames": 8, "dense_frames": 2},
    "deferred": {"deferred": True, "branches": ("cond", "free")},
}


@pytest.mark.parametrize("how", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("chunks", [0, 1, 2, 7])
def test_a_restored_session_goes_on_bit_for_bit(how: dict[str, Any], chunks: int) -> None:
    never, saved = InlineEngine(TinyKVWorld(**how)), InlineEngine(TinyKVWorld(**how))
    for engine in (never, saved):
        engine.create("a", seed=5, prompt="green")
        walk(engine, "a", chunks)
    snapshot = moved(saved.snapshot("a"))
    assert (snapshot.session_id, snapshot.chunk_index, snapshot.model) == ("a", chunks, "tiny-kv")
    other = InlineEngine(TinyKVWorld(**how))
    other.create("x", seed=9)  # pages and rows are others than they were
    walk(other, "x", 3)
    view = other.restore(snapshot)
    assert (view.chunk_index, view.pages_used, view.seed) == (chunks, never.view("a").pages_used, 5)
    never.rest()
    other.rest()
    assert other.kv_bits("a") == never.kv_bits("a")
    assert walk(other, "a", 6, chunks) == walk(never, "a", 6, chunks)
    assert walk(saved, "a", 1, chunks) == [walk_of(how, chunks)[-1]]


def walk_of(how: dict[str, Any], chunks: int) -> list[bytes]:
    engine = InlineEngine(TinyKVWorld(**how))
    engine.create("a", seed=5, prompt="green")
    walk(engine, "a", chunks)
    return walk(engine, "a", 1, chunks)


def test_prompt_controls_and_waiting_events_come_along() -> None:
    one = InlineEngine(TinyKVWorld())
    one.create("a", seed=1, outputs=("frames", "latent"))
    one.accept("a", 3, prompt="blue", controls=[move(2)])
    one.next("a")
    one.accept("a", 8, controls=[move(1)])
    one.accept("a", 9, prompt="green")
    two = InlineEngine(TinyKVWorld())
    two.restore(moved(one.snapshot("a")), "b")
    assert two.view("b").pending_event_count == 2
    for name, engine in (("a", one), ("b", two)):
        assert engine.view(name).event_floor == 9
    ours, theirs = one.next("a"), two.next("b")
    assert ours.metadata.applied_event_ids == theirs.metadata.applied_event_ids == (8, 9)
    assert tuple(theirs.artifacts) == ("frames", "latent")
    for name, artifact in ours.artifacts.items():
        assert np.array_equal(artifact.data, theirs.artifacts[name].data)


def test_fates_of_events_are_remembered() -> None:
    one = InlineEngine(TinyKVWorld())
    one.create("a")
    one.accept("a", 1, prompt="blue")
    one.next("a")
    one.accept("a", 2, prompt="red")
    one.reset("a")
    two = InlineEngine(TinyKVWorld())
    two.restore(moved(one.snapshot("a")))
    assert two.view("a").epoch == 1
    assert two.accept("a", 1, prompt="blue").status is AcceptStatus.DUPLICATE
    assert two.accept("a", 2, prompt="red").status is AcceptStatus.DISCARDED
    with pytest.raises(OmniError) as conflict:
        two.accept("a", 2, prompt="green")
    assert conflict.value.code == ErrorCode.EVENT_CONFLICT
    with pytest.raises(OmniError) as stale:
        two.accept("a", 0, prompt="green")
    assert stale.value.code == ErrorCode.STALE


def test_a_reset_after_a_restore_starts_the_same_world_again() -> None:
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    one = InlineEngine(TinyKVWorld(prefill=True))
    one.create("a", seed=4, prompt="blue", image=image)
    first = picture(one, "a")
    snapshot = one.snapshot("a")
    image += 1  # the caller's array is the caller's
    two = InlineEngine(TinyKVWorld(prefill=True))
    two.restore(moved(snapshot))
    assert picture(two, "a") != first
    two.reset("a")
    assert picture(two, "a") == first


@pytest.mark.parametrize("point", POINTS)
def test_a_snapshot_during_a_tick_is_of_the_last_committed_chunk(point: str) -> None:
    never, engine = InlineEngine(TinyKVWorld()), InlineEngine(TinyKVWorld())
    for each in (never, engine):
        each.create("a", seed=2)
        walk(each, "a", 2)
        each.accept("a", 5, prompt="red", controls=[move(3)])
    taken: list[Snapshot] = []
    with at(engine, point, lambda: taken.append(engine.engine.take_snapshot("a"))):
        undisturbed = picture(engine, "a")
    other = InlineEngine(TinyKVWorld())
    other.restore(moved(taken[0]))
    assert other.view("a").chunk_index == 2
    expected = picture(never, "a")
    assert undisturbed == expected
    assert picture(other, "a") == expected  # its event was still waiting at the last committed chunk
    assert walk(other, "a", 3, 6) == walk(engine, "a", 3, 6) == walk(never, "a", 3, 6)


@pytest.mark.parametrize("when", ["carried", "in its prefill", "written"])
def test_a_block_that_is_not_written_yet_is_written_where_the_session_is_restored(when: str) -> None:
    never, engine = InlineEngine(TinyKVWorld(deferred=True)), InlineEngine(TinyKVWorld(deferred=True))
    for each in (never, engine):
        each.create("a", seed=2)
        walk(each, "a", 2)
    taken: list[Snapshot] = []
    save = lambda: taken.append(engine.engine.take_snapshot("a"))  # noqa: E731
    if when == "in its prefill":
        with at(engine, "prefill:1", save):
            engine.cycle()
    else:
        engine.cycle(1 if when == "written" else 0)
        save()
    assert engine.runner.needs_prefill(SessionId("a")) is (when == "carried")
    carries = any(name.startswith("state.0.") for name in taken[0].tensors)
    assert carries is (when != "written")
    other = InlineEngine(TinyKVWorld(deferred=True))
    other.restore(moved(taken[0]))
    assert walk(other, "a", 4, 2) == walk(never, "a", 4, 2) == walk(engine, "a", 4, 2)


def test_a_command_in_the_middle_of_a_tick_does_not_wait_for_it() -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("a")
    engine.post_next("a")
    tickets: list[int] = []
    with at(engine, "forward:1", lambda: tickets.append(engine.send(SAVE))):
        with at(engine, "forward:3", lambda: tickets.append(engine.answered(tickets[0]))):
            engine.cycle()
    assert tickets[1] is True
    assert engine.result(tickets[0]).chunk_index == 0


def test_a_failed_session_is_saved_at_its_last_good_chunk() -> None:
    engine, never = InlineEngine(TinyKVWorld()), InlineEngine(TinyKVWorld())
    for each in (engine, never):
        each.create("a", seed=3)
        walk(each, "a", 2)
    with inject(engine, "forward:2"), pytest.raises(OmniError):
        engine.next("a")
    other = InlineEngine(TinyKVWorld())
    assert other.restore(moved(engine.snapshot("a"))).state == "active"
    assert picture(other, "a") == picture(never, "a")


def test_a_failed_session_without_state_cannot_be_saved() -> None:
    engine = InlineEngine(TinyKVWorld(), on_failure="release")
    engine.create("a")
    with inject(engine, "forward:2"), pytest.raises(OmniError):
        engine.next("a")
    with pytest.raises(StateError):
        engine.snapshot("a")


def test_a_closed_session_cannot_be_saved() -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("a")
    engine.close("a")
    with pytest.raises(SessionGoneError):
        engine.snapshot("a")


def test_an_id_that_is_taken_is_refused_and_another_one_works() -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("a")
    walk(engine, "a", 1)
    snapshot = engine.snapshot("a")
    with pytest.raises(StateError) as taken:
        engine.restore(snapshot)
    assert taken.value.code == ErrorCode.SESSION_EXISTS
    engine.restore(snapshot, "b")
    assert walk(engine, "b", 4, 1) == walk(engine, "a", 4, 1)
    engine.close("a")
    engine.restore(snapshot)
    assert engine.engine.sessions_created == 3


def test_a_full_server_refuses_and_nothing_changes() -> None:
    engine = InlineEngine(TinyKVWorld(), sessions=2)
    engine.create("a")
    walk(engine, "a", 2)
    snapshot = engine.snapshot("a")
    engine.create("b")
    free = engine.free_pages
    with pytest.raises(CapacityError):
        engine.restore(snapshot, "c")
    assert engine.free_pages == free
    engine.cycle()


def test_a_full_server_with_policy_lru_evicts_the_oldest() -> None:
    engine = InlineEngine(TinyKVWorld(), sessions=2, policy="lru")
    engine.create("a")
    walk(engine, "a", 2)
    snapshot = engine.snapshot("a")
    engine.create("b")
    engine.restore(snapshot, "c")
    assert engine.kinds("a") == ["evicted"]
    engine.cycle()


def test_nobody_is_evicted_for_a_snapshot_that_is_refused() -> None:
    engine = InlineEngine(TinyKVWorld(), sessions=1, policy="lru")
    engine.create("a")
    walk(engine, "a", 2)
    good = engine.snapshot("a")
    short = {n: t[:1] if n.startswith("kv.") else t for n, t in good.tensors.items()}
    with pytest.raises(OmniError) as refused:
        engine.restore(Snapshot(good.header, short), "b")
    assert refused.value.code == ErrorCode.SNAPSHOT_CORRUPT
    assert engine.kinds("a") == []
    assert walk(engine, "a", 1, 2)


def test_more_waiting_events_than_the_queue_admits_are_refused_not_dropped() -> None:
    engine = InlineEngine(TinyKVWorld(), max_pending_events=4)
    engine.create("a")
    for number in range(4):
        engine.accept("a", number, prompt="red")
    with pytest.raises(EventQueueFullError):
        InlineEngine(TinyKVWorld(), max_pending_events=3).restore(engine.snapshot("a"))


def test_a_restore_at_which_the_copy_fails_leaves_the_pages_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InlineEngine(TinyKVWorld())
    engine.create("a")
    walk(engine, "a", 3)
    snapshot, free = engine.snapshot("a"), engine.free_pages

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.storage, "write", fail)
        with pytest.raises(StateError) as internal:
            engine.restore(snapshot, "b")
    assert internal.value.code == ErrorCode.INTERNAL
    assert engine.free_pages == free
    engine.cycle()
    engine.restore(snapshot, "b")
    assert walk(engine, "b", 2, 3) == walk(engine, "a", 2, 3)


def test_a_session_may_be_restored_with_another_page_size() -> None:
    config = small_config()
    one = InlineEngine(TinyKVWorld(), config)
    two = InlineEngine(TinyKVWorld(), replace(config, kv=replace(config.kv, page_tokens=3)))
    one.create("a", seed=1)
    walk(one, "a", 5)
    two.restore(moved(one.snapshot("a")))
    assert walk(two, "a", 5, 5) == walk(one, "a", 5, 5)


def test_a_restored_session_can_be_rewound_as_far_as_the_saved_one() -> None:
    config = small_config()
    config = replace(config, kv=replace(config.kv, rewind_blocks=3))
    one, two = InlineEngine(TinyKVWorld(), config), InlineEngine(TinyKVWorld(), config)
    one.create("a", seed=1)
    pictures = walk(one, "a", 8)
    two.restore(moved(one.snapshot("a")))
    assert two.view("a").oldest_rewind == one.view("a").oldest_rewind == 5
    for index in (7, 5):
        two.rewind("a", index)
        two.accept("a", 100 - index, prompt=("red", "green", "blue")[index % 3], controls=[move(index % 4)])
        assert picture(two, "a") == pictures[index]
        two.engine.check()


def test_a_server_that_keeps_less_of_the_past_takes_what_it_keeps() -> None:
    config = small_config()
    one = InlineEngine(TinyKVWorld(), replace(config, kv=replace(config.kv, rewind_blocks=3)))
    two = InlineEngine(TinyKVWorld(), config)
    one.create("a", seed=1)
    pictures = walk(one, "a", 8)
    two.restore(moved(one.snapshot("a")))
    assert two.view("a").oldest_rewind == 7
    assert two.view("a").pages_used < one.view("a").pages_used
    assert walk(two, "a", 3, 8) == walk(one, "a", 3, 8)
    two.rewind("a", 10)
    one.rewind("a", 10)
    assert walk(two, "a", 3, 20) == walk(one, "a", 3, 20)
    three = InlineEngine(TinyKVWorld())
    three.restore(moved(two.snapshot("a")))
    assert len(pictures) == 8
    assert walk(three, "a", 2, 30) == walk(one, "a", 2, 30)


def test_the_journal_comes_along() -> None:
    one, two = InlineEngine(TinyKVWorld()), InlineEngine(TinyKVWorld())
    one.create("a", seed=1)
    walk(one, "a", 3)
    one.next("a")
    two.restore(moved(one.snapshot("a")), "b")
    assert log_of(two, "b") == log_of(one, "a")
    walk(two, "b", 2, 5)
    walk(one, "a", 2, 5)
    assert log_of(two, "b") == log_of(one, "a")


def log_of(engine: InlineEngine, name: str) -> str:
    log: EventLog = engine.ask(c.Log(ticket=0, session_id=SessionId(name)))
    return log.to_json()


def test_forks_and_rewound_sessions_are_saved_like_others() -> None:
    one, two = InlineEngine(TinyKVWorld()), InlineEngine(TinyKVWorld())
    one.create("a", seed=1)
    walk(one, "a", 5)
    one.fork("a", "b")
    walk(one, "b", 2, 10)
    one.rewind("b", 6)
    for name in ("a", "b"):
        two.restore(moved(one.snapshot(name)))
    one.close("a")
    assert walk(two, "b", 4, 20) == walk(one, "b", 4, 20)
    two.engine.check()
    two.close("a")
    two.close("b")
    assert two.runner.pages()[0] == 0


def test_a_model_that_may_edit_state_in_a_tick_is_saved_between_ticks_only() -> None:
    engine, other = InlineEngine(TinyKVWorld(rollback_safe=False)), InlineEngine(TinyKVWorld(rollback_safe=False))
    engine.create("a", seed=1)
    walk(engine, "a", 2)
    engine.post_next("a")
    tickets: list[int] = []
    with at(engine, "forward:1", lambda: tickets.append(engine.send(SAVE))):
        engine.cycle()
    with pytest.raises(StateError):
        engine.result(tickets[0])
    other.restore(moved(engine.snapshot("a")))
    assert walk(other, "a", 3, 5) == walk(engine, "a", 3, 5)


def test_the_null_model_moves_on_from_where_it_was() -> None:
    one, two = InlineEngine(NullWorld(), dtype="float32"), InlineEngine(NullWorld(), dtype="float32")
    one.create("a", prompt="dusk")
    picture(one, "a")
    two.restore(moved(one.snapshot("a")))
    assert picture(two, "a") == picture(one, "a")
