"""The contract between the engine and a model. A model is a folder, a catalog line and a recipe; it touches no engine code.

A model owns weights and pure functions over *values*: it keeps no per-session state on itself (tests prove it; a bounded
cache of values by content, marked ``shared_by_content``, is none). What a
session needs to remember is a typed, immutable state object that :meth:`WorldModel.step` replaces; the engine swaps it in
when the tick commits and forgets it when it does not. The engine measures the storage that a state keeps alive, a view with
all of the storage behind it, and holds it against ``KVSpec.model_owned_bytes_per_session``. Keys and values go through the
attention object of the batch; the model never sees a page. There is no single-session step: a batch of one is a batch.

``step`` is a generator. It yields a :class:`Checkpoint` before every forward pass, decode and device synchronisation; at
each of them the engine may drop rows (close, abort, reset) or close the generator. After every yield the model must look at
``batch.active`` again and compute only those rows.

A block becomes history in a *clean pass*: one more forward over its finished content, which writes keys and values. Nobody
who waits for the pictures needs it, so a model may defer it: ``step`` writes nothing and returns a state that carries the
block (:meth:`WorldModel.needs_prefill`). The chunk is committed and delivered at once; :meth:`WorldModel.prefill` writes
the block afterwards, always before the session's next tick. That state alone must determine what is written.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from msgspec import Struct

from realtime_omni.kv.capacity import CapacityPlan, KVSpec
from realtime_omni.session.controls import ControlReducer, LatestWinsReducer, PreparedControls
from realtime_omni.session.journal import Origin
from realtime_omni.session.values import (
    Artifact,
    ArtifactSpec,
    ChunkMetadata,
    SessionEvent,
    SessionId,
    TickRequest,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    from realtime_omni.duplex.spec import DuplexSpec
    from realtime_omni.kv.attention.decode import DecodePlan
    from realtime_omni.kv.attention.plan import AttentionBackend
    from realtime_omni.kv.attention.rooms import Rooms
    from realtime_omni.kv.storage import KVStorage
    from realtime_omni.models.policy import PolicySpec
    from realtime_omni.session.signals import Signal


@dataclass(frozen=True, slots=True)
class ControlSchema:
    """A control vocabulary a model understands, for discovery. ``json_schema`` describes ``ControlInput.data``."""

    track: str
    schema: str
    json_schema: Mapping[str, Any]
    description: str


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the engine, the server and a client need to know about a model before a session exists."""

    name: str
    kv: KVSpec
    artifacts: tuple[ArtifactSpec, ...]
    height: int
    width: int
    fps: float
    frames_per_block: int
    pictures_per_frame: int = 1
    """Of a model whose frames are latent: pictures that its decoder makes of each, but only one of a session's first.
    ``fps``, height and width are the pictures'; ``frames_per_block`` and the horizon count frames."""
    first_frame_pictures: int = 1
    """Pictures of a session's first frame, where that is not one: a session that goes on from frames that it was given."""
    controls: tuple[ControlSchema, ...] = ()
    prompts: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    default_prompt: str | None = None
    start_prompts: Mapping[str, str] = field(default_factory=dict)
    """The prompt that goes with a start picture, when the client gives none."""
    rollback_safe: bool = False
    """States are values: a tick, failed or not, leaves earlier states and committed pages intact. So the same chunk may run
    again (``on_failure: keep``), and sessions may be forked and rewound."""
    past_state_bytes: int | None = None
    """At most so many bytes does a state that a rewind can go back to hold that later ones do not; None: as many as a state
    may have."""
    serial: bool = False
    """Only batches of one; asking for more is refused at start (rows A28, AC-17)."""
    continuous: bool = False
    """Rows join a step that runs, and each is settled as soon as it is done; see :class:`StepBatch`. Only for models without
    history (:meth:`KVSpec.none`)."""
    horizon_frames: int | None = None
    takes_image: bool = False
    """A client may give its own start picture; otherwise one is refused instead of ignored."""
    policy: PolicySpec | None = None
    """Set for a policy, which computes every chunk from an observation; see :mod:`realtime_omni.models.policy`."""
    duplex: DuplexSpec | None = None
    """Set for a duplex model, which takes a frame of sound in every tick; see :mod:`realtime_omni.models.duplex`."""

    @property
    def is_world(self) -> bool:
        """It goes on by itself: a tick needs neither an observation nor a frame of sound."""
        return self.duplex is None and (self.policy is None or self.policy.imagines)

    @property
    def pictures_per_block(self) -> int:
        """Of every block but a session's first, which may have fewer."""
        return self.frames_per_block * self.pictures_per_frame

    def pictures_before(self, chunk_index: int) -> int:
        """How many pictures a session's first ``chunk_index`` chunks have."""
        return max(chunk_index * self.pictures_per_block - (self.pictures_per_frame - self.first_frame_pictures), 0)

    @property
    def primary(self) -> str:
        return next(a.name for a in self.artifacts if a.primary)


