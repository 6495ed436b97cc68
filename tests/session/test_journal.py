"""The journal of a session: what it remembers, what it forgets, and its portable form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realtime_omni.errors import ArgumentError
from realtime_omni.session import journal as module
from realtime_omni.session.journal import Applied, EventLog, Journal, Origin
from realtime_omni.session.values import ChunkIndex, ControlInput, EventId, SessionEvent

ORIGIN = Origin("red", 7)


def event(event_id: int, prompt: str | None = "green", dx: int = 1) -> SessionEvent:
    return SessionEvent(EventId(event_id), prompt, (ControlInput("move", "test.v1", {"dx": dx}),))


def journal(*chunks: tuple[int, int], origin: Origin = ORIGIN, ids: int = 10) -> Journal:
    """Each (chunk, dx) applies one event; its id is ``ids`` times the chunk."""
    made = Journal(origin)
    for chunk, dx in chunks:
        made.record(0, ChunkIndex(chunk), (event(ids * chunk, dx=dx),))
    return made


def log(made: Journal, next_chunk: int = 10) -> EventLog:
    made.check(next_chunk)
    return made.log("tiny", ChunkIndex(next_chunk))


def test_it_names_the_origin_and_every_chunk_that_applied_something() -> None:
    told = log(journal((0, 1), (3, 2)))
    assert (told.origin, told.first_chunk, told.next_chunk, told.lineage) == (ORIGIN, 0, 10, ORIGIN.lineage)
    assert [(a.epoch, a.chunk_index, [e.event_id for e in a.events]) for a in told.chunks] == [
        (0, 0, [0]),
        (0, 3, [30]),
    ]


def test_the_lineage_is_that_of_the_events_and_their_chunks_but_not_of_their_ids() -> None:
    made = journal((2, 1))
    renamed = Journal(ORIGIN)
    renamed.record(5, ChunkIndex(2), (event(99, dx=1),))
    assert made.lineage == renamed.lineage
    others = [
        journal(),
        journal((3, 1)),
        journal((2, 2)),
        journal((2, 1), (3, 1)),
        *(journal((2, 1), origin=o) for o in (Origin("blue", 7), Origin("red", 8), Origin("red", 7, "hall"))),
        journal((2, 1), origin=Origin("red", 7, None, "0" * 64)),
    ]
    assert len({made.lineage, *(o.lineage for o in others)}) == 1 + len(others)


def test_a_rewind_leaves_what_was_there_before() -> None:
    made, lineages = Journal(ORIGIN), [ORIGIN.lineage]
    for chunk in range(6):
        made.record(0, ChunkIndex(chunk), (event(chunk, dx=chunk),) if chunk % 2 else ())
        lineages.append(made.lineage)
    made.rewind(ChunkIndex(4), lineages[4])
    assert log(made, 4) == log(journal((1, 1), (3, 3), ids=1), 4)
    assert [a.chunk_index for a in log(made, 4).chunks] == [1, 3]
    made.record(1, ChunkIndex(4), (event(50),))
    assert [(a.epoch, a.chunk_index) for a in log(made, 5).chunks] == [(0, 1), (0, 3), (1, 4)]
    assert made.lineage != lineages[5]


def test_the_oldest_falls_off_and_the_cursor_says_from_where_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    made, lineages = Journal(ORIGIN), {0: ORIGIN.lineage}
    for chunk in range(0, 12, 2):
        made.record(0, ChunkIndex(chunk), (event(chunk, dx=chunk),))
        lineages[chunk + 1] = made.lineage
    told = log(made, 12)
    assert (told.first_chunk, told.lineage) == (5, lineages[5])
    assert [a.chunk_index for a in told.chunks] == [6, 8, 10]
    made.rewind(ChunkIndex(3), lineages[3])
    assert (log(made, 3).first_chunk, log(made, 3).lineage, log(made, 3).chunks) == (3, lineages[3], ())


def test_bytes_are_bounded_as_well_also_by_one_event_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 3 * event(1).payload_bytes)
    made = journal(*((chunk, 1) for chunk in range(5)))
    assert [a.chunk_index for a in log(made).chunks] == [2, 3, 4]
    large = SessionEvent(EventId(99), "x" * 1000)
    made.record(0, ChunkIndex(7), (large,))
    assert (log(made).first_chunk, log(made).chunks) == (8, ())


def test_a_copy_goes_its_own_way() -> None:
    made = journal((0, 1))
    twin = made.copy()
    twin.record(0, ChunkIndex(4), (event(40),))
    made.rewind(ChunkIndex(0), ORIGIN.lineage)
    assert [[a.chunk_index for a in log(j).chunks] for j in (made, twin)] == [[], [0, 4]]


def test_a_journal_made_of_a_log_hands_out_that_log() -> None:
    made = journal((0, 1), (3, 2))
    twin = Journal.of(log(made))
    assert (log(twin), twin.lineage) == (log(made), made.lineage)


# ---------------------------------------------------------------------- the text

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(str.strip)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
controls = st.builds(ControlInput, names, names, st.dictionaries(names, values, max_size=3))


@given(
    chunks=st.lists(st.tuples(st.integers(0, 5), controls, st.none() | names), max_size=6),
    origin=st.builds(
        Origin, st.none() | names, st.integers(0, 2**53), st.none() | names, st.none() | st.just("ab" * 32)
    ),
)
def test_the_text_of_a_log_is_the_log(chunks: list[tuple[int, ControlInput, str | None]], origin: Origin) -> None:
    made, chunk = Journal(origin), 0
    for number, (step, control, prompt) in enumerate(chunks):
        chunk += 1 + step
        made.record(step, ChunkIndex(chunk), (SessionEvent(EventId(number), prompt, (control,)),))
    told = log(made, chunk + 1)
    again = EventLog.from_json(told.to_json())
    assert again == told
    assert Journal.of(again).lineage == made.lineage
    assert EventLog.from_json(told.to_json().encode()) == told


def edited(path: str, value: Any) -> str:
    """The text of a good log with one value replaced; ``del`` removes it."""
    whole = json.loads(log(journal((0, 1), (3, 2))).to_json())
    *above, leaf = path.split(".")
    here = whole
    for part in above:
        here = here[int(part) if part.isdigit() else part]
    if value is del_:
        del here[leaf]
    else:
        here[int(leaf) if leaf.isdigit() else leaf] = value
    return json.dumps(whole)


del_ = object()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", "realtime_omni.event_log.v2"),
        ("format", del_),
        ("surprise", 1),
        ("model", 3),
        ("origin.seed", -1),
        ("origin.seed", True),
        ("origin.seed", 2**53 + 1),
        ("origin.prompt", " "),
        ("origin.prompt", "blue"),  # the lineage is another's then
        ("origin.image", "AB" * 32),
        ("origin.start", del_),
        ("lineage", "0" * 63),
        ("lineage", "0" * 64),
        ("first_chunk", -1),
        ("first_chunk", 1),
        ("next_chunk", 3),
        ("next_chunk", 2**60),
        ("next_chunk", 1.5),
        ("chunks.0.epoch", -1),
        ("chunks.0.chunk_index", 3),
        ("chunks.0.events", []),
        ("chunks.0.events.0.event_id", 30),
        ("chunks.0.events.0.event_id", "0"),
        ("chunks.0.events.0.controls", {}),
        ("chunks.0.events.0.controls.0.data", []),
        ("chunks.0.events.0.controls.0.track", ""),
        ("chunks.0.events.0.controls.0.extra", 1),
    ],
)
def test_a_text_that_is_no_log_is_refused(path: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as refused:
        EventLog.from_json(edited(path, value))
    assert (refused.value.path or "").startswith("log")


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "[" * 100_000, '{"format": NaN}', b"\xff\xfe{}", " " * (9 << 20)]
)
def test_a_text_that_is_nothing_at_all_is_refused_too(text: str | bytes) -> None:
    with pytest.raises(ArgumentError):
        EventLog.from_json(text)


def test_a_log_that_contradicts_itself_cannot_be_made() -> None:
    good = log(journal((0, 1), (3, 2)))
    for first, following in ((0, 3), (1, 10), (5, 4)):
        with pytest.raises(ArgumentError):
            EventLog("tiny", ORIGIN, ChunkIndex(first), ChunkIndex(following), ORIGIN.lineage, good.chunks)
    with pytest.raises(ArgumentError):
        EventLog("tiny", ORIGIN, ChunkIndex(0), ChunkIndex(1), ORIGIN.lineage, (Applied(0, ChunkIndex(0), ()),))
