"""One transformer decoder layer for Gemma and Llama towers, plain or conditioned on the flow time.

Owns: norms, projections, MLP. Must not know: who sees whom; the caller passes ``see``, which gets rotated queries and keys.
Gemma (arXiv 2403.08295) scales by 1 + weight and uses GELU; Llama (arXiv 2302.13971) scales by weight and uses SiLU. The
adaptive norm is pi0.5's (arXiv 2504.16054): scale, shift and a gate of the residual come from the condition.

Shape legend: B rows, T tokens, D width, C width of the condition, h query heads, g key heads, d channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.models.common.vla.attention import Rope, rotate
from realtime_omni.models.common.vla.gated import MANY, geglu

Places = tuple[Tensor, Tensor]
"""Buffers [B, T, g, d] for keys and values."""
See = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``see(q, k, v)``: q [B, T, h, d], k and v [B, T, g, d]; returns q's shape."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Dimensions of a tower. ``condition``: width of the condition of adaptive norms, None for plain norms."""

    width: int
    layers: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    family: Literal["gemma", "llama"] = "gemma"
    eps: float = 1e-6
    condition: int | None = None


class RmsNorm(nn.Module):
    """x / rms(x), scaled by ``offset + weight``; computed in float32."""

    def __init__(self, width: int, eps: float, offset: float) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))

    def forward(self, x: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        normed = normalised(x, self.eps) * (self.offset + self.weight.float())
        return normed.to(x.dtype), None


class AdaptiveRmsNorm(nn.Module):
    """x / rms(x), scaled and shifted by the condition, which also gates the branch's output."""

    def __init__(self, width: int, eps: float, condition: int) -> None:
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(condition, 3 * width)
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor | None]:
        """``condition`` [B, 1, C] or, for a time of its own per token, [B, T, C]."""
        scale, shift, gate = self.dense(condition).float().chunk(3, dim=-1)
        normed = normalised(x, self.eps) * (1.0 + scale) + shift
        return normed.to(x.dtype), gate.to(x.dtype)


