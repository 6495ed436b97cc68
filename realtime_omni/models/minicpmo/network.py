"""A causal transformer with rotary positions: Qwen3 (the language model) and Llama (the talker) as transformers compute them.

Owns the forward pass. Keys and values belong to whoever gives ``attend``: the engine's pages, a call's state, or in a test a
dense cache. Source of the formulas: Touvron et al. 2023 (Llama), Su et al. 2021 (rotary positions), Qwen Team 2025
(Qwen3: q and k normed per head); rotary pairs are (i, i + d/2), as in transformers.

Shapes: B rows, T tokens, D model, H heads, K key heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from realtime_omni.models.minicpmo.config import DecoderConfig

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_BTHd, k_BTKd, v_BTKd), rotated, to the attention's output [B, T, H, d]; causal."""


def empty(*shape: int) -> nn.Parameter:
    """A parameter that a loader fills."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def sent(numbers: Sequence[object], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of Python's numbers on its way to the device: nobody waits until the device has done what came before, so the
    next kernels are asked for while it does."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)


def turns(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [..., d], of ``position * base ** (-2j / d)``, each half the same. The angle is computed in
    float64, so that a call of days loses nothing; there is no table to run out of."""
    angle = positions.double()[..., None] * _speeds(head_dim, base, positions.device)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().float(), angle.sin().float()


@lru_cache(16)
def _speeds(head_dim: int, base: float, device: torch.device) -> Tensor:
    j = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
    return base ** (-j / head_dim)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + d/2) of ``x`` [..., d] by its angle. Turning by one angle and then by another is turning by
    their sum, so a key that is turned already can be turned on to another position."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    return (wide * turn[0] + swapped * turn[1]).to(x.dtype)


class Layer(nn.Module):
    """One layer's weights; ``qkv`` and ``gate_up`` hold theirs one below the other."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads + 2 * config.num_key_value_heads
        self.config = config
        self.norm1 = empty(width)
        self.qkv = empty(heads * config.head_dim, width)
        if config.qk_norm:
            self.q_norm, self.k_norm = empty(config.head_dim), empty(config.head_dim)
        self.out = empty(width, config.num_attention_heads * config.head_dim)
        self.norm2 = empty(width)
        self.gate_up = empty(2 * config.intermediate_size, width)
        self.down = empty(width, config.intermediate_size)

    def forward(self, x: Tensor, index: int, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        config = self.config
        fused = linear(self._normed(x, self.norm1), self.qkv)
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        qk, v = torch.split(fused.view(*x.shape[:2], -1, config.head_dim), [heads + key_heads, key_heads], dim=2)
        if config.qk_norm:
            q, k = torch.split(qk, [heads, key_heads], dim=2)
            qk = torch.cat((self._normed(q, self.q_norm), self._normed(k, self.k_norm)), dim=2)
        q, k = torch.split(rotate(qk, turn), [heads, key_heads], dim=2)
        x = x + linear(attend(index, q, k, v).flatten(2), self.out)
        gate, up = linear(self._normed(x, self.norm2), self.gate_up).chunk(2, dim=-1)
        return x + linear(silu(gate) * up, self.down)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


class Decoder(nn.Module):
    """The layers and the last norm. Parameters are empty until a loader fills them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = empty(config.hidden_size)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the last norm, [B, T, D]."""
        cos, sin = turns(positions_BT, self.config.head_dim, self.config.rope_theta)
        turn = (cos.unsqueeze(2), sin.unsqueeze(2))
        for index, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, index, turn, attend)
        return rms_norm(x_BTD, self.norm.shape, self.norm, self.config.rms_norm_eps)


class Language(nn.Module):
    """The language model around its decoder: table of tokens and head."""

    def __init__(self, config: DecoderConfig, vocab_size: int) -> None:
        super().__init__()
        self.embed = empty(vocab_size, config.hidden_size)
        self.decoder = Decoder(config)
        self.head = empty(vocab_size, config.hidden_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [..., V]."""
        return linear(hidden, self.head).float()
