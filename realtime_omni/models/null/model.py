"""A world that computes nothing: a moving colour gradient, one KV token per frame, no weights.

What a tick, a session and the wire cost by themselves; also the smallest complete example of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta

from realtime_omni.errors import ArgumentError, ErrorCode
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.models.base import (
    Checkpoint,
    ControlReducer,
    ControlSchema,
    LatestWinsReducer,
    ModelSpec,
    PackedState,
    RowOutput,
    SessionSetup,
    Step,
    StepBatch,
    StepRow,
)
from realtime_omni.models.common.packing import fingerprint, unpack_values
from realtime_omni.session.values import Artifact, ArtifactSpec, ChunkMetadata, Modality, Representation, SessionEvent

if TYPE_CHECKING:
    from realtime_omni.config import Config

SIZE = 128
FRAMES = 3
HUES = {"dawn": (255, 160, 120), "noon": (120, 190, 255), "dusk": (150, 110, 220)}


class NullOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The recipe's ``options``: there are none."""


@dataclass(frozen=True, slots=True)
class NullState:
    """How many frames were made, and how far the keys have moved the gradient."""

    frames: int = 0
    shift: int = 0


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    frames: Annotated[int, Meta(ge=0)]
    shift: Annotated[int, Meta(ge=0, lt=2 * SIZE)]


class NullWorld:
    """See the module docstring. Keys ``j``/``l`` of ``realtime_omni.held_keys.v1`` move the picture left and right."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self._zeros = torch.zeros(1, FRAMES, 1, 1, dtype=dtype, device=device)
        ramp = np.linspace(0.0, 1.0, SIZE, dtype=np.float32)
        self._ramp = (0.35 + 0.65 * ramp)[None, :] * np.ones((SIZE, 1), np.float32)
        self._pictures = {n: self._picture(rgb) for n, rgb in HUES.items()}
        self._fingerprint = fingerprint("null", str(SIZE), str(FRAMES), str(HUES))
        self._spec = ModelSpec(
            name="null",
            kv=KVSpec(
                num_layers=1, num_kv_heads=1, head_dim=1, tokens_per_frame=1, frames_per_block=FRAMES, window_frames=6
            ),
            artifacts=(
                ArtifactSpec("frames", Modality.VIDEO, Representation.DECODED, "TCHW", fps=12.0, primary=True),
                ArtifactSpec("latent", Modality.VIDEO, Representation.LATENT, "TCHW", fps=12.0),
            ),
            height=SIZE,
            width=SIZE,
            fps=12.0,
            frames_per_block=FRAMES,
            controls=(
                ControlSchema(
                    "camera",
                    "realtime_omni.held_keys.v1",
                    {
                        "type": "object",
                        "properties": {
                            "keys": {"type": "array", "items": {"type": "string"}},
                            "t_ms": {"type": "number"},
                        },
                        "required": ["keys"],
                    },
                    "The keys held from now on.",
                ),
            ),
            prompts=tuple(HUES),
            default_prompt="noon",
            rollback_safe=True,
        )

    @classmethod
    def from_config(cls, config: Config) -> NullWorld:
        config.options_as(NullOptions)
        return cls(getattr(torch, config.dtype), config.device)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def open(self, setup: SessionSetup) -> NullState:
        self._hue(setup.prompt)
        return NullState()

    def understand(self, event: SessionEvent) -> str | None:
        for control in event.controls:
            if (control.track, control.schema) != ("camera", "realtime_omni.held_keys.v1"):
                raise ArgumentError(
                    f"this model does not know {control.track}/{control.schema}",
                    code=ErrorCode.SCHEMA_UNKNOWN,
                    path="controls",
                )
            keys = control.data.get("keys")
            if not isinstance(keys, tuple) or not all(isinstance(k, str) for k in keys):
                raise ArgumentError("keys must be a list of strings", code=ErrorCode.CONTROL_INVALID, path="data.keys")
            t_ms = control.data.get("t_ms", 0)
            if isinstance(t_ms, bool) or not isinstance(t_ms, int | float):
                raise ArgumentError("t_ms must be a number", code=ErrorCode.CONTROL_INVALID, path="data.t_ms")
        return None if event.prompt is None else self._hue(event.prompt)

    def new_reducer(self) -> ControlReducer:
        return LatestWinsReducer()

    def needs_prefill(self, state: NullState) -> bool:
        return False

    def prefill(self, batch: StepBatch) -> Step:
        raise NotImplementedError("this model starts from nothing")

    def step(self, batch: StepBatch) -> Step:
        attention = batch.attention()
        yield Checkpoint("forward")
        rows = batch.active
        kv = self._zeros.expand(len(rows), -1, -1, -1)
        attention.write(0, kv, kv, rows=rows)  # nothing is computed, so nobody needs to look back
        if any("frames" in batch.rows[r].outputs for r in batch.active):
            yield Checkpoint("decode")
        return {r: self._output(batch.rows[r]) for r in batch.active}

    def pack(self, state: NullState) -> PackedState:
        return PackedState(values={"frames": state.frames, "shift": state.shift})

    def unpack(self, packed: PackedState) -> NullState:
        values = unpack_values(packed, _Saved)
        return NullState(values.frames, values.shift)

    def fingerprint(self) -> str:
        return self._fingerprint

    def close(self, state: NullState) -> None:
        """Nothing to give back."""

    def start_image(self, name: str) -> bytes:
        raise KeyError(name)

    def _hue(self, prompt: str | None) -> str:
        words = (prompt or "noon").lower().split()
        found = next((n for n in HUES if n in words), None)
        if found is None:
            raise ArgumentError(f"this model knows {', '.join(HUES)}", code=ErrorCode.PROMPT_UNKNOWN, path="prompt")
        return found

    def _picture(self, rgb: Sequence[int]) -> np.ndarray:
        """uint8 [H, 3 W, 3]: a ramp up, down and up again, so that a frame shifted by up to 2 W is a slice."""
        wide = np.concatenate([self._ramp, self._ramp[:, ::-1], self._ramp], axis=1)
        return np.stack([np.clip(wide * c, 0, 255) for c in rgb], axis=-1).astype(np.uint8)

    def _output(self, row: StepRow) -> RowOutput:
        state: NullState = row.state
        keys = next((c.data["keys"] for c in row.tick.controls if c.track == "camera"), ())
        turn = ("l" in keys) - ("j" in keys)
        picture = self._pictures[self._hue(row.tick.prompt)]
        shifts = [(state.shift + (1 + 4 * turn) * (i + 1)) % (2 * SIZE) for i in range(FRAMES)]
        artifacts: list[Artifact] = []
        if "frames" in row.outputs:
            # Colours side by side in memory, as encoders want them.
            frames = np.stack([picture[:, s : s + SIZE] for s in shifts]).transpose(0, 3, 1, 2)
            artifacts.append(
                Artifact("frames", Modality.VIDEO, Representation.DECODED, "TCHW", frames, fps=self._spec.fps)
            )
        if "latent" in row.outputs:
            latent = np.asarray(shifts, np.float32).reshape(FRAMES, 1, 1, 1) / (2 * SIZE)
            artifacts.append(
                Artifact("latent", Modality.VIDEO, Representation.LATENT, "TCHW", latent, fps=self._spec.fps)
            )
        following = NullState(state.frames + FRAMES, shifts[-1])
        return RowOutput(ChunkMetadata.from_tick(row.tick), tuple(artifacts), following)
