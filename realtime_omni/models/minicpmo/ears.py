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

from realtime_omni.kv.attention.sdpa import kernels_of_any_length
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

    def forward(self, x: Tensor, heads: int, past: Tensor | None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``past`` [B, 2, P, H, d]; ``mask`` bool [B, 1, 1, P + T], True where there is something. Returns the positions'
        output, and their keys and values [B, 2, T, H, d]."""
        width = x.shape[-1]
        normed = layer_norm(x, (width,), self.norm1, self.norm1_bias, EPSILON)
        q, k, v = linear(normed, self.qkv, self.qkv_bias).view(*x.shape[:2], 3, heads, -1).unbind(2)
        new = torch.stack((k, v), dim=1)
        both = new if past is None else torch.cat((past, new), dim=2)
        keys, values = both.transpose(2, 3).unbind(1)
        attended = scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask).transpose(1, 2)
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

    def encode(self, x: Tensor, past: Tensor | None, lengths: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Positions [B, 50, D] behind a past [B, L, 2, P, H, d] to tokens [B, tokens, output], and their keys and values
        [B, L, 2, 50, H, d]. ``lengths``: how many of each row's P are there, the last ones; None: all."""
        before, new_positions = 0 if past is None else past.shape[3], x.shape[1]
        mask: Tensor | None = None
        if lengths is None or min(lengths) == before:
            x = x + self.positions[before : before + new_positions]
        else:
            x = x + torch.stack([self.positions[length : length + new_positions] for length in lengths])
            filled = before - torch.tensor(lengths, device=x.device)
            mask = torch.arange(before + new_positions, device=x.device) >= filled[:, None, None, None]
        new: list[Tensor] = []
        with kernels_of_any_length(x):
            for index, layer in enumerate(self.layers):
                x, made = layer(x, self.config.encoder_attention_heads, None if past is None else past[:, index], mask)
                new.append(made)
        x = layer_norm(x, x.shape[-1:], self.norm, self.norm_bias, EPSILON)
        x = linear(relu(linear(x, self.project1, self.project1_bias)), self.project2, self.project2_bias)
        return avg_pool1d(x.transpose(1, 2), self.config.pool).transpose(1, 2), torch.stack(new, dim=1)

    def hear(
        self, mels: Sequence[Tensor], pasts: Sequence[Past], *, together: bool | None = None
    ) -> tuple[Tensor, list[Past]]:
        """A second of every row: mel frames [80, 104], of a call's first second [80, 102], and what the row remembers; to
        tokens [B, tokens, output] and what it remembers now. ``together``: all rows share a pass, what is remembered filled
        up and masked; False: those that remember as much; None: on a GPU, where a pass costs its launches."""
        kept = [past if len(past) < self.most_seconds else () for past in pasts]
        if self.positions.is_cuda if together is None else together:
            groups = [list(range(len(mels)))]
        else:
            alike: dict[tuple[int, int], list[int]] = {}
            for row, (mel, past) in enumerate(zip(mels, kept, strict=True)):
                alike.setdefault((mel.shape[1], len(past)), []).append(row)
            groups = list(alike.values())
        out: dict[int, Tensor] = {}
        after: dict[int, Past] = {}
        for rows in groups:
            x = self._entered([mels[row] for row in rows])
            tokens, new = self.encode(x, *_filled([kept[row] for row in rows]))
            for place, row in enumerate(rows):
                out[row], after[row] = (
                    tokens[place],
                    (*kept[row], new[place].clone()),
                )  # a view would keep the batch alive
        return torch.stack([out[row] for row in range(len(mels))]), [after[row] for row in range(len(mels))]

    def _entered(self, mels: Sequence[Tensor]) -> Tensor:
        """Each row's own positions [B, 50, D], without their place."""
        alike: dict[int, list[int]] = {}
        for row, mel in enumerate(mels):
            alike.setdefault(mel.shape[1], []).append(row)
        out: dict[int, Tensor] = {}
        for frames, rows in alike.items():
            left = (frames - 2 * POSITIONS) // 2 - 1  # positions that belong to the neighbour
            x = self.convolve(torch.stack([mels[row] for row in rows]))[:, left : left + POSITIONS]
            out |= dict(zip(rows, x, strict=True))
        return torch.stack([out[row] for row in range(len(mels))])

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


def _filled(pasts: Sequence[Past]) -> tuple[Tensor | None, list[int]]:
    """[B, L, 2, P, H, d] of pasts that are filled up in front, as :meth:`Ears.encode` takes them, and their lengths."""
    joined = [torch.cat(past, dim=2) if past else None for past in pasts]
    lengths = [0 if each is None else each.shape[2] for each in joined]
    there = next((each for each in joined if each is not None), None)
    if there is None:
        return None, lengths
    longest = max(lengths)
    stacked = there.new_zeros(len(pasts), *there.shape[:2], longest, *there.shape[3:])
    for row, (each, length) in enumerate(zip(joined, lengths, strict=True)):
        if each is not None:
            stacked[row, :, :, longest - length :].copy_(each)
    return stacked, lengths
