"""Keys and values of what a session is conditioned on, encoded once: a prompt, a picture, per guidance branch.

Owns the rule that a branch is complete or not there: its parts (text; text and image) are drawn from the model, checked and
published together, under the key that they were made from, so a failure half way leaves what was there before. The value is
immutable and belongs to the session's state. Hence the rest needs no code: sessions and branches cannot read each other, a
failed tick has changed nothing, whoever holds it can read it after its session is gone, and its bytes are counted with the
state, each storage once however many sessions, branches or views share it.

Must not know: what a key means, attention, pages. Keys and values of generated blocks are pages (:mod:`realtime_omni.kv`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

KeysValues = tuple[Tensor, Tensor]
"""Of one layer."""
Parts = Mapping[str, Iterable[KeysValues]]
"""What an encoding yields: for each part, keys and values layer by layer."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One complete branch. ``key``: what it was made from, compared by ``==``. ``parts``: keys and values per layer."""

    key: Hashable
    parts: Mapping[str, tuple[KeysValues, ...]]

    def __getitem__(self, part: str) -> tuple[KeysValues, ...]:
        return self.parts[part]


@dataclass(frozen=True, slots=True)
class Conditioning:
    """A session's branches. ``layers`` and ``parts``: what a branch must hold to be complete.

    An empty one is as true as a full one: it has no length, so ``conditioning or default`` never swaps it for another.
    """

    layers: int
    parts: tuple[str, ...] = ("text",)
    branches: Mapping[str, Encoded] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Raises ValueError (``partially initialized``) for a branch that is not complete."""
        for branch, encoded in self.branches.items():
            self._check(branch, encoded.parts)

    def find(self, branch: str, key: Hashable) -> Encoded | None:
        """The branch, if it was made from exactly this key."""
        known = self.branches.get(branch)
        return known if known is not None and known.key == key else None

    def get(self, branch: str) -> Encoded | None:
        """The branch, whatever it was made from; None when it was never encoded."""
        return self.branches.get(branch)

    def capture(self, branch: str, key: Hashable, encode: Callable[[], Parts]) -> Conditioning:
        """With this branch encoded; the same object when it is already, and then ``encode`` is not called.

        Nothing is copied: the tensors that ``encode`` yields are kept. Whatever it raises leaves this value as it is.

        Raises:
            ValueError: a part or layer is missing, or there is one too many (``partially initialized``).
        """
        if self.find(branch, key) is not None:
            return self
        parts = {name: tuple(layers) for name, layers in encode().items()}
        branches = {**self.branches, branch: Encoded(key, MappingProxyType(parts))}
        return replace(self, branches=MappingProxyType(branches))

    def without(self, *branches: str) -> Conditioning:
        """Without the named branches; without any when none is named."""
        kept = {name: encoded for name, encoded in self.branches.items() if branches and name not in branches}
        return replace(self, branches=MappingProxyType(kept))

    def _check(self, branch: str, parts: Mapping[str, tuple[KeysValues, ...]]) -> None:
        if set(parts) != set(self.parts):
            missing = sorted(set(self.parts) ^ set(parts))
            raise ValueError(f"branch {branch!r} is partially initialized: {', '.join(missing)}")
        for name, layers in parts.items():
            if len(layers) != self.layers:
                raise ValueError(
                    f"branch {branch!r} is partially initialized: {name} has {len(layers)} of {self.layers} layers"
                )
            first = layers[0] if layers else None
            if first is not None and any(k.shape != first[0].shape or v.shape != first[1].shape for k, v in layers):
                raise ValueError(f"branch {branch!r}: the layers of {name} differ in shape")


def stacked(rows: Sequence[tuple[KeysValues, ...]]) -> tuple[KeysValues, ...]:
    """One part of several rows, ready for a batch: per layer [B, ...] twice. A lone row is not copied."""
    if len(rows) == 1:
        return tuple((k[None], v[None]) for k, v in rows[0])
    return tuple(
        (torch.stack([k for k, _ in layer]), torch.stack([v for _, v in layer])) for layer in zip(*rows, strict=True)
    )