@dataclass(frozen=True, slots=True)
class SessionSetup:
    """How a session begins, and begins again after a reset.

    ``image`` is uint8 RGB [H, W, 3] of any size, ``start`` the name of a bundled start picture; at most one of them.
    """

    session_id: SessionId
    prompt: str | None
    seed: int
    image: np.ndarray | None = None
    start: str | None = None

    @property
    def origin(self) -> Origin:
        """What an event log says of it."""
        return Origin(self.prompt, self.seed, self.start, _image_digest(self.image))


def _image_digest(image: np.ndarray | None) -> str | None:
    if image is None:
        return None
    shape = "x".join(str(n) for n in image.shape)
    return hashlib.sha256(f"{shape}:".encode() + image.tobytes()).hexdigest()


class Checkpoint(Struct, frozen=True):
    """A place between two pieces of device work: ``forward``, ``decode`` or ``sync``. ``stage``: what timings call the
    piece that follows, where that is not its kind."""

    kind: str
    stage: str | None = None


class GrowingAttention(Protocol):
    """Attention of rows whose blocks are written in pieces; see ``kv.attention.growing``. Causal, and each pass is
    committed."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, rows: Sequence[int]
    ) -> torch.Tensor:
        """q [B, T, heads, head_dim], k, v [B, T, kv_heads, head_dim] of the named rows' next T tokens, already rotated;
        returns q's shape."""
        ...

    def finish(self, rows: Sequence[int]) -> None:
        """The named rows have written all their tokens, at least none; without it their tick fails."""
        ...

    def use(self, rooms: Rooms) -> None:
        """Copy the rows' histories there, before the first pass: memory that stays where it is, for CUDA graphs (see
        ``kv.attention.rooms``). A pass of the named rows through ``rooms``, with ``columns`` before and ``wrote`` after it,
        then stands in the place of ``attend``. Raises ValueError where they do not fit."""
        ...

    def columns(self, rows: Sequence[int]) -> list[int]:
        """Where each named row's next token stands in its room."""
        ...

    def wrote(self, rows: Sequence[int], tokens: int) -> None:
        """A pass through every layer has put the named rows' next tokens there."""
        ...


