"""MiniCPM-o's vocoder against the published modules with tiny random weights: see make_token2wav_golden.py.

In float64 on both sides: a second of phase of a pitch's ninth multiple magnifies float32's last digit ten thousand times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from parity.rebuilt import KEPT, token2wav_weights
from realtime_omni.errors import ArgumentError
from realtime_omni.models.minicpmo.mouth import Job, Voice
from realtime_omni.models.minicpmo.vocoder.convert import convert_weights
from realtime_omni.models.minicpmo.vocoder.token2wav import Sample, Token2Wav
from realtime_omni.models.minicpmo.vocoder.weights import FILE, load

KEPT_AS = json.loads((KEPT / "token2wav" / "weights.json").read_text())
TRACE = load_file(KEPT / "token2wav" / "trace.safetensors")
SAMPLE = Sample(TRACE["voice_codes"], TRACE["voice_mel"], TRACE["voice_speaker"])
SAMPLES = {"one": SAMPLE, "two": Sample(SAMPLE.codes.flip(0), SAMPLE.mel.flip(0), -SAMPLE.speaker)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("token2wav")
    for file, weights in token2wav_weights().items():
        torch.save({name: tensor.double() for name, tensor in weights.items()}, folder / f"{file}.pt")
    convert_weights(folder)
    return folder


@pytest.fixture(scope="module")
def vocoder(folder: Path) -> Token2Wav:
    flow, hift = load(folder / FILE, steps=KEPT_AS["steps"], dtype=torch.float64, device="cpu")
    return Token2Wav(flow, hift, SAMPLES, "cpu", "tiny")


def pieces() -> list[tuple[tuple[int, ...], bool]]:
    codes, begin, out = TRACE["codes"].tolist(), 0, []
    for size in KEPT_AS["pieces"]:
        out.append((tuple(codes[begin : begin + size]), begin + size == len(codes)))
        begin += size - 3
    return out


def said(vocoder: Token2Wav, voice: Voice) -> list[Tensor]:
    sounds = []
    for codes, last in pieces():
        [(sound, voice)] = vocoder.sound([Job(voice, codes, last)])
        sounds.append(sound)
    return sounds


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs.double(), rtol=0, atol=1e-5)


@pytest.mark.req("AC-43")
@torch.no_grad()
def test_the_encoder_writes_what_the_published_one_writes(vocoder: Token2Wav) -> None:
    flow = vocoder.flow
    codes = torch.cat((SAMPLE.codes, torch.full((3,), vocoder.silence)))
    ours, _ = flow.encoder(flow.input_embedding(codes[None]), flow.encoder.empty(1), last=False)
    close(ours[0], TRACE["encoder"])


@torch.no_grad()
def test_a_step_of_the_estimator_is_the_published_one(vocoder: Token2Wav) -> None:
    estimator = vocoder.flow.decoder.estimator
    x = TRACE["x"].T.double()
    entered = torch.cat((x, 0.5 * x, torch.ones_like(x), 0.2 * x), dim=1)[None]
    size = estimator.sizes
    ours, _, _ = estimator(
        entered,
        torch.tensor(0.3).double(),
        torch.zeros(size.depth, 1, 2 * size.channels, 2).double(),
        torch.zeros(size.depth, 1, size.heads, 0, 2 * size.head_size).double(),
    )
    close(ours[0].T, TRACE["estimator"])


@torch.no_grad()
def test_a_streamed_turn_has_the_published_mel_past_what_is_kept_of_it(vocoder: Token2Wav) -> None:
    memory = vocoder.flow.begin(SAMPLE.codes, SAMPLE.mel, SAMPLE.speaker)
    made = []
    for codes, last in pieces():
        mel, memory = vocoder.flow(torch.tensor([codes]), memory, last=last)
        made.append(mel[0])
    close(torch.cat(made, dim=1), TRACE["mel"])


@torch.no_grad()
def test_sound_of_a_given_source_is_the_published_generators(vocoder: Token2Wav) -> None:
    source = 0.1 * torch.randn((1, 9 * 480), generator=torch.Generator().manual_seed(1)).double()
    close(vocoder.hift.decode(TRACE["x"][None].double(), source)[0, :: KEPT_AS["thinned"]], TRACE["decoded"])


@pytest.mark.req("AC-43")
def test_a_streamed_turn_sounds_as_the_published_one(vocoder: Token2Wav) -> None:
    sounds = said(vocoder, vocoder.begin("one"))
    assert [len(sound) for sound in sounds] == TRACE["lengths"].tolist()
    close(torch.cat(sounds)[:: KEPT_AS["thinned"]], TRACE["sound"])


@pytest.mark.parametrize("captured_rows", [None, 3])
def test_calls_of_a_batch_sound_as_each_alone_and_leave_their_memories_as_they_were(
    vocoder: Token2Wav, captured_rows: int | None
) -> None:
    """As on a GPU, with and without graphs: of a turn's six pieces the generator replays four, the flow two."""
    batched = Token2Wav(vocoder.flow, vocoder.hift, SAMPLES, "cpu", "tiny", together=True, captured_rows=captured_rows)
    alone = {name: said(vocoder, vocoder.begin(name)) for name in ("one", "two")}
    voices = [vocoder.begin("one"), vocoder.begin("two"), vocoder.begin("one")]
    for number, (codes, last) in enumerate(pieces()):
        held = [{name: tensor.clone() for name, tensor in voice.items()} for voice in voices]
        made = batched.sound([Job(voice, codes, last) for voice in voices])
        for voice, before in zip(voices, held, strict=True):
            assert all(torch.equal(voice[name], before[name]) for name in before)
        for (sound, _), name in zip(made, ("one", "two", "one"), strict=True):
            close(sound, alone[name][number])
        voices = [vocoder.check({n: t.clone() for n, t in voice.items()}) for _, voice in made]


def test_a_memory_that_was_not_made_here_is_refused(vocoder: Token2Wav) -> None:
    voice = dict(vocoder.begin(None))
    assert vocoder.check(voice).keys() == voice.keys()
    held = sum(t.numel() * t.element_size() for t in voice.values())
    assert held < vocoder.voice_bytes
    wrong: list[dict[str, Tensor]] = [
        {},
        voice | {"past": voice["past"][..., :-1]},
        voice | {"prompt": torch.tensor([2])},
        voice | {"made": torch.tensor([-1])},
        voice | {"made": torch.tensor([4])},
        voice | {"pre": voice["pre"] * float("nan")},
        voice | {"up": voice["up"].float()},
        voice | {"more": torch.zeros(1)},
    ]
    for memory in wrong:
        with pytest.raises(ArgumentError):
            vocoder.check(memory)
    with pytest.raises(ArgumentError, match="no sample"):
        vocoder.begin("three")
    with pytest.raises(ArgumentError, match="too few"):
        vocoder.sound([Job(voice, (1, 2, 3), False)])
    with pytest.raises(ArgumentError, match="codes are"):
        vocoder.sound([Job(voice, (99,) * 12, False)])
