"""Bytes of model states, measured: which storages a state reaches, and how many bytes all sessions' states hold together.

Owns the walk over a state and the count of holders per storage. Knows no model and no device: a tensor is what has an
``untyped_storage``, an array what has an ``nbytes`` and a ``base``. A view counts with the whole storage that it keeps alive,
and a storage that forks or moments share counts once. States are values: a tensor that was measured keeps its storage.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Struct, field, inspect

Place: TypeAlias = int
"""Of a storage: the device (a GPU's number; -1: the CPU; -2: numpy) above 64 bits of address, or of an array's ``id``. One
number: to spell a device's name takes longer than all else that is asked of a tensor, and fifty are looked up in a tick."""
Storages: TypeAlias = Mapping[Place, int]
"""Bytes by place."""
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


class Extent(Struct, frozen=True):
    """What one state keeps alive. ``places``: of its tensors and arrays, by ``id``; to be read while the state lives."""

    storages: Storages = field(default_factory=dict)
    places: Mapping[int, Place] = field(default_factory=dict)


NOTHING: Final = Extent()


def measure(state: Any, before: Extent = NOTHING) -> Extent:
    """Every storage that is reached from ``state`` through attributes, containers and modules.

    ``before``: of the state that it follows, which still lives. A tensor that is in both is not asked again: most of fifty
    are, in every tick of every session, and to ask one takes ten times as long as to know it."""
    walk = _Walk(before)
    walk.over(state)
    return Extent(walk.found, walk.places)


def storages(thing: Any) -> Storages:
    """The storages of :func:`measure`."""
    return measure(thing).storages


class Census:
    """How many holders each storage has; ``bytes`` counts every storage once. Reading ``bytes`` is safe from any thread."""

    def __init__(self) -> None:
        self._holders: dict[Place, int] = {}
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
    """What one session holds in its moments, told to a census. Neighbours share most of what they hold, so a storage counts
    once for each run of neighbours: a moment that comes or goes costs what it does not share with the one beside it."""

    def __init__(self) -> None:
        self.storages: dict[Place, int] = {}
        """Of all moments, each once."""
        self.bytes = 0
        """Of :attr:`storages`."""
        self._last: Storages = {}
        """Of the newest moment; at first one that holds nothing."""
        self._ending: deque[Storages] = deque()
        """Of every moment but the newest, the oldest first: what the one behind it does not hold."""
        self._runs: dict[Place, int] = {}

    def push(self, moment: Storages, census: Census) -> None:
        """The next one begins."""
        last, self._last = self._last, moment
        self._ending.append({place: size for place, size in last.items() if place not in moment})
        runs, first = self._runs, dict[Place, int]()
        for place in [place for place in moment if place not in last]:
            runs[place] = run = runs.get(place, 0) + 1
            if run == 1:
                first[place] = moment[place]
        self.storages.update(first)
        self.bytes += sum(first.values())
        census.add(first)

    def drop_oldest(self, census: Census) -> None:
        """It is not held any more; the next one is."""
        runs, gone = self._runs, dict[Place, int]()
        for place, size in self._ending.popleft().items():
            runs[place] = left = runs[place] - 1
            if not left:
                gone[place] = size
                del runs[place], self.storages[place]
        self.bytes -= sum(gone.values())
        census.remove(gone)

    def update(self, moments: Iterable[Storages], census: Census) -> None:
        """``moments``, the oldest first, are all that is held now; none: it ends."""
        before = len(self._ending) + 1
        for moment in tuple(moments) or ({},):
            self.push(moment, census)
        for _ in range(before):
            self.drop_oldest(census)


class _Walk:
    """Over one state; ``found`` and ``places`` become its extent."""

    def __init__(self, before: Extent) -> None:
        self.found: dict[Place, int] = {}
        self.places: dict[int, Place] = {}
        self._before = before
        self._seen: set[int] = set()

    def over(self, thing: Any) -> None:
        number = id(thing)
        if number in self._seen:
            return
        self._seen.add(number)
        what = _what(type(thing))  # type: ignore[arg-type]
        if what == "tensor":
            storage = thing.untyped_storage()
            if size := storage.nbytes():
                self._note(number, (thing.get_device() << 64) + storage.data_ptr(), size)
        elif what == "array":
            owner = thing
            while hasattr(owner.base, "__array_interface__"):  # the last one may lie in bytes that somebody else holds
                owner = owner.base
            self._note(number, (-2 << 64) + id(owner), owner.nbytes)
        elif what == "values":
            self._over_all(thing)
        elif what == "mapping":
            self._over_all(part for item in thing.items() for part in item)
        elif what == "object":
            self._over_all(_attributes(thing))

    def _over_all(self, values: Iterable[Any]) -> None:
        known, sizes, found, places = self._before.places, self._before.storages, self.found, self.places
        for value in values:
            place = known.get(id(value))
            if place is not None:
                places[id(value)], found[place] = place, sizes[place]
            elif type(value) not in _PLAIN:
                self.over(value)

    def _note(self, number: int, place: Place, size: int) -> None:
        self.places[number] = place
        self.found[place] = size


@lru_cache(maxsize=4096)
def _what(kind: type) -> Literal["leaf", "tensor", "array", "mapping", "values", "object"]:
    """How a thing of this type is walked; asked of the type, because a walk over a few plain fields is done for every tick."""
    if kind in _PLAIN or issubclass(kind, _LEAVES) or (issubclass(kind, msgspec.Struct) and _is_plain(kind)):
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
    slots, read = _slots(type(thing))  # type: ignore[arg-type]
    own: Iterable[Any] = getattr(thing, "__dict__", {}).values()
    if read is None:
        return [*own, *(getattr(thing, slot, None) for slot in slots)]
    try:
        held = read(thing)
    except AttributeError:  # one that was never set
        held = [getattr(thing, slot, None) for slot in slots]
    return [*own, *held] if own else held


@lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[tuple[str, ...], attrgetter[Any] | None]:
    """Of all classes; and, of several, what reads all at once: a state of plain fields is read in every tick."""
    slots = [k.__dict__.get("__slots__", ()) for k in kind.__mro__]
    flat = [slot for own in slots for slot in ((own,) if isinstance(own, str) else own)]
    names = tuple(slot for slot in flat if slot not in ("__weakref__", "__dict__"))
    return names, attrgetter(*names) if len(names) > 1 else None
