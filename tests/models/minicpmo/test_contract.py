"""MiniCPM-o behind the duplex contract: check_model, prompts, exact contexts, and going back to the heard second."""

from __future__ import annotations

import re
import wave
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from models.minicpmo.tiny import checkpoint, recipe
from realtime_omni.build import kv_spec
from realtime_omni.config import Config
from realtime_omni.engine import commands as c
from realtime_omni.errors import ArgumentError, ConfigError, OmniError
from realtime_omni.models import catalog
from realtime_omni.models.base import SessionSetup
from realtime_omni.models.minicpmo.loader import check_voices
from realtime_omni.models.minicpmo.model import MiniCPMO
from realtime_omni.session.frame import Cancel, Configure, Directive, Frame, Respond
from realtime_omni.session.signals import ResponseEnded, ResponseStarted, Speaking
from realtime_omni.session.values import Chunk, SessionId
from realtime_omni.testing.check_model import check_model
from realtime_omni.testing.faults import inject
from realtime_omni.testing.inline import InlineEngine

GREEDY = {"code_temperature": 0.0, "code_repetition": 1.0}
"""Of codes alone: 25 draws a second are most of a tiny tick."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its calls listen, speak and end turns, each in its time."""
    return checkpoint(tmp_path_factory.mktemp("minicpm") / "tiny", talkative=4.0)


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    return recipe(folder, **GREEDY)


@pytest.fixture(scope="module")
def model(config: Config) -> MiniCPMO:
    made = catalog.build(config)
    assert isinstance(made, MiniCPMO)
    return made


@pytest.mark.timeout(400)  # twenty seconds of one core, and a machine may be busy
def test_a_tiny_minicpm_keeps_the_model_contract(folder: Path) -> None:
    """Every rule: batches, faults, rewinds, saved calls here and in another process, grammar, cancels."""
    report = check_model(recipe(folder, unit_words=4, **GREEDY))
    assert report.passed, str(report)


def _sound(number: int) -> np.ndarray:
    return np.random.default_rng(number).normal(0, 0.1, 16_000).astype(np.float32)


def hear(engine: InlineEngine, name: str, number: int, *directives: Directive) -> Chunk:
    frame = Frame(_sound(number), directives)
    chunk = engine.ask(c.Next(ticket=0, session_id=SessionId(name), frame=frame))
    assert isinstance(chunk, Chunk)
    return chunk


def speech(chunk: Chunk) -> np.ndarray:
    return np.asarray(chunk.artifacts["speech"].data)


# ---------------------------------------------------------------------- the context


def test_the_context_holds_what_was_read_and_written_and_nothing_else(model: MiniCPMO, config: Config) -> None:
    """Tokens that the language model reads are counted as they pass: prompt and units have exactly so many, what a page has
    beyond them is zero, and every unit is <unit>, ten tokens of sound, what was written, </unit>."""
    read: list[int] = []
    hook = model._mind.language.decoder.register_forward_pre_hook(lambda module, args: read.append(args[0].shape[1]))
    engine = InlineEngine(model, config)
    engine.create("a", seed=1)
    try:
        for number in range(9):
            before = sum(read)
            hear(engine, "a", number, *((Respond(f"x{number}"),) if number in (1, 5) else ()))
            engine.rest()
            facts = engine.state_of("a").facts
            prompt = model._prompts.tokens(facts.prompt)
            if number:
                assert sum(read) - before == facts.lengths[-1]
            else:
                assert sum(read) == prompt + facts.lengths[0] == prompt + 13  # <unit>, ten, <|listen|>, </unit>
            assert facts.tokens == sum(read) == prompt + sum(facts.lengths)
    finally:
        hook.remove()
    assert len(set(facts.lengths)) > 1, "every unit is as long: nothing is proven"
    table, storage = engine.runner.book.table("a", "main"), engine.runner.storage
    for frame in table.retained():
        keys, values = storage.read(0, [frame])
        sinks = model.spec.kv.sink_frames
        held = (
            model._prompts.held(facts.prompt, frame.index)
            if frame.index < sinks
            else facts.lengths[frame.index - facts.frames]
        )
        assert bool((keys[:held].abs().sum((1, 2)) > 0).all())
        assert not bool(keys[held:].any())
        assert not bool(values[held:].any())


