"""Mel spectrogram to sound: HiFT, a generator that shapes a harmonic source and ends in an inverse Fourier transform.

Source of the formulas: HiFTNet (Li et al. 2023, arXiv 2309.09493) as CosyVoice 2 and Step-Audio 2 publish it
(Apache-2.0), read as facts: rates 8, 5, 3 and a transform of 16 with steps of 4, so 480 samples a frame at 24 kHz.
Parameters have the published names, weight normalisation multiplied out. It knows nothing of streams; what it draws is
given to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RATE = 24_000
UP = ((8, 16), (5, 11), (3, 7))
"""Rate and kernel of each upsampling."""
KERNELS, DILATIONS = (3, 7, 11), (1, 3, 5)
SOURCE_KERNELS = (7, 7, 11)
FFT, STEP = 16, 4
HOP = 480
AGAIN = 8
"""Frames that the generator hears again."""
OVERLAP = AGAIN * HOP
HARMONICS = 9
VOICED_HZ = 10.0
SINE, VOICED_NOISE, UNVOICED_NOISE = 0.1, 0.003, 0.1 / 3
SLOPE = 0.1
LIMIT = 0.99
LOUDEST = 1e2


@dataclass(frozen=True, slots=True)
class HiFTSizes:
    """``channels``: behind the first convolution. ``pitch``: of the pitch predictor."""

    mels: int = 80
    channels: int = 512
    pitch: int = 512


class Snake(nn.Module):
    """x + sin²(a x) / a, an ``a`` each channel (Ziyin et al. 2020, arXiv 2006.08195)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels))

    def forward(self, x_BCT: Tensor) -> Tensor:
        alpha = self.alpha[:, None]
        return x_BCT + (1.0 / (alpha + 1e-9)) * (x_BCT * alpha).sin().square()


class ResBlock(nn.Module):
    """Three residual pairs of convolutions, the first of each dilated."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, dilation=d, padding=(kernel - 1) * d // 2) for d in DILATIONS
        )
        self.convs2 = nn.ModuleList(nn.Conv1d(channels, channels, kernel, padding=kernel // 2) for _ in DILATIONS)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in DILATIONS)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in DILATIONS)

    def forward(self, x_BCT: Tensor) -> Tensor:
        for first, second, before, between in zip(
            self.convs1, self.convs2, self.activations1, self.activations2, strict=True
        ):
            x_BCT = x_BCT + second(between(first(before(x_BCT))))
        return x_BCT


class Pitch(nn.Module):
    """Hertz of every frame, below ten where there is no voice."""

    def __init__(self, mels: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number in range(5):
            layers += [nn.Conv1d(channels if number else mels, channels, 3, padding=1), nn.ELU()]
        self.condnet = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, 1)

    def forward(self, mel_BMT: Tensor) -> Tensor:
        hertz: Tensor = self.classifier(self.condnet(mel_BMT).transpose(1, 2))
        return hertz.squeeze(-1).abs()


class Source(nn.Module):
    """Sines at the pitch and its multiples and noise, mixed into one excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.l_linear = nn.Linear(HARMONICS, 1)

    def forward(self, hertz_BT: Tensor, noise_BSH: Tensor) -> Tensor:
        """[B, S] of frames' hertz [B, T] and standard normal noise [B, S, 9], S = 480 T. The phase begins at zero."""
        multiples = torch.arange(1, HARMONICS + 1, device=hertz_BT.device, dtype=hertz_BT.dtype)
        turns = (hertz_BT[:, None] * multiples[:, None] / RATE) % 1
        phase = turns.cumsum(-1) * (2 * math.pi) * HOP
        sines = F.interpolate(phase, scale_factor=float(HOP), mode="linear").sin().transpose(1, 2) * SINE
        voiced = (hertz_BT > VOICED_HZ).to(sines).repeat_interleave(HOP, dim=1)[..., None]
        loudness = voiced * VOICED_NOISE + (1 - voiced) * UNVOICED_NOISE
        mixed: Tensor = self.l_linear(sines * voiced + loudness * noise_BSH)
        return mixed.squeeze(-1).tanh()


