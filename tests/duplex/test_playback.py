"""How much of a response was heard: never more than was sent, never less than before, except where it is cut."""

from __future__ import annotations

from realtime_omni.duplex.playback import REMEMBERED, PlaybackLedger


def ledger(generated_ms: float = 800.0, sent_ms: float = 800.0) -> PlaybackLedger:
    made = PlaybackLedger()
    made.start("r")
    made.generated("r", generated_ms)
    made.sent("r", sent_ms, 1.0)
    return made


def test_a_silent_client_is_taken_to_play_what_it_gets() -> None:
    made = ledger()
    assert round(made.remaining_ms("r", 1.3), 6) == 500.0
    assert made.remaining_ms("r", 9.0) == 0.0
    made.check()


def test_a_client_that_tells_is_believed_within_what_was_sent() -> None:
    made = ledger()
    assert made.played("r", 300.0) == 300.0
    assert made.played("r", 200.0) == 300.0, "it does not go back"
    assert made.played("r", 9000.0) == 800.0, "it cannot have played what it does not have"
    assert made.remaining_ms("r", 1.0) == 0.0
    made.check()


def test_only_a_cut_goes_back() -> None:
    made = ledger()
    made.played("r", 700.0)
    assert made.cut("r", 100.0) == 100.0
    assert made.cut("r", 500.0) == 100.0, "a second cut adds nothing"
    made.check()


def test_what_is_committed_was_heard() -> None:
    made = ledger()
    made.commit("r", 1.2)
    playback = made.get("r")
    assert playback is not None
    assert round(playback.committed_ms, 6) == 200.0
    made.check()


def test_unknown_responses_change_nothing() -> None:
    made = ledger()
    assert made.played("other", 1.0) is None
    assert made.cut("other", 1.0) is None
    made.generated("other", 1.0)
    assert made.remaining_ms("other", 1.0) == 0.0


def test_it_remembers_so_many() -> None:
    made = PlaybackLedger()
    for number in range(REMEMBERED + 5):
        made.start(str(number))
    made.check()
    assert made.get("0") is None
    assert made.get(str(REMEMBERED + 4)) is not None
