"""TinyRecurrentWorld: a world whose whole memory is a hidden vector; it declares no keys and values at all.

What the contract must also carry: a state-space model, a recurrent voice. All values are integers that float64 holds exactly,
so that a batch equals its members and a repeated run repeats bit for bit. Per pass, with wrap(y) = (y + 32) mod 64 - 32::

    x = wrap(3 x + h W + prompt + dx)          twice, from noise of (seed, chunk)
    h = wrap(h W + x summed over the frames)   the next hidden vector
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

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
from realtime_omni.models.common.noise import block_noise
from realtime_omni.models.common.packing import fingerprint, unpack_tensor, unpack_values
from realtime_omni.session.values import Artifact, ArtifactSpec, ChunkMetadata, Modality, Representation, SessionEvent

WIDTH = 12
FRAMES = 2
PASSES = 2
TRACK, SCHEMA = "move", "testing.move.v1"
DX = {"type": "object", "properties": {"dx": {"type": "integer"}}, "required": ["dx"]}
PROMPTS = ("calm", "storm")


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """``hidden`` float64 [D], integer-valued in -32..31; ``chunks`` made so far."""

    hidden: Tensor
    chunks: int


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    chunks: int


class TinyRecurrentWorld:
    """See the module docstring."""

    def __init__(self) -> None:
        weights = torch.Generator().manual_seed(11)
        self._weights_DD = torch.randint(-3, 4, (WIDTH, WIDTH), generator=weights).to(torch.float64)
        self._fingerprint = fingerprint("tiny-recurrent", str(self._weights_DD.tolist()))
        self._spec = ModelSpec(
            name="tiny-recurrent",
            kv=KVSpec.none(frames_per_block=FRAMES, model_owned_bytes_per_session=8 * WIDTH),
            artifacts=(
                ArtifactSpec("frames", Modality.VIDEO, Representation.DECODED, "TCHW", fps=8.0, primary=True),
                ArtifactSpec("latent", Modality.VIDEO, Representation.LATENT, "TC"),
            ),
            height=1,
            width=WIDTH,
            fps=8.0,
            frames_per_block=FRAMES,
            controls=(ControlSchema(TRACK, SCHEMA, DX, "dx: an integer added to everything"),),
            prompts=PROMPTS,
            default_prompt=PROMPTS[0],
            rollback_safe=True,
        )

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def open(self, setup: SessionSetup) -> RecurrentState:
        _prompt_code(setup.prompt)
        return RecurrentState(torch.zeros(WIDTH, dtype=torch.float64), 0)

    def understand(self, event: SessionEvent) -> str | None:
        for control in event.controls:
            if (control.track, control.schema) != (TRACK, SCHEMA):
                raise ArgumentError("unknown schema", code=ErrorCode.SCHEMA_UNKNOWN, path="controls")
            if isinstance(control.data.get("dx"), bool) or not isinstance(control.data.get("dx"), int):
                raise ArgumentError("dx must be an integer", code=ErrorCode.CONTROL_INVALID, path="controls.dx")
        if event.prompt is not None:
            _prompt_code(event.prompt)
        return event.prompt

    def new_reducer(self) -> ControlReducer:
        return LatestWinsReducer()

    def needs_prefill(self, state: RecurrentState) -> bool:
        return False

    def prefill(self, batch: StepBatch) -> Step:
        raise NotImplementedError("this model starts from nothing")

    def step(self, batch: StepBatch) -> Step:
        shape = (FRAMES, WIDTH)
        x = {
            number: _wrap(torch.round(9 * block_noise(row.seed, row.tick.chunk_index, 0, shape, dtype=torch.float64)))
            for number, row in enumerate(batch.rows)
        }
        for _ in range(PASSES):
            yield Checkpoint("forward")
            for row in batch.active:
                x[row] = _wrap(3 * x[row] + self._drive(batch.rows[row]))
        if any("frames" in batch.rows[r].outputs for r in batch.active):
            yield Checkpoint("decode")
        return {r: self._output(batch.rows[r], x[r]) for r in batch.active}

    def pack(self, state: RecurrentState) -> PackedState:
        return PackedState({"hidden": state.hidden}, {"chunks": state.chunks})

    def unpack(self, packed: PackedState) -> RecurrentState:
        chunks = unpack_values(packed, _Saved, ["hidden"]).chunks
        return RecurrentState(unpack_tensor(packed, "hidden", (WIDTH,), dtype=torch.float64, device="cpu"), chunks)

    def fingerprint(self) -> str:
        return self._fingerprint

    def close(self, state: RecurrentState) -> None:
        """Nothing beside the state itself."""

    def start_image(self, name: str) -> bytes:
        raise KeyError(name)

    def _drive(self, row: StepRow) -> Tensor:
        state: RecurrentState = row.state
        dx = sum(int(control.data["dx"]) for control in row.tick.controls)
        return state.hidden @ self._weights_DD + _prompt_code(row.tick.prompt) + dx + state.chunks % 7

    def _output(self, row: StepRow, x_FD: Tensor) -> RowOutput:
        artifacts = []
        if "frames" in row.outputs:
            frames = (x_FD.reshape(FRAMES, 1, 1, WIDTH) + 128).to(torch.uint8).expand(-1, 3, -1, -1).numpy()
            artifacts.append(
                Artifact("frames", Modality.VIDEO, Representation.DECODED, "TCHW", frames, fps=self._spec.fps)
            )
        if "latent" in row.outputs:
            artifacts.append(Artifact("latent", Modality.VIDEO, Representation.LATENT, "TC", x_FD.numpy()))
        state: RecurrentState = row.state
        hidden_D = _wrap(state.hidden @ self._weights_DD + x_FD.sum(0))
        following = RecurrentState(hidden_D, state.chunks + 1)
        return RowOutput(ChunkMetadata.from_tick(row.tick), tuple(artifacts), following)


def _wrap(x: Tensor) -> Tensor:
    return torch.remainder(x + 32, 64) - 32


def _prompt_code(prompt: str | None) -> int:
    text = prompt or PROMPTS[0]
    if text not in PROMPTS:
        raise ArgumentError(f"this model knows {', '.join(PROMPTS)}", code=ErrorCode.PROMPT_UNKNOWN, path="prompt")
    return 5 * PROMPTS.index(text)
