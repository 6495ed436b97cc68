"""What the voice hears: speech activity, end of turn, words. The networks are the real ones, where they are there."""

import re
import shutil

import numpy as np
import pytest

from models.voice.real import needs_weights, spoken
from realtime_omni.models.voice.activity import SILENCE, WINDOW, VoiceActivity
from realtime_omni.models.voice.endpoint import SAMPLES, EndOfTurn, last_eight_seconds, log_mel
from realtime_omni.models.voice.recognizer import Recognizer, read_pieces
from realtime_omni.models.voice.speech import Synthesizer
from realtime_omni.models.voice.weights import cache_folder


@pytest.fixture(scope="module")
def activity():
    return VoiceActivity(cache_folder() / "silero_vad.onnx")


@pytest.fixture(scope="module")
def recognizer():
    parts = ("moonshine_encoder.ort", "moonshine_decoder.ort", "moonshine_tokenizer.bin")
    return Recognizer(*(cache_folder() / part for part in parts))


@pytest.fixture(scope="module")
def question():
    """Half a second of silence, "What is the capital of France?", half a second of silence; 16 kHz."""
    import soxr

    said = soxr.resample(Synthesizer()("What is the capital of France?"), 24_000, 16_000)
    quiet = np.zeros(8_000, np.float32)
    return np.concatenate((quiet, said.astype(np.float32), quiet))


def test_the_log_mel_picture_is_whispers():
    """Every constant written out again, the transform as the sum it is."""
    rng = np.random.default_rng(3)
    audio = rng.normal(0, 0.1, SAMPLES).astype(np.float32)
    got = log_mel(audio)
    assert got.shape == (80, 800)
    x = (audio - audio.mean()) / np.sqrt(audio.var() + 1e-7)
    padded = np.concatenate((x[200:0:-1], x, x[-2:-202:-1]))
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    wave = np.exp(-2j * np.pi * np.arange(201)[:, None] * np.arange(400)[None] / 400)
    power = np.abs(wave @ (np.lib.stride_tricks.sliding_window_view(padded, 400)[::160][:800] * window).T) ** 2
    edges = np.linspace(0, 15 + 27 * np.log(8) / np.log(6.4), 82)  # 8 kHz on Slaney's scale
    hertz = [m * 200 / 3 if m < 15 else 1000 * 6.4 ** ((m - 15) / 27) for m in edges]
    mel = np.zeros((80, 201))
    for i, (low, mid, high) in enumerate(zip(hertz, hertz[1:], hertz[2:], strict=False)):
        for k in range(201):
            f = k * 40.0
            rise, fall = (f - low) / (mid - low), (high - f) / (high - mid)
            mel[i, k] = max(0.0, min(rise, fall)) * 2 / (high - low)
    log = np.log10(np.maximum(mel @ power, 1e-10))
    want = (np.maximum(log, log.max() - 8) + 4) / 4
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


def test_eight_seconds_are_the_last_ones_with_silence_in_front():
    assert np.array_equal(last_eight_seconds(np.ones(3, np.float32))[-4:], [0, 1, 1, 1])
    long = np.arange(SAMPLES + 5, dtype=np.float32)
    assert np.array_equal(last_eight_seconds(long), long[5:])


def test_pieces_are_read_by_their_length_of_one_byte_or_two():
    long = b"x" * 300
    data = bytes([2]) + b"ab" + bytes([0x80 | (300 & 0x7F), 300 >> 7]) + long + bytes([0])
    assert read_pieces(data) == [b"ab", long, b""]
    for cut in (len(data) - 200, 4):
        with pytest.raises(ValueError, match="ends inside"):
            read_pieces(data[:cut])


@needs_weights
def test_speech_is_told_from_silence_whatever_the_pieces_and_the_batch(activity, question):
    _, [whole] = activity.hear([SILENCE], [question])
    assert len(whole) == len(question) // WINDOW
    state, pieces = SILENCE, []
    for start in range(0, len(question), 1280):
        _, [silent] = activity.hear([SILENCE], [np.zeros(1280, np.float32)])
        [state, _], [part, _] = activity.hear(
            [state, SILENCE], [question[start : start + 1280], np.zeros(1280, np.float32)]
        )
        pieces += part
    np.testing.assert_allclose(pieces, whole, atol=1e-4)
    assert max(silent) < 0.1
    speech = [i * 32 for i, p in enumerate(whole) if p > 0.5]
    assert 400 <= speech[0] <= 700
    assert speech[-1] <= len(question) / 16 - 400
    assert np.mean([p > 0.5 for p in whole[20:60]]) > 0.9


@needs_weights
def test_noise_is_no_speech(activity):
    noise = np.random.default_rng(0).normal(0, 0.05, 16_000 * 10).astype(np.float32)
    _, [heard] = activity.hear([SILENCE], [noise])
    assert max(heard) < 0.5


@needs_weights
def test_a_finished_question_ends_the_turn_and_half_of_it_does_not(question):
    judge = EndOfTurn(cache_folder() / "smart_turn.onnx")
    assert judge(question) > 0.5
    assert judge(question[:20_000]) < 0.5


@needs_weights
def test_words_are_recognised(recognizer, question):
    assert recognizer(question) == "What is the capital of France?"
    assert len(recognizer(np.zeros(10, np.float32))) < 10  # too short for the network by itself


@needs_weights
def test_more_than_nine_seconds_are_recognised(recognizer, question):
    assert recognizer(np.tile(question, 4)).count("capital of France") == 4


SAID = (
    "what is the weather like in london today",
    "please turn left and walk forward",
    "tell me something about the history of bread",
    "how many people live in new york",
    "i would like to order a cup of coffee",
    "can you help me with my homework",
)


@needs_weights
@pytest.mark.parametrize("program", ["flite", "espeak-ng"])
def test_at_most_fifteen_words_in_a_hundred_of_other_synthesisers_are_wrong(recognizer, program, tmp_path):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    wrong = words = 0
    for sentence in SAID:
        heard = re.sub(r"[^a-z ]", "", recognizer(spoken(program, sentence, tmp_path)).lower())
        wrong += edits(sentence.split(), heard.split())
        words += len(sentence.split())
    assert wrong <= 0.15 * words, f"{wrong} of {words} words"


def edits(want: list[str], got: list[str]) -> int:
    """Levenshtein's distance in words."""
    row = list(range(len(got) + 1))
    for i, a in enumerate(want, 1):
        row, before = [i], row
        for j, b in enumerate(got, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b)))
    return row[-1]
