"""The rules of MiniCPM-o's parts: units, chance, the mouth, the ear, text, checkpoints. No network but tiny tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.minicpmo.tiny import checkpoint, recipe
from realtime_omni.errors import ConfigError
from realtime_omni.models import catalog
from realtime_omni.models.minicpmo.config import config_of
from realtime_omni.models.minicpmo.listening import Ear, listen
from realtime_omni.models.minicpmo.mouth import Job, Mouth, Speech, hear, pieces, speak
from realtime_omni.models.minicpmo.sampling import CodeChance, TextChance, choose_codes, choose_words, uniforms
from realtime_omni.models.minicpmo.units import Unit
from realtime_omni.models.minicpmo.vocabulary import Marks, TokenizerFile, readable
from realtime_omni.session.signals import Signal, SpeechStarted, SpeechStopped, TurnCommitted
from realtime_omni.testing.vocoder import Hum

MARKS = Marks(
    unit=0, unit_end=1, listen=2, speak=3, tts_bos=4, chunk_eos=5, chunk_tts_eos=6, turn_eos=7, forbidden=(8,)
)
WORD = 20


# ---------------------------------------------------------------------- units


def _written(unit: Unit, choices: list[int]) -> list[int]:
    rest = iter(choices)
    while not unit.done:
        unit.write(next(rest) if unit.chooses else None)
    return unit.tokens


def test_a_unit_listens_or_speaks_until_its_end() -> None:
    unit = Unit(MARKS, 20, turn_over=True)
    assert _written(unit, [MARKS.listen]) == [MARKS.listen]
    assert unit.listens
    assert unit.turn_over
    unit = Unit(MARKS, 20, turn_over=True)
    assert _written(unit, [MARKS.speak, WORD, MARKS.chunk_eos]) == [MARKS.speak, WORD, MARKS.chunk_eos]
    assert not unit.listens
    assert not unit.turn_over


def test_in_the_middle_of_a_turn_listening_is_replaced() -> None:
    """So the model cannot yield: who interrupts it is the server."""
    unit = Unit(MARKS, 20, turn_over=False)
    assert _written(unit, [MARKS.listen, WORD, MARKS.chunk_tts_eos]) == [MARKS.tts_bos, WORD, MARKS.chunk_tts_eos]


def test_behind_the_end_of_a_turn_listening_is_the_end_of_the_unit() -> None:
    unit = Unit(MARKS, 20, turn_over=False)
    _written(unit, [MARKS.speak, WORD, MARKS.turn_eos, MARKS.listen])
    assert unit.ended_turn
    assert unit.turn_over
    assert not unit.listens


def test_a_units_last_token_is_its_end_and_a_decision_may_be_forced() -> None:
    unit = Unit(MARKS, 4, turn_over=True, forced=MARKS.speak)
    assert _written(unit, [WORD] * 9) == [MARKS.speak, WORD, WORD, MARKS.chunk_eos]
    assert _written(Unit(MARKS, 4, turn_over=True, forced=MARKS.listen), []) == [MARKS.listen]


# ---------------------------------------------------------------------- chance


def _shares(logits: torch.Tensor, chance: TextChance, before: list[int], draws: int = 4000) -> np.ndarray:
    numbers = np.random.default_rng(3).random((draws, 2))
    rows = logits.expand(draws, -1)
    words = choose_words(rows, MARKS, chance, [before] * draws, [tuple(pair) for pair in numbers.tolist()])
    return np.bincount(words, minlength=logits.shape[-1]) / draws


def test_words_are_drawn_in_their_shares_and_the_end_first() -> None:
    """The end by its share of all (temperature 1); else among the best, without what is forbidden. Shares by hand."""
    logits = torch.full((1, 30), -20.0)
    logits[0, [MARKS.chunk_eos, WORD, WORD + 1, 8]] = torch.tensor([0.2, 0.5, 0.3, 0.4]).log()
    plain = TextChance(temperature=1.0, top_k=30, top_p=1.0, repetition=1.0, length=1.0)
    end = 0.2 / 1.4
    shares = _shares(logits, plain, [])
    expected = {MARKS.chunk_eos: end, WORD: (1 - end) * 5 / 8, WORD + 1: (1 - end) * 3 / 8, 8: 0.0}
    for token, share in expected.items():
        assert shares[token] == pytest.approx(share, abs=0.03)


def test_only_the_best_words_stay_and_repeated_ones_lose() -> None:
    logits = torch.full((1, 30), -20.0)
    logits[0, WORD : WORD + 3] = torch.tensor([2.0, 1.5, 1.0])
    few = TextChance(temperature=1.0, top_k=2, top_p=1.0, repetition=1.0, length=1.0)
    assert _shares(logits, few, [])[WORD + 2] == 0
    first = torch.softmax(torch.tensor([2.0, 1.5, 1.0]), 0)[0]
    narrow = TextChance(temperature=1.0, top_k=30, top_p=float(first) - 0.01, repetition=1.0, length=1.0)
    assert _shares(logits, narrow, [])[WORD] == 1
    tired = TextChance(temperature=1.0, top_k=30, top_p=1.0, repetition=2.0, length=1.0)
    odds = np.exp([1.0, 1.5, 1.0])
    assert _shares(logits, tired, [WORD, WORD])[WORD + 1] == pytest.approx(odds[1] / odds.sum(), abs=0.03)


def test_codes_are_drawn_in_their_shares_and_end_only_where_they_may() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(4000, -1)
    draws = np.random.default_rng(4).random(4000).tolist()
    chance = CodeChance(temperature=1.0, repetition=1.0)
    for may_end, expected in ((True, [0.5, 0.3, 0.2]), (False, [0.625, 0.375, 0.0])):
        made = choose_codes(logits, chance, [[]] * 4000, [may_end] * 4000, draws)
        assert np.bincount(made, minlength=3) / 4000 == pytest.approx(expected, abs=0.03)
    tired = CodeChance(temperature=0.0, repetition=2.0)
    assert choose_codes(torch.tensor([[2.0, 1.5, -9.0]]), tired, [[0]], [True], [0.0]) == [1]


def test_numbers_depend_on_seed_and_unit_alone() -> None:
    assert uniforms(1, 2, 4) == uniforms(1, 2, 8)[:4]
    assert uniforms(1, 2, 4) != uniforms(1, 3, 4) != uniforms(2, 3, 4)


# ---------------------------------------------------------------------- the mouth


def test_a_turns_codes_become_seconds_and_its_end_what_is_left() -> None:
    codes = tuple(range(1, 26))
    first, waiting = pieces((0, 0, 0, *codes), first=True, last=False)
    assert first == [((0, 0, 0, *codes), False)]
    assert waiting == codes[-3:]
    steady, waiting = pieces((*waiting, *codes), first=False, last=False)
    assert steady == [((*codes[-3:], *codes), False)]
    end, waiting = pieces((*waiting, *codes[:4]), first=False, last=True)
    assert end == [((*codes[-3:], *codes[:4]), True)]
    assert waiting == ()


def test_a_short_beginning_comes_behind_silence_and_a_long_end_in_the_next_second() -> None:
    hum = Hum(Path(), "cpu")
    (mouth,) = speak(hum, [Speech(Mouth.silent(), (7,) * 10, False)], [None])
    assert len(mouth.pending) == 24_000
    assert not mouth.pending[: 24_000 - 10 * 960].any()
    assert mouth.pending[24_000 - 7 * 960 + 1 :].any()
    sound, mouth = hear(mouth)
    assert len(sound) == 24_000
    assert not len(mouth.pending)
    (mouth,) = speak(hum, [Speech(mouth, (7,) * 25, True)], [None])
    assert mouth.voice is None
    assert mouth.codes == ()
    assert len(mouth.pending) == 28 * 960
    _, mouth = hear(mouth)
    assert len(mouth.pending) == 3 * 960


def test_a_vocoder_gets_every_code_of_a_turn_once_and_its_own_memory() -> None:
    """Sound of three units is the sound of the whole turn at once."""
    hum = Hum(Path(), "cpu")
    units = [tuple(range(1, 26)), tuple(range(3, 28)), tuple(range(5, 12))]
    mouth, heard = Mouth.silent(), []
    for number, codes in enumerate(units):
        (mouth,) = speak(hum, [Speech(mouth, codes, number == 2)], [None])
        heard.append(mouth.pending)
        mouth = Mouth(mouth.voice, mouth.codes, torch.zeros(0))
    whole = (0, 0, 0, *units[0], *units[1], *units[2])
    ((expected, _),) = hum.sound([Job(hum.begin(None), whole, True)])
    assert torch.allclose(torch.cat(heard), expected, atol=1e-4)


# ---------------------------------------------------------------------- the ear


def _listened(*loudness: float) -> list[Signal]:
    signals: list[Signal] = []
    ear = Ear()
    for second, loud in enumerate(loudness):
        noise = np.random.default_rng(second).normal(0, 1, 16_000).astype(np.float32)
        ear = listen(ear, np.clip(noise * loud, -1, 1), 1000.0 * second, signals)
    return signals


def test_a_loud_second_is_an_utterance_and_a_steady_noise_is_none() -> None:
    started, stopped, committed = _listened(0.0001, 0.1, 0.0001)
    assert isinstance(started, SpeechStarted)
    assert started.at_ms == pytest.approx(1000, abs=10)
    assert isinstance(stopped, SpeechStopped)
    assert stopped.at_ms == pytest.approx(2000, abs=10)
    assert isinstance(committed, TurnCommitted)
    assert committed.utterance == started.utterance
    assert not _listened(0.0001, 0.005, 0.0001)
    noise = np.full(16_000, 0.3, np.float32)
    noise[800:] = 0.0001  # 50 ms
    signals: list[Signal] = []
    listen(Ear(), noise, 0.0, signals)
    assert not signals


def test_a_noise_that_stays_is_soon_no_speech() -> None:
    """A fan at -34 dBFS begins an utterance, at most, and ends it within seconds."""
    signals = _listened(*[0.02] * 20)
    assert sum(isinstance(signal, SpeechStarted) for signal in signals) == 1
    assert any(isinstance(signal, TurnCommitted) for signal in signals)


# ---------------------------------------------------------------------- text and checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("minicpm") / "tiny")


def test_letters_of_several_tokens_are_told_whole(folder: Path) -> None:
    words = TokenizerFile(folder)
    tokens = tuple(words.tokens("é你!"))
    assert len(tokens) == 6
    read, unread = readable(words, tokens[:4], last=False)
    assert (read, unread) == ("é", tokens[2:4])
    assert readable(words, (*unread, *tokens[4:]), last=False) == ("你!", ())
    assert readable(words, tokens[:1], last=True)[1] == ()
    assert words.text([words.marks.speak, *words.tokens("a<|turn_eos|>b")]) == "ab"


def _refused(folder: Path, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        catalog.build(recipe(folder))


def test_a_checkpoint_in_several_files_is_the_same(folder: Path, tmp_path: Path) -> None:
    split = checkpoint(tmp_path / "split")
    stored = load_file(split / "model.safetensors")
    names = sorted(stored)
    (split / "model.safetensors").unlink()
    index = {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: stored[name] for name in part}, split / f"part-{number}.safetensors")
        index |= dict.fromkeys(part, f"part-{number}.safetensors")
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    one, two = catalog.build(recipe(folder)), catalog.build(recipe(split))
    for name in ("ears", "talker"):
        mine, other = getattr(one, name).state_dict(), getattr(two, name).state_dict()
        assert all(torch.equal(mine[key], other[key]) for key in mine)
    (split / "part-1.safetensors").unlink()
    _refused(split, r"split lacks part-1\.safetensors")
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    _refused(split, "outside its folder")


def test_names_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    wrong = checkpoint(tmp_path / "wrong")
    stored = load_file(wrong / "model.safetensors")
    del stored["apm.conv1.bias"]
    stored["llm.model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
    stored["tts.emb_code.0.weight"] = torch.zeros(3, 3)
    stored["vpm.anything"] = torch.zeros(1)  # sight, which is not used
    save_file(stored, wrong / "model.safetensors")
    _refused(
        wrong, r"missing: apm\.conv1\.bias; unexpected: llm\.model\.layers\.7.*; other shapes: tts\.emb_code\.0\.weight"
    )
    stored = load_file(checkpoint(tmp_path / "eighth") / "model.safetensors")
    stored["llm.lm_head.weight"] = stored["llm.lm_head.weight"].to(torch.int8)
    save_file(stored, tmp_path / "eighth" / "model.safetensors")
    _refused(tmp_path / "eighth", r"llm\.lm_head\.weight is I8")


def test_another_network_is_refused_by_its_keys(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    assert config_of(raw).language.qk_norm
    raw["tts_config"]["num_vq"] = 4
    raw["attention_bias"] = False
    with pytest.raises(ConfigError, match=r"tts_config\.num_vq=4"):
        config_of(raw)
    raw["tts_config"]["num_vq"] = 1
    del raw["audio_config"]
    with pytest.raises(ConfigError, match="lacks 'audio_config'"):
        config_of(raw)
