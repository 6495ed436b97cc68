"""A snapshot: one session at its last committed chunk, as a value that can be kept, sent and restored.

Owns the pairing of header and tensors. Must not know an engine or a model.

    snapshot = await session.snapshot()
    snapshot.save("walk.safetensors")                 # blocks on the disk: asyncio.to_thread(snapshot.save, ...)
    ...
    session = await manager.restore(Snapshot.load("walk.safetensors"))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from realtime_omni.snapshot import file
from realtime_omni.snapshot.header import Header, decode_header, encode_header


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """``tensors`` are contiguous copies on the CPU; nobody may write to them."""

    header: Header
    tensors: Mapping[str, Tensor]

    @property
    def model(self) -> str:
        """Name of the model that the session belongs to."""
        return self.header.identity.model

    @property
    def session_id(self) -> str:
        return self.header.setup.session_id

    @property
    def epoch(self) -> int:
        return self.header.session.epoch

    @property
    def chunk_index(self) -> int:
        """Index of the chunk that comes next."""
        return self.header.session.present.chunk_index

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def save(self, path: str | Path) -> None:
        """Write the file atomically: it is there whole, or what was there before is.

        Raises SnapshotError (``snapshot_write_failed``): disk full, no such folder, no permission.
        """
        file.write(Path(path), encode_header(self.header), self.tensors)

    @classmethod
    def load(cls, path: str | Path, *, max_bytes: int = file.MAX_BYTES) -> Snapshot:
        """Read and check a file; more than ``max_bytes`` are not even read.

        Raises SnapshotError: ``snapshot_read_failed``, ``snapshot_too_large``, ``snapshot_corrupt``,
        ``snapshot_version``. Whether it fits a model is checked by ``restore``.
        """
        return cls._of(*file.read(Path(path), max_bytes=max_bytes))

    def to_bytes(self) -> bytes:
        """What :meth:`save` writes."""
        return file.to_bytes(encode_header(self.header), self.tensors)

    @classmethod
    def from_bytes(cls, data: bytes, *, max_bytes: int = file.MAX_BYTES) -> Snapshot:
        """The other way round; raises as :meth:`load` does."""
        return cls._of(*file.from_bytes(data, max_bytes=max_bytes))

    @classmethod
    def _of(cls, header: str, tensors: dict[str, Tensor]) -> Snapshot:
        return cls(decode_header(header), tensors)
