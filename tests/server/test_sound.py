"""Wire sound: G.711 as the standard library has it, PCM bit for bit, resampling without drift and whatever the pieces."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from realtime_omni.server.sound import PCM_24K, QUIET, Landing, SoundDecoder, SoundEncoder, SoundFormat

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    audioop = pytest.importorskip("audioop")  # the reference; gone from Python 3.13

EVERY_SAMPLE = np.arange(-32768, 32768, dtype="<i2")
EVERY_CODE = bytes(range(256))


@pytest.mark.parametrize(
    ("encoding", "to", "back"), [("pcmu", "lin2ulaw", "ulaw2lin"), ("pcma", "lin2alaw", "alaw2lin")]
)
def test_g711_is_the_reference_on_every_value(encoding: str, to: str, back: str) -> None:
    form = SoundFormat(encoding, 8_000)  # type: ignore[arg-type]
    encoded = SoundEncoder(8_000, form).feed(EVERY_SAMPLE.astype(np.float32) / 32768)
    assert encoded == getattr(audioop, to)(EVERY_SAMPLE.tobytes(), 2)
    decoded = SoundDecoder(form, 8_000).feed(EVERY_CODE)
    assert np.array_equal(decoded * 32768, np.frombuffer(getattr(audioop, back)(EVERY_CODE, 2), "<i2"))


def test_pcm_comes_back_bit_for_bit() -> None:
    samples = SoundDecoder(PCM_24K, 24_000).feed(EVERY_SAMPLE.tobytes())
    assert samples.dtype == np.float32
    assert SoundEncoder(24_000, PCM_24K).feed(samples) == EVERY_SAMPLE.tobytes()


def test_what_is_too_loud_is_clipped() -> None:
    loud = np.array([1.5, -1.5, 1.0, np.float32(-1.0)], np.float32)
    assert np.frombuffer(SoundEncoder(24_000, PCM_24K).feed(loud), "<i2").tolist() == [32767, -32768, 32767, -32768]


@pytest.mark.parametrize(
    ("rate_in", "rate_out"), [(16_000, 24_000), (8_000, 24_000), (24_000, 16_000), (48_000, 16_000)]
)
def test_resampling_keeps_time_and_does_not_depend_on_the_pieces(rate_in: int, rate_out: int) -> None:
    time = np.arange(rate_in * 10) / rate_in
    data = (8000 * np.sin(2 * np.pi * 440 * time)).astype("<i2").tobytes()
    whole, pieces = (SoundDecoder(SoundFormat("pcm16", rate_in), rate_out) for _ in range(2))
    at_once = whole.feed(data)
    rng, parts, at = np.random.default_rng(1), [], 0
    while at < len(data):
        size = 2 * int(rng.integers(1, 4000))
        parts.append(pieces.feed(data[at : at + size]))
        at += size
    joined = np.concatenate(parts)
    shorter = min(len(at_once), len(joined))
    np.testing.assert_allclose(joined[:shorter], at_once[:shorter], atol=1e-6)
    held_back_ms = (10 - len(joined) / rate_out) * 1000
    assert 0 <= held_back_ms <= 65, "what the filter holds back does not grow"
    expected = 8000 / 32768 * np.sin(2 * np.pi * 440 * np.arange(shorter) / rate_out)
    middle = slice(rate_out, shorter - rate_out)
    np.testing.assert_allclose(at_once[middle], expected[middle], atol=2e-3)


def test_sound_that_is_cut_lands_and_all_else_stays() -> None:
    time = np.arange(1920) / 24_000
    tone = (0.5 * np.cos(2 * np.pi * 220 * time)).astype(np.float32)  # ends high
    silence = np.zeros(1920, np.float32)
    landing = Landing(24_000)
    frames = [landing.smooth(frame) for frame in (silence, tone, tone, silence, silence, tone * 0.001, silence)]
    heard = np.concatenate(frames)
    assert np.abs(np.diff(heard[2 * 1920 :])).max() < 0.04, "no step larger than the tone's own"
    assert not heard[3 * 1920 + 120 :][: 1920 - 120].any(), "5 ms later it is silent"
    for number, sent in ((0, silence), (1, tone), (2, tone), (4, silence), (6, silence)):
        np.testing.assert_array_equal(frames[number], sent)
    assert abs(0.001 * tone[-1]) < QUIET
