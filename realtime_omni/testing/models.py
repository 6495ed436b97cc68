"""TinyKVWorld: a whole world model small enough to reason about, with knobs that make it misbehave.

Real attention over paged KV (two layers, sink and window), two denoise passes and a clean one (in the tick or deferred),
prompts, controls, seed, model-owned state and an optional start block, all of which change the picture. Every value
between attention calls is an integer that float64 holds exactly, so that sums do not depend on their order: a batch of N
must equal N batches of one bit for bit, and a run that is repeated must repeat exactly.

The arithmetic, per pass, with x integer-valued [rows, tokens, 4] in -32..31 and wrap(y) = (y + 32) mod 64 - 32::

    h = wrap(x + prompt + dx + drift + frame)
    per layer:  h = wrap(h + round(attention(h Wq / 64, h Wk, h Wv)))
    x = wrap(3 x + h)          with two branches: wrap(3 x + 2 h_cond - h_free)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from msgspec import Meta
from msgspec.structs import replace as with_fields
from torch import Tensor

from realtime_omni.errors import ArgumentError, ErrorCode
from realtime_omni.kv.capacity import KVBranch, KVSpec
from realtime_omni.models.base import (
    BlockAttention,
    Checkpoint,
    ControlReducer,
    ControlSchema,
    LatestWinsReducer,
    ModelSpec,
    PackedState,
    RowError,
    RowOutput,
    SessionSetup,
    Step,
    StepBatch,
    StepRow,
)
from realtime_omni.models.common.noise import block_noise
from realtime_omni.models.common.packing import fingerprint, unpack_tensor, unpack_values
from realtime_omni.session.values import (
    Artifact,
    ArtifactSpec,
    ChunkMetadata,
    ControlInput,
    Modality,
    Representation,
    SessionEvent,
)

LAYERS = 2
FRAMES = 2
TOKENS = 2
WIDTH = 4
PASSES = 2
DECLARED_RATE_HZ = 24000
RUNTIME_RATE_HZ = 16000
TRACK, SCHEMA = "move", "testing.move.v1"
DX = {"type": "object", "properties": {"dx": {"type": "integer"}}, "required": ["dx"]}
PROMPTS = ("red", "green", "blue")
PREFILL_STEP = 900

Misreport = Literal["session_id", "request_id", "chunk_index", "applied_event_ids"]
ArtifactFault = Literal[
    "missing", "undeclared", "duplicate", "unrequested", "latent_as_frames", "float_frames", "layout"
]


def move(dx: int) -> ControlInput:
    """A control that this model understands."""
    return ControlInput(TRACK, SCHEMA, {"dx": dx})


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A block to prefill: ``x`` [FRAMES * TOKENS, WIDTH], and what its passes add to it on each branch."""

    x: Tensor
    shifts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TinyState:
    """``drift`` depends on every chunk so far; ``unwritten`` is the start, or a block whose clean pass is deferred."""

    drift: int = 0
    unwritten: Unwritten | None = None


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    drift: Annotated[int, Meta(ge=0, lt=29)]
    shifts: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Knobs:
    """How the model misbehaves, for sessions named in ``sessions`` (None: all)."""

    sessions: frozenset[str] | None = None
    misreport: Misreport | None = None
    artifact: ArtifactFault | None = None
    raise_in: int | None = None
    """Raise in the k-th forward of a tick, from inside the model; the whole batch is hit."""
    row_error: bool = False
    """Raise RowError for the row in the first forward."""
    row_result: Exception | None = None
    """Return this instead of an output."""
    skip_layer: bool = False
    """The clean pass leaves a layer unwritten."""

    def hit(self, session_id: str) -> bool:
        return self.sessions is None or session_id in self.sessions


