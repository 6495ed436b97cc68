"""Between two frames: what is ready is passed on at once, what nobody wants any more is dropped."""

import gc
import threading

import numpy as np
import pytest

from models.voice.stand_ins import Language, hum, parts
from models.voice.talk import Talk
from realtime_omni.engine import commands as c
from realtime_omni.models.voice.lm.language import Draft
from realtime_omni.models.voice.model import EmbeddedVoice
from realtime_omni.models.voice.rehearsing import Rehearsals
from realtime_omni.models.voice.state import Facts, VoiceState
from realtime_omni.session.signals import SpeechStopped

LIVENESS_S = 20


class Growing(Language):
    """Its answer grows when a test says so."""

    def __init__(self):
        super().__init__()
        self.text = ""
        self.asked_for = []
        self.asked = threading.Event()

    def watch(self, notice):
        self.notice = notice

    def draft(self, prompt, limit=60, call=""):
        if prompt not in self.asked_for:
            self.asked_for.append(prompt)
            self.asked.set()
        return Draft(self.text, len(self.text), False, False)

    def grow(self, text):
        self.text += text
        self.notice()


@pytest.fixture
def gate():
    return threading.Event()


@pytest.fixture
def language():
    return Growing()


@pytest.fixture
def spoken():
    return []


@pytest.fixture
def talk(gate, language, spoken):
    """Its recogniser waits at ``gate``; ``spoken`` are clauses and an event for each."""
    said, texts = threading.Event(), ["What is love?", "What is love for a dog?"]

    def recognize(audio):
        assert gate.wait(LIVENESS_S)
        return texts.pop(0)

    def say(text):
        spoken.append(text)
        said.set()
        return np.full(24_000, 0.25, np.float32)

    made = parts(recognize=recognize, say=say, language=language, finished=lambda audio: 0.01)
    talk = Talk(EmbeddedVoice(made, threads=2))
    talk.said_event = said
    yield talk
    gate.set()


def test_recogniser_language_model_and_synthesizer_follow_each_other_without_a_frame(talk, gate, language, spoken):
    talk.hear(hum(0.1, 800))
    talk.wait(200)
    gate.set()
    assert language.asked.wait(LIVENESS_S)
    language.grow("The capital of France ")
    language.grow("is ")
    assert talk.said_event.wait(LIVENESS_S)
    assert spoken == ["The capital of France"]
    assert not talk.of(SpeechStopped)
    talk.frame()
    assert talk.facts.guess is not None, "the next frame takes over what was begun"
    assert not language.dropped


def test_what_was_begun_between_two_frames_is_dropped_when_the_user_goes_on(talk, gate, language):
    talk.hear(hum(0.1, 800))
    talk.wait(200)
    gate.set()
    assert language.asked.wait(LIVENESS_S)
    [prompt] = language.asked_for
    language.asked.clear()
    talk.hear(hum(0.1, 400))
    talk.wait(200)
    assert language.asked.wait(LIVENESS_S)
    talk.frame()
    assert language.dropped == [prompt]


def test_what_was_begun_between_two_frames_is_dropped_when_the_call_ends(talk, gate, language):
    talk.hear(hum(0.1, 800))
    talk.wait(200)
    gate.set()
    assert language.asked.wait(LIVENESS_S)
    talk.engine.ask(c.Close(ticket=0, session_id="a"))
    assert language.dropped == language.asked_for


class Fake:
    def __init__(self, begins, fault=None):
        self.begins, self.fault = begins, fault
        self.state = VoiceState(Facts(guess=(1,)))
        self.went_on, self.gave_up = threading.Event(), 0

    def go_on(self):
        self.went_on.set()
        if self.fault is not None:
            raise self.fault

    def give_up(self):
        self.gave_up += 1


@pytest.fixture
def rehearsals():
    made = Rehearsals(threaded=True)
    yield made
    made.close()


def leave(rehearsals, fake, call="a"):
    with rehearsals.frame(call, VoiceState(Facts())):
        rehearsals.leave(call, fake)


def test_a_frame_goes_on_from_what_was_begun_and_one_of_another_state_gives_it_up(rehearsals):
    here, elsewhere = VoiceState(Facts()), VoiceState(Facts())
    fake = Fake(here)
    leave(rehearsals, fake)
    for _ in range(2):  # a frame that fails is run again
        with rehearsals.frame("a", here) as state:
            assert state is fake.state
    with rehearsals.frame("a", elsewhere) as state:
        assert state is elsewhere
    assert fake.gave_up == 1
    with rehearsals.frame("a", here) as state:
        assert state is here


def test_a_call_that_ends_leaves_nothing_behind(rehearsals):
    state = VoiceState(Facts())
    mine, other = Fake(state), Fake(VoiceState(Facts()))
    leave(rehearsals, mine)
    leave(rehearsals, other, "b")
    rehearsals.forget(state)
    assert (mine.gave_up, other.gave_up) == (1, 0)
    rehearsals.notice()
    assert other.went_on.wait(LIVENESS_S)
    assert not mine.went_on.is_set()


def test_a_fault_between_two_frames_is_one_calls(rehearsals, caplog):
    bad, good = Fake(VoiceState(Facts()), ValueError("no")), Fake(VoiceState(Facts()))
    leave(rehearsals, bad, "bad")
    leave(rehearsals, good, "good")
    rehearsals.notice()
    assert good.went_on.wait(LIVENESS_S)
    assert "session_id=bad" in caplog.text
    bad.went_on.clear()
    good.went_on.clear()
    rehearsals.notice()
    assert good.went_on.wait(LIVENESS_S)
    assert not bad.went_on.is_set()


def test_the_thread_ends_with_the_model():
    model = EmbeddedVoice(parts(), threads=1)
    thread = next(t for t in threading.enumerate() if t.name == "voice-rehearsals")
    del model
    gc.collect()
    thread.join(LIVENESS_S)
    assert not thread.is_alive()
