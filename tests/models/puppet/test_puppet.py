"""The puppet keeps the order of its signals, whatever it is told in the middle of what."""

import json

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from models.voice.stand_ins import hum
from models.voice.talk import FRAME_MS, SAMPLES, Talk
from realtime_omni.models.puppet.model import Puppet, PuppetOptions
from realtime_omni.models.puppet.state import MOST_PENDING
from realtime_omni.session.frame import AddText, Cancel, Clear, Commit, Configure, Respond, Say, Tool, Turns
from realtime_omni.session.signals import (
    ResponseEnded,
    ResponseStarted,
    SpeechStarted,
    SpeechStopped,
    ToolCall,
    TurnCommitted,
)

LONG = "one two three four five six seven eight nine ten"


def puppet(**options):
    return Talk(Puppet(PuppetOptions(frame_ms=FRAME_MS, input_rate_hz=16_000, **options)))


@pytest.fixture
def talk():
    return puppet()


def test_what_is_cleared_while_the_user_speaks_is_forgotten_and_the_utterance_goes_on(talk):
    talk.tell(Configure(turns=Turns("energy", respond=False)))
    talk.hear(hum(0.3, 800))
    talk.tell(Clear())
    cleared_ms = (talk.frames - 1) * FRAME_MS
    talk.hear(hum(0.3, 400))
    talk.wait(1500)
    [started], [stopped], [committed] = talk.of(SpeechStarted), talk.of(SpeechStopped), talk.of(TurnCommitted)
    assert started.utterance == stopped.utterance == committed.utterance
    assert committed.start_ms == cleared_ms
    talk.hear(hum(0.3, 400))
    talk.wait(1500)
    assert len(talk.of(TurnCommitted)) == 2


def test_turns_may_become_the_clients_while_the_user_speaks(talk):
    talk.tell(Configure(turns=Turns("energy", respond=False)))
    talk.hear(hum(0.3, 400))
    talk.tell(Configure(turns=Turns("client")))
    talk.tell(Configure(turns=Turns("energy", respond=False)))
    talk.hear(hum(0.3, 400))
    talk.tell(Configure(turns=Turns("client")), Commit())
    talk.tell(Configure(turns=Turns("energy", respond=False)))
    talk.hear(hum(0.3, 400))
    assert len(talk.of(SpeechStarted)) == 2
    assert talk.of(SpeechStarted)[0].utterance == talk.of(TurnCommitted)[0].utterance


def test_one_that_waits_can_be_cancelled_by_name_and_the_one_that_runs_goes_on(talk):
    talk.tell(Say("x", LONG), Say("y", "two"), Say("z", "three"))
    told = talk.tell(Cancel("y"))
    ends = [(type(s), s.response) for s in told if isinstance(s, ResponseStarted | ResponseEnded)]
    assert ends == [(ResponseStarted, "y"), (ResponseEnded, "y")]
    talk.until(ResponseEnded)
    talk.until(ResponseEnded)
    assert talk.said() == {"x": LONG, "z": "three"}


def test_one_too_many_fails_at_once(talk):
    names = [f"q{number}" for number in range(MOST_PENDING + 2)]
    talk.tell(Say(names[0], LONG))
    talk.tell(*(Say(name, LONG) for name in names[1:-1]))
    talk.tell(Say(names[-1], "x"))
    talk.tell(Cancel())
    ended = {s.response: s.reason for s in talk.of(ResponseEnded)}
    assert ended.keys() == set(names)
    assert ended[names[-1]] == "failed"


def test_a_line_may_call_a_tool():
    talk = puppet(lines=('call turn {"direction": "left"}',))
    talk.tell(AddText("Go on."), Respond("x"))
    talk.until(ResponseEnded)
    assert talk.said()["x"].startswith("call turn")  # nobody offers it
    talk.tell(Configure(tools=(Tool("turn"),)), Respond("y"))
    [call] = talk.of(ToolCall)
    assert (call.response, call.name, json.loads(call.arguments)) == ("y", "turn", {"direction": "left"})


directives = st.one_of(
    st.just(Commit()),
    st.just(Clear()),
    st.builds(Cancel, st.one_of(st.none(), st.sampled_from([f"q{number}" for number in range(12)]))),
    st.builds(Configure, turns=st.builds(Turns, st.sampled_from(["client", "energy", "semantic"]), st.booleans())),
)
steps = st.lists(st.tuples(st.booleans(), st.integers(1, 8), st.lists(directives, max_size=3)), max_size=12)


@given(steps, st.integers(0, 3), st.booleans())
@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_signals_keep_their_grammar_whatever_happens(steps, asks, yields):
    talk = puppet(yields=yields)
    for number, (loud, frames, told) in enumerate(steps):
        more = (Say(f"q{number}", LONG),) if number % 4 < asks else ()
        audio = hum(0.3, frames * FRAME_MS) if loud else np.zeros(frames * SAMPLES, np.float32)
        talk.hear(audio, *more, *told)
    talk.tell(Cancel())  # of what was asked for: a turn that ends now is answered all the same
    assert {f"q{n}" for n in range(len(steps)) if n % 4 < asks} <= talk.grammar.ended
