"""One frame of a puppet: what it is told, what it hears, what it says; from one state to the next.

Owns the rules; the state is a value that is replaced. Lives as long as a frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from realtime_omni.duplex.spec import DuplexSpec
from realtime_omni.models.puppet import speech
from realtime_omni.models.puppet.ears import Ears, listen
from realtime_omni.models.puppet.state import MOST_PENDING, MOST_TURNS, Call, Line, Manners, PuppetState, Turn
from realtime_omni.session.frame import (
    AddText,
    Cancel,
    Clear,
    Commit,
    Configure,
    Directive,
    Frame,
    RemoveText,
    Respond,
    Say,
    ToolResult,
    Truncate,
    Turns,
)
from realtime_omni.session.signals import (
    EndReason,
    IdleTimeout,
    InputTranscript,
    OutputText,
    ResponseEnded,
    ResponseStarted,
    Signal,
    Speaking,
    SpeechStarted,
    SpeechStopped,
    ToolCall,
    TurnCommitted,
    Usage,
)

if TYPE_CHECKING:
    from realtime_omni.models.puppet.model import PuppetOptions

MOST_CHARS = 2000
"""Of a line and of a remembered turn."""


class Scene:
    """See the module docstring. ``signals`` and ``state`` are the frame's result."""

    def __init__(self, state: PuppetState, start_ms: float, options: PuppetOptions, spec: DuplexSpec) -> None:
        self.state = state
        self.signals: list[Signal] = []
        self._start_ms = start_ms
        self._end_ms = start_ms + spec.frame_ms
        self._options = options
        self._spec = spec
        if not state.frames and options.greeting is not None:
            self._queue(Line(id=self._name_response(), text=options.greeting))

    # ------------------------------------------------------------------ what it is told

    def obey(self, directive: Directive) -> None:
        match directive:
            case Configure():
                self._configure(directive)
            case AddText():
                self._remember(directive.id or "", directive.role, directive.text, directive.after)
            case RemoveText():
                self._set(turns=tuple(t for t in self.state.turns if t.id != directive.id))
            case Commit():
                self._commit(self.state.heard_from_ms, self._start_ms)
            case Clear():
                self._clear()
            case Respond():
                self._queue(self._answer(directive))
            case Say():
                self._queue(Line(id=directive.id, text=directive.text[:MOST_CHARS]))
            case Cancel():
                self._cancel(directive)
            case Truncate():
                self._cut(directive.response, directive.heard_ms)
            case ToolResult():
                self._remember("", "user", f"say {directive.output}", None)

    def _configure(self, directive: Configure) -> None:
        if directive.instructions is not None:
            others = tuple(t for t in self.state.turns if t.id or t.role != "system")
            self._set(turns=(Turn(id="", role="system", text=directive.instructions[:MOST_CHARS]), *others))
        if directive.tools is not None:
            self._set(tools=tuple(t.name for t in directive.tools))
        if directive.turns is not None:
            self._set(manners=_manners(directive.turns))

    def _answer(self, request: Respond) -> Line:
        """What the last text of the user asks for, else the next line."""
        turns = self.state.turns
        if request.context is not None:
            turns = tuple(Turn(id="", role=t.role, text=t.text) for t in request.context)
        asked = next((t.text for t in reversed(turns) if t.role == "user"), "")
        tools = self.state.tools if request.tools is None else tuple(t.name for t in request.tools)
        tools = () if request.tool_choice == "none" else tools
        line = Line(id=request.id, text="", text_only=request.text_only, remember=request.remember)
        verb, _, rest = asked.strip().partition(" ")
        if verb == "say":
            return replace(line, text=rest[:MOST_CHARS])
        if verb == "repeat":
            said = next((t.text for t in reversed(turns) if t.role == "assistant"), "nothing")
            return replace(line, text=said)
        call = _call(asked, tools)
        if call is not None:
            return replace(line, call=call)
        text = self._next_line()
        return replace(line, text=text, call=_call(text, tools))

    def _clear(self) -> None:
        """An utterance that is under way goes on, without what was heard of it."""
        ears, start_ms = self.state.ears, self._start_ms
        ears = replace(ears, began_ms=start_ms, last_ms=start_ms) if ears.speaking else Ears()
        self._set(ears=ears, heard_from_ms=start_ms)

    def _cancel(self, directive: Cancel) -> None:
        line = self.state.line
        if line is not None and directive.response in (None, line.id):
            said_ms = (self.state.frames - line.began) * self._spec.frame_ms
            self._end(line, "cancelled", said_ms if directive.heard_ms is None else min(directive.heard_ms, said_ms))
        for waiting in self.state.pending:
            if directive.response in (None, waiting.id):
                self.signals += (ResponseStarted(waiting.id), ResponseEnded(waiting.id, "cancelled"))
                self._set(pending=tuple(line for line in self.state.pending if line is not waiting))

    def _cut(self, response: str, heard_ms: float) -> None:
        turns = tuple(
            replace(t, text=speech.heard(t.text, heard_ms)) if t.id == response and t.role == "assistant" else t
            for t in self.state.turns
        )
        self._set(turns=turns)

    # ------------------------------------------------------------------ what it hears

    def listen(self, frame: Frame) -> None:
        manners = self.state.manners
        ears = listen(self.state.ears, frame.audio, self._spec.input_rate_hz, self._start_ms, manners.threshold)
        if manners.mode == "client":
            self._set(ears=replace(ears, speaking=self.state.transcript is not None))
            return
        if ears.speaking and not self.state.ears.speaking:
            name = self._name_utterance()
            self._set(transcript=name)
            self.signals.append(SpeechStarted(name, ears.began_ms))
        self._set(ears=ears)
        if ears.speaking and self._end_ms - ears.last_ms >= manners.silence_ms:
            self._stop(ears)
        self._wait_for_the_user(manners)

    def _stop(self, ears: Ears) -> None:
        name = self.state.transcript
        assert name is not None
        self.signals.append(SpeechStopped(name, ears.last_ms))
        self._commit(ears.began_ms, ears.last_ms)
        if self.state.manners.respond:
            self._queue(self._answer(Respond(self._name_response())))

    def _commit(self, start_ms: float, end_ms: float) -> None:
        name = self.state.transcript or self._name_utterance()
        said = f"{(end_ms - start_ms) / 1000:.1f} seconds of sound"
        self.signals += (TurnCommitted(name, start_ms, end_ms), InputTranscript(name, said, start_ms, end_ms, True))
        self._remember(name, "user", said, None)
        self._set(ears=Ears(), transcript=None, heard_from_ms=end_ms, quiet_from_ms=self._end_ms)

    def _wait_for_the_user(self, manners: Manners) -> None:
        state = self.state
        if state.line is not None or state.pending or state.ears.speaking:
            self._set(quiet_from_ms=self._end_ms)
        elif manners.idle_ms is not None and self._end_ms - state.quiet_from_ms >= manners.idle_ms:
            self.signals.append(IdleTimeout(state.quiet_from_ms, self._end_ms))
            self._set(quiet_from_ms=self._end_ms)
            self._queue(self._answer(Respond(self._name_response())))

    # ------------------------------------------------------------------ what it says

    def speak(self) -> NDArray[np.float32] | None:
        """This frame's sound; None: silence."""
        if self._gives_way() and self.state.line is not None:
            line = self.state.line
            self._end(line, "yielded", (self.state.frames - line.began) * self._spec.frame_ms)
        self._begin()
        begun = self.state.line
        sound = None if begun is None else self._say(begun)
        self._set(frames=self.state.frames + 1)
        return sound

    def _gives_way(self) -> bool:
        ears = self.state.ears
        hears = self._options.yields and ears.speaking and self.state.manners.mode != "client"
        return hears and self._end_ms - ears.began_ms >= self._options.yield_after_ms

    def _begin(self) -> None:
        """The responses that wait, until one takes time."""
        while self.state.line is None and self.state.pending:
            line, *rest = self.state.pending
            line = replace(line, began=self.state.frames)
            self._set(line=line, pending=tuple(rest))
            self.signals.append(ResponseStarted(line.id))
            if line.call is not None:
                call_id = f"call-{self.state.calls}"
                self._set(calls=self.state.calls + 1)
                self.signals.append(ToolCall(line.id, call_id, line.call.name, line.call.arguments))
                self._end(line, "completed", 0.0)
            elif line.text_only or not speech.words(line.text):
                self.signals.append(OutputText(line.id, line.text, self._start_ms, self._start_ms))
                self._end(line, "completed", float("inf"))

    def _say(self, line: Line) -> NDArray[np.float32]:
        frame_ms = self._spec.frame_ms
        from_ms = (self.state.frames - line.began) * frame_ms
        began_ms = self._start_ms - from_ms
        sound = speech.sound(line.text, from_ms, self._spec.output_samples, self._spec.output_rate_hz)
        self.signals.append(Speaking(line.id))
        for word in speech.words(line.text):
            if from_ms <= word.start_ms < from_ms + frame_ms:
                self.signals.append(OutputText(line.id, word.text, began_ms + word.start_ms, began_ms + word.end_ms))
        if from_ms + frame_ms >= speech.length_ms(line.text):
            self._end(line, "completed", float("inf"))
        return sound

    def _end(self, line: Line, reason: EndReason, heard_ms: float) -> None:
        said = line.text if line.text_only else speech.heard(line.text, heard_ms)
        spoken = 0 if line.text_only else self.state.frames - line.began + (reason == "completed")
        usage = Usage(output_text=len(said.split()), output_audio=spoken)
        self.signals.append(ResponseEnded(line.id, reason, usage))
        self._set(line=None)
        if line.remember and said:
            self._remember(line.id, "assistant", said, None)

    # ------------------------------------------------------------------ inside

    def _set(self, **fields: object) -> None:
        self.state = replace(self.state, **fields)

    def _queue(self, line: Line) -> None:
        if len(self.state.pending) < MOST_PENDING:
            self._set(pending=(*self.state.pending, line))
        else:
            self.signals += (ResponseStarted(line.id), ResponseEnded(line.id, "failed"))

    def _remember(self, name: str, role: str, text: str, after: str | None) -> None:
        turn = Turn(id=name, role=role, text=text[:MOST_CHARS])  # type: ignore[arg-type]
        turns = list(self.state.turns)
        where = 0 if after == "" else next((i + 1 for i, t in enumerate(turns) if t.id == after), len(turns))
        turns.insert(where, turn)
        self._set(turns=tuple(turns[-MOST_TURNS:]))

    def _next_line(self) -> str:
        lines = self._options.lines
        self._set(lines=self.state.lines + 1)
        return lines[(self.state.lines - 1) % len(lines)] if lines else ""

    def _name_utterance(self) -> str:
        self._set(utterances=self.state.utterances + 1)
        return f"u{self.state.utterances}"

    def _name_response(self) -> str:
        self._set(responses=self.state.responses + 1)
        return f"r{self.state.responses}"


def _call(text: str, tools: tuple[str, ...]) -> Call | None:
    """What ``call NAME {arguments}`` calls, where there is such a tool."""
    verb, _, rest = text.strip().partition(" ")
    name, _, arguments = rest.partition(" ")
    return Call(name, arguments or "{}") if verb == "call" and name in tools else None


def _manners(turns: Turns) -> Manners:
    return Manners(
        mode=turns.mode,
        respond=turns.respond,
        threshold=turns.threshold,
        silence_ms=turns.silence_ms,
        idle_ms=turns.idle_ms,
    )
