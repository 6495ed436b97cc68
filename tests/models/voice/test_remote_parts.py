"""Endpoints in the recipe, and several of them in one call."""

import gc

import anyio
import msgspec
import numpy as np
import pytest

from models.voice.endpoints import CHAT, SPEECH, WORDS, chat, ended, mouth, pcm, talk_with, tone
from models.voice.stand_ins import hum, parts
from models.voice.stub_endpoint import sends
from models.voice.talk import FRAME_MS, Talk
from realtime_omni.config import Config
from realtime_omni.errors import BackendUnavailable, ConfigError
from realtime_omni.models.voice import parts as loading
from realtime_omni.models.voice.model import EmbeddedVoice
from realtime_omni.models.voice.parts import VoiceOptions, load_parts
from realtime_omni.models.voice.remote import web as remote_web
from realtime_omni.models.voice.remote.hearing import RemoteRecognizer
from realtime_omni.models.voice.remote.settings import RecognizerEndpoint
from realtime_omni.models.voice.remote.web import Web
from realtime_omni.session.frame import Cancel, Respond, Say
from realtime_omni.session.signals import OutputText


def test_a_part_is_one_line_of_the_recipe(monkeypatch, tmp_path, caplog):
    fetched = []
    monkeypatch.setattr(loading, "missing", lambda _, wheels: [w for w in wheels if w.project not in fetched])
    monkeypatch.setattr(loading, "fetch", lambda _, wheels, **__: fetched.extend(w.project for w in wheels))
    for name in ("VoiceActivity", "EndOfTurn"):
        monkeypatch.setattr(loading, name, lambda *files: files)
    for name in ("Recognizer", "Synthesizer", "Language"):
        monkeypatch.setattr(loading, name, lambda *_, **__: pytest.fail("an embedded part was loaded"))
    line = {"url": "http://127.0.0.1:1/v1", "model": "m"}
    options = {
        "recognizer": line | {"fall_back": False},
        "language": line,
        "synthesizer": line | {"fall_back": False},
    }
    made = load_parts(tmp_path, Config(model="voice", options=options).options_as(VoiceOptions))
    assert (made.recognize, made.say, made.skills) == (None, None, False)
    assert fetched == ["pipecat-ai"], "weights that nobody needs are not fetched"
    assert made.language.calls_tools
    made.close()
    options["language"] = line | {"key_env": "NO_SUCH_KEY"}
    with pytest.raises(ConfigError, match="NO_SUCH_KEY, which is not set"):
        load_parts(tmp_path, Config(model="voice", options=options).options_as(VoiceOptions))
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None if name == "httpx" else name)
    with pytest.raises(BackendUnavailable, match=r"realtime-omni\[endpoints\]"):
        load_parts(tmp_path, Config(model="voice", options=options).options_as(VoiceOptions))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "ftp://x/v1"}, "no http"),
        ({"url": "localhost:8080"}, "no http"),
        ({"url": "http://me:secret@x/v1"}, "has a user"),
        ({"url": "http://x/v1?key=1"}, "a query"),
        ({"key": "sk"}, "unknown field"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"key_env": "a b"}, "key_env"),
    ],
)
def test_a_wrong_line_is_refused_by_name(settings, words):
    options = {"language": {"url": "http://x/v1", "model": "m"} | settings}
    with pytest.raises(ConfigError, match=words):
        Config(model="voice", options=options).options_as(VoiceOptions)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, VoiceOptions)


def test_an_endpoint_that_never_answers_takes_no_connection_of_another(stub, web, monkeypatch):
    monkeypatch.setattr(remote_web, "_MOST_CONNECTIONS", 2)

    async def silent(request, send):
        await stub.loop.create_future()

    stub.answers |= {CHAT: silent, SPEECH: sends(pcm(tone(0.5)))}
    language = chat(web, stub, patient=False)
    for number in range(3):
        language.draft(language.prompt(None, [("user", f"Count to {number}.")]))
    talk = talk_with(synthesizer=mouth(web, stub))
    talk.tell(Say("x", "One two three."))
    ended(talk)
    assert np.abs(talk.audio).max() > 0.1, "the synthesizer has answered"
    assert len(stub.requests) <= 3, "the third question waits"


def test_frames_are_not_held_up_by_an_endpoint(stub, web):
    """A tick looks and goes on: a call with a dead slow endpoint hears and is silent, frame by frame."""

    async def silent(request, send):
        await stub.loop.create_future()

    stub.answers |= {CHAT: silent, WORDS: silent}
    language = chat(web, stub, patient=False)
    recognizer = RemoteRecognizer(web, RecognizerEndpoint(url=stub.url, model="w"))
    talk = Talk(EmbeddedVoice(parts(skills=False, language=language, recognizer=recognizer), threads=1))
    talk.hear(hum(0.1, 800))
    talk.tell(Respond("x"))
    talk.wait(100 * FRAME_MS)
    assert not talk.of(OutputText)
    talk.tell(Cancel())


def test_a_stop_leaves_a_connections_own_tasks_to_anyio():
    """anyio's task that is cancelled before it has begun never awaits what it was given; its group waits for its begin."""
    web, ended = Web(), []

    async def attempt():
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    async def work():
        async with anyio.create_task_group() as connection:
            connection.start_soon(attempt)
            web._loop.stop()  # at the end of this turn, before the attempt begins
            await anyio.sleep_forever()

    stopped = web.begin("a part", work)
    web._thread.join(10)
    assert stopped.cancelled()
    assert ended == [True]
    gc.collect()  # a coroutine that nobody awaited would warn here
