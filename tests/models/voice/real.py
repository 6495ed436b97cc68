"""The voice's real weights, for tests that need them: opt-in, because they are 150 MB and fetched once."""

import subprocess
import wave

import numpy as np
import pytest
import soxr

from realtime_omni.models.voice.weights import cache_folder, missing


def needs_weights(test):
    """Marks a test of the real networks."""
    there = not missing(cache_folder())
    reason = "needs the voice's weights: realtime-omni fetch voice"
    return pytest.mark.slow(pytest.mark.skipif(not there, reason=reason)(test))


def read_wav(path, rate: int = 16_000) -> np.ndarray:
    """float32 mono at ``rate``."""
    with wave.open(str(path)) as file:
        raw = np.frombuffer(file.readframes(file.getnframes()), np.int16).reshape(-1, file.getnchannels())[:, 0]
        return soxr.resample(raw.astype(np.float32) / 32768, file.getframerate(), rate).astype(np.float32)


def spoken(program: str, text: str, folder) -> np.ndarray:
    """``text`` at 16 kHz by another synthesiser: ``flite`` (voice rms) or ``espeak-ng``."""
    path = folder / "said.wav"
    command = ["flite", "-voice", "rms", "-t", text, "-o"] if program == "flite" else ["espeak-ng", text, "-w"]
    subprocess.run([*command, str(path)], check=True)
    return read_wav(path)
