"""The container: a safetensors file with the header and a checksum in its metadata, written atomically.

Owns bytes on disk, the checksum and the size limits. Must not know what the header or the tensors mean.

``__metadata__`` has two entries: ``header``, the JSON text, and ``sha256``, over that text and then, in the order of their
names, a line ``name dtype [shape]`` and the bytes of every tensor. Any safetensors tool can open the file. There is no pickle.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from realtime_omni.errors import ErrorCode, SnapshotError

MAX_BYTES = 64 << 30
"""Larger than the state of any model we know of; a caller that reads files of strangers passes less."""
MAX_HEADER_BYTES = 64 << 20


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    header: str
    sha256: str


class _Index(msgspec.Struct, frozen=True, rename={"metadata": "__metadata__"}):
    """The part of a safetensors index that the library does not hand out for bytes."""

    metadata: _Metadata


def checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 as the module docstring says. Tensors are contiguous and on the CPU."""
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n".encode())
        if tensor.numel():  # nothing at all may have a stride of 0, which cannot be seen as bytes
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def to_bytes(header: str, tensors: Mapping[str, Tensor]) -> bytes:
    """The file as bytes."""
    return bytes(safetensors.torch.save(dict(tensors), _metadata(header, tensors)))


def from_bytes(data: bytes, *, max_bytes: int = MAX_BYTES) -> tuple[str, dict[str, Tensor]]:
    """Header and tensors of :func:`to_bytes`.

    Raises SnapshotError: ``snapshot_too_large``, or ``snapshot_corrupt`` for whatever is not exactly what was written.
    """
    _require_size(len(data), max_bytes)
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, MAX_HEADER_BYTES):
        raise SnapshotError("the snapshot is cut short, or no safetensors file")
    try:
        metadata = msgspec.json.decode(memoryview(data)[8 : 8 + length], type=_Index).metadata
        tensors = safetensors.torch.load(data)
    except (msgspec.DecodeError, SafetensorError, RecursionError, UnicodeError, KeyError, ValueError):
        raise SnapshotError("the snapshot is cut short, damaged, or no saved session") from None
    if checksum(metadata.header, tensors) != metadata.sha256:
        raise SnapshotError("the snapshot is damaged: its checksum does not match")
    return metadata.header, tensors


def write(path: Path, header: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a file next to ``path``, make it durable, and rename it; on failure ``path`` is as before.

    Raises SnapshotError (``snapshot_write_failed``).
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        safetensors.torch.save_file(dict(tensors), temporary, _metadata(header, tensors))
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: no path can be that, say one with a NUL in it
        raise SnapshotError(
            f"the snapshot could not be written: {_why(error)}", code=ErrorCode.SNAPSHOT_WRITE_FAILED
        ) from error
    finally:
        _remove(temporary)


def read(path: Path, *, max_bytes: int = MAX_BYTES) -> tuple[str, dict[str, Tensor]]:
    """Header and tensors of a file. Raises SnapshotError as :func:`from_bytes` does, or ``snapshot_read_failed``."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            _require_size(size, max_bytes)
            data = file.read(size)
    except (OSError, ValueError) as error:
        raise SnapshotError(
            f"the snapshot could not be read: {_why(error)}", code=ErrorCode.SNAPSHOT_READ_FAILED
        ) from error
    return from_bytes(data, max_bytes=max_bytes)


def _metadata(header: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {"header": header, "sha256": checksum(header, tensors)}


def _require_size(size: int, limit: int) -> None:
    if size > limit:
        raise SnapshotError(f"the snapshot has {size} bytes, allowed are {limit}", code=ErrorCode.SNAPSHOT_TOO_LARGE)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except (OSError, ValueError):  # the folder itself is gone or not ours; the first error says why
        return


def _why(error: Exception) -> str:
    """The system's reason, without the path that an OSError's text carries."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else None
    return "unknown error" if number is None else os.strerror(number)
