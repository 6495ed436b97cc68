"""A llama decoder (Touvron et al. 2023) for CPUs: RMS norm, rotary positions, grouped-query attention, SwiGLU, a tied head.

Owns the forward pass. Keys and values belong to whoever gives it ``attend``: pages (:mod:`.sequences`) or, in a test, a dense
cache. Matrices are int8 with one scale a row, or float32. Rotary pairs are neighbours (2i, 2i+1), as in GGUF files: their
converter permutes the rows of q and k, whose original pairs are i and i + d/2.

Shapes: B rows, T tokens, D model, H heads, K key heads, d head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_BTHd, k_BTKd, v_BTKd) to the attention's output, shaped as q; causal."""
_CONTENDERS = 16
_INT8_ALIGNMENT = 16
"""Bytes: torch's int8 kernel for AVX-512 crashes elsewhere, and in a mapped file a tensor lies where the header ends."""


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes; ``head_dim`` d is ``model / heads``."""

    layers: int
    model: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    rope_base: float
    norm_epsilon: float
    context: int

    @property
    def head_dim(self) -> int:
        return self.model // self.heads


class Matrix:
    """``x @ W.T`` with W [out, in] in int8 and a bfloat16 scale for each row, or in float32.

    torch has a fast int8 kernel for bfloat16 inputs only (M=1, 3072 x 576, one core with AVX2: 0.15 ms, 1.8 ms with float32
    inputs, 0.19 ms for a float32 matrix); everything between two matrices is float32.
    """

    def __init__(self, weight: Tensor, scale: Tensor | None = None) -> None:
        if (weight.dtype == torch.int8) != (scale is not None):
            raise ValueError("int8 rows need scales, float32 rows have none")
        self._weight = weight.contiguous()
        if scale is not None and self._weight.data_ptr() % _INT8_ALIGNMENT:
            self._weight = self._weight.clone()
        self._scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        if self._scale is None:
            return linear(x, self._weight)
        flat = torch._weight_int8pack_mm(x.reshape(-1, x.shape[-1]).bfloat16(), self._weight, self._scale)
        return flat.float().view(*x.shape[:-1], -1)

    def rows(self, index: Tensor) -> Tensor:
        """The named rows in float32: an embedding."""
        rows = self._weight[index]
        return rows if self._scale is None else rows.float() * self._scale[index].float().unsqueeze(-1)


class Norm:
    """``x / sqrt(mean(x ** 2) + epsilon) * weight`` over the last dimension (Zhang and Sennrich 2019), as
    ``x / hypot(|x|, sqrt(n * epsilon)) * (sqrt(n) * weight)``: four calls where torch's own makes eight on a CPU (one row: 8
    and 22 us)."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self._weight = weight * len(weight) ** 0.5
        self._least = torch.tensor((len(weight) * epsilon) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        normed: Tensor = x / torch.hypot(length, self._least) * self._weight
        return normed


class Llama:
    """The network over named tensors (see :func:`names`)."""

    def __init__(self, config: LlamaConfig, tensors: Mapping[str, Tensor]) -> None:
        """Raises KeyError for a missing tensor."""
        self.config = config
        self._tensors = tensors
        self._embedding = self._matrix("embedding")
        self._layers = [
            {part: self._matrix(f"layers.{i}.{part}") for part in ("qkv", "out", "gate_up", "down")}
            for i in range(config.layers)
        ]
        self._norm = Norm(tensors["norm"], config.norm_epsilon)
        self._norms = [
            tuple(Norm(tensors[f"layers.{i}.norm{n}"], config.norm_epsilon) for n in (1, 2))
            for i in range(config.layers)
        ]
        self._turns = rotary_table(config)

    def logits(self, tokens: Tensor, positions: Tensor, attend: Attend, every: bool = False) -> Tensor:
        """Logits [B, V] after the last of ``tokens`` int64 [B, T] at ``positions`` int64 [B, T], or [B * T, V] after ``every``
        one of them."""
        size = self.config
        rotated = size.heads + size.kv_heads
        turn = self._turns[positions].unsqueeze(2)  # [B, T, 1, d/2]
        x_BTD = self._embedding.rows(tokens)
        for i, (layer, (norm1, norm2)) in enumerate(zip(self._layers, self._norms, strict=True)):
            qkv = layer["qkv"](norm1(x_BTD))
            heads = qkv.view(*qkv.shape[:2], -1, size.head_dim)
            qk, v = rotate(heads[:, :, :rotated], turn), heads[:, :, rotated:]
            q, k = qk[:, :, : size.heads], qk[:, :, size.heads :]
            attended = attend(i, q, k, v)
            x_BTD = x_BTD + layer["out"](attended.flatten(2))
            gate, up = layer["gate_up"](norm2(x_BTD)).chunk(2, dim=-1)
            x_BTD = x_BTD + layer["down"](silu(gate) * up)
        last = self._norm(x_BTD.flatten(0, 1) if every else x_BTD[:, -1])
        return self._head(last)

    def _head(self, last: Tensor) -> Tensor:
        """bfloat16 tells large logits apart only in steps of an eighth; those that can win are computed again in float32."""
        logits_BV = self._embedding(last)
        best = logits_BV.topk(min(_CONTENDERS, logits_BV.shape[1])).indices
        return logits_BV.scatter(1, best, torch.einsum("bkd,bd->bk", self._embedding.rows(best), last))

    def _matrix(self, name: str) -> Matrix:
        return Matrix(self._tensors[name], self._tensors.get(f"{name}.scale"))


def names(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and shape, scales not among them."""
    kv = config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocabulary, config.model), "norm": (config.model,)}
    for i in range(config.layers):
        shapes[f"layers.{i}.norm1"] = shapes[f"layers.{i}.norm2"] = (config.model,)
        shapes[f"layers.{i}.qkv"] = (config.model + 2 * kv, config.model)
        shapes[f"layers.{i}.out"] = (config.model, config.model)
        shapes[f"layers.{i}.gate_up"] = (2 * config.hidden, config.model)
        shapes[f"layers.{i}.down"] = (config.model, config.hidden)
    return shapes


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [out, in], bfloat16 scales [out]) of a float matrix; a row's largest magnitude becomes about 127.

    The scale is rounded first, so that its rounding costs nothing."""
    scale = (weight.float().abs().amax(dim=1).clamp_min(1e-12) / 127).bfloat16()
    levels = (weight.float() / scale.float()[:, None]).round()
    return levels.clamp(-127, 127).to(torch.int8), scale


def rotary_table(config: LlamaConfig) -> Tensor:
    """complex64 [context, d/2]: e ** (i * position * base ** (-2j / d))."""
    j = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    angle = torch.arange(config.context, dtype=torch.float64)[:, None] * config.rope_base ** (-j / config.head_dim)
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn each pair (2j, 2j+1) of ``x`` [B, T, heads, d], as a complex number, by its angle."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)
