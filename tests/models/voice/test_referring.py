"""A question that stands for itself, and one that needs what was said before."""

import pytest

from realtime_omni.models.voice.lm.referring import refers

BEFORE = ("What is the capital of France?", "The capital of France is Paris.")


@pytest.mark.parametrize(
    "text",
    [
        "How do birds fly?",
        "Why is the sky blue?",
        "Can you tell me a joke?",
        "How do I learn to swim?",
        "What's your favorite color?",
        "Where does chocolate come from?",
    ],
)
def test_stands_for_itself(text):
    assert not refers(text, BEFORE)


@pytest.mark.parametrize(
    "text",
    [
        "Is it big?",
        "And the biggest river?",
        "What about the river?",
        "Why?",
        "Tell me more.",
        "Are you sure?",
        "What happened next?",
        "What is my name?",
        "Who am I really?",
        "What is the capital of Spain?",
        "Who lives in Paris?",
        "It’s not what you say.",
        "♪",
        "",
    ],
)
def test_needs_what_was_said(text):
    assert refers(text, BEFORE)


def test_nothing_was_said_before_and_an_answer_to_the_assistants_question():
    assert not refers("Is it big?", ())
    assert refers("Jazz and classical music", ("Do you like music?", "Yes. What do you like?"))
