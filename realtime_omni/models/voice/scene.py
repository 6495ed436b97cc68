"""One frame of a call with the embedded voice: what it is told, what it hears, what it says; from one state to the next.

Owns what directives do. Lives as long as a frame.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from realtime_omni.models.voice import conversation
from realtime_omni.models.voice.activity import Hearing
from realtime_omni.models.voice.answering import Answerer
from realtime_omni.models.voice.board import Board, Cast
from realtime_omni.models.voice.deciding import manners_of
from realtime_omni.models.voice.state import Entry, Offered, Response, Sound, VoiceState
from realtime_omni.models.voice.turns import Listener
from realtime_omni.session.frame import (
    AddText,
    Cancel,
    Clear,
    Commit,
    Configure,
    Directive,
    RemoveText,
    Respond,
    Say,
    Tool,
    ToolResult,
    Truncate,
)
from realtime_omni.session.signals import Signal
from realtime_omni.session.values import canonical_json


class Scene:
    """See the module docstring. ``signals`` and ``state`` are the frame's result."""

    def __init__(self, state: VoiceState, start_ms: float, cast: Cast, call: str) -> None:
        self._board = Board(state, start_ms, cast, call)
        self._listener = Listener(self._board)
        self._answerer = Answerer(self._board)

    @property
    def state(self) -> VoiceState:
        return self._board.state

    @property
    def signals(self) -> Sequence[Signal]:
        return self._board.signals

    def listen(self, audio: Sound, hearing: Hearing, probabilities: tuple[float, ...]) -> None:
        """``audio``: the frame's; ``hearing``, ``probabilities``: what the detector made of it."""
        self._listener.listen(audio, hearing, probabilities)

    def speak(self) -> Sound | None:
        """This frame's sound; None: silence."""
        return self._answerer.speak()

    def rehearsal(self) -> Rehearsal | None:
        """What can go on before the next frame."""
        if not self._listener.pauses and not self._answerer.waits:
            return None
        return Rehearsal(self.state, self._board.start_ms, self._board.cast, self._board.call)

    def obey(self, directive: Directive) -> None:
        match directive:
            case Configure():
                self._configure(directive)
            case AddText():
                entry = Entry(directive.id or "", directive.role, directive.text, directive.kind)
                self._board.set(entries=conversation.add(self._board.facts.entries, entry, directive.after))
            case RemoveText():
                self._board.set(entries=conversation.remove(self._board.facts.entries, directive.id))
            case Commit():
                self._listener.commit(self._board.start_ms, self._board.start_ms, respond=False)
            case Clear():
                self._listener.clear()
            case Respond():
                self._board.queue(self._requested(directive))
            case Say():
                self._board.queue(Response(directive.id, said=directive.text))
            case Cancel():
                self._answerer.cancel(directive)
            case Truncate():
                entries = conversation.cut(self._board.facts.entries, directive.response, directive.heard_ms)
                self._board.set(entries=entries)
            case ToolResult():
                self._board.add(Entry(directive.call_id, "user", directive.output, "result"))

    def _configure(self, directive: Configure) -> None:
        if directive.instructions is not None:
            self._board.set(instructions=directive.instructions or None)
            self._board.prepare()
        if directive.tools is not None:
            self._board.set(offer=replace(self._board.facts.offer, tools=_offered(directive.tools)))
        if directive.tool_choice is not None:
            self._board.set(offer=replace(self._board.facts.offer, choice=directive.tool_choice))
        if directive.turns is not None:
            self._board.set(manners=manners_of(directive.turns))

    def _requested(self, request: Respond) -> Response:
        context, most = None, self._board.most_tokens
        if request.context is not None:
            context = tuple(Entry(t.id or "", t.role, t.text, t.kind) for t in request.context)
        return Response(
            request.id,
            text_only=request.text_only,
            remember=request.remember,
            instructions=request.instructions,
            context=context,
            tools=None if request.tools is None else _offered(request.tools),
            tool_choice=request.tool_choice,
            limit=min(request.max_tokens or most, most),
        )


class Rehearsal:
    """A frame that is never told; see :class:`~realtime_omni.models.voice.rehearsing.Rehearsal`."""

    def __init__(self, begins: VoiceState, start_ms: float, cast: Cast, call: str) -> None:
        self.begins = begins
        self._board = Board(begins, start_ms, cast, call)

    @property
    def state(self) -> VoiceState:
        return self._board.state

    def go_on(self) -> None:
        Listener(self._board).rehearse()
        Answerer(self._board).rehearse()

    def give_up(self) -> None:
        self._board.drop_guess()


def _offered(tools: Sequence[Tool]) -> tuple[Offered, ...]:
    return tuple(Offered(tool.name, tool.description, canonical_json(tool.parameters)) for tool in tools)