class BlockAttention(Protocol):
    """Attention of the rows of one batch over their own history plus the current block; see ``kv.attention``."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        rows: Sequence[int],
        commit: bool,
        ahead: bool = False,
    ) -> torch.Tensor:
        """q, k, v [B, T, heads, head_dim] of the named rows, already rotated; returns the same shape.

        ``commit=False`` (denoising) changes nothing; ``commit=True`` (the clean pass) also writes k and v to the pages
        that this tick reserved. Nothing becomes visible to later ticks before the tick commits. ``ahead=True``: a pass after
        the clean pass, over history and the block that it has written; up to a block and the scratch tokens, never kept."""
        ...

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, *, rows: Sequence[int]) -> None:
        """What ``attend(commit=True)`` does beside attending, for a clean pass that needs no answer of its last layer."""
        ...


class StepRow(Struct, frozen=True):
    """One session in a batch.

    ``frame_index``: absolute position of the block's first frame in the KV history (a prefilled block counts).
    ``outputs``: names of the artifacts asked for; the model computes no other.
    """

    tick: TickRequest
    state: Any
    seed: int
    frame_index: int
    outputs: tuple[str, ...]


class StepBatch(Protocol):
    """The rows of one tick and their attention.

    For a ``continuous`` model rows join between two checkpoints, under numbers that were never given before: what is new in
    ``active`` is to be begun. Its step ends when no row is active, and returns nothing beside what it has finished."""

    @property
    def rows(self) -> Sequence[StepRow]:
        """In the order of their numbers. In a batch that is joined those who left are missing: use :meth:`row`."""
        ...

    def row(self, number: int) -> StepRow:
        """An active row."""
        ...

    @property
    def active(self) -> tuple[int, ...]:
        """Row numbers still wanted; read again after every yield."""
        ...

    def attention(self, branch: str | None = None) -> BlockAttention:
        """The attention of one branch (default: the first)."""
        ...

    def decoding(self) -> DecodePlan:
        """In place of ``attention``, for passes over one token a row in memory that stays where it is, as CUDA graphs need it;
        see ``kv.attention.decode``."""
        ...

    def growing(self, tokens: Callable[[int, int], int], turn: Callable[[int, torch.Tensor], None]) -> GrowingAttention:
        """In place of ``attention``, for a model that declares how many tokens a frame has at most: its passes append.

        ``tokens`` (row, frame index): how many the frame of history holds. ``turn`` (row, keys
        [..., heads, tokens, head_dim]) edits a copy of the keys that it sees, in one layer or all, before they are used."""
        ...

    def rewritten(self, row: int) -> tuple[int, ...]:
        """Of a :class:`RewritingModel`'s row: the numbers that its attention knows the earlier blocks by which this tick writes
        anew, oldest first. One clean pass each (``rows=(number,)``), before the first pass over the block itself."""
        ...

    def finish(self, row: int, result: RowOutput | Exception) -> None:
        """A ``continuous model's row is done: it is not active any more, and settled at the next checkpoint."""
        ...


class RowOutput(Struct, frozen=True):
    """What a row yields: its metadata (must equal the tick), named artifacts, the next state; a duplex model also signals."""

    metadata: ChunkMetadata
    artifacts: tuple[Artifact, ...]
    next_state: Any
    signals: tuple[Signal, ...] = ()


@dataclass(frozen=True, slots=True)
class PackedState:
    """A model's state taken apart, to be saved: its tensors by name, and everything else as JSON values.

    Names are of ``A-Z a-z 0-9 _ . -``. It holds all that cannot be computed again from the model, the session's prompt
    and the keys and values; what can (a derived cache) is left out.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


class RowError(Exception):
    """Raised by a model when one row, and only that row, cannot go on."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


Step = Generator[Checkpoint, None, Mapping[int, RowOutput | Exception]]


