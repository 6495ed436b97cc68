"""Codes to what the flow follows: a conformer without convolutions that looks three codes ahead and doubles the rate.

Streamed: every call continues from the memory of the one before. Source of the formulas: Step-Audio 2's
``UpsampleConformerEncoderV2`` (Apache-2.0, after CosyVoice 2 and ESPnet), read as facts; relative positions as in
Transformer-XL (Dai et al. 2019, arXiv 1901.02860, section 3.3). Parameters have the published names. Legend: B rows, T
new frames, K frames in sight, C channels, H heads, D of a head, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOOKAHEAD = 3
RATE = 2
"""Frames of a code."""
PRE, UP = 2, 2 * RATE
"""Frames that the two convolutions remember."""


@dataclass(frozen=True, slots=True)
class EncoderSizes:
    """``blocks`` before the rate is doubled, ``up_blocks`` behind. ``key_bias``: keys have a bias."""

    channels: int = 512
    heads: int = 8
    hidden: int = 2048
    blocks: int = 6
    up_blocks: int = 4
    key_bias: bool = True


@dataclass(frozen=True, slots=True)
class EncoderMemory:
    """``pre`` [B, C, 2], ``up`` [B, C, 4]: of the convolutions. ``codes`` [L, B, H, K, 2 D] and ``frames``: keys and values at
    either rate, oldest first."""

    pre: Tensor
    up: Tensor
    codes: Tensor
    frames: Tensor


class Attention(nn.Module):
    """Every frame sees all that came before and the whole of its own call."""

    def __init__(self, sizes: EncoderSizes) -> None:
        super().__init__()
        wide, self.heads = sizes.channels, sizes.heads
        self.linear_q = nn.Linear(wide, wide)
        self.linear_k = nn.Linear(wide, wide, bias=sizes.key_bias)
        self.linear_v = nn.Linear(wide, wide)
        self.linear_out = nn.Linear(wide, wide)
        self.linear_pos = nn.Linear(wide, wide, bias=False)
        self.pos_bias_u = nn.Parameter(torch.zeros(sizes.heads, wide // sizes.heads))
        self.pos_bias_v = nn.Parameter(torch.zeros(sizes.heads, wide // sizes.heads))

    def forward(self, x_BTC: Tensor, places_KC: Tensor, past_BHKE: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (self._heads(project(x_BTC)) for project in (self.linear_q, self.linear_k, self.linear_v))
        present = torch.cat((past_BHKE, torch.cat((k, v), dim=-1)), dim=2)
        k, v = present.chunk(2, dim=-1)
        new, seen = q.shape[2], k.shape[2]
        distances = self._heads(self.linear_pos(places_KC)[None])
        bias = (q + self.pos_bias_v[:, None]) @ distances.transpose(-2, -1)
        index = torch.arange(seen, device=q.device) - torch.arange(new, device=q.device)[:, None] + new - 1
        bias = bias.gather(-1, index.expand(*bias.shape[:2], new, seen)) / math.sqrt(q.shape[-1])
        seen_BHTD = F.scaled_dot_product_attention(q + self.pos_bias_u[:, None], k, v, attn_mask=bias)
        out: Tensor = self.linear_out(seen_BHTD.transpose(1, 2).flatten(2))
        return out, present

    def _heads(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.view(*x_BTC.shape[:2], self.heads, -1).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, sizes: EncoderSizes) -> None:
        super().__init__()
        self.w_1 = nn.Linear(sizes.channels, sizes.hidden)
        self.w_2 = nn.Linear(sizes.hidden, sizes.channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w_2(F.silu(self.w_1(x)))
        return out


class Layer(nn.Module):
    def __init__(self, sizes: EncoderSizes) -> None:
        super().__init__()
        self.self_attn = Attention(sizes)
        self.feed_forward = FeedForward(sizes)
        self.norm_ff = nn.LayerNorm(sizes.channels, eps=1e-12)
        self.norm_mha = nn.LayerNorm(sizes.channels, eps=1e-12)

    def forward(self, x: Tensor, places: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        seen, present = self.self_attn(self.norm_mha(x), places, past)
        x = x + seen
        return x + self.feed_forward(self.norm_ff(x)), present


class Embed(nn.Module):
    """A projection whose output is normalised, then scaled by the root of its width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(channels, channels), nn.LayerNorm(channels))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x)
        return out * math.sqrt(out.shape[-1])


