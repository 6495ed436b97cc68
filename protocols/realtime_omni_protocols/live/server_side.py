"""`LiveServerSide`: the server's end of one Live session and of every connection to it, sans I/O.

Owns: the session's wire state, its connections (one primary, sidebands), mute and fixture, ids, which event goes to
whom, and that every command is answered once.  Must not know: sockets, clocks, models, resampling, how a session is
stored.
Invariants: nothing is sent before `session.start`; `session.started` comes before every other event of the session;
`session.closed` is sent exactly once to every connection and nothing follows it; `client_event_id` is only on the
connection that sent the event; an `error` of an event goes to nobody else; `receive` never raises for what a peer sent.

A shell makes one per primary connection, carries out the commands of `receive` and tells facts by the methods below;
all of them return outputs in the order in which they have to be carried out::

    for command in side.receive(PRIMARY, frame):
        match command:
            case Send(peer, data): await sockets[peer].send(data)
            case Close(peer, code, reason): await sockets[peer].close(code, reason)
            case Start(config): ... side.started(...), or side.refuse_start(error)
            case Append(audio, heard): ...            side.output_audio(...) once per tick
            case Inject(ticket, kind, text, _): ...   side.injected(ticket, start_ms, end_ms)
            case PlayFixture(audio): ...              side.fixture_played()
            case End(): ...                           side.closed(seconds)
"""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec import UNSET, Struct, structs

from ..errors import LocalError
from .audience import PRIMARY, Audience, Origin
from .backend import call_events, empty_events, function_tools, read_output, tool_choice
from .client_events import (
    MAX_APPEND_S,
    MAX_FIXTURE_S,
    AnyClientEvent,
    AnyContextAppend,
    ClientEvent,
    CommentaryAppend,
    FixturePlay,
    ForkStart,
    InputAudioAppend,
    InputAudioMute,
    InputAudioUnmute,
    InstructionsAppend,
    PlainAppend,
    ResponseCreate,
    ResponseItemCreate,
    SessionClose,
    SessionStart,
    SessionUpdate,
    ThinkingAppend,
    check_audio,
    decode_audio,
    event_type,
    parse_client,
)
from .commands import Append, Command, End, GoOn, Inject, Injection, PlayFixture, Start, ToolOutput, UseTools
from .config import PCM_24K, Delegation, SessionConfig, SessionResource, merged, resolve
from .errors import LiveClose, LiveCode, LiveError
from .server_events import (
    CloseReason,
    CommentaryAppended,
    ContextWindow,
    DelegationCreated,
    DelegationInfo,
    FixturePlayed,
    FixturePlaying,
    Info,
    InputAudioMuted,
    InputAudioUnmuted,
    InputTranscriptDelta,
    InstructionsAppended,
    OutputTranscriptDelta,
    ResponseEvent,
    ServerEvent,
    SessionClosed,
    SessionStarted,
    SessionUpdated,
    ThinkingAppended,
    Usage,
    UsageUpdated,
)
from .states import PRIMARY_ONLY, LiveState, refusal

T = TypeVar("T")

MAX_PENDING = 32
"""Injections that wait for their tick."""
MAX_DELEGATIONS = 256
"""Ids that are still known; the oldest are forgotten first."""


class LiveStatistics(Struct, frozen=True, kw_only=True):
    state: str
    sidebands: int
    events_received: int
    events_sent: int
    errors: int
    pending: int


class _Waiting(Struct, frozen=True):
    """An injection that waits for its tick."""

    origin: Origin
    kind: Injection


