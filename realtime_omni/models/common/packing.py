"""Helpers for ``pack``, ``unpack`` and ``fingerprint``: strict reading of a packed state, a hash of weights.

Owns the checks that every model needs. A packed state may come from a file that somebody has edited.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch import Tensor, nn

from realtime_omni.errors import ArgumentError
from realtime_omni.models.base import PackedState

S = TypeVar("S", bound=msgspec.Struct)
_SAMPLE_BYTES = 1 << 20


def unpack_values(packed: PackedState, kind: type[S], tensors: Collection[str] = ()) -> S:
    """The values as ``kind`` (a struct with ``forbid_unknown_fields``), and exactly these ``tensors`` are there.

    Raises ArgumentError.
    """
    if set(packed.tensors) != set(tensors):
        raise ArgumentError(f"the state has the tensors {sorted(packed.tensors)}", path="state")
    try:
        return msgspec.convert(dict(packed.values), kind)
    except msgspec.ValidationError as error:
        raise ArgumentError(f"the state is not valid: {error}", path="state") from None


def unpack_tensor(
    packed: PackedState, name: str, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """One tensor, moved to ``device``. Raises ArgumentError: missing, or of another shape or dtype."""
    tensor = packed.tensors.get(name)
    if tensor is None:
        raise ArgumentError(f"the state lacks the tensor {name}", path="state")
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise ArgumentError(
            f"the state's {name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {tuple(shape)}", path="state"
        )
    return tensor.to(device)


def fingerprint(*parts: str, weights: nn.Module | None = None) -> str:
    """SHA-256, as hexadecimal digits, over the parts and all parameters and buffers: about a second for two gigabytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}\n".encode())
    for name, tensor in sorted((weights.state_dict() if weights is not None else {}).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprint_of_files(files: Iterable[Path], *parts: str) -> str:
    """Over the parts, names, sizes, and a megabyte of each end of the files: weights too large to read twice."""
    digest = hashlib.sha256(repr(parts).encode())
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(size - _SAMPLE_BYTES, 0))
            digest.update(file.read())
    return digest.hexdigest()
