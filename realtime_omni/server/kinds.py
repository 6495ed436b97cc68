"""Several models on one server: at most one of each kind, each with an engine of its own.

Owns what a kind is. Must not know a protocol: each endpoint asks for the kind that it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, TypeVar, get_args

from realtime_omni.errors import ConfigError
from realtime_omni.server.backend import Backend, ModelDescription

Kind: TypeAlias = Literal["world", "voice", "policy"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_B = TypeVar("_B", bound=Backend)


def kinds_of(model: ModelDescription) -> tuple[Kind, ...]:
    """A policy takes observations, a voice frames of sound; what takes neither makes a world, and so does a policy that can go
    on without observations."""
    if model.policy is not None:
        return ("world", "policy") if model.policy.imagines else ("policy",)
    return ("world",) if model.duplex is None else ("voice",)


def by_kind(managers: Sequence[_B]) -> dict[Kind, _B]:
    """The managers of a server in the order of ``KINDS``; one may serve two. Raises ConfigError naming two of the same kind."""
    found: dict[Kind, _B] = {}
    for manager in managers:
        model = manager.describe()
        for kind in kinds_of(model):
            other = found.setdefault(kind, manager)
            if other is not manager:
                raise ConfigError(
                    f"{other.describe().name} and {model.name}: a server has one {kind} at most", path="model"
                )
    return {kind: found[kind] for kind in KINDS if kind in found}


def first_kinds(models: dict[Kind, _B]) -> dict[Kind, _B]:
    """Every manager once, under the first of its kinds."""
    return {kind: each for kind, each in models.items() if next(k for k, m in models.items() if m is each) == kind}