class TinyKVWorld:
    """See the module docstring. ``trace`` is told of every piece of work with the sessions it is for."""

    def __init__(
        self,
        *,
        branches: Sequence[str] = ("main",),
        prefill: bool = False,
        deferred: bool = False,
        serial: bool = False,
        rollback_safe: bool = True,
        sink_frames: int = 2,
        window_frames: int = 4,
        dense_frames: int | None = None,
        horizon_frames: int | None = None,
        trace: Callable[[str, tuple[str, ...]], None] | None = None,
        knobs: Knobs | None = None,
    ) -> None:
        self.knobs = knobs if knobs is not None else Knobs(sessions=frozenset())
        self._trace = trace
        self._branches = tuple(branches)
        self._prefill = prefill
        self._deferred = deferred
        weights = torch.Generator().manual_seed(7)
        shape = (LAYERS, 3, WIDTH, WIDTH)
        self._weights = torch.randint(-3, 4, shape, generator=weights).to(torch.float64)
        self._fingerprint = fingerprint("tiny-kv", str(self._weights.tolist()))
        self._spec = ModelSpec(
            name="tiny-kv",
            kv=KVSpec(
                num_layers=LAYERS,
                num_kv_heads=1,
                head_dim=WIDTH,
                tokens_per_frame=TOKENS,
                frames_per_block=FRAMES,
                window_frames=window_frames,
                sink_frames=sink_frames,
                dense_frames=dense_frames,
                branches=tuple(KVBranch(name, i) for i, name in enumerate(self._branches)),
                dtype_bytes=8,
                model_owned_bytes_per_session=8 * FRAMES * TOKENS * WIDTH if prefill or deferred else 0,
            ),
            artifacts=(
                ArtifactSpec("frames", Modality.VIDEO, Representation.DECODED, "TCHW", fps=8.0, primary=True),
                ArtifactSpec("latent", Modality.VIDEO, Representation.LATENT, "TNC"),
                ArtifactSpec("sound", Modality.AUDIO, Representation.DECODED, "CT", sample_rate_hz=DECLARED_RATE_HZ),
            ),
            height=TOKENS,
            width=WIDTH,
            fps=8.0,
            frames_per_block=FRAMES,
            controls=(ControlSchema(TRACK, SCHEMA, DX, "dx: an integer added to everything"),),
            prompts=PROMPTS,
            default_prompt=PROMPTS[0],
            rollback_safe=rollback_safe,
            serial=serial,
            horizon_frames=horizon_frames,
            takes_image=prefill,
        )

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def open(self, setup: SessionSetup) -> TinyState:
        code = _prompt_code(setup.prompt)
        if not self._prefill:
            if setup.image is not None:
                raise ArgumentError("this model takes no image", code=ErrorCode.IMAGE_INVALID, path="image")
            return TinyState()
        start = setup.seed % 11 if setup.image is None else int(np.asarray(setup.image).sum()) % 61
        x = _wrap(torch.round(3 * _noise(setup.seed, 0, PREFILL_STEP)) + start)
        return TinyState(unwritten=Unwritten(x, tuple(code if b == self._branches[0] else -3 for b in self._branches)))

    def understand(self, event: SessionEvent) -> str | None:
        for i, control in enumerate(event.controls):
            if (control.track, control.schema) != (TRACK, SCHEMA):
                raise ArgumentError("unknown schema", code=ErrorCode.SCHEMA_UNKNOWN, path=f"controls[{i}]")
            if isinstance(control.data.get("dx"), bool) or not isinstance(control.data.get("dx"), int):
                raise ArgumentError("dx must be an integer", code=ErrorCode.CONTROL_INVALID, path=f"controls[{i}].dx")
        if event.prompt is None:
            return None
        _prompt_code(event.prompt)
        return event.prompt.lower()

    def new_reducer(self) -> ControlReducer:
        return LatestWinsReducer()

    def needs_prefill(self, state: TinyState) -> bool:
        return state.unwritten is not None

    def prefill(self, batch: StepBatch) -> Step:
        attentions = [batch.attention(b) for b in self._branches]
        yield Checkpoint("forward")
        active = batch.active
        self._tell("prefill", batch, active)
        blocks: list[Unwritten] = [batch.rows[r].state.unwritten for r in active]
        x = torch.stack([b.x for b in blocks])
        for number, attention in enumerate(attentions):
            self._pass(batch, active, x, attention, [b.shifts[number] for b in blocks], commit=True)
        return {
            r: RowOutput(ChunkMetadata.from_tick(batch.rows[r].tick), (), replace(batch.rows[r].state, unwritten=None))
            for r in batch.active
        }

    def step(self, batch: StepBatch) -> Step:
        attentions = [batch.attention(b) for b in self._branches]
        x = {
            number: _wrap(torch.round(9 * _noise(row.seed, row.tick.chunk_index, 0)))
            for number, row in enumerate(batch.rows)
        }
        for number in range(1, PASSES + 1):
            yield Checkpoint("forward")
            active = batch.active
            self._tell(f"forward:{number}", batch, active)
            self._misbehave(number, batch, active)
            now = torch.stack([x[r] for r in active])
            seen = [
                self._pass(batch, active, now, attention, self._shifts(batch, active, branch), commit=False)
                for branch, attention in zip(self._branches, attentions, strict=True)
            ]
            h = seen[0] if len(seen) == 1 else 2 * seen[0] - seen[1]
            x.update(zip(active, _wrap(3 * now + h), strict=True))
        if not self._deferred:
            yield Checkpoint("forward")
            active = batch.active
            self._tell(f"forward:{PASSES + 1}", batch, active)
            self._misbehave(PASSES + 1, batch, active)
            clean = torch.stack([x[r] for r in active])
            for branch, attention in zip(self._branches, attentions, strict=True):
                self._pass(batch, active, clean, attention, self._shifts(batch, active, branch), commit=True)
        decoding = [r for r in batch.active if {"frames", "sound"} & set(batch.rows[r].outputs)]
        if decoding:
            yield Checkpoint("decode")
            decoding = [r for r in decoding if r in batch.active]
            self._tell("decode", batch, tuple(decoding))
        return {r: self._result(batch.rows[r], x[r]) for r in batch.active}

    def pack(self, state: TinyState) -> PackedState:
        block = state.unwritten
        if block is None:
            return PackedState(values={"drift": state.drift, "shifts": None})
        return PackedState({"x": block.x}, {"drift": state.drift, "shifts": list(block.shifts)})

    def unpack(self, packed: PackedState) -> TinyState:
        saved = unpack_values(packed, _Saved, packed.tensors.keys() & {"x"})
        if not packed.tensors and saved.shifts is None:
            return TinyState(saved.drift)
        if saved.shifts is None or len(saved.shifts) != len(self._branches):
            raise ArgumentError("the state has not one shift for each branch", path="state")
        x = unpack_tensor(packed, "x", (FRAMES * TOKENS, WIDTH), dtype=torch.float64, device="cpu")
        return TinyState(saved.drift, Unwritten(x, saved.shifts))

    def fingerprint(self) -> str:
        return self._fingerprint

    def close(self, state: TinyState) -> None:
        if self._trace is not None:
            self._trace("close", ())

    def start_image(self, name: str) -> bytes:
        raise KeyError(name)

    # ------------------------------------------------------------------ arithmetic

    def _pass(
        self,
        batch: StepBatch,
        active: tuple[int, ...],
        x_BTD: Tensor,
        attention: BlockAttention,
        shifts: Sequence[int],
        *,
        commit: bool,
    ) -> Tensor:
        shift = torch.tensor(shifts, dtype=torch.float64)
        first = torch.tensor([batch.rows[r].frame_index for r in active], dtype=torch.float64)
        frame = first[:, None] + torch.arange(FRAMES, dtype=torch.float64)
        position = torch.remainder(frame, 13).repeat_interleave(TOKENS, dim=1)
        h = _wrap(x_BTD + shift[:, None, None] + position[:, :, None])
        knobs = self.knobs
        skip = [i for i, r in enumerate(active) if knobs.skip_layer and knobs.hit(batch.rows[r].tick.session_id)]
        for layer in range(LAYERS):
            q, k, v = (h @ w for w in self._weights[layer])
            q, k, v = (t[:, :, None] for t in (q / 64, _wrap(k), _wrap(v)))
            if commit and skip and layer == 0:
                write = [i for i in range(len(active)) if i not in skip]
                rows = [active[i] for i in write]
                attention.attend(layer, q[write], k[write], v[write], rows=rows, commit=True)
            seen = attention.attend(layer, q, k, v, rows=active, commit=commit and not (skip and layer == 0))
            h = _wrap(h + torch.round(seen[:, :, 0]))
        return h

    def _shifts(self, batch: StepBatch, active: Sequence[int], branch: str) -> list[int]:
        return [self._shift(batch.rows[r], branch) for r in active]

    def _shift(self, row: StepRow, branch: str) -> int:
        drift: int = row.state.drift
        if branch != self._branches[0]:
            return drift - 3  # the branch without guidance knows neither prompt nor control
        dx = sum(control.data["dx"] for control in row.tick.controls)
        return drift + int(dx) + _prompt_code(row.tick.prompt)

    def _result(self, row: StepRow, x: Tensor) -> RowOutput | Exception:
        knobs = self.knobs if self.knobs.hit(row.tick.session_id) else Knobs()
        if knobs.row_result is not None:
            return knobs.row_result
        artifacts = _break_artifacts(knobs.artifact, _artifacts(row, x))
        metadata = _misreport(knobs.misreport, ChunkMetadata.from_tick(row.tick))
        drift = (row.state.drift * 5 + int(x.sum()) + 1) % 29
        unwritten = Unwritten(x.clone(), tuple(self._shift(row, b) for b in self._branches)) if self._deferred else None
        return RowOutput(metadata, artifacts, TinyState(drift, unwritten))

    def _misbehave(self, number: int, batch: StepBatch, active: tuple[int, ...]) -> None:
        for r in active:
            if not self.knobs.hit(batch.rows[r].tick.session_id):
                continue
            if self.knobs.raise_in == number:
                raise ValueError(f"forward {number} went wrong on purpose")
            if self.knobs.row_error:
                raise RowError(r, "this row cannot go on, on purpose")

    def _tell(self, what: str, batch: StepBatch, rows: tuple[int, ...]) -> None:
        if self._trace is not None:
            self._trace(what, tuple(batch.rows[r].tick.session_id for r in rows))


