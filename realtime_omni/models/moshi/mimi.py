"""Mimi, kyutai's codec: a frame of sound to a column of codes and back, for several calls at once.

Owns the forward passes, on plain tensors of a batch; what a call remembers between frames goes in and comes out. Encoder:
SEANet, a causal transformer, a convolution that halves the rate, a split residual quantizer (the first codebook by itself, the
others of the same input one on the rest of another). Decoder: the same backwards. Source: Défossez et al. 2024, "Moshi",
section 3.3; the layout of kyutai's published weights.

Attention reaches ``context`` positions back from the *newest* of a frame: the earlier one of its two sees one fewer, as
in kyutai's own streaming, whose ring holds both before either looks.

Shapes: B rows, C channels, T positions of a frame, L positions of the past, H heads, d head size, N codebooks, P layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, embedding, gelu, layer_norm, linear, scaled_dot_product_attention

from realtime_omni.models.moshi.config import MimiConfig
from realtime_omni.models.moshi.convolution import Carry, Convolution, Residual, Transposed, carried
from realtime_omni.models.moshi.network import empty, rotate, turns


class MimiLayer(nn.Module):
    """One transformer layer's weights."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm1_bias = empty(dim), empty(dim)
        self.norm2, self.norm2_bias = empty(dim), empty(dim)
        self.qkv = empty(3 * dim, dim)
        self.out = empty(dim, dim)
        self.up = empty(hidden, dim)
        self.down = empty(dim, hidden)
        self.scale1 = empty(dim)
        self.scale2 = empty(dim)

    def forward(self, x: Tensor, turn: Tensor, past: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """``past`` [B, 2, L, H, d]; returns x [B, T, C] and this frame's keys and values [B, 2, T, H, d]."""
        y = layer_norm(x, x.shape[-1:], self.norm1, self.norm1_bias)
        q, k, v = linear(y, self.qkv).view(*x.shape[:2], 3, -1, 2 * turn.shape[-1]).unbind(2)
        own = torch.stack((rotate(k, turn), v), dim=1)
        keys, values = torch.cat((past, own), dim=2).transpose(2, 3).unbind(1)
        y = scaled_dot_product_attention(rotate(q, turn).transpose(1, 2), keys, values, attn_mask=mask)
        x = x + self.scale1 * linear(y.transpose(1, 2).flatten(2), self.out)
        y = layer_norm(x, x.shape[-1:], self.norm2, self.norm2_bias)
        return x + self.scale2 * linear(gelu(linear(y, self.up)), self.down), own


class MimiTransformer(nn.Module):
    """The layers of one direction."""

    def __init__(self, config: MimiConfig) -> None:
        super().__init__()
        self._config = config
        self.layers = nn.ModuleList(MimiLayer(config.dimension, config.hidden) for _ in range(config.layers))

    def forward(self, x: Tensor, past: Tensor, places: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, C, T]; ``past`` [B, P, 2, L, H, d] at the positions ``places`` int64 [B, L], negative where there is nothing,
        in any order; ``frames`` int64 [B] before this one. Returns x and the new keys and values [B, P, 2, T, H, d]."""
        config = self._config
        steps = frames[:, None] * x.shape[-1] + torch.arange(x.shape[-1], device=x.device)
        keys = torch.cat((places, steps), dim=1)
        reach = (keys >= 0) & (keys > steps[:, -1:] - config.context)
        mask = (reach[:, None] & (keys[:, None] <= steps[..., None]))[:, None]
        turn = turns(steps, config.head_dim, config.max_period).unsqueeze(2)
        y, new = x.transpose(1, 2), []
        for index, layer in enumerate(self.layers):
            y, own = layer(y, turn, past[:, index], mask)
            new.append(own)
        return y.transpose(1, 2), torch.stack(new, dim=1)


class Encoder(nn.Module):
    """Sound to latents at the codec's rate, still continuous."""

    def __init__(self, config: MimiConfig) -> None:
        super().__init__()
        width = config.filters
        self.first = Convolution(1, width, config.kernel)
        self.residuals, self.strided = nn.ModuleList(), nn.ModuleList()
        for ratio in reversed(config.ratios):
            self.residuals.append(Residual(width, config.residual_kernel, config.compress))
            self.strided.append(Convolution(width, 2 * width, 2 * ratio, stride=ratio))
            width *= 2
        self.last = Convolution(width, config.dimension, config.last_kernel)
        self.transformer = MimiTransformer(config)
        per = config.per_frame
        self.resample = Convolution(config.dimension, config.dimension, 2 * per, stride=per, bias=False)
        self.carried = carried(self)

    def forward(
        self, sound: Tensor, memory: Tensor, past: Tensor, places: Tensor, frames: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sound [B, samples] of one frame to latents [B, C, 1], memory and new keys and values."""
        carry = Carry(memory)
        x = self.first(sound[:, None], carry)
        for residual, strided in zip(self.residuals, self.strided, strict=True):
            x = strided(elu(residual(x, carry)), carry)
        x = self.last(elu(x), carry)
        x, new = self.transformer(x, past, places, frames)
        return self.resample(x, carry, frames == 0), carry.after(), new


class Decoder(nn.Module):
    """Latents at the codec's rate to sound."""

    def __init__(self, config: MimiConfig) -> None:
        super().__init__()
        dim, width = config.dimension, config.filters * 2 ** len(config.ratios)
        self.resample = Transposed(dim, dim, config.per_frame, groups=dim, bias=False)
        self.transformer = MimiTransformer(config)
        self.first = Convolution(dim, width, config.kernel)
        self.strided, self.residuals = nn.ModuleList(), nn.ModuleList()
        for ratio in config.ratios:
            self.strided.append(Transposed(width, width // 2, ratio))
            width //= 2
            self.residuals.append(Residual(width, config.residual_kernel, config.compress))
        self.last = Convolution(width, 1, config.last_kernel)
        self.carried = carried(self)

    def forward(
        self, x: Tensor, memory: Tensor, past: Tensor, places: Tensor, frames: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Latents [B, C, 1] to sound [B, samples], memory and new keys and values."""
        carry = Carry(memory)
        x, new = self.transformer(self.resample(x, carry), past, places, frames)
        x = self.first(x, carry)
        for strided, residual in zip(self.strided, self.residuals, strict=True):
            x = residual(strided(elu(x), carry), carry)
        return self.last(elu(x), carry)[:, 0], carry.after(), new


class Codebooks(nn.Module):
    """A residual quantizer: each table codes what the ones before have left. ``tables`` [N, bins, D]."""

    def __init__(self, config: MimiConfig, count: int) -> None:
        super().__init__()
        self.inputs = empty(config.codebook_dim, config.dimension)
        self.outputs = empty(config.dimension, config.codebook_dim)
        self.tables = empty(count, config.bins, config.codebook_dim)

    def encode(self, x_BC: Tensor) -> Tensor:
        """Codes int64 [B, N]: of the nearest entry, in Euclid's distance."""
        rest, codes = linear(x_BC, self.inputs), []
        for table in self.tables:
            nearest = torch.cdist(rest[None], table[None])[0].argmin(dim=-1)
            codes.append(nearest)
            rest = rest - embedding(nearest, table)
        return torch.stack(codes, dim=1)

    def decode(self, codes_BN: Tensor) -> Tensor:
        """[B, C]."""
        total = embedding(codes_BN[:, 0], self.tables[0])
        for index in range(1, codes_BN.shape[1]):
            total = total + embedding(codes_BN[:, index], self.tables[index])
        return linear(total, self.outputs)


class Mimi(nn.Module):
    """Both directions, with the first ``count`` codebooks; float32."""

    def __init__(self, config: MimiConfig, count: int) -> None:
        super().__init__()
        self.config = config
        self.count = count
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.semantic = Codebooks(config, 1)
        self.acoustic = Codebooks(config, count - 1)

    def encode(
        self, sound: Tensor, memory: Tensor, past: Tensor, places: Tensor, frames: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One frame of sound, float32 [B, samples], to codes int64 [B, N]; see :class:`MimiTransformer` for the rest."""
        latents, memory, new = self.encoder(sound, memory, past, places, frames)
        x = latents[..., 0]
        return torch.cat((self.semantic.encode(x), self.acoustic.encode(x)), dim=1), memory, new

    def decode(
        self, codes: Tensor, memory: Tensor, past: Tensor, places: Tensor, frames: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Codes int64 [B, N] to one frame of sound, float32 [B, samples]."""
        x = self.semantic.decode(codes[:, :1]) + self.acoustic.decode(codes[:, 1:])
        sound, memory, new = self.decoder(x[..., None], memory, past, places, frames)
        return sound, memory, new