def test_a_tick_that_fails_anywhere_in_a_speaking_second_runs_again_alike(model: MiniCPMO, config: Config) -> None:
    """The first tick of a call, which the rules look at, thinks nothing yet."""
    engine, control = InlineEngine(model, config), InlineEngine(model, config)
    for each in (engine, control):
        each.create("a", seed=1)
        hear(each, "a", 0)
        each.rest()
    seen: list[str] = []
    control.runner.faults = lambda point, sessions: seen.append(point)
    expected = hear(control, "a", 1, Respond("x"))
    points = [point for point in seen if point != "release"]
    assert len(points) > 6
    for point in points:
        with inject(engine, point), pytest.raises(OmniError):
            hear(engine, "a", 1, Respond("x"))
        engine.rollback("a")
    again = hear(engine, "a", 1, Respond("x"))
    assert again.signals == expected.signals
    assert np.array_equal(speech(again), speech(expected))


def test_a_prompt_that_fails_runs_again(model: MiniCPMO, config: Config) -> None:
    engine, control = InlineEngine(model, config), InlineEngine(model, config)
    for each in (engine, control):
        each.create("a", seed=1)
    hear(engine, "a", 0)
    with inject(engine, "prefill:1"):
        engine.rest()
    assert engine.view("a").state == "failed"
    engine.rollback("a")
    hear(control, "a", 0)
    assert np.array_equal(speech(hear(engine, "a", 1)), speech(hear(control, "a", 1)))


def test_calls_hold_no_more_than_is_planned_for_them(model: MiniCPMO, config: Config) -> None:
    """With the states of four rewinds, through several windows of the encoder and turns of the talker."""
    engine = InlineEngine(model, config)
    engine.create("a", seed=0)
    planned = kv_spec(config, model.spec).model_owned_bytes_per_session
    most = 0
    for number in range(14):
        hear(engine, "a", number, Respond(f"x{number}"))
        most = max(most, engine.runner.state_bytes(SessionId("a")))
    assert most <= planned


def test_a_call_goes_back_to_the_heard_second_and_keeps_its_pages(model: MiniCPMO, config: Config) -> None:
    """Rewound by three seconds and told something else, it is the call that was told so at once; units have left since."""
    engine = InlineEngine(model, config)
    for name in ("a", "b"):
        engine.create(name, seed=5)
    for number in range(11):
        hear(engine, "a", number, Respond(f"x{number}"))
    for number in range(8):
        hear(engine, "b", number, Respond(f"x{number}"))
    engine.rewind("a", 8)
    for number in range(40, 43):
        sound = speech(hear(engine, "a", number))
        assert sound.any()
        assert np.array_equal(sound, speech(hear(engine, "b", number)))


# ---------------------------------------------------------------------- what is asked for and told


def test_a_response_that_is_asked_for_begins_and_a_cancel_is_heard_at_once(model: MiniCPMO, config: Config) -> None:
    """The unit of the cancel listens, its turn is over, and the call goes on."""
    engine = InlineEngine(model, config)
    engine.create("a", seed=3)
    hear(engine, "a", 0, Respond("asked"))
    chunk = hear(engine, "a", 1)
    assert chunk.signals[:2] == (ResponseStarted("asked"), Speaking("asked"))
    assert speech(chunk).any()
    cut = hear(engine, "a", 2, Cancel())
    ended = [(s.response, s.reason) for s in cut.signals if isinstance(s, ResponseEnded)]
    assert ended == [("asked", "cancelled")]
    assert not speech(cut).any()
    state = engine.state_of("a")
    assert state.facts.lengths[-1] == 13
    assert state.facts.turn_over
    assert not state.turn
    assert not len(state.mouth.pending)
    assert hear(engine, "a", 3).chunk_index == 3


def test_a_calls_first_second_names_its_text_and_another_text_is_another_call(model: MiniCPMO, config: Config) -> None:
    engine = InlineEngine(model, config)
    for name in ("kind", "rude", "plain"):
        engine.create(name, seed=1)
    hear(engine, "kind", 0, Configure(instructions="be kind"))
    hear(engine, "rude", 0, Configure(instructions="be rude"))
    hear(engine, "plain", 0)
    engine.rest()
    texts = {name: engine.state_of(name).facts.prompt.before for name in ("kind", "rude", "plain")}
    words = model._words
    assert words.text(texts["kind"]).endswith("be kind")
    assert words.text(texts["plain"]).endswith("Streaming Omni Conversation.")
    assert engine.state_of("kind").facts.tokens == len(texts["kind"]) + 13
    sounds = [speech(hear(engine, name, 1, Respond("x"))) for name in ("kind", "rude")]
    assert not np.array_equal(*sounds)


