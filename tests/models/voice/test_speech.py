"""What the voice says: clauses of growing text, and their sound."""

import numpy as np
import pytest

from realtime_omni.models.voice.speech import RATE, Synthesizer, enough_said, first_clause, take_clause, trim


@pytest.mark.parametrize(
    ("text", "final", "spoken", "rest"),
    [
        ("The capital of", False, "", "The capital of"),
        ("The capital of France is", True, "The capital of France is", ""),
        ("Yes. It", False, "Yes.", "It"),
        ("Well, that is", False, "", "Well, that is"),  # one word is no clause
        ("In the morning, we", False, "In the morning,", "we"),
        ("It costs 3.5", False, "", "It costs 3.5"),
        ("It is done.", False, "", "It is done."),  # a digit may follow
        ("It is done.", True, "It is done.", ""),
        ('He said "no." Then', False, 'He said "no."', "Then"),
        ("a b c d e f g h i j k", False, "a b c d e f g h i j", "k"),
        ("", True, "", ""),
    ],
)
def test_a_clause_is_taken_once_it_is_sure(text, final, spoken, rest):
    assert take_clause(text, final=final) == (spoken, rest)


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        ("Bees make honey, which is a type of food.", "Bees make honey,"),
        ("Yes. It is.", "Yes."),
        ("The sky is blue because of a process.", "The sky is blue"),
        ("Pendulins are found in the Marvel Universe today.", "Pendulins are found in the Marvel"),  # "the" leans on it
        ("The capital of France is Paris.", "The capital of France"),
        ("a the a the a the a the a the a the a", "a the a the a the a the a the"),  # ten words are enough
    ],
)
def test_a_first_clause_is_short_and_the_same_however_much_more_is_there(text, clause):
    taken = {first_clause(text[:n], final=False)[0] for n in range(len(text) + 1)} - {""}
    taken.add(first_clause(text, final=True)[0])
    assert taken == {clause}
    assert "".join((clause, first_clause(text, final=True)[1])).replace(" ", "") == text.replace(" ", "")


def test_no_text_is_lost_or_said_twice_however_it_grows():
    text = (
        "Well, I think so. It costs 3.5 euros, and that is fine! Anything else that I can do for you today my friend?"
    )
    for step in (1, 3, 7):
        said, waiting = [], ""
        for at in range(0, len(text), step):
            waiting += text[at : at + step]
            while True:
                clause, waiting = take_clause(waiting, final=False)
                if not clause:
                    break
                said.append(clause)
        clause, waiting = take_clause(waiting, final=True)
        assert " ".join([*said, clause]) == text
        assert waiting == ""


@pytest.fixture(scope="module")
def synthesizer():
    return Synthesizer()


def test_a_sentence_sounds_and_sounds_the_same_again(synthesizer):
    audio = synthesizer("Hello there.")
    assert audio.dtype == np.float32
    assert 0.5 * RATE < len(audio) < 2 * RATE
    assert np.abs(audio[: RATE // 20]).max() > 0.003  # it begins within 50 ms
    assert 0.05 < np.abs(audio).max() <= 1.0
    assert np.array_equal(audio, synthesizer("Hello there."))


@pytest.mark.parametrize("text", ["", "…", "こんにちは", "привет", "🙂"])
def test_what_the_voice_cannot_say_is_silence_and_no_error(synthesizer, text):
    assert len(synthesizer(text)) == 0


def test_silence_around_a_clause_is_cut_to_a_breath():
    audio = np.concatenate((np.zeros(9600), np.full(2400, 0.1), np.zeros(9600))).astype(np.float32)
    assert len(trim(audio)) == 480 + 2400 - 1 + 2880
    assert len(trim(np.zeros(2400, np.float32))) == 0


@pytest.mark.parametrize(
    ("text", "kept", "enough"),
    [
        ("Cats are small. They purr", "Cats are small. They purr", False),
        ("They are smart. They are smart. They", "They are smart.", True),
        ("They are smart. They are smart.", "They are smart.", True),
        ("The sun is big. So the sun is big", "The sun is big. So the sun is big", False),  # "bigger" may come
        ("The sun is big. So the sun is big and", "The sun is big.", True),
        ("One. Two. Three.", "One. Two.", True),
        ("One. Two.", "One. Two.", False),  # 2.5 may follow; the model ends it
        ("", "", False),
    ],
)
def test_an_answer_has_two_sentences_and_none_twice(text, kept, enough):
    assert enough_said(text) == (kept, enough)
