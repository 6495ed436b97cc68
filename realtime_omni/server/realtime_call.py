"""A Realtime machine and a call: commands become directives, what the call tells becomes facts. No socket.

Owns: which response, utterance and item are the same thing under the names of both sides; the sound formats.  Must not know:
sockets, the order of events (the machine's), models.
The call ends turns and answers them by itself (`Profile.model_decides`), so that an answer does not wait for a trip to the
machine and back; what a client asks for is a `Respond`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from realtime_omni.duplex.outputs import Ended, InputReport, Interrupted, Output, Tick
from realtime_omni.errors import EventQueueFullError, OmniError, SessionGoneError
from realtime_omni.server.realtime_words import choice_of, end_fact, ending, sound_format, text_of, tools_of, turns_of
from realtime_omni.server.sound import PCM_24K, SoundDecoder, SoundEncoder
from realtime_omni.session import frame as d
from realtime_omni.session import signals as s
from realtime_omni_protocols.realtime import commands as c
from realtime_omni_protocols.realtime.codes import RealtimeCode, RealtimeError
from realtime_omni_protocols.realtime.items import FunctionCallOutputItem, Item, MessageItem
from realtime_omni_protocols.realtime.server_events import OutputItemAdded
from realtime_omni_protocols.realtime.server_side import RealtimeServerSide
from realtime_omni_protocols.realtime.session import AudioFormat, ServerVad, SessionConfig

if TYPE_CHECKING:
    from realtime_omni.call import Call

_log = logging.getLogger(__name__)
Out: TypeAlias = c.Send | c.Close
MAX_NAMES = 4_096
"""Names of either kind that are remembered: more than a conversation has items."""


class Names:
    """What is called what on the other side; bounded: the oldest go."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()

    def put(self, name: str, other: str) -> None:
        self._names[name] = other
        while len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)

    def get(self, name: str) -> str | None:
        return self._names.get(name)

    def pop(self, name: str) -> str | None:
        return self._names.pop(name, None)