def test_a_text_that_is_too_long_is_refused_at_the_door_and_cut_in_a_frame(model: MiniCPMO, config: Config) -> None:
    with pytest.raises(ArgumentError, match="tokens too long"):
        model.open(SessionSetup(SessionId("a"), "x" * 100, 0))
    engine = InlineEngine(model, config)
    engine.create("a", seed=1)
    hear(engine, "a", 0, Configure(instructions="x" * 100))
    engine.rest()
    room = model._prompts.frames * model._prompts.per_frame
    assert model._prompts.tokens(engine.state_of("a").facts.prompt) == room


def test_a_voice_is_part_of_the_prompt(folder: Path, tmp_path: Path) -> None:
    """Two seconds are twenty tokens between their marks; a call that is saved goes on in its voice."""
    other = checkpoint(tmp_path / "voiced")
    (other / "voices").mkdir()
    with wave.open(str(other / "voices" / "north.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((np.concatenate([_sound(1), _sound(2)]) * 32767).astype("<i2").tobytes())
    config = recipe(other, prompt_tokens=96, **GREEDY)
    model = catalog.build(config)
    assert isinstance(model, MiniCPMO)
    assert model.spec.duplex is not None
    assert model.spec.duplex.voices == ("north",)
    engine = InlineEngine(model, config)
    engine.create("a", seed=1)
    hear(engine, "a", 0)
    engine.rest()
    prompt = engine.state_of("a").facts.prompt
    assert model._prompts.tokens(prompt) == len(prompt.before) + 20 + len(prompt.after)
    engine.restore(engine.snapshot("a"), "b")
    assert np.array_equal(speech(hear(engine, "a", 1)), speech(hear(engine, "b", 1)))
    with pytest.raises(ArgumentError, match="known: north"):
        hear(engine, "a", 2, Configure(voice="south"))


# ---------------------------------------------------------------------- what is refused


def _refused(config: Config, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        catalog.build(config)


def test_what_does_not_fit_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    _refused(recipe(tmp_path / "nowhere"), "must be a folder")
    _refused(recipe(folder, vocoder="nowhere:Vocoder"), "vocoder cannot be imported")
    _refused(recipe(folder, vocoder="plain"), r"package\.module:factory")
    _refused(recipe(folder, window=400), "the model reads 4096")
    bare = checkpoint(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    _refused(recipe(bare), "bare lacks tokenizer.json")
    (bare / "model.safetensors").unlink()
    (bare / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    _refused(recipe(bare), "bare lacks model.safetensors")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("1 +\n", r"cannot be imported: SyntaxError: .*\(own_vocoder_0\.py, line 1\)$"),
        ("{}['import']\n", r"cannot be imported: KeyError: 'import' \(own_vocoder_1\.py, line 1\)$"),
        ("", r"cannot be imported: AttributeError: .*'own_vocoder_2' has no attribute 'Mine'$"),
        (
            "def Mine(folder, device):\n    {}['load']\n",
            r"could not be loaded: KeyError: 'load' \(own_vocoder_3\.py, line 2\)$",
        ),
        (
            "class Mine:\n    silence = begin = 0\n    def __init__(*own_vocoder_4):\n        pass\n",
            r"lacks voice_bytes, fingerprint, sound, check$",
        ),
    ],
    ids=["syntax", "import", "factory", "load", "contract"],
)
def test_an_error_in_a_vocoders_own_file_is_told_with_its_type_and_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    name = re.search(r"own_vocoder_\d", source + why)
    assert name is not None
    (tmp_path / f"{name[0]}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    _refused(recipe(folder, vocoder=f"{name[0]}:Mine"), "the vocoder " + why)


def test_an_error_of_a_vocoder_that_begins_in_a_voice_is_told_likewise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_vocoder_5.py").write_text("class Mine:\n    def begin(self, voice):\n        {}[voice]\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot begin: KeyError: 'north' \(own_vocoder_5\.py, line 3\)$"):
        check_voices(import_module("own_vocoder_5").Mine(), ["north"])


def test_states_share_what_they_remember(model: MiniCPMO, config: Config) -> None:
    """A second later the encoder's past is the same tensors and one more."""
    engine = InlineEngine(model, config)
    engine.create("a", seed=1)
    pasts: list[tuple[Tensor, ...]] = []
    for number in range(6):
        hear(engine, "a", number)
        pasts.append(engine.state_of("a").past)
    assert [len(past) for past in pasts] == [1, 2, 3, 4, 1, 2]
    assert all(a is b for a, b in zip(pasts[2], pasts[3], strict=False))
