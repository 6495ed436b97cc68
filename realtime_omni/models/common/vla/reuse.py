"""Exact reuse: work that an observation shares with an earlier one is not done again.

Two things are reusable. A picture's features depend on the picture alone. A prefix's keys depend on every picture and every
word: from the second layer on each token has seen all others, so a prefix is reused whole or not at all. It is the same in
these cases: a new state without a new frame (pi0, pi0.5 within one bin), another noise sample, another hold on the old
chunk, a retry.

Keys are complete: content digests, and :class:`Identity` for everything else a value depends on. Owns no thread and no lock;
one owner calls it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from realtime_omni.models.common.vla.attention import PrefixKV
from realtime_omni.models.common.vla.network import FlowNetwork, PolicyInputs

Value = TypeVar("Value")


class Identity(NamedTuple):
    """What a value depends on besides the observation: weights, statistics, number format, resolution, device."""

    weights: str
    statistics: str
    dtype: str
    image_size: int
    device: str


class PictureKey(NamedTuple):
    identity: Identity
    picture: bytes


class PrefixKey(NamedTuple):
    """``pictures``: one digest per slot, None where masked. ``state``: empty unless the prefix reads it."""

    identity: Identity
    pictures: tuple[bytes | None, ...]
    tokens: tuple[int, ...]
    state: bytes


def digest(tensor: Tensor) -> bytes:
    """16 bytes of a tensor's content, shape and dtype."""
    held = tensor.detach().contiguous().cpu()
    hasher = hashlib.blake2b(f"{held.dtype}{tuple(held.shape)}".encode(), digest_size=16)
    hasher.update(held.view(torch.uint8).numpy().data)
    return hasher.digest()


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    entries: int
    nbytes: int
    hits: int
    misses: int
    evicted: int


class ContentCache(Generic[Value]):
    """Values by content key; the least recently used leave when ``capacity_bytes`` would be exceeded. 0 turns it off."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes must not be negative, is {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self._held: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._nbytes = self._hits = self._misses = self._evicted = 0

    def get(self, key: Hashable) -> Value | None:
        found = self._held.get(key)
        if found is None:
            self._misses += 1
            return None
        self._hits += 1
        self._held.move_to_end(key)
        return found[0]

    def put(self, key: Hashable, value: Value, nbytes: int) -> None:
        """A value larger than the whole cache is not kept."""
        self.drop(key)
        if nbytes > self.capacity_bytes:
            return
        while self._nbytes + nbytes > self.capacity_bytes:
            _, (_, freed) = self._held.popitem(last=False)
            self._nbytes -= freed
            self._evicted += 1
        self._held[key] = (value, nbytes)
        self._nbytes += nbytes

    def drop(self, key: Hashable) -> None:
        _, freed = self._held.pop(key, (None, 0))
        self._nbytes -= freed

    def clear(self) -> None:
        self._held.clear()
        self._nbytes = 0

    def statistics(self) -> CacheStatistics:
        return CacheStatistics(len(self._held), self._nbytes, self._hits, self._misses, self._evicted)


@dataclass(frozen=True, slots=True)
class Reuse:
    """The two caches of one network and the identity their keys carry."""

    identity: Identity
    pictures: ContentCache[Tensor]
    prefixes: ContentCache[PrefixKV]

    def encode(self, network: FlowNetwork, row: PolicyInputs) -> PrefixKV:
        """What ``network.encode`` returns for one row, with as little work as its content allows."""
        if row.image_mask.shape[0] != 1:
            raise ValueError("content is compared row by row")
        digests = [
            digest(image) if there else None for image, there in zip(row.images[0], row.image_mask[0], strict=True)
        ]
        key = self._key(network, row, digests)
        kv = self.prefixes.get(key)
        if kv is None:
            prefix = network.embed_prefix(self._features(network, row, digests), row)
            kv = network.prefill(prefix.pack())
            self.prefixes.put(key, kv, kv.nbytes)
        return network.add_state(kv, row.state)

    def _key(self, network: FlowNetwork, row: PolicyInputs, digests: list[bytes | None]) -> PrefixKey:
        tokens = tuple(row.tokens[row.token_mask].tolist())
        state = digest(row.state) if network.shape.state_in_prefix else b""
        return PrefixKey(self.identity, tuple(digests), tokens, state)

    def _features(self, network: FlowNetwork, row: PolicyInputs, digests: list[bytes | None]) -> Tensor:
        """[1, N, K, D]; pictures that are not known are encoded together."""
        keys = [None if d is None else PictureKey(self.identity, d) for d in digests]
        known = {slot: self.pictures.get(key) for slot, key in enumerate(keys) if key is not None}
        fresh = [slot for slot, features in known.items() if features is None]
        if fresh:
            for slot, features in zip(fresh, network.embed_images(row.images[0, fresh]), strict=True):
                known[slot] = features
                self.pictures.put(keys[slot], features, features.numel() * features.element_size())
        there = {slot: features for slot, features in known.items() if features is not None}
        blank = torch.zeros_like(next(iter(there.values())))
        return torch.stack([there.get(slot, blank) for slot in range(len(keys))])[None]