def normalised(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def residual(x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
    return x + y if gate is None else x + y * gate


def make_norm(config: DecoderConfig) -> nn.Module:
    if config.condition is not None:
        return AdaptiveRmsNorm(config.width, config.eps, config.condition)
    return RmsNorm(config.width, config.eps, offset=1.0 if config.family == "gemma" else 0.0)


class DecoderLayer(nn.Module):
    """Attention and gated MLP. ``key_width``: what k and v are projected from, when not from this tower's own tokens."""

    def __init__(self, config: DecoderConfig, key_width: int | None = None) -> None:
        super().__init__()
        width, inner, keys = config.width, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.gelu = config.family == "gemma"
        self.attn_norm = make_norm(config)
        self.q = nn.Linear(width, inner, bias=False)
        self.k = nn.Linear(key_width or width, keys, bias=False)
        self.v = nn.Linear(key_width or width, keys, bias=False)
        self.o = nn.Linear(inner, width, bias=False)
        self.mlp_norm = make_norm(config)
        self.gate = nn.Linear(width, config.mlp_width, bias=False)
        self.up = nn.Linear(width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, width, bias=False)
        self.qkv_weight: Tensor | None = None
        self.mlp_weight: Tensor | None = None
        self.one_pass = False
        """Whether many tokens' MLP goes through :func:`.gated.geglu`; see :func:`.graphs.compile_layers`."""

    def forward(
        self, x_BTD: Tensor, at: Rope, see: See, condition: Tensor | None = None, into: Places | None = None
    ) -> Tensor:
        """The tokens after this layer [B, T, D]; ``into``: where keys and values are written before ``see`` is called."""
        q, k, v, gate = self.project(x_BTD, at, condition, into)
        return self.finish(x_BTD, see(q, k, v), gate, condition)

    def project(
        self, x_BTD: Tensor, at: Rope, condition: Tensor | None = None, into: Places | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What comes before attention: rotated queries and keys, values, and the gate of the residual."""
        h, gate = self.attn_norm(x_BTD, condition)
        if self.qkv_weight is None:
            q, k, v = self.q(h), self.k(h), self.v(h)
        else:
            sizes = [self.q.out_features, self.k.out_features, self.v.out_features]
            q, k, v = torch.split(functional.linear(h, self.qkv_weight), sizes, dim=-1)
        k, v = rotate(self._heads(k), at), self._heads(v)
        if into is not None:
            k, v = into[0].copy_(k), into[1].copy_(v)
        return rotate(self._heads(q), at), k, v, gate

    def finish(self, x_BTD: Tensor, seen: Tensor, gate: Tensor | None, condition: Tensor | None = None) -> Tensor:
        """What comes after attention; ``seen`` [B, T, h, d]."""
        x_BTD = residual(x_BTD, self.o(seen.flatten(2)), gate)
        h, gate = self.mlp_norm(x_BTD, condition)
        if self.mlp_weight is None:
            inner = self._opened(self.gate(h)) * self.up(h)
        else:
            inner = self._gated(functional.linear(h, self.mlp_weight))
        return residual(x_BTD, self.down(inner), gate)

    def _gated(self, both: Tensor) -> Tensor:
        if self.one_pass and both.numel() >= MANY and not torch.is_grad_enabled():
            return cast("Tensor", geglu(both))
        opened, up = both.chunk(2, dim=-1)
        return self._opened(opened) * up

    def _opened(self, gate: Tensor) -> Tensor:
        return gelu(gate) if self.gelu else functional.silu(gate)

    def fuse(self) -> None:
        """One product for queries, keys and values and one for gate and up from now on. The weights move into one storage,
        of which the parameters become views; so it is called last, when the module has its device and dtype."""
        if self.k.in_features == self.q.in_features:
            self.qkv_weight = share([self.q, self.k, self.v])
        self.mlp_weight = share([self.gate, self.up])

    def cross(
        self, x_BTD: Tensor, at: Rope, see: Callable[[Tensor], Tensor], condition: Tensor | None = None
    ) -> Tensor:
        """The same with queries only; the keys that ``see`` knows come from :meth:`keys_of`."""
        h, gate = self.attn_norm(x_BTD, condition)
        seen = see(rotate(self._heads(self.q(h)), at))
        return self.finish(x_BTD, seen, gate, condition)

    def keys(self, x_BTD: Tensor, at: Rope, condition: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """This layer's rotated keys and its values [B, T, g, d] and nothing else: all that a last prefix layer is for."""
        h, _ = self.attn_norm(x_BTD, condition)
        return rotate(self._heads(self.k(h)), at), self._heads(self.v(h))

    def keys_of(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, g, d] projected from another tower's, which are rotated already."""
        return self._heads(self.k(k.flatten(2))), self._heads(self.v(v.flatten(2)))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_dim)


def gelu(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (arXiv 1606.08415): x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))).

    1 + tanh(u) is 2 * sigmoid(2 * u), which a compiler makes of one exponential; its tanh was most of the time of pi0's
    largest elementwise kernel (15 of 135 ms for 16 robots on an H200)."""
    if not torch.compiler.is_compiling():
        return functional.gelu(x, approximate="tanh")
    wide = x.float()
    inner = 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return (wide * torch.sigmoid(inner)).to(x.dtype)


def share(parts: list[nn.Linear]) -> Tensor:
    """The weights of layers with one input, one below the other in one storage; each layer keeps its part as a view."""
    whole = torch.cat([part.weight.detach() for part in parts])
    for part, weight in zip(parts, torch.split(whole, [p.out_features for p in parts]), strict=True):
        part.weight = nn.Parameter(weight, requires_grad=part.weight.requires_grad)
    return whole


def layers_of(stack: nn.ModuleList) -> list[DecoderLayer]:
    """A stack's layers, by their type."""
    return cast("list[DecoderLayer]", list(stack))