def _wrap(x: Tensor) -> Tensor:
    return torch.remainder(x + 32, 64) - 32


def _noise(seed: int, chunk_index: int, step: int) -> Tensor:
    return block_noise(seed, chunk_index, step, (FRAMES * TOKENS, WIDTH), dtype=torch.float64)


def _prompt_code(prompt: str | None) -> int:
    text = (prompt or PROMPTS[0]).lower()
    if text not in PROMPTS:
        raise ArgumentError(f"this model knows {', '.join(PROMPTS)}", code=ErrorCode.PROMPT_UNKNOWN, path="prompt")
    return 5 * PROMPTS.index(text)


def _artifacts(row: StepRow, x: Tensor) -> tuple[Artifact, ...]:
    """The requested ones; frames show x + 128, sound is x / 64."""
    out = []
    if "frames" in row.outputs:
        frames = (x.reshape(FRAMES, 1, TOKENS, WIDTH) + 128).to(torch.uint8).expand(-1, 3, -1, -1)
        out.append(_artifact("frames", Modality.VIDEO, Representation.DECODED, "TCHW", frames.numpy(), fps=8.0))
    if "latent" in row.outputs:
        latent = x.reshape(FRAMES, TOKENS, WIDTH).numpy()
        out.append(_artifact("latent", Modality.VIDEO, Representation.LATENT, "TNC", latent))
    if "sound" in row.outputs:
        sound = (x.reshape(1, -1) / 64).to(torch.float32).numpy()
        out.append(
            _artifact("sound", Modality.AUDIO, Representation.DECODED, "CT", sound, sample_rate_hz=RUNTIME_RATE_HZ)
        )
    return tuple(out)


