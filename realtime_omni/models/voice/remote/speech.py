"""How it sounds, from a speech endpoint: ``POST {url}/audio/speech``, 16-bit samples that are played while they come."""

from __future__ import annotations

from typing import Any

import numpy as np
import soxr  # type: ignore[import-untyped]

from realtime_omni.models.voice.remote.settings import SynthesizerEndpoint
from realtime_omni.models.voice.remote.web import Asked, EndpointFailed, Request, Web, pieces
from realtime_omni.models.voice.speech import LEAD_S, LOUD, RATE, TAIL_S
from realtime_omni.models.voice.state import Sound

MOST_S = 60.0
"""Of one clause."""
_NOTHING: Sound = np.zeros(0, np.float32)


class Spoken(Request):
    """Sound of a clause so far, at 24 kHz."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[Sound] = []

    def add(self, audio: Sound) -> None:
        if len(audio):
            self._parts.append(audio)

    @property
    def audio(self) -> Sound:
        """float32 [n] in -1..1; only grows."""
        parts = self._parts
        if len(parts) > 1:
            count = len(parts)
            return np.concatenate(parts[:count])
        return parts[0] if parts else _NOTHING


class RemoteSynthesizer:
    """Sound of clauses. ``settings.fall_back`` is for who asks."""

    def __init__(self, web: Web, settings: SynthesizerEndpoint, *, patient: bool = False) -> None:
        self._web = web
        self._settings = settings
        self._asked = Asked(self._begin, patient=patient)

    def look(self, clause: str, call: str) -> Spoken:
        """Asking begins it. Each call has sound of its own, which another's barge-in does not stop."""
        return self._asked.look((call, clause), clause)

    def forgive(self, clause: str, call: str) -> None:
        """Where it failed, the next time that this is said it is asked again."""
        self._asked.forgive((call, clause))

    def drop(self, clause: str, call: str) -> None:
        self._asked.drop((call, clause))

    def _begin(self, clause: str) -> Spoken:
        spoken = Spoken()
        spoken.follow(self._web.begin("the synthesizer's endpoint", lambda: self._ask(clause, spoken)))
        return spoken

    async def _ask(self, clause: str, spoken: Spoken) -> None:
        settings = self._settings
        fields: dict[str, Any] = {"model": settings.model, "voice": settings.voice, "input": clause}
        fields |= {"response_format": "pcm"} | settings.body
        body = {name: value for name, value in fields.items() if value is not None}
        samples = Samples(settings.rate_hz)
        async with self._web.post(settings, "/audio/speech", json=body) as response:
            kind = response.headers.get("content-type", "")
            if "json" in kind or kind.startswith("text/"):
                raise EndpointFailed("the answer is text, not sound")
            async for piece in pieces(response, int(MOST_S * settings.rate_hz) * 2):
                spoken.add(samples.feed(piece))
        spoken.add(samples.end())
        if not len(spoken.audio):
            raise EndpointFailed("the answer has no sound")


class Samples:
    """Bytes as they come to sound at 24 kHz, without most of the silence at its beginning and its end."""

    def __init__(self, rate_hz: int) -> None:
        self._odd = b""
        self._begun = False
        self._resampler = (
            None if rate_hz == RATE else soxr.ResampleStream(rate_hz, RATE, 1, dtype="float32", quality="LQ")
        )
        self._loud = False
        self._held: Sound = _NOTHING

    def feed(self, data: bytes) -> Sound:
        """float32. Raises EndpointFailed for a file in place of samples."""
        data = self._odd + data
        if not self._begun and data[:4] in (b"RIFF", b"OggS", b"fLaC", b"ID3\x03", b"ID3\x04"):
            raise EndpointFailed(f"the answer is a file ({data[:4]!r}), not pcm")
        self._begun = self._begun or len(data) >= 4
        whole = len(data) // 2 * 2
        self._odd = data[whole:]
        return self._trim(self._resample(np.frombuffer(data[:whole], "<i2").astype(np.float32) / np.float32(32768)))

    def end(self) -> Sound:
        """The rest, with a short silence at most."""
        loud = self._trim(self._resample(_NOTHING, last=True))
        return np.concatenate((loud, self._held[: int(TAIL_S * RATE)])) if self._loud else loud

    def _resample(self, audio: Sound, *, last: bool = False) -> Sound:
        if self._resampler is None:
            return audio
        return np.asarray(self._resampler.resample_chunk(audio, last=last), np.float32)

    def _trim(self, audio: Sound) -> Sound:
        """Silence is held back until something follows it; before the first sound only its end counts."""
        held = np.concatenate((self._held, np.clip(audio, -1.0, 1.0)))
        loud = np.flatnonzero(np.abs(held) > LOUD)
        if not len(loud):
            self._held = held if self._loud else held[-int(LEAD_S * RATE) :]
            return _NOTHING
        first = 0 if self._loud else max(0, loud[0] - int(LEAD_S * RATE))
        self._loud = True
        self._held = held[loud[-1] + 1 :]
        return held[first : loud[-1] + 1]
