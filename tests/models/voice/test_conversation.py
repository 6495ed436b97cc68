"""A call with the embedded voice, frame by frame: who speaks, what is remembered, what is told. Its networks are stand-ins."""

import gc
import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from models.voice.stand_ins import ANSWER, SAMPLES_A_LETTER, Language, hum, parts, voice
from models.voice.talk import FRAME_MS, SAMPLES, Talk
from realtime_omni.errors import ArgumentError
from realtime_omni.models.base import PackedState
from realtime_omni.models.voice.model import EmbeddedVoice
from realtime_omni.models.voice.skills.table import TOOLS
from realtime_omni.models.voice.speaker import Draft
from realtime_omni.models.voice.state import KEPT_ENTRIES, MOST_ENTRIES
from realtime_omni.session.frame import (
    AddText,
    Cancel,
    Clear,
    Commit,
    Configure,
    RemoveText,
    Respond,
    Say,
    ToolResult,
    Truncate,
    Turns,
)
from realtime_omni.session.signals import (
    IdleTimeout,
    InputTranscript,
    OutputText,
    ResponseEnded,
    ResponseStarted,
    Speaking,
    SpeechStarted,
    SpeechStopped,
    ToolCall,
    TurnCommitted,
)
from realtime_omni.testing.check_model import check_model


def test_the_model_contract_holds():
    report = check_model(voice())
    assert report.passed, str(report)


def test_a_question_is_heard_understood_and_answered(talk):
    talk.wait(400)
    talk.hear(hum(0.1, 800))
    talk.until(ResponseEnded)
    started, stopped, committed = talk.of(SpeechStarted, SpeechStopped, TurnCommitted)
    assert (started.at_ms, stopped.at_ms) == (384, 1216)  # whole windows of 32 ms around 400..1200
    assert (committed.start_ms, committed.end_ms) == (384, 1216)
    [heard] = talk.of(InputTranscript)
    assert (heard.text, heard.final, heard.utterance) == ("What is the capital of France?", True, started.utterance)
    answer = ANSWER + "What is the capital of France?"
    assert list(talk.said().values()) == [answer]
    [ended] = talk.of(ResponseEnded)
    assert ended.reason == "completed"
    sounded = np.flatnonzero(talk.audio)
    assert sounded[0] % 960 == 0
    assert len(sounded) == SAMPLES_A_LETTER * (len(answer) - 2)  # two blanks between clauses make no sound
    assert [(e.role, e.text) for e in talk.facts.entries] == [
        ("user", "What is the capital of France?"),
        ("assistant", answer),
    ]