def _artifact(*what: Any, **rates: Any) -> Artifact:
    return Artifact(*what, **rates)


def _break_artifacts(fault: ArtifactFault | None, good: tuple[Artifact, ...]) -> tuple[Artifact, ...]:
    if fault is None:
        return good
    first = good[0]
    latent = np.zeros((FRAMES, TOKENS, WIDTH))
    broken: dict[ArtifactFault, tuple[Artifact, ...]] = {
        "missing": good[1:],
        "undeclared": (*good, with_fields(first, name="depth")),
        "duplicate": (*good, first),
        "unrequested": (*good, _artifact("latent", Modality.VIDEO, Representation.LATENT, "TNC", latent)),
        "latent_as_frames": (_artifact("frames", Modality.VIDEO, Representation.LATENT, "TNC", latent), *good[1:]),
        "float_frames": (with_fields(first, data=first.data.astype(np.float32)), *good[1:]),
        "layout": (with_fields(first, layout="THWC"), *good[1:]),
    }
    return broken[fault]


def _misreport(name: Misreport | None, true: ChunkMetadata) -> ChunkMetadata:
    if name is None:
        return true
    wrong: dict[Misreport, Any] = {
        "session_id": f"{true.session_id}x",
        "request_id": f"{true.request_id}x",
        "chunk_index": true.chunk_index + 1,
        "applied_event_ids": (*true.applied_event_ids, 10**6),
    }
    return with_fields(true, **{name: wrong[name]})
