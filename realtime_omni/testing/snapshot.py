"""A fingerprint of everything that hangs on an object, to see whether running sessions left something there.

Walks attributes, containers and modules; arrays and tensors count by their bytes. Functions, classes and modules of code are
not followed: they are shared by nature. Nor is what says of itself that it is ``shared_by_content``: a bounded cache whose
values depend on their keys alone, so that whoever put one there makes no difference.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

DEEPEST = 12
NOT_FOLLOWED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type)

Snapshot = dict[str, str]
"""Path to fingerprint."""


def snapshot(thing: Any, name: str = "model") -> Snapshot:
    """Path and fingerprint of every leaf under ``thing``."""
    out: Snapshot = {}
    _walk(thing, name, 0, set(), out)
    return out


def changed(before: Snapshot, after: Snapshot) -> tuple[str, ...]:
    """The paths that are new, gone or different."""
    return tuple(sorted(p for p in before.keys() | after.keys() if before.get(p) != after.get(p)))


def _walk(thing: Any, path: str, depth: int, seen: set[int], out: Snapshot) -> None:
    if isinstance(thing, NOT_FOLLOWED) or depth > DEEPEST or getattr(thing, "shared_by_content", False) is True:
        return
    if thing is None or isinstance(thing, (bool, int, float, complex, str, bytes)):
        out[path] = repr(thing)
        return
    if isinstance(thing, np.ndarray) or hasattr(thing, "untyped_storage"):
        out[path] = _digest(thing)
        return
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Mapping):
        out[path] = f"{type(thing).__name__} of {len(thing)}"
        for key, value in thing.items():
            _walk(value, f"{path}[{key!r}]", depth + 1, seen, out)
    elif isinstance(thing, (list, tuple)):
        out[path] = f"{type(thing).__name__} of {len(thing)}"
        for index, value in enumerate(thing):
            _walk(value, f"{path}[{index}]", depth + 1, seen, out)
    elif isinstance(thing, Set):
        out[path] = f"set of {len(thing)}: {sorted(map(repr, thing))}"
    else:
        for key, value in _attributes(thing):
            _walk(value, f"{path}.{key}", depth + 1, seen, out)


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    found = dict(getattr(thing, "__dict__", {}))
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, slot):
                found[slot] = getattr(thing, slot)
    return sorted(found.items())


def _digest(data: Any) -> str:
    if hasattr(data, "untyped_storage"):
        import torch

        flat = data.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return f"tensor {tuple(data.shape)} {data.dtype} {hashlib.sha256(raw).hexdigest()}"
    return f"array {data.shape} {data.dtype} {hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest()}"
