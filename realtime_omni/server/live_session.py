"""One session of the Live protocol: its call, its primary connection and its sidebands. Event ↔ call, nothing else.

Owns the call's life, its connections, and what a client does to it; what the call tells is ``live_telling``'s. The rules of the
wire are in ``realtime_omni_protocols.live``; what is said and heard is the call's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, assert_never

from realtime_omni.errors import ArgumentError, CapacityError, OmniError
from realtime_omni.server.codes import describe_error
from realtime_omni.server.incoming import Incoming
from realtime_omni.server.live_telling import Telling
from realtime_omni.server.outbox import ConnectionEnded
from realtime_omni.server.outgoing import Outgoing, PromptTransport
from realtime_omni.server.sound import PCM_24K, SoundDecoder, SoundEncoder, SoundFormat
from realtime_omni.server.transport import TransportLost
from realtime_omni.session.frame import AddText, Configure, Directive, Respond, Role, Say, Tool, ToolResult
from realtime_omni_protocols.live import (
    PRIMARY,
    Append,
    AudioFormat,
    Close,
    Command,
    End,
    FunctionTool,
    GoOn,
    Inject,
    LiveClose,
    LiveCode,
    LiveError,
    LiveServerSide,
    LiveState,
    PlayFixture,
    Send,
    SessionConfig,
    Start,
    ToolOutput,
    UseTools,
    function_tools,
    tool_choice,
)
from realtime_omni_protocols.live.config import BUILT_IN_VOICES

if TYPE_CHECKING:
    from realtime_omni.call import Call
    from realtime_omni.server.live import LiveHub, Origin

_log = logging.getLogger(__name__)
_ENCODINGS = {"audio/pcm": "pcm16", "audio/pcmu": "pcmu", "audio/pcma": "pcma"}
_ROLES: dict[str, Role] = {"developer": "system", "user": "user", "assistant": "assistant"}
LAST_WORD_S = 5.0
OUR_MODEL_NAMES = "gpt-live"
"""Clients that name OpenAI's models mean the model that is here."""