class LiveServerSide:
    """One session. ``stored``: on a fork's connection, the configuration of the session that is continued."""

    def __init__(self, *, stored: SessionConfig | None = None) -> None:
        self.state = LiveState.NEW
        self.muted = False
        self._stored = stored
        self._config: SessionConfig | None = None
        self._resource: SessionResource | None = None
        self._audience = Audience()
        self._starting: Origin | None = None
        self._ending: tuple[CloseReason, Origin | None] | None = None
        self._fixture: Origin | None = None
        self._waiting: dict[int, _Waiting] = {}
        self._delegations: dict[str, None] = {}
        self._backend = False
        self._calls: dict[str, str] = {}
        """Calls of the backend that are not answered, with their delegations."""
        self._seconds = 0
        self._tickets = self._responses = self._received = 0

    # ---- connections

    def attach(self) -> int:
        """A new sideband of an active session: its number.

        Raises:
            LiveError: ``session_not_found`` when it is not active, ``capacity_exceeded``.
        """
        if self.state is not LiveState.ACTIVE:
            raise LiveError(LiveCode.SESSION_NOT_FOUND, "no such session, or it is over")
        return self._audience.add()

    def lost(self, peer: int) -> list[Command]:
        """A connection is gone. A session ends with its primary connection."""
        self._audience.remove(peer)
        return self.end("connection_lost") if peer == PRIMARY else []

    # ---- receiving

    def receive(self, peer: int, frame: str | bytes) -> list[Command]:
        """One frame of a connection: commands, or the refusal."""
        if self.state is LiveState.CLOSED or peer not in self._audience:
            return []
        self._received += 1
        event_id: str | None = None
        try:
            event = parse_client(frame, fork=self._stored is not None)
            event_id = event.event_id
            self._check(peer, event)
            return self._take(event, Origin(peer, event_id))
        except LiveError as error:
            return self._audience.refuse(Origin(peer, event_id or error.client_event_id), error)

    def _check(self, peer: int, event: AnyClientEvent) -> None:
        kind = type(event)
        if peer != PRIMARY and isinstance(event, PRIMARY_ONLY):
            raise LiveError(LiveCode.PRIMARY_ONLY, f"{event_type(kind)} belongs to the primary connection")
        code = refusal(self.state, kind)
        if code is not None:
            raise LiveError(code, f"{event_type(kind)} is not allowed: the session is {self.state.value}")

    def _take(self, event: AnyClientEvent, origin: Origin) -> list[Command]:
        match event:
            case PlainAppend():
                assert self._config is not None
                return self._append(check_audio(event.audio, self._config.format, MAX_APPEND_S))
            case SessionStart():
                return self._start(event.session, origin)
            case ForkStart(session=overrides):
                assert self._stored is not None  # parse_client makes a ForkStart for a fork only
                _refuse_client(overrides.client)
                return self._start(overrides.over(self._stored), origin)
            case SessionUpdate():
                return self._update(event, origin)
            case InputAudioAppend():
                assert self._config is not None
                return self._append(decode_audio(event.audio, self._config.format, MAX_APPEND_S))
            case InputAudioMute():
                self.muted = True
                return self._tell(InputAudioMuted, origin)
            case InputAudioUnmute():
                self.muted = False
                return self._tell(InputAudioUnmuted, origin)
            case FixturePlay():
                return self._play(event, origin)
            case InstructionsAppend() | ThinkingAppend() | CommentaryAppend():
                return self._inject(event, origin)
            case ResponseItemCreate(item=item):
                return self._answer(item)
            case ResponseCreate():
                return self._go_on(origin)
            case SessionClose():
                return self.end("close_requested", origin)
            case _:
                raise LiveError(LiveCode.UNSUPPORTED_EVENT, f"this server has no backend for {event_type(event)}")

    def _append(self, audio: bytes) -> list[Command]:
        return [Append(audio, heard=not self.muted and self._fixture is None)]

    def _start(self, config: SessionConfig, origin: Origin) -> list[Command]:
        _refuse_client(config.client)
        _refuse_triggers(config.triggers)
        function_tools(config.delegation)
        self.state, self._config, self._starting = LiveState.STARTING, config, origin
        return [Start(config)]

    def _update(self, event: SessionUpdate, origin: Origin) -> list[Command]:
        assert self._config is not None
        assert self._resource is not None
        change, before = event.session, self._config.delegation or Delegation(type="client")
        tools, choice = None, None
        if change.triggers is not UNSET:
            _refuse_triggers(change.triggers)
        if isinstance(change.delegation, Delegation):
            if change.delegation.type != before.type:
                text = f"the delegation's type stays {before.type}"
                raise LiveError(LiveCode.IMMUTABLE_PARAMETER, text, "session.delegation.type")
            tools, choice = function_tools(change.delegation), tool_choice(change.delegation)
            self._config = structs.replace(self._config, delegation=merged(before, change.delegation))
        self._resource = self._resource.with_delegation(self._config.delegation)
        told = self._tell(SessionUpdated, origin, session=self._resource)
        return [UseTools(tools, choice), *told] if self._backend and (tools is not None or choice) else told

    def _play(self, event: FixturePlay, origin: Origin) -> list[Command]:
        if self._fixture is not None:
            raise LiveError(LiveCode.FIXTURE_ACTIVE, "another fixture is playing")
        audio = decode_audio(event.audio, PCM_24K, MAX_FIXTURE_S)
        self._fixture = origin
        return [*self._tell(FixturePlaying, origin), PlayFixture(audio)]

    def _inject(self, event: AnyContextAppend, origin: Origin) -> list[Command]:
        if self._fixture is not None:
            raise LiveError(LiveCode.FIXTURE_ACTIVE, "nothing is appended while a fixture plays")
        if event.delegation_id is not None and event.delegation_id not in self._delegations:
            raise LiveError(LiveCode.DELEGATION_NOT_FOUND, "there is no such delegation", "delegation_id")
        if len(self._waiting) >= MAX_PENDING:
            raise LiveError(LiveCode.TOO_MANY_PENDING, f"{MAX_PENDING} appends wait for their tick already")
        self._tickets += 1
        kind = _KIND[type(event)]
        self._waiting[self._tickets] = _Waiting(origin, kind)
        return [Inject(self._tickets, kind, event.content, event.delegation_id)]

    def _answer(self, item: dict[str, Any]) -> list[Command]:
        self._need_backend()
        output = read_output(item)
        if self._calls.pop(output.call_id, None) is None:
            text = "no such call, or it is answered already"
            raise LiveError(LiveCode.INVALID_VALUE, text, "item.call_id")
        return [ToolOutput(output.call_id, output.output)]

    def _go_on(self, origin: Origin) -> list[Command]:
        self._need_backend()
        begun, completed = empty_events(self._new_response(), self._model)
        return [*self._tell(ResponseEvent, origin, event=begun), GoOn(), *self._tell(ResponseEvent, event=completed)]

    def _need_backend(self) -> None:
        if not self._backend:
            raise LiveError(
                LiveCode.UNSUPPORTED_EVENT, "there is no backend: responses delegation and a model with tools"
            )

    # ---- facts: beginning and end

    def started(
        self, session_id: str, *, expires_at: int, model: str, voice: str, takes_tools: bool = False
    ) -> list[Command]:
        """The session exists. ``expires_at``: Unix seconds; ``model`` and ``voice``: the ones it really has;
        ``takes_tools``: the model calls functions, so it can stand in for a hosted backend."""
        self._expect(LiveState.STARTING)
        assert self._config is not None
        self.state = LiveState.ACTIVE
        origin, self._starting = self._starting, None
        self._resource = resolve(self._config, session_id=session_id, expires_at=expires_at, model=model, voice=voice)
        sent = self._tell(SessionStarted, origin, session=self._resource)
        self._backend = takes_tools and self._resource.delegation.type == "responses"
        if self._resource.delegation.type == "responses" and not takes_tools:
            sent += self.inform("delegation_unavailable", "this server has no backend; the model answers by itself")
        if self._ending is not None:
            (reason, closer), self._ending = self._ending, None
            sent += self.end(reason, closer)
        return sent

    def refuse_start(self, error: LiveError) -> list[Command]:
        """There is no session. The client may try again on the same connection."""
        self._expect(LiveState.STARTING)
        assert self._starting is not None
        self.state, origin = LiveState.NEW, self._starting
        self._config = self._starting = self._ending = None
        return self._audience.refuse(origin, error)

    def end(self, reason: CloseReason, origin: Origin | None = None) -> list[Command]:
        """The session ends, unless it ends already; from now on nothing but `session.closed` is said. A session that
        is being started ends when it has started."""
        if self.state is LiveState.STARTING:
            self._ending = self._ending or (reason, origin)
            return []
        if self.state is not LiveState.ACTIVE:
            return []
        self.state, self._ending = LiveState.CLOSING, (reason, origin)
        return [*self._refuse_waiting(), End(reason)]

    def closed(self, seconds: int) -> list[Command]:
        """The session is over. ``seconds``: of its timeline."""
        self._expect(LiveState.CLOSING)
        assert self._ending is not None
        reason, origin = self._ending
        usage = self._usage(seconds)
        sent = self._tell(SessionClosed, origin, reason=reason, session=self._resource, usage=usage)
        self.state = LiveState.CLOSED
        return [*sent, *self._audience.dismiss(LiveClose.NORMAL, reason)]

    def fatal(self, error: LiveError, close: LiveClose) -> list[Command]:
        """Every connection hears of it and is closed, and no `session.closed` follows: the session did not end in
        order. Nothing when it is over already."""
        if self.state is LiveState.CLOSED:
            return []
        self.state = LiveState.CLOSED
        return [*self._audience.complain(error), *self._audience.dismiss(close, error.code.value)]

    # ---- facts: the session's timeline

    def output_audio(self, audio: bytes, start_ms: int, end_ms: int, reflected: bytes | None = None) -> list[Command]:
        """What is heard in this span, silence included. ``audio``: in the session's format; ``reflected``: the same as
        PCM16 at 24 kHz, needed while there are sidebands."""
        return self._audience.audio(audio, start_ms, end_ms, reflected) if self.state is LiveState.ACTIVE else []

    def reflect_input(self, audio: bytes) -> list[Command]:
        """What the primary connection sent, muted or not, as PCM16 at 24 kHz: for sidebands only."""
        return self._audience.reflect(audio) if self.state is LiveState.ACTIVE else []

    def input_transcript(self, text: str, start_ms: int, end_ms: int) -> list[Command]:
        """What the user was heard to say in this span."""
        return self._event(InputTranscriptDelta, delta=text, start_ms=start_ms, end_ms=end_ms)

    def output_transcript(self, text: str, start_ms: int, end_ms: int) -> list[Command]:
        """What the model says in this span."""
        return self._event(OutputTranscriptDelta, delta=text, start_ms=start_ms, end_ms=end_ms)

    def injected(self, ticket: int, start_ms: int, end_ms: int) -> list[Command]:
        """The text of `Inject` went into the tick that has this span."""
        waiting = self._waiting.pop(ticket, None)
        if waiting is None:
            return []
        return self._tell(_APPENDED[waiting.kind], waiting.origin, start_ms=start_ms, end_ms=end_ms)

    def refuse_injection(self, ticket: int, error: LiveError) -> list[Command]:
        """The model does not take the text of `Inject`."""
        waiting = self._waiting.pop(ticket, None)
        return [] if waiting is None else self._audience.refuse(waiting.origin, error)

    def called(self, call_id: str, name: str, arguments: str, offset_ms: int) -> list[Command]:
        """The model calls a function; ``arguments``: JSON text. With client delegation it is a delegation whose id is
        ``call_id``, with a backend it is the backend's stream."""
        if self.state is not LiveState.ACTIVE:
            return []
        if not self._backend:
            return self._delegate(call_id, offset_ms)
        delegation, response = f"delegation_{call_id}", self._new_response()
        _remember(self._calls, call_id, delegation)
        info = DelegationInfo(id=delegation, target="responses", type="delegation", response_id=response)
        told = self._event(DelegationCreated, delegation=info, offset_ms=offset_ms)
        for event in call_events(response, self._model, call_id, name, arguments):
            told += self._event(ResponseEvent, event=event, delegation_id=delegation)
        return told

    def _delegate(self, delegation_id: str, offset_ms: int) -> list[Command]:
        if self._config is None or (self._config.delegation and self._config.delegation.type != "client"):
            return []
        _remember(self._delegations, delegation_id, None)
        info = DelegationInfo(id=delegation_id, target="client", type="delegation")
        return self._event(DelegationCreated, delegation=info, offset_ms=offset_ms)

    def fixture_played(self) -> list[Command]:
        """The fixture is at its end; input is heard again."""
        origin, self._fixture = self._fixture, None
        if origin is None:
            raise LocalError("no fixture is playing")
        return self._tell(FixturePlayed, origin) if self.state is LiveState.ACTIVE else []

    def usage(self, seconds: int, usage_ratio: float | None) -> list[Command]:
        """``seconds``: of the timeline so far; ``usage_ratio``: of the model's window, None where it has no bound."""
        window = None if usage_ratio is None else ContextWindow(usage_ratio=usage_ratio)
        return self._event(UsageUpdated, usage=self._usage(seconds), context_window=window)

    def inform(self, code: str, message: str) -> list[Command]:
        """A notice that refuses nothing."""
        return self._event(Info, code=code, message=message)

    def complain(self, error: LiveError) -> list[Command]:
        """An error of the session that answers no event; it goes on."""
        return self._audience.complain(error) if self.state is LiveState.ACTIVE else []

    # ---- looking

    @property
    def config(self) -> SessionConfig | None:
        """What the session was started with, as it is now; None before a start."""
        return self._config

    @property
    def fixture_active(self) -> bool:
        return self._fixture is not None

    @property
    def sidebands(self) -> int:
        """How many there are: without one, nothing has to be reflected."""
        return self._audience.sidebands

    def statistics(self) -> LiveStatistics:
        return LiveStatistics(
            state=self.state.value,
            sidebands=self.sidebands,
            events_received=self._received,
            events_sent=self._audience.sent,
            errors=self._audience.errors,
            pending=len(self._waiting),
        )

    # ---- inside

    @property
    def _model(self) -> str:
        assert self._resource is not None
        return self._resource.model

    def _new_response(self) -> str:
        self._responses += 1
        return f"resp_{self._responses}"

    def _expect(self, state: LiveState) -> None:
        if self.state is not state:
            raise LocalError(f"state is {self.state.value}, not {state.value}")

    def _event(self, kind: type[ServerEvent], **fields: Any) -> list[Command]:
        """An event of the session that answers nothing, to everybody; nothing once the session ends."""
        return self._tell(kind, **fields) if self.state is LiveState.ACTIVE else []

    def _tell(self, kind: type[ServerEvent], origin: Origin | None = None, **fields: Any) -> list[Command]:
        return self._audience.tell(kind(event_id=self._audience.new_id(), **fields), origin)

    def _usage(self, seconds: int) -> Usage:
        self._seconds = max(self._seconds, seconds)
        return Usage(seconds=self._seconds)

    def _refuse_waiting(self) -> list[Command]:
        waiting, self._waiting = list(self._waiting.values()), {}
        error = LiveError(LiveCode.SESSION_CLOSED, "the session ended before the next tick")
        return [sent for one in waiting for sent in self._audience.refuse(one.origin, error)]


_KIND: dict[type[ClientEvent], Injection] = {
    InstructionsAppend: "instructions",
    ThinkingAppend: "thinking",
    CommentaryAppend: "commentary",
}
_APPENDED: dict[Injection, type[InstructionsAppended | ThinkingAppended | CommentaryAppended]] = {
    "instructions": InstructionsAppended,
    "thinking": ThinkingAppended,
    "commentary": CommentaryAppended,
}


def _remember(known: dict[str, T], key: str, value: T) -> None:
    """Bounded: the oldest go."""
    known[key] = value
    if len(known) > MAX_DELEGATIONS:
        del known[next(iter(known))]


def _refuse_client(client: object) -> None:
    if client is not None:
        raise LiveError(LiveCode.UNSUPPORTED_PARAMETER, "a WebSocket has no data channel", "session.client")


def _refuse_triggers(triggers: tuple[Any, ...] | None) -> None:
    if triggers:
        raise LiveError(LiveCode.UNSUPPORTED_PARAMETER, "this server has no decisions backend", "session.triggers")
