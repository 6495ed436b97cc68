"""Bytes of model states, measured: which storages a state reaches, and how many bytes all sessions' states hold together.

Owns the walk over a state and the count of holders per storage. Knows no model and no device: a tensor is what has an
``untyped_storage``, an array what has an ``nbytes`` and a ``base``. A view counts with the whole storage that it keeps alive,
and a storage that forks or moments share counts once.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal

import msgspec
from msgspec import inspect

Storages = Mapping[tuple[str, int], int]
"""Bytes by device and address."""
_LEAVES = (
    *(str, bytes, int, float, complex, type(None)),
    *(type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
)
"""Hold no storage, or are shared by nature."""
_PLAIN = frozenset((str, bytes, bool, int, float, complex, type(None)))
_PLAIN_TYPES = (
    *(inspect.NoneType, inspect.BoolType, inspect.IntType, inspect.FloatType, inspect.StrType, inspect.BytesType),
    *(inspect.LiteralType, inspect.EnumType),
)


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """Bytes by owner. Allocated from the start: ``kv_pool`` (the null page included), ``scratch``, ``weights``. Of the
    pool, ``kv_used`` is held by sessions, and ``kv_shared`` of that by more than one. ``states``: all model states, each
    storage once. ``caches``: what a model keeps beside them for whoever needs it next."""

    kv_pool: int = 0
    kv_used: int = 0
    kv_shared: int = 0
    scratch: int = 0
    weights: int = 0
    states: int = 0
    caches: int = 0

    @property
    def total(self) -> int:
        """What the allocator has handed out for all of it, between two ticks."""
        return self.kv_pool + self.scratch + self.weights + self.states + self.caches


def storages(thing: Any) -> Storages:
    """Every storage that is reached from ``thing`` through attributes, containers and modules."""
    found: dict[tuple[str, int], int] = {}
    _walk(thing, found, set())
    return found


class Census:
    """How many holders each storage has; ``bytes`` counts every storage once. Reading ``bytes`` is safe from any thread."""

    def __init__(self) -> None:
        self._holders: dict[tuple[str, int], int] = {}
        self.bytes = 0

    def add(self, held: Storages) -> None:
        for key, size in held.items():
            before = self._holders.get(key, 0)
            self._holders[key] = before + 1
            if not before:
                self.bytes += size

    def bytes_without(self, held: Storages) -> int:
        """Of ``held``, what nobody else holds. Safe from any thread."""
        return sum(size for key, size in held.items() if key not in self._holders)

    def remove(self, held: Storages) -> None:
        for key, size in held.items():
            left = self._holders[key] - 1
            if left:
                self._holders[key] = left
            else:
                del self._holders[key]
                self.bytes -= size

    def check(self, holders: Iterable[Storages]) -> None:
        """Recount against everything that is held now. Raises AssertionError."""
        fresh = Census()
        for held in holders:
            fresh.add(held)
        assert (fresh.bytes, fresh._holders) == (self.bytes, self._holders), "the bytes of states do not add up"


class Holding:
    """What one session holds in all its moments, told to a census. A change costs what has changed, not what is held: a state
    may be fifty storages, and there may be as many moments."""

    def __init__(self) -> None:
        self.storages: dict[tuple[str, int], int] = {}
        """Of all parts, each once."""
        self._parts: dict[int, Storages] = {}
        self._holders: dict[tuple[str, int], int] = {}

    def update(self, parts: Iterable[Storages], census: Census) -> None:
        """``parts``, one a moment, are all that is held now; the same objects as before where nothing changed."""
        held = {id(part): part for part in parts if part}
        new = [part for number, part in held.items() if number not in self._parts]
        gone = [part for number, part in self._parts.items() if number not in held]
        self._parts = held
        first: dict[tuple[str, int], int] = {}
        for part in new:
            for key, size in part.items():
                before = self._holders.get(key, 0)
                self._holders[key] = before + 1
                if not before:
                    first[key] = size
        last: dict[tuple[str, int], int] = {}
        for part in gone:
            for key, size in part.items():
                left = self._holders[key] - 1
                self._holders[key] = left
                if not left:
                    last[key] = size
        self.storages.update(first)
        for key in last:
            del self._holders[key], self.storages[key]
        census.add(first)
        census.remove(last)


def _walk(thing: Any, found: dict[tuple[str, int], int], seen: set[int]) -> None:
    kind = type(thing)
    if kind in _PLAIN or id(thing) in seen:
        return
    what = _what(kind)  # type: ignore[arg-type]
    if what == "leaf":
        return
    seen.add(id(thing))
    values: Iterable[Any] = ()
    if what == "tensor":
        storage = thing.untyped_storage()
        if storage.nbytes():
            found[str(storage.device), storage.data_ptr()] = storage.nbytes()
    elif what == "array":
        owner = thing
        while hasattr(owner.base, "__array_interface__"):  # the last one may lie in bytes that somebody else holds
            owner = owner.base
        found["host", id(owner)] = owner.nbytes
    elif what == "mapping":
        values = (part for item in thing.items() for part in item)
    elif what == "values":
        values = thing
    else:
        values = _attributes(thing)
    for value in values:
        if type(value) not in _PLAIN:
            _walk(value, found, seen)


@lru_cache(maxsize=4096)
def _what(kind: type) -> Literal["leaf", "tensor", "array", "mapping", "values", "object"]:
    """How a thing of this type is walked; asked of the type, because a walk over a few plain fields is done for every tick."""
    if issubclass(kind, _LEAVES) or (issubclass(kind, msgspec.Struct) and _is_plain(kind)):
        return "leaf"
    if hasattr(kind, "untyped_storage"):
        return "tensor"
    if hasattr(kind, "__array_interface__"):
        return "array"
    if issubclass(kind, Mapping):
        return "mapping"
    return "values" if issubclass(kind, (list, tuple, Set)) else "object"


def _is_plain(kind: type[msgspec.Struct]) -> bool:
    """Whether the declared types of a struct's fields, all the way down, can hold no storage."""
    try:
        return _holds_nothing(inspect.type_info(kind), set())
    except (TypeError, NameError):  # a type that msgspec does not know
        return False


