"""Recogniser and synthesizer as endpoints: a stub on a real socket that answers well, slowly, badly, too much, or not."""

import wave
from io import BytesIO

import numpy as np
import pytest

from models.voice.endpoints import SPEECH, WORDS, ears, ended, mouth, pcm, talk_with, tone
from models.voice.stand_ins import hum
from models.voice.stub_endpoint import sends
from realtime_omni.models.voice.remote.speech import Samples
from realtime_omni.models.voice.remote.web import EndpointFailed
from realtime_omni.models.voice.turns import NOT_UNDERSTOOD
from realtime_omni.session.frame import Cancel, Say
from realtime_omni.session.signals import InputTranscript, OutputText, ResponseEnded


def test_a_turn_is_recognised_by_the_endpoint(stub, web):
    stub.answers[WORDS] = sends(b'{"text": " Bonjour. ", "language": "fr"}', kind="application/json")
    talk = talk_with(recognizer=ears(web, stub, body={"language": "fr"}))
    talk.wait(400)
    talk.hear(hum(0.1, 800))
    ended(talk)
    assert [s.text for s in talk.of(InputTranscript)] == ["Bonjour."]
    body = stub.requests[0].body
    assert b'name="model"\r\n\r\nw\r\n' in body
    assert b'name="language"\r\n\r\nfr\r\n' in body
    with wave.open(BytesIO(body[body.index(b"RIFF") :])) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        assert 0.8 < file.getnframes() / 16_000 < 1.5
    assert len({r.body[-3000:] for r in stub.requests}) == len(stub.requests)  # nothing is asked twice


BAD_EARS = {
    "refused": sends(b"no", 500),
    "malformed": sends(b"text", kind="application/json"),
    "no text": sends(b"{}", kind="application/json"),
    "huge": sends(b'{"text": "' + b"x" * 1_000_000),
}


@pytest.mark.parametrize("answer", BAD_EARS.values(), ids=BAD_EARS)
def test_the_embedded_recogniser_hears_where_the_endpoint_fails(stub, web, answer):
    stub.answers[WORDS] = answer
    talk = talk_with(recognizer=ears(web, stub))
    talk.hear(hum(0.1, 800))
    ended(talk)
    assert [s.text for s in talk.of(InputTranscript)] == ["What is the capital of France?"]


def test_without_any_recogniser_left_it_says_that_it_did_not_understand(stub, web):
    stub.answers[WORDS] = sends(b"no", 500)
    talk = talk_with(recognizer=ears(web, stub), recognize=None)
    talk.hear(hum(0.1, 800))
    ended(talk)
    assert list(talk.said().values()) == [NOT_UNDERSTOOD]
    assert talk.facts.entries == ()


@pytest.mark.parametrize("rate", [24_000, 16_000])
def test_a_clause_sounds_as_the_endpoint_says_it_without_its_silence(stub, web, rate):
    silence = np.zeros(rate // 2)
    whole = pcm(np.concatenate((silence, tone(1.0, rate), silence)))

    async def odd_pieces(request, send):
        for at in range(0, len(whole), 777):
            await send(whole[at : at + 777])

    stub.answers[SPEECH] = odd_pieces
    talk = talk_with(synthesizer=mouth(web, stub, rate_hz=rate))
    talk.tell(Say("x", "One two three."))
    ended(talk)
    assert stub.requests[0].json == {"model": "t", "voice": "v", "input": "One two three.", "response_format": "pcm"}
    loud = np.flatnonzero(np.abs(talk.audio) > 0.01)
    assert loud[0] < 0.03 * 24_000
    assert (loud[-1] - loud[0]) / 24_000 == pytest.approx(1.0, abs=0.01)
    assert talk.said()["x"] == "One two three."
    spectrum = np.abs(np.fft.rfft(talk.audio[loud[0] : loud[-1]]))
    assert np.argmax(spectrum) / ((loud[-1] - loud[0]) / 24_000) == pytest.approx(220, abs=2)


def test_a_clause_sounds_before_it_is_complete_and_every_word_is_told_once(stub, web):
    text = "one two three four five six seven eight nine"

    async def slow(request, send):
        await send(pcm(tone(1.0)))
        await stub.going_on.wait()
        await send(pcm(tone(2.0)))

    stub.answers[SPEECH] = slow
    talk = talk_with(synthesizer=mouth(web, stub, patient=False))
    talk.tell(Say("x", text))
    talk.until(OutputText, 10**7)
    for _ in range(20):
        talk.frame()
    assert not talk.of(ResponseEnded)
    before = len(talk.of(OutputText))
    assert 1 <= before < 9
    assert np.count_nonzero(talk.audio) / 24_000 <= 1.0
    stub.go_on()
    ended(talk)
    assert talk.said()["x"] == text
    assert np.count_nonzero(talk.audio) / 24_000 == pytest.approx(3.0, abs=0.05)
    ends = [w.start_ms for w in talk.of(OutputText)]
    assert ends == sorted(ends)


def test_a_barge_in_stops_the_speech_that_still_comes(stub, web):
    async def endless(request, send):
        await send(pcm(tone(1.0)))
        await stub.loop.create_future()

    stub.answers[SPEECH] = endless
    talk = talk_with(synthesizer=mouth(web, stub, patient=False))
    talk.tell(Say("x", "one two three"))
    talk.until(OutputText, 10**7)
    talk.tell(Cancel())
    assert stub.gone.wait(10)


BAD_MOUTHS = {
    "refused": sends(b"no", 429),
    "json": sends(b"{}", kind="application/json; charset=utf-8"),
    "a file": sends(b"RIFF1234WAVE"),
    "nothing": sends(b""),
    "huge": sends(bytes(24_000 * 2 * 61)),
}


@pytest.mark.parametrize("answer", BAD_MOUTHS.values(), ids=BAD_MOUTHS)
@pytest.mark.parametrize("embedded", [True, False])
def test_without_its_endpoint_a_clause_is_said_by_the_embedded_voice_or_told_as_text(stub, web, answer, embedded):
    stub.answers[SPEECH] = answer
    talk = talk_with(synthesizer=mouth(web, stub), **({} if embedded else {"say": None}))
    talk.tell(Say("x", "one two three"))
    ended(talk)
    assert talk.said()["x"] == "one two three"
    assert bool(talk.audio.any()) is embedded


def test_an_endpoint_that_failed_at_a_clause_is_asked_again_when_it_is_said_again(stub, web):
    stub.answers[SPEECH] = sends(b"busy", 503)
    talk = talk_with(synthesizer=mouth(web, stub), say=None)
    talk.tell(Say("x", "Yes."))
    ended(talk)
    assert not talk.audio.any()
    assert len(stub.requests) == 1
    stub.answers[SPEECH] = sends(pcm(np.full(4800, 0.5)))
    talk.tell(Say("y", "Yes."))
    talk.wait(1000)
    assert talk.audio.any()
    assert len(stub.requests) == 2


def test_samples_keep_the_pauses_inside_and_drop_those_around():
    quiet, loud = np.zeros(24_000), np.full(2_400, 0.5)
    samples = Samples(24_000)
    got = [samples.feed(pcm(np.concatenate((quiet, loud, quiet[:4_800], loud, quiet))))]
    got.append(samples.end())
    audio = np.concatenate(got)
    assert np.flatnonzero(audio)[0] == 480  # 20 ms
    assert len(audio) == 480 + 2_400 + 4_800 + 2_400 + 2_880  # and 120 ms
    with pytest.raises(EndpointFailed, match="is a file"):
        Samples(24_000).feed(b"OggS....")
