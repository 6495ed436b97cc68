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
on, and its ResponseEnded is in that tick's signals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from realtime_omni.errors import ArgumentError, ErrorCode
from realtime_omni.models.base import (
    ControlReducer,
    LatestWinsReducer,
    ModelSpec,
    RowOutput,
    Step,
    StepBatch,
    StepRow,
    WorldModel,
)
from realtime_omni.session.frame import AddText, Configure, Directive, Frame, Respond, Say, ToolResult, TurnMode, Turns
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


@dataclass(frozen=True, slots=True)
class DuplexSpec:
    """What a duplex model takes, yields and can do.

    Args:
        frame_ms: length of a tick, in and out (80 for Moshi, 1000 for MiniCPM-o).
        input_rate_hz, output_rate_hz: mono; a frame is a whole number of samples at both.
        turn_modes: who may end the user's turn; the first is the default.
        voices: names; the first is the default. Empty: it has one voice.
        transcribes: it tells what the user said (InputTranscript).
        takes_text: AddText, RemoveText and instructions act.
        takes_requests: Respond acts; without it only the model decides when it speaks.
        says: Say acts.
        text_only: Respond may ask for text without speech.
        isolates: Respond may bring its own context.
        takes_tools: tools are called, ToolResult acts.
        yields: overlap policy ``model``: it gives way, or insists, by itself.
        keeps_on_barge_in: after a barge-in it goes on from what was heard: the heard prefix by a rewind (its KV is kept).
            Without it the conversation is corrected as text, by Cancel and Truncate.
        context_tokens: bound of its context; None: it has none, or slides.
    """

    frame_ms: float
    input_rate_hz: int
    output_rate_hz: int
    turn_modes: tuple[TurnMode, ...] = ("model",)
    voices: tuple[str, ...] = ()
    transcribes: bool = False
    takes_text: bool = False
    takes_requests: bool = False
    says: bool = False
    text_only: bool = False
    isolates: bool = False
    takes_tools: bool = False
    yields: bool = False
    keeps_on_barge_in: bool = False
    context_tokens: int | None = None

    def __post_init__(self) -> None:
        for rate in (self.input_rate_hz, self.output_rate_hz):
            samples = rate * self.frame_ms / 1000
            if samples < 1 or samples != int(samples):
                raise ArgumentError(f"a frame of {self.frame_ms} ms is no whole number of samples at {rate} Hz")

    @property
    def input_samples(self) -> int:
        """Of one frame."""
        return int(self.input_rate_hz * self.frame_ms / 1000)

    @property
    def output_samples(self) -> int:
        """Of one frame."""
        return int(self.output_rate_hz * self.frame_ms / 1000)

    def check(self, frame: Frame) -> None:
        """Raises ArgumentError for a frame of another length, or (``unsupported``) a directive that the model cannot do."""
        if frame.audio.shape != (self.input_samples,):
            raise ArgumentError(
                f"a frame has {self.input_samples} samples at {self.input_rate_hz} Hz, not {frame.audio.size}",
                path="audio",
            )
        for directive in frame.directives:
            self.check_directive(directive)

    def check_directive(self, directive: Directive) -> None:
        """Raises ArgumentError, or (``unsupported``) for what the model cannot do."""
        match directive:
            case Configure():
                self._check_configuration(directive)
            case AddText():
                self._need(self.takes_text, "text", "directives")
            case Respond():
                self._need(self.takes_requests, "requests for a response", "directives")
                self._need(self.text_only or not directive.text_only, "responses without speech", "text_only")
                self._need(
                    self.isolates or directive.context is None, "responses with a context of their own", "context"
                )
                self._need(self.takes_tools or not directive.tools, "tools", "tools")
            case Say():
                self._need(self.says, "lines to say", "directives")
            case ToolResult():
                self._need(self.takes_tools, "tools", "directives")
            case _:
                pass

    def _check_configuration(self, directive: Configure) -> None:
        self._need(self.takes_text or not directive.instructions, "instructions", "instructions")
        self._need(self.takes_tools or not directive.tools, "tools", "tools")
        if directive.voice is not None and directive.voice not in self.voices:
            known = ", ".join(self.voices) or "none to choose"
            raise ArgumentError(f"no voice {directive.voice!r}; known: {known}", path="voice")
        if directive.turns is not None:
            self.check_turns(directive.turns)

    def check_turns(self, turns: Turns) -> None:
        """Raises ArgumentError (``unsupported``)."""
        known = ", ".join(self.turn_modes)
        self._need(turns.mode in self.turn_modes, f"turns ended by {turns.mode} (known: {known})", "turns.mode")

    def _need(self, able: bool, what: str, path: str) -> None:
        if not able:
            raise ArgumentError(f"this model takes no {what}", code=ErrorCode.UNSUPPORTED, path=path)


@runtime_checkable
class DuplexModel(WorldModel, Protocol):
    """What a duplex model implements beside the rest of the contract; its ``spec.duplex`` is set."""

    def check_frame(self, frame: Frame) -> None:
        """Raises ArgumentError, naming the field, for a frame that ``step`` could not go on from; changes nothing.

        Called on the engine's thread for every frame: it must take microseconds."""
        ...


class DuplexBase:
    """What duplex models answer alike: they take frames, no events, and have no start pictures."""

    @property
    def spec(self) -> ModelSpec:
        """With ``duplex`` set."""
        raise NotImplementedError

    def understand(self, event: SessionEvent) -> str | None:
        raise ArgumentError("a duplex model takes frames, no events", path="event")

    def check_frame(self, frame: Frame) -> None:
        assert self.spec.duplex is not None
        self.spec.duplex.check(frame)

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
    "DuplexModel",
    "DuplexSpec",
    "duplex_output",
    "speech_artifact",
]
