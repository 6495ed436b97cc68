"""What was said, from a transcription endpoint: ``POST {url}/audio/transcriptions`` with a WAV file, JSON back."""

from __future__ import annotations

import io
import wave

import msgspec
import numpy as np

from realtime_omni.models.voice.remote.settings import RecognizerEndpoint
from realtime_omni.models.voice.remote.web import Asked, EndpointFailed, Request, Web, whole
from realtime_omni.models.voice.state import Kept

RATE = 16_000
_MOST_BYTES = 1 << 18
_MOST_CHARS = 2_000


class Transcript(Request):
    """``text``, once it is done."""

    text = ""


class _Answer(msgspec.Struct):
    text: str


class RemoteRecognizer:
    """Words of a turn. ``settings.fall_back`` is for who asks."""

    def __init__(self, web: Web, settings: RecognizerEndpoint, *, patient: bool = False) -> None:
        self._web = web
        self._settings = settings
        self._asked = Asked(self._begin, patient=patient)

    def look(self, turn: Kept) -> Transcript:
        """``turn``: int16 [n] at 16 kHz. Asking begins it; the same sound is asked about once."""
        return self._asked.look(turn.tobytes(), turn)

    def _begin(self, turn: Kept) -> Transcript:
        transcript = Transcript()
        transcript.follow(self._web.begin("the recogniser's endpoint", lambda: self._ask(turn, transcript)))
        return transcript

    async def _ask(self, turn: Kept, transcript: Transcript) -> None:
        fields = {"model": self._settings.model, "response_format": "json"} | self._settings.body
        form = {name: str(value) for name, value in fields.items() if value is not None}
        file = ("turn.wav", wav(turn), "audio/wav")
        async with self._web.post(self._settings, "/audio/transcriptions", data=form, files={"file": file}) as response:
            body = await whole(response, _MOST_BYTES)
        try:
            transcript.text = msgspec.json.decode(body, type=_Answer).text.strip()[:_MOST_CHARS]
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise EndpointFailed('the answer is no JSON with a "text"') from None


def wav(turn: Kept) -> bytes:
    """A file of 16-bit samples, mono."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(turn.astype(np.dtype("<i2")).tobytes())
    return file.getvalue()