class LiveSession:
    """See the module docstring. ``origin``: what a fork goes on from."""

    def __init__(self, hub: LiveHub, transport: PromptTransport, origin: Origin | None = None) -> None:
        self.id = f"live_{secrets.token_hex(12)}"
        self.side = LiveServerSide(stored=None if origin is None else origin.config)
        self.call: Call | None = None
        self._hub = hub
        self._voice = hub.voice
        self._transport = transport
        self._origin = origin
        self._out = Outgoing(transport)
        self._sockets: dict[int, Outgoing] = {PRIMARY: self._out}
        self._group: asyncio.TaskGroup | None = None
        self._started, self._ending = asyncio.Event(), asyncio.Event()
        self._finishing: asyncio.Task[None] | None = None
        self._decoder: SoundDecoder | None = None
        self._reflect_in: SoundDecoder | None = None
        self._asked = 0
        self._telling = Telling(self.side, hub.voice, self._out, self._do)

    # -- life ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the primary connection, and the session, to the end. Leaves no task and no call."""
        writer = asyncio.create_task(self._out.run())
        incoming = Incoming(self._transport, self._voice.reading_pace(), partial(self.receive, PRIMARY))
        try:
            async with asyncio.TaskGroup() as self._group:
                self._group.create_task(self._follow(writer))
                self._group.create_task(incoming.run())
                self._group.create_task(self._telling.tell_late())
                self._group.create_task(self._watch_start())
                self._group.create_task(self._finish_in_time())
                self._group.create_task(self._stop_with_server())
        except* (ConnectionEnded, TransportLost):
            pass
        except* Exception as faults:
            fault = describe_error(faults, session=self.id)
            self._fatal(LiveCode.SERVER_ERROR, fault.message, LiveClose.SERVER_ERROR)
        finally:
            self._telling.stop()
            try:
                await self._leave(writer)
            finally:
                writer.cancel()
                _log.info("live session gone session_id=%s %s", self.id, self.side.statistics())

    @staticmethod
    async def _follow(writer: asyncio.Task[None]) -> None:
        """The group ends with the writer, which lives a little longer than the group."""
        await asyncio.wait([writer])
        raise TransportLost

    async def _watch_start(self) -> None:
        await self._voice.clock.wait(
            self._started, self._voice.clock.now_s() + self._voice.settings.handshake_timeout_s
        )
        if not self._started.is_set():
            self._fatal(LiveCode.START_TIMEOUT, "session.start did not come", LiveClose.POLICY)
            return
        await self._voice.clock.wait(self._ending, self._voice.clock.now_s() + self._voice.max_session_s)
        self._do(self.side.end("expired"))

    async def _stop_with_server(self) -> None:
        await self._voice.stopped.wait()
        self._fatal(LiveCode.SHUTDOWN, "the server stops", LiveClose.SHUTDOWN)
        raise ConnectionEnded

    async def _finish_in_time(self) -> None:
        await self._ending.wait()
        await self._finish()

    async def _leave(self, writer: asyncio.Task[None]) -> None:
        """Whatever ended the connection: the session is over, its sidebands hear it, and the last words are written."""
        self._do(self.side.lost(PRIMARY))
        await self._finish()
        self._out.close(LiveClose.NORMAL, "")
        with contextlib.suppress(TimeoutError, ConnectionEnded, TransportLost):
            async with asyncio.timeout(LAST_WORD_S):
                await writer

    async def _finish(self) -> None:
        """End the call, once, and to the end even when the caller is cancelled."""
        if self._finishing is None:
            self._finishing = self._voice.keep(self._end_call())
        await asyncio.shield(self._finishing)

    async def _end_call(self) -> None:
        """Keep what a fork wants, release the call, and say that it is over."""
        call, self.call = self.call, None
        self._telling.call = None
        if call is not None:
            if self.side.config is not None and self.side.config.store:
                await self._hub.store(self.id, self.side.config, call)
            seconds = self._telling.seconds(call.now_ms)
            await self._voice.release(call)
            if self.side.state is LiveState.CLOSING:
                self._do(self.side.closed(seconds))
        self._hub.forget(self)

    def _fatal(self, code: LiveCode, message: str, close: LiveClose) -> None:
        self._do(self.side.fatal(LiveError(code, message), close))

    async def over(self) -> None:
        """Until its call, whose end is under way, has ended, and what a fork wants is kept."""
        if self._finishing is not None:
            await asyncio.shield(self._finishing)

    def hang_up(self) -> None:
        """As if its client had closed it."""
        self._do(self.side.end("close_requested"))

    # -- connections -----------------------------------------------------------------------------------------------

    def attach(self, transport: PromptTransport) -> tuple[int, Outgoing]:
        """A sideband. Raises LiveError."""
        peer = self.side.attach()
        self._sockets[peer] = out = Outgoing(transport)
        return peer, out

    def detach(self, peer: int) -> None:
        self._sockets.pop(peer, None)
        self._do(self.side.lost(peer))

    def receive(self, peer: int, frame: str | bytes) -> None:
        """One frame of a connection."""
        self._do(self.side.receive(peer, frame))

    # -- commands --------------------------------------------------------------------------------------------------

    def _do(self, commands: Iterable[Command]) -> None:
        """Carry out what the machine wants, in order; nothing here waits."""
        for command in commands:
            match command:
                case Send(peer, data, error):
                    self._sockets[peer].put(data)
                    if error is not None:
                        self._voice.metrics.count("voice_errors_total", protocol="live")
                case Close(peer, code, reason):
                    self._sockets[peer].close(code, reason)
                case Start(config):
                    assert self._group is not None
                    self._started.set()
                    self._group.create_task(self._start(config))
                case Append():
                    self._append(command)
                case Inject():
                    self._inject(command)
                case UseTools(tools, choice):
                    self._direct(_configure(tools, choice))
                case ToolOutput(call_id, output):
                    self._direct(ToolResult(call_id, output))
                case GoOn():
                    self._go_on()
                case PlayFixture(audio):
                    self._play(audio)
                case End():
                    self._ending.set()
                case _:
                    assert_never(command)

    async def _start(self, config: SessionConfig) -> None:
        try:
            voice = self._choose(config)
            call = await self._voice.opened(self._hub.open(self, self._origin))
        except LiveError as error:
            self._do(self.side.refuse_start(error))
            return
        except OmniError as error:
            self._do(self.side.refuse_start(_refusal(error, self.id)))
            return
        self.call = call
        form = _sound_format(config.format)
        self._decoder = SoundDecoder(form, call.spec.input_rate_hz)
        self._telling.begin(call, form)
        ignored = self._prepare(call, config, voice)
        expires_at = int(time.time() + self._voice.max_session_s)
        self._hub.add(self)
        voice = voice or next(iter(call.spec.voices), "default")
        started = self.side.started(
            self.id, expires_at=expires_at, model=self._voice.model, voice=voice, takes_tools=call.spec.takes_tools
        )
        self._do(started)
        if ignored:
            self._do(
                self.side.inform("input_ignored", f"this model takes no text: {', '.join(ignored)} without effect")
            )
        self._telling.listen(call)

    def _choose(self, config: SessionConfig) -> str | None:
        """The voice to ask the model for. Raises LiveError for a model or voice that is not here."""
        if config.model != self._voice.model and not config.model.startswith(OUR_MODEL_NAMES):
            raise LiveError(LiveCode.MODEL_NOT_FOUND, f"this server runs {self._voice.model}", "session.model")
        if config.voice is None or config.voice in self._voice.spec.voices:
            return config.voice
        if config.voice in BUILT_IN_VOICES:
            return None
        raise LiveError(LiveCode.VOICE_NOT_FOUND, "this model has no such voice", "session.audio.output.voice")

    def _prepare(self, call: Call, config: SessionConfig, voice: str | None) -> list[str]:
        """Tell the model how it begins; returns the fields that it cannot use."""
        texts = [AddText(item.text, role=_ROLES[item.role]) for item in config.input or ()]
        instructions = config.instructions if self._origin is None else None
        delegation = config.delegation
        if call.spec.takes_tools and (tools := function_tools(delegation)) is not None:
            call.direct(_configure(tools, tool_choice(delegation)))
        if call.spec.takes_text:
            call.direct(Configure(instructions=instructions, voice=voice), *texts)
            return []
        if voice is not None:
            call.direct(Configure(voice=voice))
        return [name for name, given in (("instructions", instructions), ("input", texts)) if given]

    def _append(self, command: Append) -> None:
        if self.call is None or self._decoder is None:
            return
        if self.side.sidebands:
            if self._reflect_in is None:
                self._reflect_in = SoundDecoder(self._decoder.form, PCM_24K.rate_hz)
            shown = SoundEncoder(PCM_24K.rate_hz, PCM_24K).feed(self._reflect_in.feed(command.audio))
            self._do(self.side.reflect_input(shown) if shown else [])
        self.call.mute(not command.heard)
        with contextlib.suppress(OmniError):  # it has ended: the next output says so
            self.call.append(self._decoder.feed(command.audio))
        self._telling.tell_dropped(self.call.duplex.intake.statistics)

    def _inject(self, command: Inject) -> None:
        assert self.call is not None
        try:
            directives = self._directives(command)
            self.call.direct(*directives)
        except OmniError as error:
            self._do(self.side.refuse_injection(command.ticket, _refusal(error, self.id)))
            return
        self._telling.acknowledge(directives[0], command.ticket)

    def _directives(self, command: Inject) -> list[Directive]:
        """What the model is told: the text, and for what is to be said that it may speak now."""
        spec, name = self._voice.spec, f"append_{command.ticket}"
        spoken = command.kind == "commentary"
        if spoken and not spec.takes_text:
            return [Say(name, command.text)]  # refused where it cannot do that either
        if spoken and command.delegation_id is not None and spec.takes_tools:
            first: Directive = ToolResult(command.delegation_id, command.text)
        else:
            first = AddText(command.text, role="system", kind=command.kind, id=name)
        return [first, Respond(f"{name}_response")] if spoken and spec.takes_requests else [first]

    def _direct(self, directive: Directive) -> None:
        if self.call is not None:
            try:
                self.call.direct(directive)
            except OmniError as error:
                self._do(self.side.complain(_refusal(error, self.id)))

    def _go_on(self) -> None:
        self._asked += 1
        if self._voice.spec.takes_requests:
            self._direct(Respond(f"go_on_{self._asked}"))

    def _play(self, audio: bytes) -> None:
        assert self.call is not None
        self._telling.play(audio)
        self.call.mute(True)
        with contextlib.suppress(OmniError):
            self.call.interrupt()


def _configure(tools: tuple[FunctionTool, ...] | None, choice: str | None) -> Configure:
    if tools is None:
        return Configure(tool_choice=choice)
    made = tuple(Tool(tool.name, tool.description or "", tool.parameters or {}) for tool in tools)
    return Configure(tools=made, tool_choice=choice)


def _sound_format(form: AudioFormat) -> SoundFormat:
    return SoundFormat(_ENCODINGS[form.type], form.rate)  # type: ignore[arg-type]  # the keys are the protocol's


def _refusal(error: OmniError, session: str) -> LiveError:
    """What a client is told when the engine does not take something."""
    if isinstance(error, CapacityError):
        return LiveError(LiveCode.CAPACITY, "no room for more now")
    if isinstance(error, ArgumentError):
        return LiveError(LiveCode.UNSUPPORTED_EVENT, error.message)
    return LiveError(LiveCode.SERVER_ERROR, describe_error(error, session=session).message)


__all__ = ["LiveSession"]
