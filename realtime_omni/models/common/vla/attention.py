"""Attention of a policy: rotary positions, the prefix's block mask, and what the action tokens see of a prefix.

A *prefix* is everything that does not change while a chunk is denoised (pictures, prompt, state). Its keys and values
are computed once; every denoise step reads them through :class:`PrefixAttention` and writes nothing. The dense
implementation here holds them as tensors; a paged pool implements the same three methods.

Shape legend: B rows, T prefix tokens, S suffix tokens, h query heads, g key heads, d channels of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

ROPE_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class Rope:
    """cos and sin [B, T, 1, d / 2] of integer positions."""

    cos: Tensor
    sin: Tensor


def rope(positions: Tensor, head_dim: int) -> Rope:
    """Rotary angles of positions [B, T]. In float32, as the reference computes them: float64 would differ by 1e-5 at 900."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[..., None, None] * (1.0 / ROPE_BASE**exponent)
    return Rope(angles.cos(), angles.sin())


def rotate(x: Tensor, at: Rope) -> Tensor:
    """Rotate channel pairs (i, i + d / 2) of x [B, T, heads, d]; computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * at.cos - second * at.sin, second * at.cos + first * at.sin), dim=-1)
    return turned.to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    """Softmax attention [B, S, h, d] of q over k, v [B, T, g, d]; query head i reads key head i * g // h.

    ``mask`` is bool, broadcastable to [B, S, T], True where a query sees a key; every query must see at least one."""
    seen = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if mask is None else mask[:, None],
        is_causal=causal,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return seen.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Embedded prefix tokens before the transformer.

    ``embeddings`` [B, T, D]; ``mask`` [B, T] bool, False for padding and masked cameras; ``block`` [B, T] long: a key is
    visible to a query if its block is not later than the query's. Masked tokens take no position.
    """

    embeddings: Tensor
    mask: Tensor
    block: Tensor

    @property
    def positions(self) -> Tensor:
        """[B, T] long: how many unmasked tokens come before."""
        return self.mask.long().cumsum(dim=1) - 1

    def visible(self) -> Tensor | None:
        """bool [B, T, T], or None when every token sees every other. A masked query sees what it would if it were not:
        its result is never read, but it stays finite."""
        if bool(self.mask.all()) and bool((self.block == self.block[:, :1]).all()):
            return None
        return self.mask[:, None, :] & (self.block[:, None, :] <= self.block[:, :, None])

    def pack(self) -> Prefix:
        """The same prefix without the tokens that are masked in every row's order; exact, since they are seen by nobody.

        Rows keep their order of tokens; shorter rows are padded on the right, as far as the longest row."""
        if bool(self.mask.all()):
            return self
        order = torch.argsort(self.mask.logical_not().to(torch.uint8), dim=1, stable=True)
        order = order[:, : int(self.mask.sum(dim=1).max())]
        embeddings = torch.gather(self.embeddings, 1, order[..., None].expand(-1, -1, self.embeddings.shape[-1]))
        return Prefix(embeddings, torch.gather(self.mask, 1, order), torch.gather(self.block, 1, order))


@dataclass(frozen=True, slots=True)
class PrefixKV:
    """Keys and values of a prefix, per layer [B, T, g, d], keys rotated; ``mask`` [B, T] bool. Immutable."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor

    @property
    def lengths(self) -> Tensor:
        """Unmasked tokens of every row [B] long."""
        return self.mask.sum(dim=1)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values, self.mask))

    def append(self, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> PrefixKV:
        """The same prefix followed by tokens that every row has."""
        added = torch.ones(keys[0].shape[:2], dtype=torch.bool, device=self.mask.device)
        return PrefixKV(
            tuple(torch.cat(pair, dim=1) for pair in zip(self.keys, keys, strict=True)),
            tuple(torch.cat(pair, dim=1) for pair in zip(self.values, values, strict=True)),
            torch.cat((self.mask, added), dim=1),
        )

    def expand(self, samples: int) -> PrefixKV:
        """One row's prefix for ``samples`` rows, without a copy (several noise samples of one observation)."""
        if self.mask.shape[0] != 1:
            raise ValueError(f"only a prefix of one row can be shared, this one has {self.mask.shape[0]}")
        return PrefixKV(
            tuple(k.expand(samples, -1, -1, -1) for k in self.keys),
            tuple(v.expand(samples, -1, -1, -1) for v in self.values),
            self.mask.expand(samples, -1),
        )

    @staticmethod
    def stack(rows: list[PrefixKV]) -> PrefixKV:
        """Rows of different lengths side by side, padded on the right."""
        longest = max(row.mask.shape[1] for row in rows)

        def padded(tensor: Tensor) -> Tensor:
            return functional.pad(tensor, (0, 0, 0, 0, 0, longest - tensor.shape[1]))

        layers = range(len(rows[0].keys))
        return PrefixKV(
            tuple(torch.cat([padded(row.keys[i]) for row in rows]) for i in layers),
            tuple(torch.cat([padded(row.values[i]) for row in rows]) for i in layers),
            torch.cat([functional.pad(row.mask, (0, longest - row.mask.shape[1])) for row in rows]),
        )


class PrefixAttention(Protocol):
    """What the suffix's tokens see; the only way in which a denoise step touches a prefix. Reads, never writes."""

    @property
    def lengths(self) -> Tensor:
        """Unmasked prefix tokens [B] long; the suffix's positions go on from there."""
        ...

    def joint(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
        """q [B, S, h, d] over the prefix followed by the suffix's own k, v [B, S, g, d]; returns q's shape.

        ``causal``: a suffix token sees no later suffix token; otherwise all see all."""
        ...

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """q [B, S, h, d] over the prefix alone."""
        ...


class DensePrefixAttention:
    """:class:`PrefixAttention` over keys and values that are held as tensors."""

    def __init__(self, kv: PrefixKV) -> None:
        self.kv = kv
        self.lengths = kv.lengths
        self._mask = None if bool(kv.mask.all()) else kv.mask[:, None, :]

    def joint(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
        keys = torch.cat((self.kv.keys[layer], k), dim=1)
        values = torch.cat((self.kv.values[layer], v), dim=1)
        return attend(q, keys, values, self._joint_mask(q, causal))

    def cross(self, layer: int, q: Tensor) -> Tensor:
        return attend(q, self.kv.keys[layer], self.kv.values[layer], self._mask)

    def _joint_mask(self, q: Tensor, causal: bool) -> Tensor | None:
        if self._mask is None and not causal:
            return None
        rows, suffix = q.shape[:2]
        own = torch.ones(suffix, suffix, dtype=torch.bool, device=q.device)
        own = own.tril() if causal else own
        prefix = self.kv.mask[:, None, :].expand(-1, suffix, -1)
        return torch.cat((prefix, own.expand(rows, -1, -1)), dim=2)
