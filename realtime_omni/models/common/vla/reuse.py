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
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from realtime_omni.models.common.vla.attention import PrefixKV
from realtime_omni.models.common.vla.network import PolicyInputs, PolicyShape

Value = TypeVar("Value")


class Identity(NamedTuple):
    """What a value depends on besides the observation: model, statistics, number format, resolution, how pictures are fitted,
    device. A model's weights do not change while it lives, and its caches die with it."""

    model: str
    statistics: str
    dtype: str
    image_size: int
    fit: str
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


def digest(image: NDArray[Any]) -> bytes:
    """32 bytes of a picture's content, shape and dtype. SHA-256, since processors compute it: a third of BLAKE2's time."""
    hasher = hashlib.sha256(f"{image.dtype}{image.shape}".encode())
    hasher.update(np.ascontiguousarray(image).data)
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

    @property
    def values(self) -> list[Value]:
        """All that are held; safe from any thread."""
        return [value for value, _ in tuple(self._held.values())]

    def statistics(self) -> CacheStatistics:
        return CacheStatistics(len(self._held), self._nbytes, self._hits, self._misses, self._evicted)


class Reuse:
    """What all sessions of one model share: two caches, and the identity that their keys carry."""

    shared_by_content = True
    """For ``testing.snapshot``: no session leaves anything here that another could tell."""

    def __init__(self, identity: Identity, capacity_bytes: int) -> None:
        """A quarter of ``capacity_bytes`` is for pictures, the rest for prefixes; 0: nothing is kept."""
        self.identity = identity
        self.pictures: ContentCache[Tensor] = ContentCache(capacity_bytes // 4)
        self.prefixes: ContentCache[PrefixKV] = ContentCache(capacity_bytes - capacity_bytes // 4)

    def key(
        self, images: Mapping[str, NDArray[Any]], cameras: tuple[str, ...], inputs: PolicyInputs, shape: PolicyShape
    ) -> PrefixKey:
        """Of one observation, whose pictures are ``images`` and whose one row is ``inputs``."""
        pictures = tuple(digest(images[name]) if name in images else None for name in cameras)
        state = inputs.state.numpy().tobytes() if shape.state_in_prefix else b""
        return PrefixKey(self.identity, pictures, tuple(inputs.tokens[inputs.token_mask].tolist()), state)

    def picture(self, content: bytes) -> Tensor | None:
        """Features [K, D] of a picture that was encoded before."""
        return self.pictures.get(PictureKey(self.identity, content))

    def keep_picture(self, content: bytes, features: Tensor) -> None:
        """``features`` may be a part of a batch: what is kept has storage of its own."""
        if self.pictures.capacity_bytes:
            self.pictures.put(
                PictureKey(self.identity, content), features.clone(), features.numel() * features.element_size()
            )

    @property
    def values(self) -> list[Tensor | PrefixKV]:
        """Everything that is held; safe from any thread."""
        return [*self.pictures.values, *self.prefixes.values]

    def clear(self) -> None:
        self.pictures.clear()
        self.prefixes.clear()
