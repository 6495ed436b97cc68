"""Moshi behind the duplex contract: check_model, prompts, what is told, and going back to the heard frame."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models.moshi.tiny import checkpoint, persona, recipe
from realtime_omni.build import kv_spec
from realtime_omni.errors import ArgumentError, ConfigError
from realtime_omni.models import catalog
from realtime_omni.models.moshi import prompts
from realtime_omni.models.moshi.model import Moshi
from realtime_omni.models.moshi.speaking import PAUSE_FRAMES, Speech, advance, obey
from realtime_omni.session.frame import Cancel, Configure, Directive, Frame
from realtime_omni.session.signals import OutputText, ResponseEnded, ResponseStarted, Signal, Speaking, Usage
from realtime_omni.session.values import Chunk, SessionId
from realtime_omni.testing.check_model import check_model
from realtime_omni.testing.grammar import SignalGrammar
from realtime_omni.testing.inline import InlineEngine, small_config


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("moshi") / "tiny")


def test_the_tiny_moshi_keeps_the_model_contract(folder: Path) -> None:
    """With tokens drawn by chance; every rule: batches, faults, rewinds, saved calls here and in another process."""
    report = check_model(recipe(folder))
    assert report.passed, str(report)


def test_the_tiny_persona_keeps_the_model_contract(tmp_path: Path) -> None:
    """Its calls begin with a voice's prompt, and its stages are those that a GPU captures."""
    report = check_model(persona(tmp_path, captured_rows=4))
    assert report.passed, str(report)


# ---------------------------------------------------------------------- prompts


def _frame(number: int, *directives: Directive) -> Frame:
    sound = np.random.default_rng(number).normal(0, 0.1, 1920).astype(np.float32)
    return Frame(sound, directives)


def _hear(engine: InlineEngine, name: str, number: int, *directives: Directive) -> Chunk:
    from realtime_omni.engine import commands as c

    chunk = engine.ask(c.Next(ticket=0, session_id=SessionId(name), frame=_frame(number, *directives)))
    assert isinstance(chunk, Chunk)
    return chunk


def _engine(model: object) -> InlineEngine:
    return InlineEngine(model, small_config(dtype="float32", rewind_blocks=4))  # type: ignore[arg-type]


def _sound(chunk: Chunk) -> np.ndarray:
    return np.asarray(chunk.artifacts["speech"].data)


def test_a_prompt_is_voice_silence_text_silence_in_the_agents_streams(tmp_path: Path) -> None:
    model = persona(tmp_path)
    config, codes = model.lm.config, model._settings.codes
    voice, text = model._voices["south"], (7, 9)
    steps = prompts.length(voice, text)
    assert steps == 5 + 6 + 2 + 6
    columns = [prompts.column(config, codes, voice, text, step)[0] for step in range(steps)]
    assert [c[0] for c in columns] == [3] * 11 + [7, 9] + [3] * 6
    assert voice.codes is not None
    assert [c[1:5] for c in columns] == voice.codes.tolist() + [[1, 2, 3, 4]] * 14
    assert all(c[5:] == [5, 6, 7, 8] for c in columns)
    assert prompts.framed(" be kind ") == "<system> be kind <system>" == prompts.framed("<system> be kind <system>")


def test_a_call_begins_with_the_voice_and_text_that_its_first_frame_asks_for(tmp_path: Path) -> None:
    """And with nothing else; another text is another call, without any it has the first voice."""
    model = persona(tmp_path)
    engine = _engine(model)
    for name in ("told", "other", "plain"):
        engine.create(name, seed=0)
    _hear(engine, "told", 0, Configure(instructions="hello you", voice="south"))
    _hear(engine, "other", 0, Configure(instructions="good bye", voice="south"))
    told = [_sound(_hear(engine, "told", n)) for n in range(1, 8)]
    other = [_sound(_hear(engine, "other", n)) for n in range(1, 8)]
    assert any(not np.array_equal(a, b) for a, b in zip(told, other, strict=True))
    text = model._tokens("hello you")
    assert engine.runner.book.completed_frames("told") == prompts.length(model._voices["south"], text) + 7
    _hear(engine, "plain", 0)
    _hear(engine, "plain", 1)
    assert engine.runner.book.completed_frames("plain") == prompts.length(model._voices["north"], ()) + 1


def test_a_call_that_is_saved_behind_its_prompt_goes_on(tmp_path: Path) -> None:
    """Between two of its frames there are many of history: a prompt's."""
    engine = _engine(persona(tmp_path))
    engine.create("a", seed=0)
    _hear(engine, "a", 0)
    _hear(engine, "a", 1, Configure(instructions="hello"))
    engine.rest()
    engine.restore(engine.snapshot("a"), "b")
    assert np.array_equal(_sound(_hear(engine, "a", 2)), _sound(_hear(engine, "b", 2)))


