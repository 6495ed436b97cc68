"""A whole call with the real networks: another synthesiser speaks, the voice hears, answers, is interrupted.

In the call's own time, which stands still while the networks work: delays here are those of the rules, not of the machine."""

import shutil

import numpy as np
import pytest

from models.voice.real import spoken
from models.voice.talk import FRAME_MS, SAMPLES, Talk
from realtime_omni.models.voice.model import EmbeddedVoice
from realtime_omni.models.voice.parts import VoiceOptions, load_parts
from realtime_omni.models.voice.skills.table import TOOLS
from realtime_omni.models.voice.weights import cache_folder, missing
from realtime_omni.session.frame import Cancel, Configure
from realtime_omni.session.signals import (
    InputTranscript,
    ResponseEnded,
    ResponseStarted,
    Speaking,
    SpeechStarted,
    SpeechStopped,
    ToolCall,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing(cache_folder())), reason="needs the voice's weights: realtime-omni fetch voice"),
    pytest.mark.skipif(shutil.which("flite") is None, reason="the user is flite"),
]


@pytest.fixture(scope="module")
def parts():
    return load_parts(cache_folder(), VoiceOptions(threads=0, calls=1, fetch=False))


@pytest.fixture
def talk(parts):
    return Talk(EmbeddedVoice(parts, threads=0))


def loud(audio, decibel=-35):
    """First and last sample of the 20 ms frames above so many dBFS."""
    frames = audio[: len(audio) // 320 * 320].reshape(-1, 320)
    above = np.flatnonzero(20 * np.log10(np.sqrt((frames**2).mean(1)) + 1e-9) > decibel)
    return above[0] * 320, (above[-1] + 1) * 320


def test_a_conversation(talk, tmp_path):
    waits = []
    for question, answer in (
        ("What is the capital of France?", "Paris"),
        ("What is seven times eight?", "56"),
        ("What do bees make?", "honey"),
    ):
        talk.wait(500)
        audio = spoken("flite", question, tmp_path)
        began_ms = talk.frames * FRAME_MS
        before = len(talk.of(Speaking))
        talk.hear(audio)
        while len(talk.of(Speaking)) == before:
            talk.frame()
        waits.append(talk.frames * FRAME_MS - FRAME_MS - (began_ms + loud(audio)[1] / 16))
        talk.until(ResponseEnded)
        assert answer in list(talk.said().values())[-1]
    assert next(t.text for t in talk.of(InputTranscript) if t.final) == "What is the capital of France?"
    assert np.median(waits) <= 400, waits
    assert max(waits) <= 1200, waits
    assert all(a.at_ms < b.at_ms for a, b in zip(talk.of(SpeechStarted), talk.of(SpeechStopped), strict=True))


def test_speech_is_noticed_while_it_speaks_and_what_was_not_heard_is_forgotten(talk, tmp_path):
    talk.hear(spoken("flite", "Tell me about the history of bread.", tmp_path))
    while not talk.of(Speaking):
        talk.frame()
    talk.wait(800)
    assert not talk.of(ResponseEnded)
    audio = spoken("flite", "Stop.", tmp_path)
    began_ms, heard = talk.frames * FRAME_MS, len(talk.of(SpeechStarted))
    for part in np.pad(audio, (0, -len(audio) % SAMPLES)).reshape(-1, SAMPLES):
        talk.frame(part)
        if len(talk.of(SpeechStarted)) > heard:
            break
    noticed_ms = talk.frames * FRAME_MS - (began_ms + loud(audio)[0] / 16)
    assert noticed_ms <= 320
    told = talk.tell(Cancel(heard_ms=800))
    assert [s.reason for s in told if isinstance(s, ResponseEnded)] == ["cancelled"]
    [entry] = [e for e in talk.facts.entries if e.role == "assistant"]
    assert 0 < len(entry.text.split()) < 6
    before = np.count_nonzero(talk.audio)
    talk.wait(4000)
    assert np.count_nonzero(talk.audio) == before


def test_turn_left_is_a_call_of_the_pages_tool(talk, tmp_path):
    talk.tell(Configure(tools=TOOLS))
    talk.hear(spoken("flite", "Turn left, please.", tmp_path))
    talk.until(ResponseEnded)
    assert [(c.name, c.arguments) for c in talk.of(ToolCall)] == [("turn", '{"direction": "left"}')]


def test_words_are_understood_with_noise_behind_them(talk, tmp_path):
    audio = spoken("flite", "What is the capital of France?", tmp_path)
    noise = np.random.default_rng(0).normal(0, 1, len(audio) + 64_000).astype(np.float32)
    level = np.sqrt((audio[slice(*loud(audio))] ** 2).mean()) * 10 ** (-15 / 20)
    noise *= level
    noise[16_000 : 16_000 + len(audio)] += audio
    talk.hear(np.clip(noise, -1, 1))
    assert "capital of France" in talk.of(InputTranscript)[0].text


def test_noise_and_silence_get_no_answer(talk):
    rng = np.random.default_rng(1)
    pink = np.fft.irfft(np.fft.rfft(rng.normal(0, 1, 16_000 * 40)) / np.sqrt(np.arange(1, 16_000 * 20 + 2)))
    pink = (0.05 * pink / pink.std()).astype(np.float32)
    talk.hear(np.concatenate((pink, np.zeros(16_000 * 5, np.float32))))
    assert not talk.of(ResponseStarted)


def test_a_pause_in_mid_sentence_does_not_end_the_turn(talk, tmp_path):
    whole = spoken("flite", "I would like to know what the capital of France is.", tmp_path)
    cut = int(len(whole) * 0.42)  # after "what the"
    talk.hear(np.concatenate((whole[:cut], np.zeros(14_400, np.float32), whole[cut:])))
    talk.until(ResponseEnded)
    heard = [t.text for t in talk.of(InputTranscript) if t.final]
    assert len(heard) == 1
    assert "capital of Fran" in heard[0]  # "France is" is heard as "Francis", too
