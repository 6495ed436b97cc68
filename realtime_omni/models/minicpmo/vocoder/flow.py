"""Codes to mel frames: the encoder, and Euler steps along the estimator's direction with classifier-free guidance.

A turn begins with a voice's sample: its codes, its mel spectrogram and a speaker's embedding. Every call of a turn
continues from a :class:`FlowMemory`, a value that is never edited. What is kept of a long turn is the published
streaming's (``minicpmo-utils`` 1.0.7, Apache-2.0, read as facts): the encoder keeps the sample and the last two
seconds; the estimator's memory has its newest frames first, and keeps the first ones up to the sample's length and the
last 100. Noise is a table from a seed, read from where the memory ends; the published one is drawn anew by every
process. Guidance: Ho & Salimans 2022, arXiv 2207.12598; the flow: Lipman et al. 2022, arXiv 2210.02747.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realtime_omni.models.minicpmo.vocoder.encoder import LOOKAHEAD, RATE, Encoder, EncoderMemory, EncoderSizes
from realtime_omni.models.minicpmo.vocoder.estimator import TAPS, Estimator, EstimatorSizes

GUIDANCE = 0.7
KEPT_FRAMES = 100
"""Mel frames beyond as many as the voice's sample has."""
SILENCE = 4218
"""The code of silence."""
SEED = 0
LONGEST_FRAMES = 30 * 50
"""Of a voice's sample."""
LONGEST_CODES = 1024
"""Of a call."""


@dataclass(frozen=True, slots=True)
class FlowSizes:
    codes: int = 6561
    speaker: int = 192
    encoder: EncoderSizes = field(default_factory=EncoderSizes)
    estimator: EstimatorSizes = field(default_factory=EstimatorSizes)


@dataclass(frozen=True, slots=True)
class FlowMemory:
    """Of B rows whose samples have ``prompt`` frames. ``speaker`` [B, M]. Of the estimator, guided and not: ``convolved``
    [steps, depth, B, 2, 2 C, 2], ``past`` [steps, depth, B, 2, H, K, 2 D]."""

    prompt: int
    speaker: Tensor
    encoder: EncoderMemory
    convolved: Tensor
    past: Tensor


Solve = Callable[[Tensor, Tensor, FlowMemory], tuple[Tensor, Tensor, Tensor]]
"""As :meth:`Flow.solve`."""


class Decoder(nn.Module):
    """Holds the estimator under its published name."""

    def __init__(self, sizes: EstimatorSizes) -> None:
        super().__init__()
        self.estimator = Estimator(sizes)