def test_calls_hold_no_more_than_is_planned_for_them(folder: Path) -> None:
    """With the states of four rewinds, over 40 frames: more than two segments of the codec's past."""
    config = recipe(folder)
    model = catalog.build(config)
    engine = InlineEngine(model, config)
    engine.create("a", seed=0)
    planned = kv_spec(config, model.spec).model_owned_bytes_per_session
    for n in range(40):
        _hear(engine, "a", n)
        assert engine.runner.state_bytes(SessionId("a")) <= planned


def test_a_voice_that_does_not_exist_and_a_text_where_none_is_taken_are_refused(folder: Path, tmp_path: Path) -> None:
    engine = _engine(persona(tmp_path))
    engine.create("a", seed=0)
    with pytest.raises(ArgumentError, match="known: north, south"):
        _hear(engine, "a", 0, Configure(voice="east"))
    plain = InlineEngine(catalog.build(recipe(folder)), recipe(folder))
    plain.create("a", seed=0)
    with pytest.raises(ArgumentError, match="instructions"):
        _hear(plain, "a", 0, Configure(instructions="be kind"))


def test_a_call_goes_back_to_the_heard_frame_and_keeps_its_pages(folder: Path) -> None:
    """Rewound by three frames and told something else, it is the call that was told so at once."""
    config = recipe(folder)
    engine = InlineEngine(catalog.build(config), config)
    engine.create("a", seed=5)
    engine.create("b", seed=5)
    for n in range(30):
        _hear(engine, "a", n)
    for n in range(27):
        _hear(engine, "b", n)
    engine.rewind("a", 27)
    for n in range(40, 46):
        assert np.array_equal(_sound(_hear(engine, "a", n)), _sound(_hear(engine, "b", n)))


def test_a_checkpoint_that_lacks_a_file_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    other = checkpoint(tmp_path / "other")
    (other / "tokenizer_spm_32k_3.model").unlink()
    with pytest.raises(ConfigError, match="other lacks tokenizer_spm_32k_3"):
        catalog.build(recipe(other))


# ---------------------------------------------------------------------- what is told


def test_a_cancelled_agent_is_silent_and_remembers_silence(folder: Path) -> None:
    """For a pause of 1.2 s: no sound, no word; its streams hold padding and the codec's codes of silence."""
    config = recipe(folder)
    model = catalog.build(config)
    assert isinstance(model, Moshi)
    engine = InlineEngine(model, config)
    engine.create("a", seed=3)
    frames = 0
    while not any(isinstance(s, Speaking) for s in _hear(engine, "a", frames).signals):
        frames += 1
    chunk = _hear(engine, "a", frames + 1, Cancel())
    assert [s.reason for s in chunk.signals if isinstance(s, ResponseEnded)] == ["cancelled"]
    for n in range(PAUSE_FRAMES - 1):
        assert not _sound(chunk).any()
        assert not any(isinstance(s, (Speaking, OutputText)) for s in chunk.signals)
        ring, steps = engine.state_of("a").ring, engine.runner.book.completed_frames("a")
        assert ring[:5, steps % ring.shape[1]].tolist() == model._thinking.hush.tolist()
        chunk = _hear(engine, "a", frames + 2 + n)


def _say(speech: Speech, pieces: list[str], first: int = 0) -> tuple[Speech, list[Signal]]:
    signals: list[Signal] = []
    grammar = SignalGrammar()
    for n, piece in enumerate(pieces, first):
        told: list[Signal] = []
        speech = advance(speech, piece, 80.0 * n, 80.0 * (n + 1), told)
        grammar.take(tuple(told), 80.0 * n, 80.0 * (n + 1))
        signals += told
    return speech, signals


def test_a_response_begins_with_a_word_and_ends_in_a_pause() -> None:
    speech, signals = _say(Speech(), ["", " hel", "lo", *[""] * (PAUSE_FRAMES + 3), " so"])
    assert signals[:3] == [ResponseStarted("moshi-0"), Speaking("moshi-0"), OutputText("moshi-0", " hel", 80.0, 160.0)]
    ended = signals.index(ResponseEnded("moshi-0", "completed", Usage(output_text=2, output_audio=1 + PAUSE_FRAMES)))
    assert signals[ended + 1] == ResponseStarted("moshi-1")
    assert speech.response == "moshi-1"


def test_a_cancelled_response_stays_silent_until_the_model_pauses() -> None:
    speech, _ = _say(Speech(), [" one", " two"])
    told: list[Signal] = []
    speech = obey(speech, (Cancel("another"),), told)
    assert not told
    speech = obey(speech, (Cancel(),), told)
    assert told == [ResponseEnded("moshi-0", "cancelled", Usage(output_text=2, output_audio=2))]
    speech, signals = _say(speech, [" three", *[""] * (PAUSE_FRAMES - 1)], 2)
    assert speech.muted
    assert not signals
    speech, signals = _say(speech, ["", " four"], 20)
    assert signals[0] == ResponseStarted("moshi-1")
