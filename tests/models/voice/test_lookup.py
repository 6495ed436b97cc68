"""What an answer may say next, from its question."""

import pytest

from realtime_omni.models.voice.lm.lookup import Lookup

BEGIN = "<|im_start|>"


def guess(question, answer):
    """Words are tokens here; a template's turn is opened by its begin, role and newline."""
    prompt = [BEGIN, "user", "\n", "What", " is", " love", "?", "<|im_end|>", "\n"]
    prompt += [BEGIN, "user", "\n", *question, "<|im_end|>", "\n", BEGIN, "assistant", "\n"]
    text_of = {BEGIN: "", "<|im_end|>": ""}
    lookup = Lookup(lambda token: text_of.get(token, token), BEGIN, 3)
    return lookup(prompt, answer)


FRANCE = ["What", " is", " the", " capital", " of", " France", "?"]


@pytest.mark.parametrize(
    ("answer", "ahead"),
    [
        ([], []),
        (["The"], [" capital", " of", " France"]),
        (["The", " capital"], [" of", " France"]),
        (["The", " capital", " of", " France"], []),
        (["The", " capital", " of", " France", " is"], []),  # "is" was before "the"
        (["The", " answer"], []),
        (["It", " is"], [" the", " capital", " of"]),
        ([" love"], []),  # of another question
        (["?"], []),
    ],
)
def test_an_answer_repeats_its_question_in_order(answer, ahead):
    assert guess(FRANCE, answer) == ahead


def test_without_a_question_there_is_no_guess():
    assert Lookup(str, 1, 3)([1, 2, 3], [2]) == []
