"""Attention of a policy: rotary positions, the prefix's block mask, and what the action tokens see of a prefix.

A *prefix* is everything that does not change while a chunk is denoised (pictures, prompt, state). Its keys and values
are computed once; every denoise step reads them through :class:`PrefixAttention` and writes nothing. The dense
implementation here holds them as tensors; a paged pool implements the same three methods.

Shape legend: B rows, T prefix tokens, S suffix tokens, h query heads, g key heads, d channels of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from realtime_omni.models.common.vla.devices import placed

ROPE_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class Rope:
    """cos and sin [B, T, 1, d / 2] of integer positions."""

    cos: Tensor
    sin: Tensor


def rope(positions: Tensor, head_dim: int) -> Rope:
    """Rotary angles of positions [B, T]. In float32, as the reference computes them: float64 would differ by 1e-5 at 900."""
    # A compiler computes them where they are used; else they would be four kernels of every denoise step.
    speeds = _speeds.__wrapped__ if torch.compiler.is_compiling() else _speeds
    angles = positions.float()[..., None, None] * speeds(head_dim, positions.device)
    return Rope(angles.cos(), angles.sin())


@lru_cache(8)
def _speeds(head_dim: int, device: torch.device) -> Tensor:
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / ROPE_BASE**exponent


def rotate(x: Tensor, at: Rope) -> Tensor:
    """Rotate channel pairs (i, i + d / 2) of x [B, T, heads, d]; computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * at.cos - second * at.sin, second * at.cos + first * at.sin), dim=-1)
    return turned.to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax attention [B, S, h, d] of q over k, v [B, T, g, d]; query head i reads key head i * g // h.

    ``mask`` [B, 1 or S, T]: bool, True where a query sees a key, or what is added to the scores; every query must see at
    least one key. The query heads of one key head become queries of it: so no kernel has to repeat keys, and with a mask,
    too, one of the fused kernels serves (grouped heads with a mask would take the unfused one)."""
    if mask is not None:
        mask = fold_mask(mask, q.shape[2] // k.shape[2])[:, None]
    folded = fold(q, k.shape[2])
    seen = functional.scaled_dot_product_attention(folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return unfold(seen, q.shape[1])


def fold(q: Tensor, groups: int) -> Tensor:
    """Queries [B, S, h, d] by key head [B, g, S * h / g, d]."""
    return torch.unflatten(q, 2, (groups, -1)).transpose(1, 2).flatten(2, 3)


def unfold(seen: Tensor, tokens: int) -> Tensor:
    """The inverse of :func:`fold`, for S ``tokens``."""
    return torch.unflatten(seen, 2, (tokens, -1)).transpose(1, 2).flatten(2, 3)


def fold_mask(mask: Tensor, repeats: int) -> Tensor:
    """A mask [B, 1 or S, T] for folded queries, of which each key head has ``repeats`` per token."""
    return mask if mask.shape[1] == 1 or repeats == 1 else mask.repeat_interleave(repeats, dim=1)


def positions(mask: Tensor) -> Tensor:
    """[B, T] long of a mask [B, T]: how many unmasked tokens come before."""
    return mask.long().cumsum(dim=1) - 1


def visible(mask: Tensor, block: Tensor) -> Tensor | None:
    """bool [B, 1 or T, T], or None when every token sees every other; see :class:`Prefix`. A masked query sees what it would
    if it were not: its result is never read, but it stays finite."""
    # A compiler would cut its graph in two to ask (training compiles the whole pass).
    if not torch.compiler.is_compiling() and bool((block == block[:, :1]).all()):
        return None if bool(mask.all()) else mask[:, None, :]
    return mask[:, None, :] & (block[:, None, :] <= block[:, :, None])


@dataclass(frozen=True, slots=True)
class Prefix:
    """Embedded prefix tokens before the transformer.

    ``embeddings`` [B, T, D]; ``mask`` [B, T] bool, False for padding and masked cameras; ``block`` [B, T] long: a key is
    visible to a query if its block is not later than the query's. Masked tokens take no position. While a policy is served,
    mask and block are on the CPU, where they come from: what is asked of them then waits for no device.
    """

    embeddings: Tensor
    mask: Tensor
    block: Tensor

    @property
    def positions(self) -> Tensor:
        """[B, T] long, where the embeddings are."""
        return placed(positions(self.mask), self.embeddings.device)

    def visible(self) -> Tensor | None:
        """Who sees whom, see :func:`visible`, where the embeddings are."""
        seen = visible(self.mask, self.block)
        return None if seen is None else placed(seen, self.embeddings.device)

    def pack(self) -> Prefix:
        """The same prefix without the tokens that are masked in every row's order; exact, since they are seen by nobody.

        Rows keep their order of tokens; shorter rows are padded on the right, as far as the longest row."""
        if bool(self.mask.all()):
            return self
        order = torch.argsort(self.mask.logical_not().to(torch.uint8), dim=1, stable=True)
        order = order[:, : int(self.mask.sum(dim=1).max())]
        there = placed(order, self.embeddings.device)
        embeddings = torch.gather(self.embeddings, 1, there[..., None].expand(-1, -1, self.embeddings.shape[-1]))
        return Prefix(embeddings, torch.gather(self.mask, 1, order), torch.gather(self.block, 1, order))

    def rows(self, numbers: list[int]) -> Prefix:
        """Some of the rows."""
        there = placed(torch.tensor(numbers), self.embeddings.device)
        return Prefix(self.embeddings.index_select(0, there), self.mask[numbers], self.block[numbers])


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PrefixKV:
    """Keys and values of a prefix [layers, B, T, g, d], keys rotated; ``mask`` [B, T] bool. Immutable."""

    keys: Tensor
    values: Tensor
    mask: Tensor

    @property
    def lengths(self) -> Tensor:
        """Unmasked tokens of every row [B] long."""
        return self.mask.sum(dim=1)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values, self.mask))

    def append(self, keys: Tensor, values: Tensor) -> PrefixKV:
        """The same prefix followed by tokens that every row has."""
        added = torch.ones(keys.shape[1:3], dtype=torch.bool, device=self.mask.device)
        return PrefixKV(
            torch.cat((self.keys, keys), dim=2),
            torch.cat((self.values, values), dim=2),
            torch.cat((self.mask, added), dim=1),
        )

    def expand(self, samples: int) -> PrefixKV:
        """One row's prefix for ``samples`` rows, without a copy (several noise samples of one observation)."""
        if self.mask.shape[0] != 1:
            raise ValueError(f"only a prefix of one row can be shared, this one has {self.mask.shape[0]}")
        return PrefixKV(
            self.keys.expand(-1, samples, -1, -1, -1),
            self.values.expand(-1, samples, -1, -1, -1),
            self.mask.expand(samples, -1),
        )

    def row(self, number: int) -> PrefixKV:
        """One row without its padding, in storage of its own: a view would keep the whole batch alive."""
        there = self.mask[number].nonzero()[:, 0].tolist()
        first, count = (there[0], len(there)) if there else (0, 0)
        if there == list(range(first, first + count)):
            keys, values = (t[:, number : number + 1, first : first + count].clone() for t in (self.keys, self.values))
        else:
            keys, values = (t[:, number : number + 1, there] for t in (self.keys, self.values))
        return PrefixKV(keys, values, torch.ones(1, count, dtype=torch.bool, device=self.mask.device))

    @staticmethod
    def stack(rows: list[PrefixKV]) -> PrefixKV:
        """Rows of different lengths side by side, padded on the right."""
        if len(rows) == 1:
            return rows[0]
        longest = max(row.mask.shape[1] for row in rows)

        def padded(tensor: Tensor) -> Tensor:
            return functional.pad(tensor, (0, 0, 0, 0, 0, longest - tensor.shape[2]))

        return PrefixKV(
            torch.cat([padded(row.keys) for row in rows], dim=1),
            torch.cat([padded(row.values) for row in rows], dim=1),
            torch.cat([functional.pad(row.mask, (0, longest - row.mask.shape[1])) for row in rows]),
        )


