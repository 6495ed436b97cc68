"""The contract between the engine and a duplex model: one that listens while it speaks.

A duplex model is a model (:class:`~realtime_omni.models.base.WorldModel`) in everything that the engine does with one: states
are immutable values, ``step`` is a generator with checkpoints over a batch of all due sessions, a tick commits or leaves
nothing behind; fork, rewind and snapshot come with that. What differs: a tick is one frame of sound. Each carries
``row.tick.frame`` (:class:`~realtime_omni.session.frame.Frame`: one frame at ``input_rate_hz`` and directives) and yields the
artifact ``SPEECH`` with exactly one frame at ``output_rate_hz``, silence included, and signals (``RowOutput.signals``, see
:mod:`realtime_omni.session.signals`). Frames of a session come in order and none is left out: the session fills what its
client did not send. ``row.tick.chunk_index`` is the frame's number, so times are ``chunk_index * frame_ms``.

``spec.frames_per_block`` is 1, ``fps`` is ``1000 / frame_ms``, width and height are 0.

A directive that a model declares it can do acts in the tick that carries it. A cancelled response is silent from that tick
on, and its ResponseEnded is in that tick's signals. A frame that ``spec.duplex`` admits is never refused: a model that cannot
make sense of a directive ignores it, and fails a response, not the tick.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from realtime_omni.duplex.spec import DuplexSpec
from realtime_omni.errors import ArgumentError
from realtime_omni.models.base import (
    ControlReducer,
    LatestWinsReducer,
    ModelSpec,
    RowOutput,
    Step,
    StepBatch,
    StepRow,
)
from realtime_omni.session.signals import Signal
from realtime_omni.session.values import (
    Artifact,
    ArtifactSpec,
    ChunkMetadata,
    Modality,
    Representation,
    SessionEvent,
)

SPEECH = "speech"
"""Name of a duplex model's artifact: float32 [1, N] at ``output_rate_hz``, -1..1, layout CT, N one frame."""


class DuplexBase:
    """What duplex models answer alike: they take frames, no events, and have no start pictures."""

    @property
    def spec(self) -> ModelSpec:
        """With ``duplex`` set."""
        raise NotImplementedError

    def understand(self, event: SessionEvent) -> str | None:
        raise ArgumentError("a duplex model takes frames, no events", path="event")

    def new_reducer(self) -> ControlReducer:
        return LatestWinsReducer()

    def needs_prefill(self, state: Any) -> bool:
        return False

    def prefill(self, batch: StepBatch) -> Step:
        raise NotImplementedError("this model writes no history beside its ticks")

    def close(self, state: Any) -> None:
        """Nothing beside the state itself."""

    def start_image(self, name: str) -> bytes:
        raise KeyError(name)


def speech_artifact(spec: DuplexSpec) -> ArtifactSpec:
    """The declaration of a duplex model's one artifact."""
    return ArtifactSpec(
        SPEECH, Modality.AUDIO, Representation.DECODED, "CT", sample_rate_hz=spec.output_rate_hz, primary=True
    )


def duplex_output(
    spec: DuplexSpec, row: StepRow, audio: NDArray[np.float32], signals: tuple[Signal, ...], next_state: Any
) -> RowOutput:
    """The output of one row. ``audio``: float32 [N], exactly one frame at the output rate; signals in order."""
    assert audio.shape == (spec.output_samples,), f"a frame has {spec.output_samples} samples, not {audio.shape}"
    speech = Artifact(
        SPEECH, Modality.AUDIO, Representation.DECODED, "CT", audio[None], sample_rate_hz=spec.output_rate_hz
    )
    return RowOutput(ChunkMetadata.from_tick(row.tick), (speech,), next_state, signals)


__all__ = [
    "SPEECH",
    "DuplexBase",
    "DuplexSpec",
    "duplex_output",
    "speech_artifact",
]