class Flow(nn.Module):
    """Legend: B rows, N codes, T frames, M mels."""

    def __init__(self, sizes: FlowSizes, steps: int) -> None:
        super().__init__()
        mels, wide = sizes.estimator.mels, sizes.encoder.channels
        self.sizes, self.steps = sizes, steps
        self.input_embedding = nn.Embedding(sizes.codes, wide)
        self.spk_embed_affine_layer = nn.Linear(sizes.speaker, mels)
        self.encoder = Encoder(sizes.encoder)
        self.encoder_proj = nn.Linear(wide, mels)
        self.decoder = Decoder(sizes.estimator)

    def begin(self, codes_N: Tensor, mel_TM: Tensor, speaker: Tensor) -> FlowMemory:
        """The memory of one row that a turn begins with: of a sample's codes, its mel [2 N, M] and its speaker's embedding."""
        size = self.sizes.estimator
        weight = self.encoder_proj.weight
        after = codes_N.new_full((LOOKAHEAD,), min(SILENCE, self.sizes.codes - 1))
        projected = self.spk_embed_affine_layer(F.normalize(speaker[None].to(weight), dim=1))
        guided = (self.steps, size.depth, 1, 2)
        memory = FlowMemory(
            len(mel_TM),
            projected,
            self.encoder.empty(1),
            weight.new_zeros(*guided, 2 * size.channels, TAPS),
            weight.new_zeros(*guided, size.heads, 0, 2 * size.head_size),
        )
        follow, heard = self.encode(torch.cat((codes_N, after))[None], memory.encoder, last=False)
        _, convolved, past = self.solve(follow, mel_TM[None].to(follow), memory)
        return FlowMemory(memory.prompt, projected, heard, convolved, past)

    def forward(
        self, codes_BN: Tensor, memory: FlowMemory, *, last: bool, solve: Solve | None = None
    ) -> tuple[Tensor, FlowMemory]:
        """Mel frames [B, M, 2 (N - 3)], with ``last`` 2 N, and the memory after. ``solve``: in the place of :meth:`solve`."""
        follow, heard = self.encode(codes_BN, memory.encoder, last=last)
        mel, convolved, past = (solve or self.solve)(follow, torch.zeros_like(follow), memory)
        return mel.transpose(1, 2), FlowMemory(
            memory.prompt, memory.speaker, _kept(heard, memory.prompt), convolved, past
        )

    def encode(self, codes_BN: Tensor, memory: EncoderMemory, *, last: bool) -> tuple[Tensor, EncoderMemory]:
        """What the flow follows [B, T, M], and the encoder's memory after, whole."""
        follow, memory = self.encoder(self.input_embedding(codes_BN), memory, last=last)
        return self.encoder_proj(follow), memory

    def solve(self, follow_BTM: Tensor, known_BTM: Tensor, memory: FlowMemory) -> tuple[Tensor, Tensor, Tensor]:
        """The frames [B, T, M], and the estimator's memory after. Rows are guided in pairs, the second without conditions."""
        rows, frames, mels = follow_BTM.shape
        begin = memory.past.shape[5]
        noise = noise_of(mels, follow_BTM.device)[begin : begin + frames].to(follow_BTM)
        x = noise.expand(rows, -1, -1)
        speaker = memory.speaker[:, None].expand(-1, frames, -1)
        conditions = torch.cat((follow_BTM, speaker, known_BTM), dim=-1)
        pairs = torch.stack((conditions, torch.zeros_like(conditions)), dim=1).flatten(0, 1)
        times, widths = times_of(self.steps, x.dtype, x.device)
        taps: list[Tensor] = []
        seen: list[Tensor] = []
        for step in range(self.steps):
            entered = torch.cat((x.repeat_interleave(2, dim=0), pairs), dim=-1)
            direction, tap, past = self.decoder.estimator(
                entered, times[step], memory.convolved[step].flatten(1, 2), memory.past[step].flatten(1, 2)
            )
            guided, free = direction.view(rows, 2, frames, mels).unbind(1)
            x = x + widths[step] * ((1 + GUIDANCE) * guided - GUIDANCE * free)
            taps.append(tap.view(len(tap), rows, 2, *tap.shape[2:]))
            past = kept_frames(past, memory.prompt, dim=3)
            seen.append(past.view(len(past), rows, 2, *past.shape[2:]))
        return x, torch.stack(taps), torch.stack(seen)


def kept_frames(frames: Tensor, prompt: int, dim: int, kept: int = KEPT_FRAMES) -> Tensor:
    """The first ``prompt`` and the last ``kept``; all, where there are no more."""
    size = frames.shape[dim]
    if size <= prompt + kept:
        return frames
    return torch.cat((frames.narrow(dim, 0, prompt), frames.narrow(dim, size - kept, kept)), dim)


def _kept(memory: EncoderMemory, prompt: int) -> EncoderMemory:
    return EncoderMemory(
        memory.pre,
        memory.up,
        kept_frames(memory.codes, prompt // RATE, 3, KEPT_FRAMES // RATE),
        kept_frames(memory.frames, prompt, 3),
    )


@lru_cache(4)
def times_of(steps: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Times [steps + 1] from 0 to 1, and the widths [steps] between two: rounded once, from float64."""
    times = 1 - torch.cos(torch.linspace(0, 1, steps + 1, dtype=torch.float64) * 0.5 * math.pi)
    return times.to(device, dtype), times.diff().to(device, dtype)


@lru_cache(4)
def noise_of(mels: int, device: torch.device) -> Tensor:
    """Standard normal, float32 [frames, M]: for every frame that a memory may end before."""
    most = LONGEST_FRAMES + KEPT_FRAMES + RATE * LONGEST_CODES
    return torch.randn((most, mels), generator=torch.Generator().manual_seed(SEED), device="cpu").to(device)
