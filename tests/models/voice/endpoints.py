"""Parts of a voice that ask a stub, and a call that has them."""

import numpy as np

from models.voice.stand_ins import parts
from models.voice.talk import Talk
from realtime_omni.models.voice.model import EmbeddedVoice
from realtime_omni.models.voice.remote.chat import ChatEndpoint
from realtime_omni.models.voice.remote.hearing import RemoteRecognizer
from realtime_omni.models.voice.remote.settings import LanguageEndpoint, RecognizerEndpoint, SynthesizerEndpoint
from realtime_omni.models.voice.remote.speech import RemoteSynthesizer
from realtime_omni.session.frame import Tool
from realtime_omni.session.signals import ResponseEnded

CHAT, SPEECH, WORDS = "/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions"
WEATHER = Tool("weather", "The weather of a city.", {"type": "object", "properties": {"city": {"type": "string"}}})
KEY = "sk-secret-0123456789"


def chat(web, stub, *, patient=True, **settings):
    return ChatEndpoint(web, LanguageEndpoint(url=stub.url, model="m", timeout_s=5.0, **settings), patient=patient)


def talk_with(**remote):
    """A call whose parts are stand-ins but for these; rules do not answer."""
    return Talk(EmbeddedVoice(parts(skills=False, **remote), threads=0))


def ended(talk):
    """Until all that was begun has ended; an answer without sound ends in the frame that asked for it."""
    for _ in range(10**6):
        if talk.grammar.running is None and talk.of(ResponseEnded) and not talk.facts.pending:
            return
        talk.frame()


def pcm(samples):
    return (np.asarray(samples, np.float32) * 32767).astype("<i2").tobytes()


def ears(web, stub, **settings):
    return RemoteRecognizer(web, RecognizerEndpoint(url=stub.url, model="w", timeout_s=5.0, **settings), patient=True)


def mouth(web, stub, *, patient=True, **settings):
    made = SynthesizerEndpoint(url=stub.url, model="t", voice="v", timeout_s=5.0, **settings)
    return RemoteSynthesizer(web, made, patient=patient)


def tone(seconds, rate=24_000):
    return 0.5 * np.sin(2 * np.pi * 220 * np.arange(int(seconds * rate)) / rate)
