"""What is kept of what was told: bounded in bytes and in age, and sound goes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from realtime_omni.duplex.journal import ENTRY_BYTES, Journal, JournalLimits, Lost

SOUND = 1000


def outputs(journal: Journal[str], after: int = 0) -> list[object]:
    return [output for _, output in journal.after(after)]


def test_everything_is_read_in_order_by_any_number_of_readers() -> None:
    journal: Journal[str] = Journal()
    for word in "abc":
        journal.put(word, 0.0)
    assert outputs(journal) == ["a", "b", "c"]
    assert outputs(journal, 2) == ["c"]
    assert journal.after(0, 1) == [(1, "a")]
    assert journal.after(3) == []


def test_the_oldest_sound_goes_before_anything_else() -> None:
    journal: Journal[str] = Journal(JournalLimits(max_bytes=2 * SOUND + 4 * ENTRY_BYTES))
    journal.put("word", 0.0)
    for number in range(3):
        journal.put(f"sound {number}", 0.0, sound_bytes=SOUND, mute=f"mute {number}" if number == 0 else None)
    assert outputs(journal) == ["word", "mute 0", "sound 1", "sound 2"]
    journal.put("word", 0.0)
    assert outputs(journal) == ["word", "mute 0", "sound 2", "word"], "one that is nothing without its sound is gone"
    journal.check()


def test_who_missed_more_than_sound_is_told() -> None:
    journal: Journal[str] = Journal(JournalLimits(max_bytes=3 * ENTRY_BYTES))
    for number in range(1, 6):
        journal.put(str(number), 0.0)
    assert journal.after(0) == [(2, Lost(2)), (3, "3"), (4, "4"), (5, "5")]
    assert outputs(journal, 2) == ["3", "4", "5"]
    assert outputs(journal, 4) == ["5"]


def test_what_is_large_without_sound_counts_as_it_is() -> None:
    journal: Journal[str] = Journal(JournalLimits(max_bytes=10 * ENTRY_BYTES))
    for number in range(1, 6):
        journal.put(str(number), 0.0, other_bytes=3 * ENTRY_BYTES)
    assert outputs(journal) == [Lost(3), "4", "5"]
    journal.check()


def test_age_ends_what_bytes_would_keep() -> None:
    journal: Journal[str] = Journal(JournalLimits(max_age_s=10.0))
    journal.put("old", 0.0)
    journal.put("new", 10.5)
    assert outputs(journal) == [Lost(1), "new"]


def test_an_interruption_silences_everything() -> None:
    journal: Journal[str] = Journal()
    journal.put("a", 0.0, sound_bytes=SOUND, mute="quiet a")
    journal.put("b", 0.0, sound_bytes=SOUND)
    journal.put("c", 0.0)
    journal.silence()
    journal.check()
    assert outputs(journal) == ["quiet a", "c"]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(0, 2)), max_size=60),
    st.integers(1, 8),
)
def test_it_keeps_its_bounds_and_its_order(puts: list[tuple[int, bool, float]], factor: int) -> None:
    journal: Journal[int] = Journal(JournalLimits(max_bytes=factor * (SOUND + ENTRY_BYTES), max_age_s=5.0))
    now_s = 0.0
    for number, (sounds, stays, pause_s) in enumerate(puts, 1):
        now_s += pause_s
        put = journal.put(
            number, now_s, sound_bytes=sounds * SOUND, other_bytes=number % 3 * 400, mute=number if stays else None
        )
        assert put == number
        journal.check()
        if number % 7 == 0:
            journal.silence()
            journal.check()
    read = journal.after(0)
    assert [seq for seq, _ in read] == sorted(seq for seq, _ in read)
    assert all(isinstance(output, Lost) or output == seq for seq, output in read)