class PrefixAttention(Protocol):
    """What the suffix's tokens see; the only way in which a denoise step touches a prefix. Reads, never writes."""

    @property
    def lengths(self) -> Tensor:
        """Unmasked prefix tokens [B] long; the suffix's positions go on from there."""
        ...

    def own(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Where the suffix's keys and values [B, S, g, d] are to be written before ``joint`` is called; None: it takes them."""
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
        device = kv.keys[0].device
        self.lengths = placed(kv.lengths, device)
        full = not torch.compiler.is_compiling() and bool(kv.mask.all())
        self._mask = None if full else placed(kv.mask[:, None, :], device)

    def own(self, layer: int) -> None:
        return None

    def joint(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
        keys = torch.cat((self.kv.keys[layer], k), dim=1)
        values = torch.cat((self.kv.values[layer], v), dim=1)
        return attend(q, keys, values, self._joint_mask(q, keys, causal))

    def cross(self, layer: int, q: Tensor) -> Tensor:
        return attend(q, self.kv.keys[layer], self.kv.values[layer], self._mask)

    def _joint_mask(self, q: Tensor, keys: Tensor, causal: bool) -> Tensor | None:
        """bool [B, 1 or S, T + S]."""
        if self._mask is None and not causal:
            return None
        rows, suffix = q.shape[:2]
        before = keys.shape[1] - suffix
        own = torch.ones(1, suffix if causal else 1, suffix, dtype=torch.bool, device=q.device).tril()
        own = own if causal else torch.ones_like(own)
        mask = torch.ones(rows, 1, before, dtype=torch.bool, device=q.device) if self._mask is None else self._mask
        return torch.cat((mask.expand(-1, own.shape[1], -1), own.expand(rows, -1, -1)), dim=2)
