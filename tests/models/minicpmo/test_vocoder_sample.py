"""A voice's sample: its spectra against other people's numbers, and the way from a WAV to the file that the vocoder reads."""

from __future__ import annotations

import math
import struct
import wave
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from realtime_omni.errors import ConfigError
from realtime_omni.models.minicpmo.vocoder import sample
from realtime_omni.models.minicpmo.vocoder.convert import convert_voices
from realtime_omni.models.minicpmo.voices import read_voices


def sine(hertz: float, rate: int) -> torch.Tensor:
    return 0.3 * torch.sin(2 * math.pi * hertz * torch.arange(rate) / rate)


def test_the_filter_bank_is_kaldis() -> None:
    """Four bins of a frame as ``kaldi-native-fbank`` 1.23 computes them (dither 0, 80 bins, 16 kHz)."""
    sound = sine(440, 16_000) + 0.05 * torch.randn(16_000, generator=torch.Generator().manual_seed(0))
    bank = sample.filter_bank(sound)
    assert bank.shape == (98, 80)
    theirs = torch.tensor([-7.97368, -3.6538, 0.4448, 2.68851])
    torch.testing.assert_close(bank[3, [0, 10, 40, 79]], theirs, rtol=0, atol=1e-3)


def test_the_spectrogram_has_fifty_frames_a_second_and_a_sine_in_its_bin() -> None:
    """1 kHz is 15 mel of Slaney's scale, 8 kHz 45.245: bin 81 * 15 / 45.245 = 26.85, counted from one."""
    made = sample.spectrogram(sine(1000, 24_000))
    assert made.shape == (50, 80)
    assert set(made[5:-5].argmax(dim=1).tolist()) == {26}


class Session:
    """Stands for an ONNX model: answers with what it is made with, and keeps what it was fed."""

    def __init__(self, names: list[str], answer: np.ndarray) -> None:
        self.names, self.answer, self.fed = names, answer, {}

    def get_inputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in self.names]

    def run(self, outputs: None, fed: dict[str, np.ndarray]) -> list[np.ndarray]:
        self.fed = fed
        return [self.answer]


def test_a_wav_becomes_a_sample_by_the_two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tmp_path / "assets" / "token2wav"
    files.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"lacks voices/NAME\.wav"):
        convert_voices(tmp_path)
    (tmp_path / "voices").mkdir()
    with wave.open(str(tmp_path / "voices" / "north.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((sine(300, 16_000) * 32767).numpy().astype("<i2").tobytes())
    with pytest.raises(ConfigError, match="token2wav lacks speech_tokenizer_v2_25hz"):
        convert_voices(tmp_path)
    tokenizer = Session(["feats", "feats_length"], np.arange(26, dtype=np.int32)[None])
    speaker = Session(["input"], np.ones((1, 192), np.float32))
    sessions = {sample.TOKENIZER: tokenizer, sample.SPEAKER: speaker}
    monkeypatch.setattr(sample, "_session", lambda path: sessions[path.name])
    [written] = convert_voices(tmp_path)
    made = load_file(written)
    assert written.name == "voice-north.safetensors"
    assert made["codes"].tolist() == list(range(26))
    assert made["mel"].shape == (52, 80)
    assert torch.equal(made["mel"][50], made["mel"][49])  # as long as the codes
    assert made["speaker"].shape == (192,)
    assert tokenizer.fed["feats"].shape == (1, 128, 100)
    assert tokenizer.fed["feats_length"].tolist() == [100]
    assert speaker.fed["input"].shape == (1, 98, 80)
    assert np.abs(speaker.fed["input"].mean(axis=1)).max() < 1e-4


def wav(seconds: float, *, rate: int = 16_000, width: int = 2, channels: int = 1) -> bytes:
    with BytesIO() as written:
        with wave.open(written, "wb") as file:
            file.setnchannels(channels)
            file.setsampwidth(width)
            file.setframerate(rate)
            file.writeframes(bytes(round(seconds * rate) * width * channels))
        return written.getvalue()


FLOATS = b"".join(
    [
        struct.pack("<4sI4s", b"RIFF", 36 + 64_000, b"WAVE"),
        struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, 16_000, 64_000, 4, 32),
        struct.pack("<4sI", b"data", 64_000),
        np.full(16_000, np.nan, "<f4").tobytes(),
    ]
)
FORM, UNREADABLE = "16-bit mono at 16 kHz, 1 to 30 s", "cannot be read as a WAV file"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        pytest.param(wav(0), FORM, id="nothing"),
        pytest.param(wav(0.9), FORM, id="short"),
        pytest.param(wav(30.001), FORM, id="long"),
        pytest.param(wav(600), FORM, id="ten minutes"),
        pytest.param(wav(2, width=1), FORM, id="8 bits"),
        pytest.param(wav(2, width=3), FORM, id="24 bits"),
        pytest.param(wav(2, rate=96_000), FORM, id="96 kHz"),
        pytest.param(wav(2, channels=2), FORM, id="two channels"),
        pytest.param(FLOATS, UNREADABLE, id="floats"),
        pytest.param(b"", UNREADABLE, id="empty"),
        pytest.param(wav(2)[:40], UNREADABLE, id="half a head"),
        pytest.param(wav(2).replace(b"data", b"list"), UNREADABLE, id="no sound"),
        pytest.param(wav(2)[:16] + b"\xff\xff\xff\x7f" + wav(2)[20:], UNREADABLE, id="a part longer than its file"),
    ],
)
def test_a_wav_that_is_no_voice_is_refused(data: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "north.wav").write_bytes(data)
    with pytest.raises(ConfigError, match=why):
        read_voices(tmp_path)


def test_a_wav_that_was_cut_short_within_a_number_is_read_up_to_there(tmp_path: Path) -> None:
    (tmp_path / "north.wav").write_bytes(wav(2)[:-5])
    assert read_voices(tmp_path)["north"].shape == (31_997,)


def test_an_onnx_model_of_something_else_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sample, "_session", lambda path: Session(["only"], np.zeros(1)))
    with pytest.raises(ConfigError, match=r"speech_tokenizer_v2_25hz\.onnx takes no sound"):
        sample.sample_of(sine(300, 16_000), tmp_path)
