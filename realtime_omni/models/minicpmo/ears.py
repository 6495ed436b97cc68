"""The encoder: mel frames to tokens of the language model, a second at a time, with keys and values of what came before.

Whisper's encoder (Radford et al. 2022), but a position sees its own second and the ones before it, never a later one; two
linear layers; an average over five positions. Its table of positions ends after 30 seconds: then it begins anew with nothing
before it, as the published model does. What a call remembers is a value: keys and values of a second are written once and
shared by every later state.

Shapes: B rows, T positions, D model, H heads, d head size, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d, conv1d, gelu, layer_norm, linear, relu, scaled_dot_product_attention

from realtime_omni.models.minicpmo.config import EarConfig
from realtime_omni.models.minicpmo.network import empty

POSITIONS = 50
"""Of a second."""
EPSILON = 1e-5

Past = tuple[Tensor, ...]
"""Keys and values [L, 2, 50, H, d] of each second that the encoder remembers."""


def most_seconds(config: EarConfig) -> int:
    """That the encoder remembers: one more, with the neighbours' positions, would not fit its table (OpenBMB's rule)."""
    return (config.max_source_positions - (POSITIONS + 2) - 1) // POSITIONS + 1


class EarLayer(nn.Module):
    """One layer's weights; ``qkv`` holds queries, keys and values one below the other (keys have no bias: zeros)."""

    def __init__(self, config: EarConfig) -> None:
        super().__init__()
        width = config.d_model
        self.norm1, self.norm1_bias = empty(width), empty(width)
        self.qkv, self.qkv_bias = empty(3 * width, width), empty(3 * width)
        self.out, self.out_bias = empty(width, width), empty(width)
        self.norm2, self.norm2_bias = empty(width), empty(width)
        self.up, self.up_bias = empty(config.encoder_ffn_dim, width), empty(config.encoder_ffn_dim)
        self.down, self.down_bias = empty(width, config.encoder_ffn_dim), empty(width)

    def forward(self, x: Tensor, heads: int, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """``past`` [B, 2, P, H, d]. Returns the positions' output, and their keys and values [B, 2, T, H, d]."""
        width = x.shape[-1]
        normed = layer_norm(x, (width,), self.norm1, self.norm1_bias, EPSILON)
        q, k, v = linear(normed, self.qkv, self.qkv_bias).view(*x.shape[:2], 3, heads, -1).unbind(2)
        new = torch.stack((k, v), dim=1)
        both = new if past is None else torch.cat((past, new), dim=2)
        keys, values = both.transpose(2, 3).unbind(1)
        attended = scaled_dot_product_attention(q.transpose(1, 2), keys, values).transpose(1, 2)
        x = x + linear(attended.flatten(2), self.out, self.out_bias)
        normed = layer_norm(x, (width,), self.norm2, self.norm2_bias, EPSILON)
        return x + linear(gelu(linear(normed, self.up, self.up_bias)), self.down, self.down_bias), new


class Ears(nn.Module):
    """The encoder and the layers between it and the language model of width ``output``."""

    def __init__(self, config: EarConfig, output: int) -> None:
        super().__init__()
        width = config.d_model
        self.config = config
        self.most_seconds = most_seconds(config)
        self.conv1, self.conv1_bias = empty(width, config.num_mel_bins, 3), empty(width)
        self.conv2, self.conv2_bias = empty(width, width, 3), empty(width)
        self.positions = empty(config.max_source_positions, width)
        self.layers = nn.ModuleList(EarLayer(config) for _ in range(config.encoder_layers))
        self.norm, self.norm_bias = empty(width), empty(width)
        self.project1, self.project1_bias = empty(output, width), empty(output)
        self.project2, self.project2_bias = empty(output, output), empty(output)

    @property
    def tokens(self) -> int:
        """Of a second."""
        return POSITIONS // self.config.pool

    def convolve(self, mel: Tensor) -> Tensor:
        """Mel frames [B, 80, F] to positions [B, ceil(F / 2), D], without their place."""
        x = gelu(conv1d(mel.to(self.conv1.dtype), self.conv1, self.conv1_bias, padding=1))
        return gelu(conv1d(x, self.conv2, self.conv2_bias, stride=2, padding=1)).transpose(1, 2)

    def encode(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """Positions [B, 50, D] behind a past [B, L, 2, P, H, d] to tokens [B, tokens, output], and their keys and values
        [B, L, 2, 50, H, d]."""
        before = 0 if past is None else past.shape[3]
        x = x + self.positions[before : before + x.shape[1]]
        new: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            x, made = layer(x, self.config.encoder_attention_heads, None if past is None else past[:, index])
            new.append(made)
        x = layer_norm(x, x.shape[-1:], self.norm, self.norm_bias, EPSILON)
        x = linear(relu(linear(x, self.project1, self.project1_bias)), self.project2, self.project2_bias)
        return avg_pool1d(x.transpose(1, 2), self.config.pool).transpose(1, 2), torch.stack(new, dim=1)

    def hear(self, mels: Sequence[Tensor], pasts: Sequence[Past]) -> tuple[Tensor, list[Past]]:
        """A second of every row: mel frames [80, 104], of a call's first second [80, 102], and what the row remembers; to
        tokens [B, tokens, output] and what it remembers now. Rows that remember as much share a pass."""
        together: dict[tuple[int, int], list[int]] = {}
        kept = [past if len(past) < self.most_seconds else () for past in pasts]
        for row, (mel, past) in enumerate(zip(mels, kept, strict=True)):
            together.setdefault((mel.shape[1], len(past)), []).append(row)
        out: dict[int, Tensor] = {}
        after: dict[int, Past] = {}
        for (frames, seconds), rows in together.items():
            x = self.convolve(torch.stack([mels[row] for row in rows]))
            left = (frames - 2 * POSITIONS) // 2 - 1  # positions that belong to the neighbour
            stacked = torch.stack([torch.cat(kept[row], dim=2) for row in rows]) if seconds else None
            tokens, new = self.encode(x[:, left : left + POSITIONS], stacked)
            for place, row in enumerate(rows):
                out[row], after[row] = (
                    tokens[place],
                    (*kept[row], new[place].clone()),
                )  # a view would keep the batch alive
        return torch.stack([out[row] for row in range(len(mels))]), [after[row] for row in range(len(mels))]

    def clip(self, mel: Tensor) -> Tensor:
        """Tokens [n, output] of a clip's mel frames [80, F]; at most 30 s, whole seconds see those before them."""
        x = self.convolve(mel[None])
        past: Tensor | None = None
        tokens: list[Tensor] = []
        for start in range(0, x.shape[1] - self.config.pool + 1, POSITIONS):
            made, new = self.encode(x[:, start : start + POSITIONS], past)
            past = new if past is None else torch.cat((past, new), dim=3)
            tokens.append(made[0])
        return torch.cat(tokens)
