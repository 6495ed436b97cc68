"""Skills: sentences that are answered by rule, however they are put, and those that must not be."""

import json
from datetime import datetime

import pytest

from realtime_omni.models.voice.skills.numbers import digits
from realtime_omni.models.voice.skills.table import TOOLS, Act, Intent, Spoken, StartTimer, plain, reply_to

NOW = datetime(2026, 11, 9, 15, 5)


def ask(text):
    return reply_to(text, NOW)


@pytest.mark.parametrize(
    "text",
    ["What time is it?", "what's the time please", "Can you tell me the time?", "Hey, do you know what time it is?",
     "Could you tell me what time it is now?", "Tell me the time, please."],
)  # fmt: skip
def test_the_time(text):
    assert ask(text) == Spoken("It is 3:05 PM.")


@pytest.mark.parametrize(
    "text", ["What day is it today?", "What's the date?", "Tell me today's date.", "What is today's date?"]
)
def test_the_date(text):
    assert ask(text) == Spoken("Today is Monday, November 9, 2026.")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("What is 25 times 4?", "100"),
        ("What's twenty-five times four?", "100"),
        ("How much is one hundred and five plus seven?", "112"),
        ("What is two plus three times four?", "14"),
        ("calculate 1,000 divided by 8", "125"),
        ("What is seven divided by two?", "3.5"),
        ("What is ten divided by three?", "about 3.333"),
        ("what is 5 minus 12", "minus 7"),
        ("What's fifteen percent of eighty?", "12"),
        ("What is 20% of 50?", "10"),
        ("What is the square root of 144?", "12"),
        ("What is the square root of two?", "1.414"),
        ("What is nine squared?", "81"),
        ("two to the power of ten", "1024"),
        ("Please work out three point five plus one point two five.", "4.75"),
        ("What is 12 + 30?", "42"),
        ("What is two thousand and six minus nineteen?", "1987"),
    ],
)
def test_sums(text, value):
    said = ask(text)
    assert isinstance(said, Spoken)
    assert said.text.removeprefix("That is ").removesuffix(".") in (value, f"about {value}")


def test_sums_that_have_no_answer():
    assert ask("What is seven divided by zero?") == Spoken("Nothing can be divided by zero.")
    assert ask("What is nine to the power of nine to the power of nine?") == Spoken("That number is too long to say.")
    assert ask("What is 999999999999999 times 10?") == Spoken("That number is too long to say.")


@pytest.mark.parametrize(
    ("words", "number"),
    [("seventeen", "17"), ("ninety nine", "99"), ("two hundred", "200"), ("three million", "3000000"), ("one two", "1 2"),
     ("twenty twelve", "20 12"), ("five thousand three hundred and forty two", "5342"), ("zero", "0"), ("apples", "apples"),
     ("one and a half", "1 and a half"), ("hundred", "hundred"), ("four point oh", "4 point oh")],
)  # fmt: skip
def test_number_words(words, number):
    assert digits(words) == number


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("Set a timer for five minutes.", 300),
        ("Could you set a timer for 1 hour and 30 minutes, please?", 5400),
        ("Start a ten second timer", 10),
        ("Remind me in half an hour", 1800),
        ("set an alarm in a minute", 60),
        ("set a timer for an hour", 3600),
        ("Give me a countdown of twenty seconds.", 20),
    ],
)
def test_timers(text, seconds):
    reply = ask(text)
    assert isinstance(reply, StartTimer)
    assert reply.seconds == seconds
    assert reply.text.startswith("Timer set for")


def test_timers_that_cannot_be_set_or_are_dropped():
    assert ask("Set a timer for three days") is None
    assert ask("Set a timer for forty hours") == Spoken("I can set timers of up to a day.")
    assert ask("Cancel my timer.") == Act("drop_timers")


@pytest.mark.parametrize(
    ("text", "tool", "arguments"),
    [
        ("Walk forward.", "move", {"direction": "forward"}),
        ("Walked forward.", "move", {"direction": "forward"}),  # as it is heard
        ("Please go straight ahead", "move", {"direction": "forward"}),
        ("Can you move backwards a bit?", "move", {"direction": "back", "amount": "a little"}),
        ("Take a step to the right", "move", {"direction": "right", "amount": "a little"}),
        ("Turn left a bit.", "turn", {"direction": "left", "amount": "a little"}),
        ("Turn a little bit to the right, please.", "turn", {"direction": "right", "amount": "a little"}),
        ("Look slightly up", "turn", {"direction": "up", "amount": "a little"}),
        ("Turn left.", "turn", {"direction": "left"}),
        ("Could you turn to the right, please?", "turn", {"direction": "right"}),
        ("look up", "turn", {"direction": "up"}),
        ("Now turn around", "turn", {"direction": "around"}),
        ("Stop walking.", "halt", {}),
        ("Make it snow.", "set_scene", {"scene": "snow"}),
        ("Make it night, please", "set_scene", {"scene": "night"}),
        ("Let it rain", "set_scene", {"scene": "rain"}),
        ("Take me to the desert.", "set_scene", {"scene": "desert"}),
        ("Change the weather to fog", "set_scene", {"scene": "fog"}),
        ("Pick up the red block.", "instruct_robot", {"instruction": "pick up the red block"}),
        ("Please push the cube to the left", "instruct_robot", {"instruction": "push the cube to the left"}),
    ],
)
def test_the_world_and_the_robot_are_steered_by_tools(text, tool, arguments):
    reply = ask(text)
    assert isinstance(reply, Intent)
    assert (reply.tool, json.loads(reply.arguments)) == (tool, arguments)
    [declared] = [t for t in TOOLS if t.name == tool]
    assert set(arguments) <= set(declared.parameters["properties"])
    for name, value in arguments.items():
        assert value in declared.parameters["properties"][name].get("enum", [value])


@pytest.mark.parametrize("text", ["Stop talking, please.", "Be quiet", "Never mind.", "Okay, enough"])
def test_hush(text):
    assert ask(text) == Act("hush")


@pytest.mark.parametrize("text", ["Stop.", "Please stop!", "Okay, stop it now."])
def test_stop(text):
    assert ask(text) == Act("stop")


@pytest.mark.parametrize("text", ["Repeat that, please.", "Can you say that again?", "What did you say?", "Pardon?"])
def test_repeat(text):
    assert ask(text) == Act("repeat")


@pytest.mark.parametrize("text", ["What's your name?", "Who are you?", "Tell me your name"])
def test_its_name(text):
    assert "realtime omni" in ask(text).text


@pytest.mark.parametrize(
    "text",
    [
        "What is the capital of France?",
        "Tell me a joke.",
        "How are you today?",
        "What is the meaning of life?",
        "Who won the world cup in 1998?",
        "I have two dogs and three cats.",
        "Stop the music in my story and go on.",
        "What time did the Titanic sink?",
        "My name is Anna.",
        "Why do birds sing?",
        "Turn the page of history for me, and tell me about Rome.",
        "Make it stop.",
        "What is love?",
        "Can you put yourself in my position?",
        "",
        "...",
        "Do you like the number 7?",
    ],
)
def test_everything_else_is_left_to_the_model(text):
    assert ask(text) is None


def test_politeness_is_no_part_of_a_command():
    assert plain("Okay, could you please turn left now?") == "turn left"
    assert plain("It’s 3.5, isn't it?") == "it's 3.5 isn't it"