class HiFT(nn.Module):
    """The generator. Legend: B rows, M mels, T frames, S = 480 T samples, H harmonics."""

    def __init__(self, sizes: HiFTSizes) -> None:
        super().__init__()
        widths = [sizes.channels // 2**level for level in range(len(UP) + 1)]
        self.f0_predictor = Pitch(sizes.mels, sizes.pitch)
        self.m_source = Source()
        self.conv_pre = nn.Conv1d(sizes.mels, widths[0], 7, padding=3)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(wide, narrow, kernel, rate, padding=(kernel - rate) // 2)
            for wide, narrow, (rate, kernel) in zip(widths, widths[1:], UP, strict=False)
        )
        self.source_downs = nn.ModuleList(_down(level, width) for level, width in enumerate(widths[1:]))
        self.source_resblocks = nn.ModuleList(
            ResBlock(width, kernel) for width, kernel in zip(widths[1:], SOURCE_KERNELS, strict=True)
        )
        self.resblocks = nn.ModuleList(ResBlock(width, kernel) for width in widths[1:] for kernel in KERNELS)
        self.conv_post = nn.Conv1d(widths[-1], FFT + 2, 7, padding=3)

    def forward(self, mel_BMT: Tensor, noise_BSH: Tensor, before_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Sound and source, float32 [B, S] each. ``before``: the source's beginning, as an earlier call made it."""
        source = self.m_source(self.f0_predictor(mel_BMT), noise_BSH)
        source = torch.cat((before_BS, source[:, before_BS.shape[1] :]), dim=1)
        return self.decode(mel_BMT, source), source

    def decode(self, mel_BMT: Tensor, source_BS: Tensor) -> Tensor:
        """Sound [B, S] of a mel spectrogram and its excitation."""
        window = window_of(source_BS.dtype, source_BS.device)
        bins = torch.stft(source_BS, FFT, STEP, window=window, return_complex=True)
        spectrum = torch.cat((bins.real, bins.imag), dim=1)
        x = self.conv_pre(mel_BMT)
        for level, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, SLOPE))
            if level == len(self.ups) - 1:
                x = F.pad(x, (1, 0), mode="reflect")
            x = x + self.source_resblocks[level](self.source_downs[level](spectrum))
            blocks = [self.resblocks[level * len(KERNELS) + number] for number in range(len(KERNELS))]
            x = torch.stack([block(x) for block in blocks]).sum(0) / len(KERNELS)
        x = self.conv_post(F.leaky_relu(x))
        half = FFT // 2 + 1
        loudness, phase = x[:, :half].exp().clamp_max(LOUDEST), x[:, half:].sin()
        return _sound(torch.polar(loudness, phase), window).clamp(-LIMIT, LIMIT)


@lru_cache(4)
def window_of(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Hann's, [FFT]."""
    return torch.hann_window(FFT, dtype=torch.float64).to(device, dtype)


def _sound(bins_BFN: Tensor, window: Tensor) -> Tensor:
    """[B, 4 (N - 1)] of N spectra of half a transform and one: what ``torch.istft`` computes, which asks the device whether it
    may divide and so cannot be captured in a graph."""
    frames = torch.fft.irfft(bins_BFN, FFT, dim=1) * window[:, None]
    shares = _overlapped(window.square()[None, :, None].expand(1, FFT, frames.shape[2]))
    edge = FFT // 2
    return (_overlapped(frames) / shares)[:, edge:-edge]


def _overlapped(frames_BWN: Tensor) -> Tensor:
    """The sum of frames that lie STEP apart, [B, 4 (N + 3)]."""
    parts = torch.unflatten(frames_BWN, 1, (-1, STEP))
    last = parts.shape[1] - 1
    laid = [F.pad(parts[:, number], (number, last - number)) for number in range(last + 1)]
    return torch.stack(laid).sum(0).transpose(1, 2).flatten(1)


def _down(level: int, width: int) -> nn.Conv1d:
    """Brings the source's spectrum to the rate of a level."""
    rate = math.prod(rate for rate, _ in UP[level + 1 :])
    if rate == 1:
        return nn.Conv1d(FFT + 2, width, 1)
    return nn.Conv1d(FFT + 2, width, 2 * rate, rate, padding=rate // 2)