class RealtimeCall:
    """One connection's machine and call."""

    def __init__(self, side: RealtimeServerSide, call: Call, mint: Callable[[str], str]) -> None:
        self._side = side
        self._call = call
        self._mint = mint
        self._config = SessionConfig()
        self._decoder = SoundDecoder(PCM_24K, call.spec.input_rate_hz)
        self._encoders: dict[str, SoundEncoder | None] = {}
        """Of responses under way, by wire name; None: its answer is a text."""
        self._responses: dict[str, str] = {}
        """Model name to wire name, of responses under way."""
        self._beside: set[str] = set()
        """Out of band."""
        self._asked: deque[str] = deque()
        """Responses that a model which takes no requests will begin when it likes."""
        self._items = Names()
        self._answers = Names()
        self._utterances = Names()
        """Utterance to item, until its transcript is whole."""
        self._committed: deque[str] = deque(maxlen=64)
        """Items that the client committed and whose utterance the model has not named."""
        self._said = Names()
        """What is known of an utterance whose transcript is not whole, by item."""
        self._calls = Names()
        """Function calls of the model's own."""
        self._interrupted = False
        self._cut: tuple[str, ...] = ()

    # ---- what the machine asks

    def carry(self, outputs: Iterable[c.Output]) -> list[Out]:
        """Carry out the commands among the outputs; what is to be sent, in order."""
        waiting, out = deque(outputs), list[Out]()
        while waiting:
            output = waiting.popleft()
            if isinstance(output, c.Send | c.Close):
                out.append(output)
                if isinstance(output, c.Send) and isinstance(output.event, OutputItemAdded):
                    self._name_item(output.event)
                continue
            try:
                waiting.extend(self._command(output))
            except SessionGoneError:
                pass  # the call's last output says so
            except OmniError as error:
                _log.info("a command was refused session_id=%s code=%s", self._call.id, error.code.value)
                waiting.extend(self._refused(output, error))
        return out

    def _command(self, command: c.Command) -> list[c.Output]:
        call = self._call
        match command:
            case c.AppendAudio(audio, audio_format):
                samples = self._decode(audio, audio_format)
                if samples.size:
                    call.append(samples)
            case c.Configure(config):
                self._configure(config)
            case c.CommitInput(item_id, by_client):
                if by_client:
                    self._committed.append(item_id)
                    call.direct(d.Commit())
            case c.ClearInput():
                call.clear()
                call.direct(d.Clear())
            case c.AddItem():
                self._add_item(command)
            case c.RemoveItem(item_id):
                call.direct(d.RemoveText(self._items.get(item_id) or item_id))
            case c.TruncateItem(_, response_id, heard_ms, _):
                call.truncate(self._answers.get(response_id) or response_id, heard_ms)
            case c.StartResponse():
                return self._start(command)
            case c.CancelResponse(response_id):
                self._cancel(response_id)
            case c.Played(response_id, played_ms):
                call.played(self._answers.get(response_id) or response_id, played_ms)
            case c.ClearOutput():
                pass  # sound leaves as it is made: nothing waits
        return []

    def _refused(self, command: c.Command, error: OmniError) -> list[c.Output]:
        """The model or the session cannot do what was asked."""
        if isinstance(command, c.StartResponse):
            self._forget(command.response_id)
            return self._side.apply(c.ResponseFailed(command.response_id, str(error), RealtimeCode.INVALID_VALUE))
        code = RealtimeCode.RATE_LIMITED if isinstance(error, EventQueueFullError) else RealtimeCode.INVALID_VALUE
        return self._side.report(RealtimeError(code, str(error)))

    def _decode(self, audio: bytes, audio_format: AudioFormat) -> NDArray[np.float32]:
        form = sound_format(audio_format)
        if form != self._decoder.form:
            self._decoder = SoundDecoder(form, self._call.spec.input_rate_hz)
        return self._decoder.feed(audio)

    def _configure(self, config: SessionConfig) -> None:
        """What has changed, as far as the model can do it."""
        spec, old = self._call.spec, self._config
        self._config = config
        detection = config.audio.input.turn_detection
        changed = config.audio.input.turn_detection != old.audio.input.turn_detection
        instructions = config.instructions if spec.takes_text and config.instructions != old.instructions else None
        voice = config.audio.output.voice
        self._call.direct(
            d.Configure(
                instructions=instructions,
                voice=voice if voice in spec.voices and voice != old.audio.output.voice else None,
                turns=turns_of(detection, spec) if changed or not old.audio.output.voice else None,
                tools=tools_of(config.tools) if spec.takes_tools and config.tools != old.tools else None,
                tool_choice=choice_of(config.tool_choice) if config.tool_choice != old.tool_choice else None,
            )
        )
        if not spec.yields:
            interrupt = detection is not None and detection.interrupt_response
            self._call.duplex.overlap = "barge_in_on_speech" if interrupt else "listen_only"

    def _add_item(self, command: c.AddItem) -> None:
        item, spec = command.item, self._call.spec
        assert item.id is not None
        if isinstance(item, FunctionCallOutputItem) and self._calls.get(item.call_id) is not None:
            self._call.direct(d.ToolResult(item.call_id, item.output))
        elif spec.takes_text:
            after = None if command.last else "" if command.previous is None else self._model_name(command.previous)
            role = item.role if isinstance(item, MessageItem) else "system"
            self._call.direct(d.AddText(text_of(item), role, id=item.id, after=after))

    def _model_name(self, item_id: str) -> str:
        return self._items.get(item_id) or item_id

    def _start(self, command: c.StartResponse) -> list[c.Output]:
        spec, config, name = self._call.spec, command.config, command.response_id
        if not spec.takes_requests and (command.own_context or command.out_of_band):
            text = "this model speaks when it likes, from its own conversation only"
            return self._side.apply(c.ResponseFailed(name, text, RealtimeCode.INVALID_VALUE))
        self._open(name, name, config.modality == "text", config.format)
        if command.out_of_band:
            self._beside.add(name)
        if not spec.takes_requests:
            self._asked.append(name)  # it begins when the model does
            return []
        context = tuple(self._context(item) for item in command.context) if command.own_context else None
        tools = None if config.tools == self._config.tools or not spec.takes_tools else tools_of(config.tools)
        choice = None if config.tool_choice == self._config.tool_choice else choice_of(config.tool_choice)
        self._call.direct(
            d.Respond(
                name,
                instructions=None if config.instructions == self._config.instructions else config.instructions,
                text_only=config.modality == "text" and spec.text_only,
                context=context,
                remember=not command.out_of_band,
                tools=tools,
                tool_choice=choice,
                max_tokens=None if config.max_output_tokens == "inf" else config.max_output_tokens,
            )
        )
        return []

    @staticmethod
    def _context(item: Item) -> d.AddText:
        return d.AddText(text_of(item), item.role if isinstance(item, MessageItem) else "system", id=item.id)

    def _cancel(self, response_id: str) -> None:
        name = next((model for model, wire in self._responses.items() if wire == response_id), None)
        beside = response_id in self._beside
        self._forget(response_id)
        if name is None or self._interrupted:
            return  # the call did it already
        if beside:
            self._call.direct(d.Cancel(name))
        else:
            self._call.interrupt()

    # ---- what the call tells

    def tell(self, output: Output) -> list[Out]:
        """What an output of the call means on the wire."""
        match output:
            case Tick():
                return self._tick(output)
            case Interrupted():
                return self._interruption(output)
            case InputReport(kind, at_ms, measured_hz):
                _log.warning("input: %s session_id=%s at_ms=%.0f hz=%s", kind, self._call.id, at_ms, measured_hz)
                return self._apply(c.InputTrouble(kind, at_ms, measured_hz))
            case Ended(reason):
                return self.carry(self._side.end(*ending(reason)))
        return []

    def _interruption(self, output: Interrupted) -> list[Out]:
        if output.reason == "turn_detected":  # the tick that says who speaks comes next, and goes first
            self._interrupted, self._cut = True, output.ended
            return []
        return self._stop(output.ended, "client_cancelled")

    def _stop(self, ended: Iterable[str], reason: Literal["turn_detected", "client_cancelled"]) -> list[Out]:
        out: list[Out] = []
        for name in ended:
            wire = self._responses.get(name)
            if wire is not None:
                self._forget(wire)
                out += self._apply(c.ResponseStopped(wire, reason))
        return out

    def _tick(self, tick: Tick) -> list[Out]:
        out: list[Out] = []
        for signal in tick.signals:
            out += self._signal(signal, tick)
        if self._interrupted:
            out += self._stop(self._cut, "turn_detected")
            self._interrupted, self._cut = False, ()
        return out

    def _apply(self, fact: c.Fact) -> list[Out]:
        return self.carry(self._side.apply(fact))

    def _signal(self, signal: s.Signal, tick: Tick) -> list[Out]:
        match signal:
            case s.SpeechStarted(utterance, at_ms):
                padding = self._padding()
                out = self._apply(c.UserStarted(max(0, round(self._written(at_ms) - padding))))
                if self._side.user_item is not None:
                    self._utterances.put(utterance, self._side.user_item)
                return out
            case s.SpeechStopped():
                return self._apply(c.UserStopped(round(self._written(tick.end_ms))))
            case s.TurnCommitted(utterance):
                self._turn(utterance)
            case s.InputTranscript():
                return self._transcript(signal)
            case s.IdleTimeout(start_ms, end_ms):
                start, end = self._written(start_ms), self._written(end_ms)
                return self._apply(c.IdleTimeout(round(start), round(end)))
            case s.ResponseStarted(name):
                return self._started(name)
            case s.ContextUse(ratio):
                return self._apply(c.ContextUsed(ratio))
            case _:
                wire = self._responses.get(signal.response)
                return [] if wire is None else self._of_response(wire, signal, tick)
        return []

    def _padding(self) -> int:
        detection = self._config.audio.input.turn_detection
        return detection.prefix_padding_ms if isinstance(detection, ServerVad) else 0

    def _written(self, at_ms: float) -> float:
        """A moment of the session as a position in what the client has appended."""
        return self._call.duplex.intake.written_ms(at_ms)

    def _turn(self, utterance: str) -> None:
        """An utterance belongs to the conversation: which item it is."""
        item_id = self._utterances.get(utterance)
        if item_id is None and self._committed:
            item_id = self._committed.popleft()
            self._utterances.put(utterance, item_id)
        if item_id is not None:
            self._items.put(item_id, utterance)
            if item_id in self._committed:  # the client committed what was being said
                self._committed.remove(item_id)

    def _transcript(self, signal: s.InputTranscript) -> list[Out]:
        item_id = self._utterances.get(signal.utterance)
        if item_id is None:
            return []
        said = signal.text if signal.whole else (self._said.get(item_id) or "") + signal.text
        start, end = round(signal.start_ms), round(signal.end_ms)
        out: list[Out] = []
        if signal.text and not signal.whole:
            out = self._apply(c.UserTranscript(item_id, signal.text, start, end))
        if not signal.final:
            self._said.put(item_id, said)
            return out
        self._said.pop(item_id)
        self._utterances.pop(signal.utterance)
        seconds = max(0.0, signal.end_ms - signal.start_ms) / 1000
        return out + self._apply(c.UserTranscribed(item_id, said, seconds))

    def _started(self, name: str) -> list[Out]:
        """The model begins a response: one that was asked for, or one of its own."""
        if name in self._responses:
            return []
        if self._asked:
            wire = self._asked.popleft()
            self._responses[name] = wire
            self._answers.put(wire, name)
            return []
        if self._side.response is not None:  # the client asked for one meanwhile, which answers the same turn
            self._call.direct(d.Cancel(name))
            return []
        wire = self._mint("resp")
        config = self._config
        self._open(name, wire, config.output_modalities == ("text",), config.audio.output.format)
        return self._apply(c.ResponseOpened(wire))

    def _of_response(self, wire: str, signal: ResponseSignal, tick: Tick) -> list[Out]:
        match signal:
            case s.Speaking():
                encoder = self._encoders.get(wire)
                if encoder is None or not tick.audio.size:
                    return []
                audio = encoder.feed(tick.audio)
                return self._apply(c.ResponseSpeech(wire, audio, tick.start_ms, tick.end_ms))
            case s.OutputText(_, text, start_ms, end_ms):
                return self._apply(c.ResponseText(wire, text, start_ms, end_ms))
            case s.ToolCall(_, call_id, name, arguments):
                self._calls.put(call_id, name)
                return self._apply(c.ToolCall(wire, name, arguments, call_id))
            case s.ResponseEnded(_, reason, usage):
                encoder = self._encoders.get(wire)
                rest = b"" if encoder is None else encoder.end()
                self._forget(wire)
                return self._apply(c.ResponseSpeech(wire, rest)) + self._apply(end_fact(wire, reason, usage))

    # ---- names

    def _open(self, name: str, wire: str, text_only: bool, audio_format: AudioFormat) -> None:
        self._responses[name] = wire
        self._answers.put(wire, name)
        encoder = None if text_only else SoundEncoder(self._call.spec.output_rate_hz, sound_format(audio_format))
        self._encoders[wire] = encoder

    def _forget(self, wire: str) -> None:
        self._encoders.pop(wire, None)
        self._beside.discard(wire)
        for name in [name for name, known in self._responses.items() if known == wire]:
            del self._responses[name]
        if wire in self._asked:
            self._asked.remove(wire)

    def _name_item(self, event: OutputItemAdded) -> None:
        if isinstance(event.item, MessageItem) and event.item.id is not None:
            self._items.put(event.item.id, self._answers.get(event.response_id) or event.response_id)


ResponseSignal: TypeAlias = s.Speaking | s.OutputText | s.ToolCall | s.ResponseEnded