@runtime_checkable
class WorldModel(Protocol):
    """What a world model implements. All calls come from the engine thread."""

    @property
    def spec(self) -> ModelSpec: ...

    def open(self, setup: SessionSetup) -> Any:
        """The state a fresh session starts from. Raises ArgumentError (``prompt_unknown``, ``image_invalid``)."""
        ...

    def understand(self, event: SessionEvent) -> str | None:
        """Check an event before it is queued; returns what its prompt was understood as, or None without a prompt.

        Raises ArgumentError with ``prompt_unknown``, ``schema_unknown`` or ``control_invalid`` and the path."""
        ...

    def new_reducer(self) -> ControlReducer: ...

    def needs_prefill(self, state: Any) -> bool:
        """Whether the state carries a block that is not history yet: a start picture, or one whose clean pass is deferred."""
        ...

    def prefill(self, batch: StepBatch) -> Step:
        """The clean pass over the block that each active row's state carries; outputs carry no artifacts, and states that
        do not carry it any more. Only the state and the seed of a row count, not its tick; when it fails it runs again."""
        ...

    def step(self, batch: StepBatch) -> Step:
        """One block for every active row: denoise, decode what is requested, and the clean pass, now or deferred."""
        ...

    def pack(self, state: Any) -> PackedState:
        """The state as plain tensors and values. No copy is made here: the engine makes it, once of a tensor that several
        moments of a session hold."""
        ...

    def unpack(self, packed: PackedState) -> Any:
        """A state that goes on exactly as the packed one; the tensors are the model's to keep. They come on the CPU, but for
        those that several moments of a session share: these are on the engine's device, and nobody writes into them.

        Whatever was saved may have been changed by somebody: names, shapes, dtypes and ranges are checked, and
        ArgumentError is raised for what :meth:`pack` would not have made."""
        ...

    def fingerprint(self) -> str:
        """64 hexadecimal digits over everything that decides how a session goes on: weights, configuration, options.

        A saved session is restored only where the fingerprint is the same. It is asked for often: compute it once. A
        model whose weights are too large to read twice may hash their files' headers, sizes and a sample instead; its
        page then says so."""
        ...

    def close(self, state: Any) -> None:
        """Called once when a session ends or starts over (close, reset, eviction, failure), with the state it had last.

        Forks and the moments that a rewind can go back to may hold the same object, or share storage with it: what they
        hold must stay usable."""
        ...

    def start_image(self, name: str) -> bytes:
        """PNG bytes of a bundled start picture."""
        ...


class Ranks(Protocol):
    """The other processes of a model that computes on several devices. Each has pages of the same numbers as the engine's,
    with other heads (``KVSpec.num_kv_heads`` are those of one rank); the engine's book is the only one."""

    def available_bytes(self) -> int | None:
        """Free memory of the rank that has least. None: all ranks share the host's."""
        ...

    def allocate(
        self, plan: CapacityPlan, backend: AttentionBackend, *, keep_gathered: bool | None, fp8: bool
    ) -> AttentionBackend:
        """Make pools on every other rank; returns the back-end whose plans reach them. Raises BackendUnavailable."""
        ...

    @property
    def count(self) -> int: ...

    @property
    def fault(self) -> str | None:
        """Why nothing can be computed any more. Safe to ask from any thread."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class RankedModel(Protocol):
    """A world model that can be spread over ranks; ``ranks`` is None when it is not."""

    @property
    def ranks(self) -> Ranks | None: ...


@runtime_checkable
class CachingModel(Protocol):
    """A model that keeps values for all sessions, by content."""

    @property
    def cached(self) -> Sequence[object]:
        """All of them. May be asked from any thread."""
        ...


class WarmedModel(ABC):
    """A model that has something to make ready once its pages are there, before the first session opens: CUDA graphs.

    A base class and no protocol: ``isinstance`` knows a protocol by its methods' names, and would call any ``warm_up``."""

    @abstractmethod
    def warm_up(self, storage: KVStorage) -> None:
        """``storage``: the pools of every tick that will be. What is committed in them is nobody's yet, and stays as it is."""


class RewritingModel(WorldModel, Protocol):
    """A model with ``KVSpec.rewrite_frames``: a tick may write history anew, as when a prompt is to rule what is past, too.

    The new history takes the old one's place when the tick is committed; a tick that fails leaves the old one. Earlier moments
    of the session cannot be rewound to any more."""

    def rewritten_blocks(self, state: Any, tick: TickRequest) -> int:
        """How many of the latest blocks this tick is to write anew. Blocks of the sink cannot be."""
        ...


__all__ = [
    "BlockAttention",
    "Checkpoint",
    "ControlReducer",
    "ControlSchema",
    "GrowingAttention",
    "LatestWinsReducer",
    "ModelSpec",
    "PackedState",
    "PreparedControls",
    "RankedModel",
    "Ranks",
    "RewritingModel",
    "RowError",
    "RowOutput",
    "SessionSetup",
    "Step",
    "StepBatch",
    "StepRow",
    "WarmedModel",
    "WorldModel",
]
