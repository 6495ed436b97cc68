"""The flow's direction: a transformer over mel frames, of which a call sees its own and the ones that are remembered.

Streamed: every call continues from the memory of the one before at the same step of the flow. Source of the formulas:
Step-Audio 2's ``DiT`` (Apache-2.0), read as facts; the conditioning is adaLN-zero (Peebles & Xie 2022, arXiv
2212.09748). Parameters have the published names. Legend: B rows, M mels, T new frames, K frames in memory, C channels,
H heads, D of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TAPS = 2
"""Frames that a convolution remembers."""
FREQUENCIES = 256
LONGEST_PERIOD = 10_000
TIME_SCALE = 1000


@dataclass(frozen=True, slots=True)
class EstimatorSizes:
    channels: int = 512
    depth: int = 16
    heads: int = 8
    head_size: int = 64
    hidden: int = 2048
    mels: int = 80


class Attention(nn.Module):
    def __init__(self, sizes: EstimatorSizes) -> None:
        super().__init__()
        inner, self.heads = sizes.heads * sizes.head_size, sizes.heads
        self.to_q = nn.Linear(sizes.channels, inner)
        self.to_k = nn.Linear(sizes.channels, inner)
        self.to_v = nn.Linear(sizes.channels, inner)
        self.q_norm = nn.LayerNorm(sizes.head_size)
        self.k_norm = nn.LayerNorm(sizes.head_size)
        self.proj = nn.Linear(inner, sizes.channels)

    def forward(self, x_BTC: Tensor, past_BHKE: Tensor) -> tuple[Tensor, Tensor]:
        """Its output, and keys and values [B, H, T + K, 2 D], the new ones first: that order decides what is forgotten."""
        q, k, v = (
            project(x_BTC).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        present = torch.cat((torch.cat((self.k_norm(k), v), dim=-1), past_BHKE), dim=2)
        keys, values = present.chunk(2, dim=-1)
        seen = F.scaled_dot_product_attention(self.q_norm(q), keys, values)
        out: Tensor = self.proj(seen.transpose(1, 2).flatten(2))
        return out, present


class Convolutions(nn.Module):
    """Two causal convolutions, normalised in between."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = nn.ModuleDict(
            {
                "1": nn.Conv1d(channels, channels, TAPS + 1),
                "3": nn.LayerNorm(channels),
                "6": nn.Conv1d(channels, channels, TAPS + 1),
            }
        )

    def forward(self, x_BTC: Tensor, past_BCT: Tensor) -> tuple[Tensor, Tensor]:
        """``past`` [B, 2 C, 2]: what the first and the second remember, one below the other."""
        before, between = past_BCT.chunk(2, dim=1)
        first = torch.cat((before, x_BTC.transpose(1, 2)), dim=2)
        x = F.mish(self.block["3"](self.block["1"](first).transpose(1, 2)))
        second = torch.cat((between, x.transpose(1, 2)), dim=2)
        present = torch.cat((first[..., -TAPS:], second[..., -TAPS:]), dim=1)
        return self.block["6"](second).transpose(1, 2), present


class FeedForward(nn.Module):
    def __init__(self, sizes: EstimatorSizes) -> None:
        super().__init__()
        self.fc1 = nn.Linear(sizes.channels, sizes.hidden)
        self.fc2 = nn.Linear(sizes.hidden, sizes.channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return out


class Block(nn.Module):
    def __init__(self, sizes: EstimatorSizes) -> None:
        super().__init__()
        self.attn = Attention(sizes)
        self.mlp = FeedForward(sizes)
        self.conv = Convolutions(sizes.channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(sizes.channels, 9 * sizes.channels))

    def forward(self, x: Tensor, time: Tensor, convolved: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m, shift_c, scale_c, gate_c = self.adaLN_modulation(
            time
        ).chunk(9, dim=-1)
        seen, past = self.attn(_modulated(x, shift_a, scale_a), past)
        x = x + gate_a * seen
        shaped, convolved = self.conv(_modulated(x, shift_c, scale_c), convolved)
        x = x + gate_c * shaped
        return x + gate_m * self.mlp(_modulated(x, shift_m, scale_m)), convolved, past


class Time(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, channels), nn.SiLU(), nn.Linear(channels, channels))

    def forward(self, t: Tensor) -> Tensor:
        """[C] of a time 0..1."""
        half = FREQUENCIES // 2
        rates = torch.exp(-math.log(LONGEST_PERIOD) * torch.arange(half, device=t.device) / half)
        angle = t * TIME_SCALE * rates.to(t)
        out: Tensor = self.mlp(torch.cat((angle.cos(), angle.sin())))
        return out


class Final(nn.Module):
    def __init__(self, sizes: EstimatorSizes) -> None:
        super().__init__()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(sizes.channels, 2 * sizes.channels))
        self.linear = nn.Linear(sizes.channels, sizes.mels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(time).chunk(2, dim=-1)
        out: Tensor = self.linear(_modulated(x, shift, scale))
        return out


class Estimator(nn.Module):
    def __init__(self, sizes: EstimatorSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.t_embedder = Time(sizes.channels)
        self.in_proj = nn.Linear(4 * sizes.mels, sizes.channels)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.depth))
        self.final_layer = Final(sizes)

    def forward(self, x_BTI: Tensor, t: Tensor, convolved: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The direction [B, T, M] at time ``t`` (a number 0..1), and what is remembered after.

        ``x`` [B, T, 4 M]: the noisy frames, what they follow, the speaker, known frames. ``convolved`` [depth, B, 2 C, 2],
        ``past`` [depth, B, H, K, 2 D]; K grows by T."""
        time = self.t_embedder(t)
        x = self.in_proj(x_BTI)
        taps: list[Tensor] = []
        seen: list[Tensor] = []
        for block, tap, memory in zip(self.blocks, convolved, past, strict=True):
            x, tap, memory = block(x, time, tap, memory)
            taps.append(tap)
            seen.append(memory)
        return self.final_layer(x, time), torch.stack(taps), torch.stack(seen)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift
