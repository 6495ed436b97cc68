"""What the fake manager tells: values in the shape of those of ``realtime_omni.manager``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from realtime_omni.session.values import ArtifactSpec, Modality, Representation


@dataclass(frozen=True)
class FakeControl:
    track: str = "camera"
    schema: str = "realtime_omni.held_keys.v1"
    json_schema: dict[str, Any] = field(default_factory=lambda: {"type": "object"})
    description: str = "keys"


@dataclass(frozen=True)
class FakeModelInfo:
    name: str = "fake"
    height: int = 16
    width: int = 16
    fps: float = 10.0
    frames_per_block: int = 3
    controls: tuple[FakeControl, ...] = (FakeControl(),)
    prompts: tuple[str, ...] = ("a red room", "a blue room")
    starts: tuple[str, ...] = ("door",)
    takes_image: bool = True
    default_prompt: str | None = "a red room"
    artifacts: tuple[ArtifactSpec, ...] = (
        ArtifactSpec("frames", Modality.VIDEO, Representation.DECODED, "TCHW", fps=10.0, primary=True),
        ArtifactSpec("latents", Modality.VIDEO, Representation.LATENT, "TCHW"),
    )
    horizon_frames: int | None = None
    policy: None = None
    duplex: object | None = None

    @property
    def pictures_per_block(self) -> int:
        return self.frames_per_block

    def pictures_before(self, chunk_index: int) -> int:
        return chunk_index * self.frames_per_block


@dataclass(frozen=True)
class FakeNotice:
    kind: str
    reason: str = ""
    code: str | None = None
    message: str = ""
    event_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class FakeView:
    session_id: str
    state: str
    epoch: int
    chunk_index: int
    pending_event_count: int
    pages_used: int
    attached: bool
    can_rollback: bool
    oldest_rewind: int | None = None
    event_floor: int = -1


@dataclass(frozen=True)
class FakeMemory:
    kv_pool: int = 1000
    scratch: int = 100
    weights: int = 0
    states: int = 7
    caches: int = 0


@dataclass(frozen=True)
class FakeStatistics:
    ticks_settled: int = 0
    chunks_committed: int = 0
    chunks_failed: int = 0
    chunks_aborted: int = 0
    sessions: int = 0
    tombstones: int = 0
    pages_total: int = 100
    pages_used: int = 0
    memory: FakeMemory = FakeMemory()
    progress_age_s: float = 0.0
    inbox_depth: int = 0


@dataclass(frozen=True)
class FakeHealth:
    ok: bool = True
    reason: str = "ok"
