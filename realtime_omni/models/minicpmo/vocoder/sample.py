"""A voice's sound into what the flow begins a turn with: its codes, its mel spectrogram, its speaker's embedding.

The codes and the embedding are computed by the published ONNX models through onnxruntime (extra ``voice``); how they are fed is
CosyVoice's (Apache-2.0), read as facts: Whisper's spectrogram of 128 bins for the speech tokenizer, Kaldi's filter bank
less its mean for CAM++. The spectrogram is HiFi-GAN's (Kong et al. 2020, arXiv 2010.05646) at 24 kHz, 50 frames a second.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from realtime_omni.errors import ConfigError
from realtime_omni.models.minicpmo.mel import triangles
from realtime_omni.models.minicpmo.vocoder.encoder import RATE as FRAMES_A_CODE
from realtime_omni.models.minicpmo.vocoder.flow import LONGEST_FRAMES
from realtime_omni.models.minicpmo.vocoder.hift import HOP, RATE
from realtime_omni.models.minicpmo.vocoder.token2wav import Sample

HEARD = 16_000
MELS, WINDOW, TOP_HZ = 80, 1920, 8000.0
TOKENIZER, SPEAKER = "speech_tokenizer_v2_25hz.onnx", "campplus.onnx"


def sample_of(sound: Tensor, folder: Path) -> Sample:
    """Of float32 [N] at 16 kHz, by the ONNX models in ``folder``. Raises ConfigError: one is missing, or onnxruntime."""
    codes = _codes(sound, folder / TOKENIZER)
    mel = spectrogram(resampled(sound))
    frames = FRAMES_A_CODE * len(codes)
    if not 0 < frames <= LONGEST_FRAMES:
        raise ConfigError(f"{TOKENIZER} made {len(codes)} codes of {len(sound) / HEARD:.1f} s", path=TOKENIZER)
    if len(mel) < frames:
        mel = torch.cat((mel, mel[-1:].expand(frames - len(mel), -1)))
    return Sample(codes, mel[:frames].contiguous(), _speaker(sound, folder / SPEAKER))


def resampled(sound: Tensor) -> Tensor:
    """From 16 to 24 kHz."""
    import soxr  # type: ignore[import-untyped]

    return torch.from_numpy(np.asarray(soxr.resample(sound.numpy(), HEARD, RATE), np.float32))


def spectrogram(sound: Tensor) -> Tensor:
    """Natural logarithms [N // 480, 80] of float32 [N] at 24 kHz; edges are reflected."""
    edge = (WINDOW - HOP) // 2
    padded = F.pad(sound[None], (edge, edge), mode="reflect")[0]
    bins = torch.stft(padded, WINDOW, HOP, window=torch.hann_window(WINDOW), center=False, return_complex=True)
    loudness = (bins.real.square() + bins.imag.square() + 1e-9).sqrt()
    return (triangles(RATE, WINDOW, MELS, TOP_HZ) @ loudness).clamp_min(1e-5).log().T


def filter_bank(sound: Tensor) -> Tensor:
    """Kaldi's ``fbank`` without dither, [T, 80] of float32 [N] at 16 kHz: frames of 25 ms, each less its mean, emphasised by
    0.97, under a Povey window; 80 triangles on the mel scale 1127 ln(1 + f / 700) from 20 Hz on, applied to the power."""
    length, hop, size = 400, 160, 512
    frames = sound.unfold(0, length, hop)
    frames = frames - frames.mean(dim=1, keepdim=True)
    before = torch.cat((frames[:, :1], frames[:, :-1]), dim=1)
    window = torch.hann_window(length, periodic=False).pow(0.85)
    power = torch.fft.rfft((frames - 0.97 * before) * window, size).abs().square()
    mel = 1127.0 * (1.0 + torch.arange(size // 2) * (HEARD / size) / 700.0).log()
    low, high = (1127.0 * math.log(1.0 + hertz / 700.0) for hertz in (20.0, HEARD / 2))
    edges = low + (high - low) / (MELS + 1) * torch.arange(MELS + 2)
    rising = (mel - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - mel) / (edges[2:] - edges[1:-1])[:, None]
    bank = torch.minimum(rising, falling).clamp_min(0)
    energy: Tensor = power[:, :-1] @ bank.T
    return energy.clamp_min(torch.finfo(torch.float32).eps).log()


def whisper_spectrogram(sound: Tensor) -> Tensor:
    """[128, N // 160] of float32 [N] at 16 kHz, scaled as Whisper's."""
    bins = torch.stft(sound, 400, 160, window=torch.hann_window(400), return_complex=True)[:, :-1]
    power = bins.real.square() + bins.imag.square()
    log = (triangles(HEARD, 400, 128, HEARD / 2) @ power).clamp_min(1e-10).log10()
    return (torch.maximum(log, log.max() - 8.0) + 4.0) / 4.0


def _codes(sound: Tensor, file: Path) -> Tensor:
    feature = whisper_spectrogram(sound)[None]
    made = _answer(file, feature.numpy(), np.array([feature.shape[2]], np.int32))
    return torch.from_numpy(made.reshape(-1).astype(np.int64))


def _speaker(sound: Tensor, file: Path) -> Tensor:
    feature = filter_bank(sound)
    feature = (feature - feature.mean(dim=0, keepdim=True))[None]
    return torch.from_numpy(np.asarray(_answer(file, feature.numpy()), np.float32).reshape(-1))


def _answer(file: Path, *given: NDArray[Any]) -> NDArray[Any]:
    """What an ONNX model makes first of its inputs, in their order. Raises ConfigError."""
    session = _session(file)
    try:
        fed = dict(zip((each.name for each in session.get_inputs()), given, strict=True))
        return np.asarray(session.run(None, fed)[0])
    except Exception as error:  # onnxruntime's own classes, which have no common base
        raise ConfigError(f"{file.name} takes no sound ({type(error).__name__})", path=file.name) from None


def _session(file: Path) -> Any:
    if not file.is_file():
        raise ConfigError(f"{file.parent.name} lacks {file.name}", path=file.name)
    try:
        import onnxruntime  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError("a voice's sample needs onnxruntime: pip install 'realtime-omni[voice]'") from None
    try:
        return onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own classes, which have no common base
        raise ConfigError(f"{file.name} cannot be read ({type(error).__name__})", path=file.name) from None
