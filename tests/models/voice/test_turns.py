"""When a turn of the user begins, waits, and is over; those of a client that says so itself. The networks are stand-ins."""

import pytest

from models.voice.stand_ins import hum
from models.voice.talk import FRAME_MS
from realtime_omni.models.voice.listening import WINDOW_MS, listen, silence_limit_ms
from realtime_omni.models.voice.state import Ears, Manners
from realtime_omni.session.frame import Clear, Commit, Configure, Respond, Turns
from realtime_omni.session.signals import InputTranscript, ResponseEnded, ResponseStarted, TurnCommitted


def test_an_unfinished_sentence_is_waited_for(talk):
    talk.hear(hum(0.3, 800))
    told = talk.wait(3000)
    assert not [s for s in told if isinstance(s, TurnCommitted)]
    talk.hear(hum(0.3, 800))  # it goes on: one turn
    talk.wait(4200)
    [committed] = talk.of(TurnCommitted)
    assert committed.end_ms - committed.start_ms > 4000


@pytest.mark.parametrize(
    ("finished", "words", "silence_ms"),
    [
        (0.9, "What is the capital of France?", 192),
        (0.9, "I would like to", 4000),
        (0.9, "What is the?", 4000),
        (0.9, "Where does chocolate come from?", 192),
        (0.9, "I would like to know who you are.", 192),
        (0.3, "What is the capital of France?", 832),
        (0.01, "What is the capital of France?", 1032),
        (0.9, "", 192),
        (None, "What is the capital of France?", 4000),
        (0.9, None, 4000),
    ],
)
def test_how_long_a_turn_waits_for_more(finished, words, silence_ms):
    assert silence_limit_ms(finished, words, Manners()) == silence_ms
    assert silence_limit_ms(finished, words, Manners(patience_ms=500)) == min(500, silence_ms)


@pytest.mark.parametrize(("eagerness", "ms"), [("high", 2000), ("auto", 4000), ("low", 8000)])
def test_patience_follows_eagerness(talk, eagerness, ms):
    talk.tell(Configure(turns=Turns("semantic", eagerness=eagerness)))
    talk.hear(hum(0.3, 800))
    waited = 0
    while not talk.of(TurnCommitted):
        talk.frame()
        waited += FRAME_MS
    assert ms <= waited <= ms + 2 * FRAME_MS


def test_energy_turns_end_after_their_silence(talk):
    talk.tell(Configure(turns=Turns("energy", silence_ms=640)))
    talk.hear(hum(0.3, 800))
    waited = 0
    while not talk.of(TurnCommitted):
        talk.frame()
        waited += FRAME_MS
    assert 640 <= waited <= 640 + 2 * FRAME_MS


def test_silence_clicks_and_what_is_no_word_get_no_answer(talk):
    talk.wait(2000)
    talk.hear(hum(0.1, 15))
    talk.wait(2000)
    talk.hear(hum(0.1, 90))  # shorter than any word
    talk.wait(2000)
    talk.hear(hum(0.8, 800))
    talk.wait(4000)
    assert not talk.of(ResponseStarted)
    assert [s.text for s in talk.of(InputTranscript)] == ["", ""]
    assert not talk.facts.entries


def test_turns_of_the_client_are_committed_cleared_and_answered_on_request(talk):
    talk.tell(Configure(turns=Turns("client")))
    talk.hear(hum(0.1, 800))
    talk.wait(3000)
    assert not talk.signals
    talk.tell(Clear())
    talk.hear(hum(0.4, 800))
    told = talk.tell(Commit())
    assert [type(s) for s in told] == [TurnCommitted, InputTranscript]
    assert told[1].text == "What is two plus two?"
    assert not talk.of(ResponseStarted)
    talk.tell(Respond("mine"))
    talk.until(ResponseEnded)
    assert talk.said() == {"mine": "That is 4."}


def test_a_request_right_after_a_commit_answers_that_turn(talk):
    talk.tell(Configure(turns=Turns("client")))
    talk.hear(hum(0.4, 800))
    talk.tell(Commit(), Respond("mine"))
    talk.until(ResponseEnded)
    assert talk.said() == {"mine": "That is 4."}


def test_a_voice_has_ended_when_it_is_soft_and_one_that_is_lowered_is_heard_again():
    spoke = listen(Ears(), [1.0] * 10, [0.1] * 10, 10 * WINDOW_MS, Manners(), "u0")
    faded = listen(spoke, [1.0] * 3, [0.001] * 3, 13 * WINDOW_MS, Manners(), "u0")  # the detector is still sure
    assert (spoke.last_ms, faded.last_ms) == (10 * WINDOW_MS, 10 * WINDOW_MS)
    lowered = listen(spoke, [1.0] * 6, [0.002] * 6, 16 * WINDOW_MS, Manners(), "u0")
    assert lowered.last_ms == 16 * WINDOW_MS
    assert lowered.utterance == "u0"
