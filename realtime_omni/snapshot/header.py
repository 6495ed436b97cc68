"""The header of a saved session: every value that is not a tensor, as one JSON text.

Owns names, types and bounds of the fields and the version number. Must not know tensors, files or engines. The tensors that
go with a header are named by :func:`kv_name`, :func:`state_prefix` and :data:`IMAGE`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from realtime_omni.errors import ErrorCode, SnapshotError
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.session.record import Count, Digest, Name, Record, SessionRecord, Text

FORMAT: Final = "realtime_omni.session"
VERSION: Final = 2
"""2: states of a session may share tensors (:attr:`StateRecord.shared`)."""
IMAGE = "setup.image"
"""uint8 [H, W, 3]: the client's start picture, kept for a reset."""
TENSOR_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

Positive = Annotated[int, Meta(ge=1, le=1 << 31)]
SessionIdText = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class GeometryRecord(Record, frozen=True, kw_only=True):
    """The shape of the keys and values. Page size is not part of it: frames are saved, not pages."""

    layers: Count
    kv_heads: Positive
    head_dim: Positive
    tokens_per_frame: Positive
    frames_per_block: Positive
    window_frames: Positive
    sink_frames: Count
    reset_at_boundary: bool
    branches: tuple[Name, ...]

    @classmethod
    def of(cls, spec: KVSpec) -> GeometryRecord:
        return cls(
            layers=spec.num_layers,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            tokens_per_frame=spec.tokens_per_frame,
            frames_per_block=spec.frames_per_block,
            window_frames=spec.window_frames,
            sink_frames=spec.sink_frames,
            reset_at_boundary=spec.reset_at_boundary,
            branches=tuple(b.name for b in spec.branches),
        )


class IdentityRecord(Record, frozen=True, kw_only=True):
    """Which model a session belongs to. ``fingerprint`` is of its configuration and weights."""

    model: Name
    fingerprint: Digest
    dtype: Name
    geometry: GeometryRecord

    def require(self, other: IdentityRecord) -> None:
        """Raises SnapshotError (``snapshot_foreign``) naming the first thing in which ``other`` differs."""
        for field in ("model", "dtype", "geometry", "fingerprint"):
            if getattr(self, field) != getattr(other, field):
                what = {"model": "a model", "fingerprint": "weights or options"}.get(field, f"a {field}")
                raise SnapshotError(
                    f"the snapshot was made with {what} that this server does not run",
                    code=ErrorCode.SNAPSHOT_FOREIGN,
                    path=field,
                )


class SetupRecord(Record, frozen=True, kw_only=True):
    """How the session begins again after a reset. Its image is the tensor :data:`IMAGE`."""

    session_id: SessionIdText
    prompt: Text | None
    seed: Count
    start: Name | None
    outputs: tuple[Name, ...]


class StateRecord(Record, frozen=True, kw_only=True):
    """A model's state after ``frames`` committed frames: the values of its packed form.

    ``shared``: its tensors that an earlier moment has too, each with that one's name in the file.
    """

    frames: Count
    values: dict[str, Any]
    shared: dict[Name, Name] = msgspec.field(default_factory=dict)


class WorkerRecord(Record, frozen=True, kw_only=True):
    """What the executor holds beside tensors.

    ``retained``: per branch the absolute indices of the frames whose keys and values are saved. ``past``: the states at
    the boundaries that the session can be rewound to, oldest first.
    """

    retained: tuple[tuple[Count, ...], ...]
    present: StateRecord
    past: tuple[StateRecord, ...]


class Header(Record, frozen=True, kw_only=True):
    """See the module docstring."""

    format: Literal["realtime_omni.session"] = FORMAT
    version: Literal[1, 2] = VERSION
    identity: IdentityRecord
    setup: SetupRecord
    session: SessionRecord
    worker: WorkerRecord


def encode_header(header: Header) -> str:
    """One line of ASCII JSON."""
    return msgspec.json.encode(header).decode()


def decode_header(text: str) -> Header:
    """Raises SnapshotError: ``snapshot_version`` for one that a later release wrote, else ``snapshot_corrupt``."""
    try:
        about = msgspec.json.decode(text, type=_About)
        if about.format != FORMAT:
            raise SnapshotError("this is not a saved session")
        if about.version > VERSION:
            raise SnapshotError(
                f"the snapshot has version {about.version}; this release reads up to {VERSION}",
                code=ErrorCode.SNAPSHOT_VERSION,
            )
        return msgspec.json.decode(text, type=Header)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise SnapshotError(f"the snapshot's header is not valid: {error}") from None


class _About(msgspec.Struct, frozen=True):
    format: str
    version: int


def kv_name(branch: int, layer: int, which: str) -> str:
    """The tensor (``k`` or ``v``) [frames, tokens, heads, head_dim] of one branch (by local index) and layer."""
    return f"kv.{branch}.{layer}.{which}"


def state_prefix(age: int) -> str:
    """What a model's tensor names follow: in the state of ``age`` boundaries ago, 0 being the present one."""
    return f"state.{age}."