class Asked(Language):
    """Keeps what it is asked, each once."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def draft(self, prompt, limit=60, call=""):
        if prompt not in self.asked:
            self.asked.append(prompt)
        return Draft("I see.", 3, True, False)


def test_a_question_is_asked_as_it_was_begun_and_prepared_for_however_long_the_call():
    """The oldest entries go between two exchanges: in the middle of one they would change the question."""
    language = Asked()
    talk = Talk(voice(language=language))
    turns = [AddText(f"{i}", role="user" if i % 2 == 0 else "assistant") for i in range(MOST_ENTRIES - 20)]
    talk.tell(*turns)
    sizes = []
    for number in range(16):
        prepared = language.prompt(*language.reads[-1]) if language.reads else ()
        talk.hear(hum(0.1, 400))
        talk.until(ResponseEnded)
        assert len(language.asked) == number + 1, "it was begun in the pause, and nothing else was asked"
        assert language.asked[-1][: len(prepared)] == prepared
        sizes.append(len(talk.facts.entries))
    assert KEPT_ENTRIES == min(sizes) < max(sizes) <= MOST_ENTRIES - 16


def test_what_comes_behind_an_answer_is_read_while_it_sounds(talk):
    language = talk.model._parts.language
    talk.hear(hum(0.1, 800))
    talk.until(Speaking)
    while not language.reads:
        assert not talk.of(ResponseEnded)
        talk.frame()
    [(_, said)] = language.reads
    assert said == (
        ("user", "What is the capital of France?"),
        ("assistant", ANSWER + "What is the capital of France?"),
    )
    talk.until(ResponseEnded)
    assert language.reads[1:] == language.reads[:1], "of what was said then, the same"


def test_words_are_told_when_they_sound_and_in_order(talk):
    talk.tell(Say("x", "one two three, four five."))
    talk.until(ResponseEnded)
    words = talk.of(OutputText)
    assert "".join(w.text for w in words) == "one two three, four five."
    assert all(a.end_ms <= b.start_ms + 1e-6 for a, b in pairwise(words))
    begin = np.flatnonzero(talk.audio)[0] / 24
    assert words[0].start_ms == begin
    assert words[-1].end_ms == pytest.approx((np.flatnonzero(talk.audio)[-1] + 1) / 24, abs=1)


def test_a_cancelled_response_is_silent_and_only_what_was_heard_is_remembered(talk):
    text = "one two three four five six seven eight nine ten"
    talk.tell(Say("x", text))
    talk.wait(1500)
    before = len(talk.audio)
    told = talk.tell(Cancel(heard_ms=700))
    assert [(s.response, s.reason) for s in told] == [("x", "cancelled")]
    talk.wait(2000)
    assert not talk.audio[before:].any()
    [entry] = talk.facts.entries
    assert entry.text == "one two three four"  # 50 ms a letter and blank: the fourth word begins after 670 ms
    assert text.startswith(entry.text)
    talk.tell(Truncate("x", 300.0))
    assert talk.facts.entries[0].text == "one two"
    talk.tell(Truncate("x", 5000.0))
    assert talk.facts.entries[0].text == "one two"


def test_the_language_model_reads_what_was_heard_and_no_more():
    model = voice()
    talk = Talk(model)
    talk.tell(AddText("Tell me a story."), Respond("x"))
    talk.wait(1000)
    talk.tell(Cancel(heard_ms=400))
    [entry] = [e for e in talk.facts.entries if e.role == "assistant"]
    _, said = model._parts.language.reads[-1]
    assert said == (("user", "Tell me a story."), ("assistant", entry.text))
    assert 0 < len(entry.text) < len(ANSWER)
    assert len(model._parts.language.dropped) == 1


def test_a_cancel_of_everything_ends_what_waits_too(talk):
    talk.tell(Say("x", "one two three four"), Say("y", "five"))
    told = talk.tell(Cancel())
    assert [(type(s), s.response) for s in told] == [(ResponseEnded, "x"), (ResponseStarted, "y"), (ResponseEnded, "y")]
    told = talk.wait(2000)
    assert not told


def test_speech_during_speech_is_told_and_the_answer_waits_its_turn(talk):
    talk.tell(Say("x", "one two three four five six seven eight nine ten eleven twelve thirteen"))
    talk.wait(400)
    talk.hear(hum(0.4, 800))
    assert talk.of(SpeechStarted)
    talk.until(ResponseEnded)  # nobody cancelled it: it is heard to the end
    talk.until(ResponseEnded)
    assert list(talk.said().values())[1] == "That is 4."


def test_the_world_is_steered_by_tools_that_are_offered(talk):
    talk.hear(hum(0.2, 800))
    talk.until(ResponseEnded)
    assert not talk.of(ToolCall)
    assert list(talk.said().values()) == ["There is nothing here that I could steer."]
    talk.tell(Configure(tools=TOOLS))
    talk.hear(hum(0.2, 800))
    talk.until(ResponseEnded)
    [call] = talk.of(ToolCall)
    assert (call.name, json.loads(call.arguments)) == ("turn", {"direction": "left"})
    assert list(talk.said().values())[-1] == "Turning left."
    for output, said in (("ok", None), ('{"done": true}', None), ("A wall is in the way.", "A wall is in the way.")):
        talk.tell(ToolResult(call.call_id, output), Respond(f"after {output}"))
        talk.wait(3000)
        assert talk.said().get(f"after {output}") == said
    assert len(talk.of(ToolCall)) == 1


def test_stop_and_repeat(talk):
    talk.tell(Say("x", "Hello there."))
    talk.until(ResponseEnded)
    talk.hear(hum(0.6, 800))
    talk.until(ResponseEnded)
    assert list(talk.said().values())[-1] == "Hello there."
    before = np.count_nonzero(talk.audio)
    talk.hear(hum(0.5, 800))
    talk.until(ResponseEnded)
    assert np.count_nonzero(talk.audio) == before


@pytest.mark.parametrize("loudness", [0.5, 0.9])  # as it is said, and as it may be heard
def test_stop_is_the_worlds_where_it_can_stand_still(talk, loudness):
    talk.tell(Configure(tools=TOOLS))
    talk.hear(hum(loudness, 800))
    talk.until(ResponseEnded)
    [call] = talk.of(ToolCall)
    assert (call.name, call.arguments) == ("halt", "{}")
    assert not talk.audio.any()
    talk.tell(Configure(tools=()))
    talk.hear(hum(loudness, 800))
    talk.until(ResponseEnded)
    assert talk.audio.any() == (loudness == 0.9)  # nothing to halt: a word like any other


def test_a_timer_rings_on_the_sessions_clock(talk):
    talk.hear(hum(0.7, 800))
    talk.until(ResponseStarted)
    set_ms = talk.frames * FRAME_MS
    talk.until(ResponseEnded)
    talk.until(ResponseStarted)
    assert 2000 - FRAME_MS <= talk.frames * FRAME_MS - set_ms <= 2000 + 2 * FRAME_MS
    talk.until(ResponseEnded)
    assert list(talk.said().values()) == ["Timer set for 2 seconds.", "Your timer of 2 seconds is over."]


def test_a_silent_user_is_asked_once_in_a_while(talk):
    talk.tell(Configure(turns=Turns("semantic", idle_ms=1000)))
    timeout = talk.until(IdleTimeout)
    assert timeout.end_ms - timeout.start_ms >= 1000
    talk.until(ResponseEnded)
    assert list(talk.said().values()) == ["Are you still there?"]


def test_text_comes_without_sound_when_asked_for_or_without_a_synthesizer():
    for model, text_only in ((voice(), True), (voice(say=None), False)):
        talk = Talk(model)
        talk.tell(AddText("Hello"), Respond("x", text_only=text_only))
        talk.wait(400)
        assert talk.said() == {"x": ANSWER + "Hello"}
        assert not talk.of(Speaking)
        assert not talk.audio.any()
        assert talk.facts.entries[-1].text == ANSWER + "Hello"


def test_without_a_language_model_there_are_skills_and_an_echo():
    talk = Talk(voice(language=None))
    talk.tell(AddText("Nice weather."), Respond("x"))
    talk.until(ResponseEnded)
    talk.tell(AddText("What is two plus two?"), Respond("y"))
    talk.until(ResponseEnded)
    assert talk.said() == {"x": "You said: Nice weather.", "y": "That is 4."}


def test_a_part_that_fails_costs_its_turn_and_nothing_else(caplog):
    def fails(_):
        raise RuntimeError("no memory")

    deaf = Talk(voice(recognize=fails))
    deaf.hear(hum(0.1, 800))
    deaf.wait(1000)
    assert [s.text for s in deaf.of(InputTranscript)] == [""]
    mute = Talk(voice(say=fails))
    mute.tell(Say("x", "Hello there."))
    mute.wait(200)
    assert [s.reason for s in mute.of(ResponseEnded)] == ["completed"]
    assert mute.said() == {"x": "Hello there."}
    assert "a part of the voice failed" in caplog.text


def test_a_request_may_bring_its_own_context_and_leave_no_trace(talk):
    talk.tell(AddText("Remember me."))
    talk.tell(Respond("x", context=(AddText("Only this."),), remember=False))
    talk.until(ResponseEnded)
    assert talk.said() == {"x": ANSWER + "Only this."}
    assert [e.text for e in talk.facts.entries] == ["Remember me."]


def test_texts_go_where_they_are_put_and_away(talk):
    talk.tell(
        AddText("b", id="b"), AddText("a", id="a", after=""), AddText("c", id="c", after="b"), AddText("x", after="a")
    )
    talk.tell(RemoveText("b"), RemoveText("nobody"))
    assert [e.text for e in talk.facts.entries] == ["a", "x", "c"]


def test_a_saved_call_that_was_changed_is_refused():
    model = voice()
    talk = Talk(model)
    talk.hear(hum(0.3, 800))
    packed = model.pack(talk.engine.runner.resident("a").state)
    state = model.unpack(packed)
    assert model.pack(state).values == packed.values
    for name, tensor in packed.tensors.items():
        shorter = tensor.flatten()[:-1] if name != "waiting" else tensor.new_zeros(512)
        for wrong in (tensor.double(), shorter):
            with pytest.raises(ArgumentError):
                model.unpack(PackedState({**packed.tensors, name: wrong}, packed.values))
    for name in ("heard", "recurrent"):
        with pytest.raises(ArgumentError):
            model.unpack(PackedState({k: v for k, v in packed.tensors.items() if k != name}, packed.values))


def test_work_in_threads_gives_the_same_words_and_answers():
    """Only later: frames pass while the threads work."""
    with_threads = Talk(EmbeddedVoice(parts(), threads=2))
    at_once = Talk()
    for talk in (with_threads, at_once):
        talk.hear(hum(0.1, 800))
        talk.until(ResponseEnded, 10**6)
    assert list(with_threads.said().values()) == list(at_once.said().values())


def test_the_language_models_thread_ends_with_the_model():
    made = parts()
    model = EmbeddedVoice(made, threads=1)
    assert not made.language.closed
    del model
    gc.collect()
    assert made.language.closed


names = st.sampled_from(["x", "y", "z", "r0", "r1", "q1", "q2", "q5", "q6"])
directives = st.one_of(
    st.builds(AddText, st.sampled_from(["Hello", "What is two plus two?", "Turn left."])),
    st.just(Commit()),
    st.just(Clear()),
    st.builds(Cancel, st.none(), st.one_of(st.none(), st.floats(0, 3000))),
    st.builds(Cancel, names),
    st.builds(Truncate, names, st.floats(0, 3000)),
    st.builds(RemoveText, names),
    st.builds(Configure, turns=st.builds(Turns, st.sampled_from(["client", "energy", "semantic"]), st.booleans())),
    st.just(Configure(tools=TOOLS)),
    st.builds(ToolResult, st.just("call-0"), st.sampled_from(["ok", "It is done."])),
)
loudness = st.sampled_from([0.0, 0.0, 0.1, 0.2, 0.3, 0.7])
steps = st.lists(st.tuples(loudness, st.integers(1, 12), st.lists(directives, max_size=3)), max_size=14)


@given(steps, st.integers(0, 3))
@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_signals_keep_their_grammar_whatever_happens(steps, asks):
    talk = Talk()
    for number, (loudness, frames, told) in enumerate(steps):
        more = (
            (Respond(f"q{number}") if number % 2 else Say(f"q{number}", "one two three"),) if number % 4 < asks else ()
        )
        talk.hear(
            hum(loudness, frames * FRAME_MS) if loudness else np.zeros(frames * SAMPLES, np.float32), *told, *more
        )
    running = talk.grammar.running
    told = talk.tell(Cancel())
    assert running in (None, *(signal.response for signal in told if isinstance(signal, ResponseEnded)))
    assert np.abs(talk.audio).max(initial=0) <= 1
    talk.engine.runner.check()


def test_an_answer_sounds_made_before_the_turn_is_over():
    made = []

    def say(text):
        made.append((text, len(talk.of(TurnCommitted))))
        return np.full(SAMPLES_A_LETTER * len(text), 0.25, np.float32)

    for loudness, first in ((0.1, "I heard that,"), (0.4, "That is 4.")):  # the language model's, a skill's
        made.clear()
        talk = Talk(voice(say=say))
        talk.hear(hum(loudness, 1000))
        talk.until(ResponseEnded)
        assert made[0] == (first, 0)
        assert [text for text, _ in made].count(first) == 1
