"""The values that cross every door: events in, ticks to the model, chunks out.

Owns nothing and knows no clock, thread, socket, tensor library. Everything here is immutable once built and validates
when built, so that nobody downstream has to check again. Rows A3-A7, A13, A24, A40 of the session contract.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NewType

from msgspec import Struct
from msgspec import field as struct_field

from realtime_omni.errors import ArgumentError, ChunkMetadataError

if TYPE_CHECKING:
    from realtime_omni.session.frame import Frame
    from realtime_omni.session.observation import Observation
    from realtime_omni.session.signals import Signal

SessionId = NewType("SessionId", str)
EventId = NewType("EventId", int)
ChunkIndex = NewType("ChunkIndex", int)
Generation = NewType("Generation", int)

MAX_EVENT_ID = 2**53
"""Largest integer that a JSON number carries exactly in every client language."""
MAX_PAYLOAD_BYTES = 64 * 1024
MAX_PAYLOAD_DEPTH = 16
MAX_PROMPT_CHARS = 2000
MAX_TRACKS = 16
MAX_NAME_CHARS = 128


def freeze_json(value: object, path: str, depth: int = 0) -> Any:
    """Deep, immutable copy of a JSON-like value.

    Raises:
        ArgumentError: naming the path of what is not JSON (objects, tensors, NaN, infinity, too deep, non-string keys).
    """
    if depth > MAX_PAYLOAD_DEPTH:
        raise ArgumentError(f"{path} is nested deeper than {MAX_PAYLOAD_DEPTH}", path=path)
    if value is None or isinstance(value, (bool, str)):
        if isinstance(value, str):
            _check_text(value, path)
        return value
    if isinstance(value, int):
        if abs(value) > MAX_EVENT_ID:
            raise ArgumentError(f"{path} is an integer beyond 2^53", path=path)
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ArgumentError(f"{path} is not finite", path=path)
        return value
    if isinstance(value, Mapping):
        out: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise ArgumentError(f"{path} has a key that is not a string", path=path)
            _check_text(key, path)
            out[key] = freeze_json(item, f"{path}.{key}", depth + 1)
        return MappingProxyType(out)
    if isinstance(value, (list, tuple)):
        return tuple(freeze_json(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value))
    raise ArgumentError(f"{path} is not a JSON value", path=path)


def thaw_json(value: object) -> Any:
    """The plain dict/list form of a frozen value (for JSON encoders and reducers that want to edit)."""
    if isinstance(value, Mapping):
        return {k: thaw_json(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [thaw_json(v) for v in value]
    return value


def canonical_json(value: object) -> str:
    """One text per value: sorted keys, no spaces; 1, 1.0 and true stay different."""
    return _CANONICAL.encode(value)


def _as_dict(value: object) -> dict[str, Any]:
    """What the encoder does not know of a frozen value: its mappings."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, default=_as_dict)