class Lookahead(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, channels, LOOKAHEAD + 1)
        self.conv2 = nn.Conv1d(channels, channels, PRE + 1)

    def forward(self, x_BTC: Tensor, past_BCT: Tensor) -> tuple[Tensor, Tensor]:
        """Three frames fewer than it is given, and what it remembers."""
        ahead = torch.cat((past_BCT, F.leaky_relu(self.conv1(x_BTC.transpose(1, 2)))), dim=2)
        return self.conv2(ahead).transpose(1, 2) + x_BTC[:, :-LOOKAHEAD], ahead[..., -PRE:]


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, UP + 1)

    def forward(self, x_BTC: Tensor, past_BCT: Tensor) -> tuple[Tensor, Tensor]:
        """Twice as many frames, and what it remembers."""
        doubled = torch.cat((past_BCT, x_BTC.transpose(1, 2).repeat_interleave(RATE, dim=2)), dim=2)
        return self.conv(doubled).transpose(1, 2), doubled[..., -UP:]


class Encoder(nn.Module):
    def __init__(self, sizes: EncoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = Embed(sizes.channels)
        self.pre_lookahead_layer = Lookahead(sizes.channels)
        self.encoders = nn.ModuleList(Layer(sizes) for _ in range(sizes.blocks))
        self.up_layer = Upsample(sizes.channels)
        self.up_embed = Embed(sizes.channels)
        self.up_encoders = nn.ModuleList(Layer(sizes) for _ in range(sizes.up_blocks))
        self.after_norm = nn.LayerNorm(sizes.channels)

    def forward(self, x_BTC: Tensor, memory: EncoderMemory, *, last: bool) -> tuple[Tensor, EncoderMemory]:
        """[B, 2 (T - 3), C] of T codes' embeddings, with ``last`` 2 T frames (zeros are ahead); and the memory after."""
        x = self.embed(x_BTC)
        if last:
            x = F.pad(x, (0, 0, 0, LOOKAHEAD))
        x, pre = self.pre_lookahead_layer(x, memory.pre)
        x, codes = _through(self.encoders, x, memory.codes)
        x, up = self.up_layer(x, memory.up)
        x, frames = _through(self.up_encoders, self.up_embed(x), memory.frames)
        return self.after_norm(x), EncoderMemory(pre, up, codes, frames)

    def empty(self, rows: int) -> EncoderMemory:
        """What a stream begins with."""
        sizes, weight = self.sizes, self.after_norm.weight
        rest = (rows, sizes.heads, 0, 2 * sizes.channels // sizes.heads)
        return EncoderMemory(
            weight.new_zeros(rows, sizes.channels, PRE),
            weight.new_zeros(rows, sizes.channels, UP),
            weight.new_zeros(sizes.blocks, *rest),
            weight.new_zeros(sizes.up_blocks, *rest),
        )


def _through(layers: nn.ModuleList, x_BTC: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    places = distances(x_BTC.shape[1], past.shape[3], x_BTC.shape[2]).to(x_BTC)
    kept: list[Tensor] = []
    for layer, memory in zip(layers, past, strict=True):
        x_BTC, present = layer(x_BTC, places, memory)
        kept.append(present)
    return x_BTC, torch.stack(kept)


def distances(new: int, before: int, channels: int) -> Tensor:
    """Sines and cosines of how far a key lies behind a query, from farthest to ``1 - new``: [before + 2 new - 1, C]."""
    far = torch.arange(before + new - 1, -new, -1, dtype=torch.float32)[:, None]
    angle = far * torch.exp(torch.arange(0, channels, 2, dtype=torch.float32) * -(math.log(10000.0) / channels))
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
