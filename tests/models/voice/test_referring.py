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
        "What is the capital of Spain?",
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
        "Who lives in Paris?",
        "It’s not what you say.",
        "♪",
        "",
    ],
)
def test_needs_what_was_said(text):
    assert refers(text, BEFORE)


def test_what_the_user_told_is_needed_and_what_was_asked_is_not():
    said = ("I have a dog named Rex.", "That is nice.", "What do dogs eat,", "Dogs eat meat.")
    assert refers("What is the name of the dog?", said)
    assert not refers("Where do dogs live?", said)


def test_nothing_was_said_before_and_an_answer_to_the_assistants_question():
    assert not refers("Is it big?", ())
    assert refers("Jazz and classical music", ("Do you like music?", "Yes. What do you like?"))
