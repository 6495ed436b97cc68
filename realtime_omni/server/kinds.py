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


def kind_of(model: ModelDescription) -> Kind:
    """A policy takes observations, a voice frames of sound; what takes neither makes a world."""
    if model.policy is not None:
        return "policy"
    return "world" if model.duplex is None else "voice"


def by_kind(managers: Sequence[_B]) -> dict[Kind, _B]:
    """The managers of a server in the order of ``KINDS``. Raises ConfigError naming two of the same kind."""
    found: dict[Kind, _B] = {}
    for manager in managers:
        model = manager.describe()
        other = found.setdefault(kind_of(model), manager)
        if other is not manager:
            kind, name = kind_of(model), other.describe().name
            raise ConfigError(f"{name} and {model.name}: a server has one {kind} at most", path="model")
    return {kind: found[kind] for kind in KINDS if kind in found}