def _check_text(value: str, path: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{path} holds a lone surrogate", path=path) from None


def _check_name(value: object, path: str) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ArgumentError(f"{path} must be a non-blank string", path=path)
    if len(value) > MAX_NAME_CHARS:
        raise ArgumentError(f"{path} is longer than {MAX_NAME_CHARS} characters", path=path)
    _check_text(value, path)


def check_prompt(prompt: object, path: str = "prompt") -> str:
    """A prompt is text with something in it, at most ``MAX_PROMPT_CHARS`` characters."""
    if not isinstance(prompt, str) or not prompt.strip():
        raise ArgumentError(f"{path} must be a non-blank string", path=path)
    if len(prompt) > MAX_PROMPT_CHARS:
        raise ArgumentError(f"{path} is longer than {MAX_PROMPT_CHARS} characters", path=path)
    _check_text(prompt, path)
    return prompt


def check_event_id(value: object, path: str = "event_id") -> EventId:
    """Event ids are integers 0..2^53 and never bool."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"{path} must be an integer", path=path)
    if not 0 <= value <= MAX_EVENT_ID:
        raise ArgumentError(f"{path} must lie in 0..2^53", path=path)
    return EventId(value)


@dataclass(frozen=True, slots=True)
class ControlInput:
    """One opaque control: only the model's reducer looks inside ``data``.

    Args:
        track: what is controlled, e.g. ``camera``; at most one control per track and event.
        schema: which vocabulary ``data`` speaks, e.g. ``lingbot.camera_actions.v1``.
        data: a JSON object; copied and frozen here.

    Raises:
        ArgumentError: naming the offending path.
    """

    track: str
    schema: str
    data: Mapping[str, Any]

    def __post_init__(self) -> None:
        _check_name(self.track, "track")
        _check_name(self.schema, "schema")
        if not isinstance(self.data, Mapping):
            raise ArgumentError("data must be a mapping", path="data")
        object.__setattr__(self, "data", freeze_json(self.data, "data"))
        if len(canonical_json(self.data)) > MAX_PAYLOAD_BYTES:
            raise ArgumentError(f"data is larger than {MAX_PAYLOAD_BYTES} bytes", path="data")

    def to_dict(self) -> dict[str, Any]:
        return {"track": self.track, "schema": self.schema, "data": thaw_json(self.data)}


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """A client's change of the world: a new prompt, new controls, or both; applied together, in id order.

    Args:
        event_id: unique and rising within the session, also across resets; 0..2^53.
        prompt: non-blank text or None (unchanged).
        controls: at most one :class:`ControlInput` per track.
    """

    event_id: EventId
    prompt: str | None = None
    controls: tuple[ControlInput, ...] = ()
    fingerprint: str = field(init=False, repr=False, compare=False, default="")
    payload_bytes: int = field(init=False, repr=False, compare=False, default=0)
    """Of the payload as JSON text."""

    def __post_init__(self) -> None:
        check_event_id(self.event_id)
        if self.prompt is not None:
            check_prompt(self.prompt)
        if isinstance(self.controls, (str, bytes)) or not isinstance(self.controls, Sequence):
            raise ArgumentError("controls must be a sequence", path="controls")
        controls = tuple(self.controls)
        for i, control in enumerate(controls):
            if not isinstance(control, ControlInput):
                raise ArgumentError(f"controls[{i}] must be a ControlInput", path=f"controls[{i}]")
        tracks = [c.track for c in controls]
        if len(tracks) > MAX_TRACKS:
            raise ArgumentError(f"controls has more than {MAX_TRACKS} tracks", path="controls")
        if len(set(tracks)) != len(tracks):
            raise ArgumentError("controls has two entries for one track", path="controls")
        if self.prompt is None and not controls:
            raise ArgumentError("an event must carry a prompt or at least one control", path="event")
        object.__setattr__(self, "controls", controls)
        text = canonical_json({"prompt": self.prompt, "controls": tuple(c.to_dict() for c in controls)})
        object.__setattr__(self, "payload_bytes", len(text))
        object.__setattr__(self, "fingerprint", hashlib.sha256(text.encode()).hexdigest())


class AcceptStatus(StrEnum):
    """What became of an event that was not refused."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    DISCARDED = "discarded"


class EventAcceptance(Struct, frozen=True):
    """Receipt of an event. ``accepted`` never means applied: the chunk that reflects it names it.

    ``understood_prompt`` is what the model made of the prompt (its nearest known one), or None.
    """

    session_id: SessionId
    event_id: EventId
    status: AcceptStatus
    pending_event_count: int
    understood_prompt: str | None = None


class TickRequest(Struct, frozen=True):
    """Immutable snapshot that one tick works on. ``request_id`` correlates tick and metadata; it is not a routing id."""

    session_id: SessionId
    request_id: str
    chunk_index: ChunkIndex
    applied_event_ids: tuple[EventId, ...]
    prompt: str | None
    controls: tuple[ControlInput, ...]
    reset: bool = False
    close_session: bool = False
    requested_outputs: tuple[str, ...] = ()
    observation: Observation | None = None
    """What a policy computes from; None for a world."""
    frame: Frame | None = None
    """What a duplex session takes in."""

    EXTRA_ARGS_KEY = "ar_diffusion_tick"

    def to_extra_args(self) -> dict[str, Any]:
        """The dict that travels under ``extra_args["ar_diffusion_tick"]`` of a generate()-style engine."""
        return {
            "session_id": self.session_id,
            "request_id": self.request_id,
            "chunk_index": self.chunk_index,
            "applied_event_ids": list(self.applied_event_ids),
            "prompt": self.prompt,
            "controls": [c.to_dict() for c in self.controls],
            "reset": self.reset,
            "close_session": self.close_session,
        }

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any]) -> TickRequest | None:
        """Parse a tick; None when the key is absent (no ``default`` session is ever invented)."""
        raw = extra_args.get(cls.EXTRA_ARGS_KEY)
        if raw is None:
            return None
        if not isinstance(raw, Mapping):
            raise ArgumentError("ar_diffusion_tick must be a mapping", path=cls.EXTRA_ARGS_KEY)
        controls = raw.get("controls", ())
        if isinstance(controls, (str, bytes)) or not isinstance(controls, Sequence):
            raise ArgumentError("controls must be a sequence", path="controls")
        prompt = raw.get("prompt")
        return cls(
            session_id=SessionId(_text(raw.get("session_id"), "session_id")),
            request_id=_text(raw.get("request_id"), "request_id"),
            chunk_index=ChunkIndex(check_event_id(raw.get("chunk_index"), "chunk_index")),
            applied_event_ids=check_event_ids(raw.get("applied_event_ids"), "applied_event_ids"),
            prompt=None if prompt is None else check_prompt(prompt),
            controls=tuple(_control(c, f"controls[{i}]") for i, c in enumerate(controls)),
            reset=_flag(raw, "reset"),
            close_session=_flag(raw, "close_session"),
        )


