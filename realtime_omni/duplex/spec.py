"""What a duplex model takes in, yields and can do, as plain values.

Owns the check that a frame and its directives are something that the model can go on from.
"""

from __future__ import annotations

from dataclasses import dataclass

from realtime_omni.errors import ArgumentError, ErrorCode
from realtime_omni.session.frame import AddText, Configure, Directive, Frame, Respond, Say, ToolResult, TurnMode, Turns


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
        phases: in how many groups a server spreads its calls over a frame's time. 1: all share each batch, right where a pass
            costs the same for one as for all; more: smaller batches, right where every call costs time of its own.
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
    phases: int = 1

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
