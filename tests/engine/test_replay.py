"""The event log of a session, and playing it again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from realtime_omni.errors import ArgumentError, EventQueueFullError, StateError, TickError
from realtime_omni.session.journal import EventLog
from realtime_omni.session.values import MAX_EVENT_ID, Chunk
from realtime_omni.testing.faults import inject
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import TinyKVWorld, move


def engine(**model: Any) -> InlineEngine:
    return InlineEngine(TinyKVWorld(**model), rewind_blocks=4)


def walk(e: InlineEngine, name: str, chunks: int, dx: int = 1) -> list[bytes]:
    """Every third chunk applies nothing, every third two events."""
    seen = []
    for i in range(chunks):
        for _ in range(i % 3):
            floor = e.view(name).event_floor
            e.accept(name, floor + 2, prompt=("green", "blue")[i % 2], controls=[move(dx + floor)])
        seen.append(picture(e.next(name)))
    return seen


def picture(chunk: Chunk) -> bytes:
    data: bytes = chunk.artifacts["frames"].data.tobytes()
    return data


def sent(log: EventLog) -> EventLog:
    """The same, after a walk through text."""
    return EventLog.from_json(log.to_json())


@pytest.mark.parametrize("model", [{}, {"prefill": True}], ids=str)
def test_a_replay_equals_the_run_bit_for_bit_here_and_in_another_engine(model: dict[str, Any]) -> None:
    e, other = engine(**model), engine(**model)
    e.create("a", seed=3, prompt="blue")
    seen, bits = walk(e, "a", 8), e.kv_bits("a")
    log = sent(e.log("a"))
    assert (log.model, log.first_chunk, log.next_chunk) == ("tiny-kv", 0, 8)
    other.create("b", seed=99)
    for one, name in ((e, "a"), (other, "b")):
        again = one.replay(name, log)
        assert [picture(c) for c in again] == seen
        assert [c.chunk_index for c in again] == list(range(8))
        assert one.kv_bits(name) == bits
        assert one.view(name).seed == 3
        one.reset(name)
        assert picture(one.next(name)) == seen[0], "the line begins as the log says, also for a later reset"


def test_a_session_that_is_where_the_log_begins_goes_on_from_there() -> None:
    e = engine()
    e.create("a", seed=3)
    walk(e, "a", 4)
    e.fork("a", "b")
    whole = walk(e, "a", 4)
    log = e.log("a")
    rest = EventLog(
        log.model,
        log.origin,
        e.view("b").chunk_index,  # type: ignore[arg-type]
        log.next_chunk,
        e.engine.registry.get("b").session.journal.lineage,
        tuple(a for a in log.chunks if a.chunk_index >= 4),
    )
    before = e.view("b")
    assert [picture(c) for c in e.replay("b", sent(rest))] == whole
    assert (e.view("b").epoch, before.epoch) == (0, 0), "no reset was needed"
    assert e.kv_bits("a") == e.kv_bits("b")
    assert sent(e.log("b")).chunks[-1].events[-1].fingerprint == log.chunks[-1].events[-1].fingerprint
    with pytest.raises(ArgumentError) as refused:
        e.replay("b", rest)
    assert refused.value.code == "not_retained"


def test_what_a_rewind_undid_is_not_in_the_log() -> None:
    e, plain = engine(), engine()
    e.create("a", seed=3)
    kept = walk(e, "a", 4)[:2]
    e.rewind("a", 2)
    kept += walk(e, "a", 3, dx=7)
    log = e.log("a")
    assert [a.epoch for a in log.chunks] == [0, 1, 1]
    plain.create("a")
    assert [picture(c) for c in plain.replay("a", log)] == kept
    assert plain.kv_bits("a") == e.kv_bits("a")


def test_a_failed_aborted_or_refused_event_is_not_in_the_log_until_it_is_applied() -> None:
    e = engine()
    e.create("a")
    e.accept("a", 0, prompt="green")
    with inject(e, "sync"), pytest.raises(TickError):
        e.next("a")
    e.rollback("a")
    assert e.log("a").chunks == ()
    e.next("a")
    assert [(a.chunk_index, len(a.events)) for a in e.log("a").chunks] == [(0, 1)]
    e.accept("a", 1, prompt="blue")
    e.reset("a", seed=5)
    assert (e.log("a").chunks, e.log("a").origin.seed, e.log("a").next_chunk) == ((), 5, 0)


def test_a_log_that_cannot_be_played_changes_nothing() -> None:
    e = engine()
    e.create("a", seed=3)
    walk(e, "a", 3)
    log, before = e.log("a"), e.view("a")
    other = EventLog("another", log.origin, log.first_chunk, log.next_chunk, log.lineage, log.chunks)
    late = EventLog(log.model, log.origin, 2, 3, "0" * 64, ())  # type: ignore[arg-type]
    for wrong, code in ((other, "unsupported"), (late, "not_retained")):
        with pytest.raises(ArgumentError) as refused:
            e.replay("a", wrong)
        assert refused.value.code == code
    assert e.view("a") == before
    e.accept("a", before.event_floor + 1, prompt="red")
    e.fork("a", "b")
    here = EventLog(
        log.model, log.origin, log.next_chunk, log.next_chunk, e.engine.registry.get("a").session.journal.lineage, ()
    )
    with pytest.raises(StateError, match="played alone"):
        e.replay("a", here)
    assert e.replay("b", here) == []


def test_a_chunk_with_more_events_than_may_wait_is_refused_before_the_session_starts_over() -> None:
    big, small = InlineEngine(TinyKVWorld(), max_pending_events=9), InlineEngine(TinyKVWorld(), max_pending_events=8)
    for e in (big, small):
        e.create("a", seed=3)
    for number in range(9):
        big.accept("a", number, prompt="green")
    big.next("a")
    small.next("a")
    before = small.view("a")
    with pytest.raises(EventQueueFullError):
        small.replay("a", sent(big.log("a")))
    assert small.view("a") == before


def test_a_log_for_which_no_event_ids_are_left_is_refused_before_the_session_starts_over() -> None:
    e = engine()
    e.create("a", seed=3)
    walk(e, "a", 3)
    log = sent(e.log("a"))
    e.accept("a", MAX_EVENT_ID - 1, prompt="red")
    e.next("a")
    before = e.view("a")
    with pytest.raises(ArgumentError) as error:
        e.replay("a", log)
    assert error.value.path == "log.chunks"
    assert e.view("a") == before


def test_a_picture_of_the_clients_own_is_known_by_its_digest() -> None:
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    e = engine(prefill=True)
    e.create("a", image=image)
    seen = walk(e, "a", 2)
    log = sent(e.log("a"))
    e.create("b", image=image.copy())
    assert [picture(c) for c in e.replay("b", log)] == seen
    for name, other in (("c", image + 1), ("d", None)):
        e.create(name, **({} if other is None else {"image": other}))
        with pytest.raises(ArgumentError) as refused:
            e.replay(name, log)
        assert (refused.value.code, e.view(name).epoch) == ("image_invalid", 0)


def test_a_failed_session_is_replayed_from_a_reset() -> None:
    e = engine()
    e.create("a", seed=3)
    seen = walk(e, "a", 2)
    with inject(e, "sync"), pytest.raises(TickError):
        e.next("a")
    assert [picture(c) for c in e.replay("a", e.log("a"))] == seen