def _holds_nothing(info: inspect.Type, seen: set[type]) -> bool:
    match info:
        case inspect.StructType(cls=cls, fields=fields):
            if cls in seen:
                return True
            seen.add(cls)
            return all(_holds_nothing(field.type, seen) for field in fields)
        case inspect.UnionType(types=parts) | inspect.TupleType(item_types=parts):
            return all(_holds_nothing(part, seen) for part in parts)
        case (
            inspect.VarTupleType(item_type=item)
            | inspect.ListType(item_type=item)
            | inspect.FrozenSetType(item_type=item)
        ):
            return _holds_nothing(item, seen)
        case inspect.Metadata(type=inner):
            return _holds_nothing(inner, seen)
    return isinstance(info, _PLAIN_TYPES)


def _attributes(thing: Any) -> Iterable[Any]:
    slots = _slots(type(thing))  # type: ignore[arg-type]
    own: Iterable[Any] = getattr(thing, "__dict__", {}).values()
    if len(slots) < 2:
        return [*own, *(getattr(thing, slot, None) for slot in slots)]
    try:
        held = _read_all(slots)(thing)
    except AttributeError:  # one that was never set
        held = [getattr(thing, slot, None) for slot in slots]
    return [*own, *held] if own else held


@lru_cache(maxsize=1024)
def _read_all(slots: tuple[str, ...]) -> attrgetter[Any]:
    """All at once: a state of plain fields is read in every tick."""
    return attrgetter(*slots)


@lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[str, ...]:
    slots = [k.__dict__.get("__slots__", ()) for k in kind.__mro__]
    flat = [slot for own in slots for slot in ((own,) if isinstance(own, str) else own)]
    return tuple(slot for slot in flat if slot not in ("__weakref__", "__dict__"))