def _control(raw: object, path: str) -> ControlInput:
    if not isinstance(raw, Mapping) or not {"track", "schema", "data"} <= set(raw):
        raise ArgumentError(f"{path} must be a mapping with track, schema and data", path=path)
    return ControlInput(raw["track"], raw["schema"], raw["data"])


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name, False)
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be true or false", path=name)
    return value


def _text(value: object, path: str) -> str:
    _check_name(value, path)
    assert isinstance(value, str)
    return value


def check_event_ids(value: object, path: str) -> tuple[EventId, ...]:
    """A real sequence (not a string) of ids, unique and strictly increasing."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ChunkMetadataError(f"{path} must be a sequence of integers", path=path)
    ids = tuple(check_event_id(v, f"{path}[{i}]") for i, v in enumerate(value))
    if any(b <= a for a, b in pairwise(ids)):
        raise ChunkMetadataError(f"{path} must be unique and strictly increasing", path=path)
    return ids


class ChunkMetadata(Struct, frozen=True):
    """What an output says about itself; a tick commits only when this equals the submitted tick."""

    session_id: SessionId
    request_id: str
    chunk_index: ChunkIndex
    applied_event_ids: tuple[EventId, ...]

    @classmethod
    def from_tick(cls, tick: TickRequest) -> ChunkMetadata:
        return cls(tick.session_id, tick.request_id, tick.chunk_index, tick.applied_event_ids)

    @classmethod
    def parse(cls, raw: object, path: str = "multimodal_output.metadata.ar_diffusion") -> ChunkMetadata:
        """Re-validate an envelope that came from outside. Raises ChunkMetadataError naming the path."""
        if not isinstance(raw, Mapping):
            raise ChunkMetadataError(f"{path} is missing", path=path)
        try:
            return cls(
                SessionId(_text(raw.get("session_id"), f"{path}.session_id")),
                _text(raw.get("request_id"), f"{path}.request_id"),
                ChunkIndex(check_event_id(raw.get("chunk_index"), f"{path}.chunk_index")),
                check_event_ids(raw.get("applied_event_ids"), f"{path}.applied_event_ids"),
            )
        except ArgumentError as error:
            raise ChunkMetadataError(error.message, path=error.path) from None

    def to_dict(self) -> dict[str, Any]:
        return {
            "session_id": self.session_id,
            "request_id": self.request_id,
            "chunk_index": self.chunk_index,
            "applied_event_ids": list(self.applied_event_ids),
        }


class Modality(StrEnum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"
    ACTION = "action"


class Representation(StrEnum):
    LATENT = "latent"
    DECODED = "decoded"


@dataclass(frozen=True, slots=True)
class ArtifactSpec:
    """What a model declares it can yield under a name.

    Args:
        layout: for decoded data one of CHW, TCHW, CTHW, THWC, T, CT (rows H6, H7); latents name their own.
        fps / sample_rate_hz: declared defaults; the rate an output carries at run time wins.
    """

    name: str
    modality: Modality
    representation: Representation
    layout: str
    fps: float | None = None
    sample_rate_hz: int | None = None
    primary: bool = False


class Artifact(Struct, frozen=True):
    """One named output. Decoded image and video: uint8 0..255 numpy in CHW / TCHW; decoded audio: float32 CT; latents
    keep their float dtype and layout.

    ``ready``: returns once ``data`` is filled, where a device may still be copying into it when the chunk is committed; from
    any thread. None: it is filled. Shape and dtype are right from the start."""

    name: str
    modality: Modality
    representation: Representation
    layout: str
    data: Any
    fps: float | None = None
    sample_rate_hz: int | None = None
    ready: Callable[[], None] | None = None

    def __repr__(self) -> str:
        """What it is and how much of it, not the numbers."""
        dtype, shape = str(getattr(self.data, "dtype", type(self.data).__name__)), getattr(self.data, "shape", ())
        kind = f"{self.modality.value}, {self.representation.value}, {self.layout}"
        size = f"{dtype.removeprefix('torch.')} {list(shape)}, {getattr(self.data, 'nbytes', 0)} bytes"
        rates = "".join(f", {name}={rate}" for name in ("fps", "sample_rate_hz") if (rate := getattr(self, name)))
        return f"Artifact({self.name!r}, {kind}, {size}{rates})"


class ChunkTimings(Struct, frozen=True):
    """Milliseconds. ``wait_ms``: asked for to planned; ``tick_ms``: planned to settled; ``model_ms``: inside the model, and
    in the session's own prefill (a deferred clean pass) as far as the chunk waited for it.

    ``stages_ms``: inside the tick's model by stage (:class:`~realtime_omni.models.base.Checkpoint`); on an accelerator that
    works asynchronously, the last stage waits for the others.

    All but the first are of the whole batch of ``batch_size`` rows."""

    wait_ms: float
    tick_ms: float
    model_ms: float
    batch_size: int
    stages_ms: Mapping[str, float] = struct_field(default_factory=dict)


class Chunk(Struct, frozen=True):
    """A committed block.

    ``first_frame`` counts frames inside the epoch; ``primary_artifact`` is None only on abort or error outputs.
    ``pages_used``: of all sessions, at delivery; the block's own pages count once its clean pass has written them.
    ``signals``: what a duplex session tells beside its sound.
    """

    metadata: ChunkMetadata
    artifacts: Mapping[str, Artifact]
    primary: str | None
    epoch: int
    first_frame: int
    frames: int
    prompt: str | None
    timings: ChunkTimings
    pages_used: int
    pages_total: int
    signals: tuple[Signal, ...] = ()

    @property
    def primary_artifact(self) -> Artifact | None:
        return None if self.primary is None else self.artifacts[self.primary]

    @property
    def is_filled(self) -> bool:
        """No artifact is waited for."""
        return all(artifact.ready is None for artifact in self.artifacts.values())

    def fill(self) -> None:
        """Wait until every artifact's data is there; blocks, and may be called again and from any thread."""
        for artifact in self.artifacts.values():
            if artifact.ready is not None:
                artifact.ready()

    @property
    def chunk_index(self) -> int:
        return self.metadata.chunk_index
