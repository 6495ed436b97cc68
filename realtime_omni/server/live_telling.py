"""What a call tells, as events of the Live protocol: sound, transcripts, calls of functions, acknowledgements, notices, usage.

Owns the session's timeline, the sound from the model to the wire, the fixture, and the texts that wait for their tick. Must not
know connections, or how a session begins and ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, assert_never

import numpy as np
import soxr  # type: ignore[import-untyped]
from numpy.typing import NDArray

from realtime_omni.duplex.intake import IntakeStatistics
from realtime_omni.duplex.journal import Lost
from realtime_omni.duplex.outputs import Ended, InputReport, Interrupted, Output, Tick
from realtime_omni.server.live_words import Captions
from realtime_omni.server.outgoing import Outgoing
from realtime_omni.server.sound import PCM_24K, Landing, SoundDecoder, SoundEncoder, SoundFormat
from realtime_omni.session.frame import Directive
from realtime_omni.session.signals import ContextUse, InputTranscript, OutputText, ToolCall
from realtime_omni_protocols.live import Command, LiveClose, LiveCode, LiveError, LiveServerSide, LiveState

if TYPE_CHECKING:
    from realtime_omni.call import Call
    from realtime_omni.server.voice import VoiceHub

USAGE_EVERY_S = 10
SAY_AGAIN_MS = 5_000.0
"""A trouble with the input that lasts is said again after so long."""
MOST_FILLED_MS = 2_000.0
"""Of sound that was not kept and is replaced by silence, so that the client's timeline goes on."""


class Telling:
    """See the module docstring. ``call``: None from when it is being ended; its last ticks are still told."""

    def __init__(
        self, side: LiveServerSide, voice: VoiceHub, out: Outgoing, do: Callable[[Iterable[Command]], None]
    ) -> None:
        """``out``: of the primary connection, which sets the pace. ``do``: carries out what ``side`` wants."""
        self.call: Call | None = None
        self._side, self._voice, self._out, self._do = side, voice, out, do
        self._rate = voice.spec.output_rate_hz
        self._encoder: SoundEncoder | None = None
        self._landing = Landing(self._rate)
        self._reflect_out: SoundEncoder | None = None
        self._fixture: NDArray[np.float32] | None = None
        self._heard_words, self._said_words = Captions(), Captions()
        self._waiting: deque[tuple[Directive, int]] = deque()
        self._origin_ms = 0.0
        self._expected = 0
        self._usage_s = 0
        self._context: float | None = None
        self._overrun = self._behind = 0
        self._said_at_ms: dict[str, float] = {}
        self._told: Call | None = None
        """The call whose outputs are told, ``_cursor`` behind the last."""
        self._cursor = 0
        self._late = asyncio.Event()
        self._fault: Exception | None = None

    # -- what a session asks -----------------------------------------------------------------------------------------

    def begin(self, call: Call, form: SoundFormat) -> None:
        """The timeline begins now; nothing is told before :meth:`listen`."""
        self.call = call
        self._origin_ms, self._expected = call.now_ms, round(call.now_ms / call.spec.frame_ms)
        self._encoder = SoundEncoder(self._rate, form)

    def listen(self, call: Call) -> None:
        """Tell what it has told, and what it will."""
        self._told = call
        call.listen(self.tell)
        self.tell()

    def stop(self) -> None:
        """Nothing more is told."""
        self._told = None

    def seconds(self, now_ms: float) -> int:
        """Of the session so far."""
        return int((now_ms - self._origin_ms) / 1000)

    def acknowledge(self, directive: Directive, ticket: int) -> None:
        """When it goes into a tick."""
        self._waiting.append((directive, ticket))

    def play(self, audio: bytes) -> None:
        """A fixture in the place of what the model says, 24 kHz."""
        samples = SoundDecoder(PCM_24K, PCM_24K.rate_hz).feed(audio)
        self._fixture = (
            samples if self._rate == PCM_24K.rate_hz else soxr.resample(samples, PCM_24K.rate_hz, self._rate)
        )

    def tell_dropped(self, taken: IntakeStatistics) -> None:
        """Whose fault it is that sound was dropped: the client sends too fast, or this server is late."""
        if taken.overrun > self._overrun and self._may_say("overrun"):
            self._overrun = taken.overrun
            self._do(self._side.complain(LiveError(LiveCode.INPUT_OVERRUN, "audio comes faster than real time")))
        if taken.behind > self._behind and self._may_say("behind"):
            self._behind = taken.behind
            self._do(self._side.inform("input_audio_dropped", "the server is late; the oldest audio was dropped"))

    # -- what the call tells ---------------------------------------------------------------------------------------

    def tell(self) -> None:
        """What the call has told, as far as there is room for it."""
        try:
            while self._told is not None and self._fault is None:
                if not self._out.has_room:
                    self._late.set()
                    return
                found = self._told.duplex.read(self._cursor, 1)
                if not found:
                    return
                ((self._cursor, output),) = found
                self._on_output(output)
                if isinstance(output, Ended):
                    self._told = None
        except Exception as fault:  # whoever calls this is no task of ours
            self._fault = fault
            self._late.set()

    async def tell_late(self) -> None:
        """Go on when there is room again. Raises what went wrong outside any task."""
        while True:
            await self._late.wait()
            self._late.clear()
            if self._fault is not None:
                raise self._fault
            await self._out.room()
            self.tell()

    def _on_output(self, output: Output | Lost) -> None:
        match output:
            case Tick():
                self._on_tick(output)
            case Interrupted():
                pass  # what was sent is played already; from here on there is silence
            case InputReport(kind="silent_microphone"):
                self._do(
                    self._side.inform("silent_microphone", "nothing but digital silence comes from the microphone")
                )
            case InputReport(measured_hz=measured):
                rate = 0 if measured is None else round(measured)
                self._do(self._side.inform("wrong_rate", f"about {rate} samples come in a second"))
            case Lost():
                self._do(self._side.inform("output_lost", "what was not read in time is not kept"))
            case Ended(reason=reason):
                self._on_end(reason)
            case _:
                assert_never(output)

    def _on_end(self, reason: str) -> None:
        """The call ended by itself; where we ended it the machine knows."""
        if reason == "operator":
            self._do(self._side.end("close_requested"))
        elif self._side.state is LiveState.ACTIVE:
            failed = LiveError(LiveCode.SERVER_ERROR, "the session failed; the server's log says why")
            self._do(self._side.fatal(failed, LiveClose.SERVER_ERROR))

    def _on_tick(self, tick: Tick) -> None:
        start, end = self._ms(tick.start_ms), self._ms(tick.end_ms)
        self._acknowledged(tick.directives, start, end)
        if self._fixture is None:
            self._show(tick)
        frame = tick.audio if tick.audio.size else np.zeros(self._voice.spec.output_samples, np.float32)
        missing = tick.number - self._expected
        most_filled = round(MOST_FILLED_MS / self._voice.spec.frame_ms)
        for number in range(max(0, missing - most_filled), missing):
            self._sound(np.zeros_like(frame), self._expected + number)
        self._expected = tick.number + 1
        self._sound(frame if self._fixture is None else self._next_of_fixture(len(frame)), tick.number)
        if self._fixture is not None and not self._fixture.size:
            self._fixture = None
            self._do(self._side.fixture_played())
            if self.call is not None:
                self.call.mute(self._side.muted)
        if tick.source == "concealed" and self._may_say("gap"):
            self._do(self._side.inform("input_audio_gap", "audio came late; silence took its place"))
        self._count(end)

    def _acknowledged(self, directives: tuple[Directive, ...], start: int, end: int) -> None:
        while self._waiting and any(one is self._waiting[0][0] for one in directives):
            _, ticket = self._waiting.popleft()
            self._do(self._side.injected(ticket, start, end))

    def _show(self, tick: Tick) -> None:
        for signal in tick.signals:
            match signal:
                case InputTranscript():
                    if text := self._heard_words.input(signal):
                        span = self._ms(signal.start_ms), self._ms(signal.end_ms)
                        self._do(self._side.input_transcript(text, *span))
                case OutputText():
                    if text := self._said_words.output(signal):
                        span = self._ms(signal.start_ms), self._ms(signal.end_ms)
                        self._do(self._side.output_transcript(text, *span))
                case ToolCall():
                    at = self._ms(tick.start_ms)
                    self._do(self._side.called(signal.call_id, signal.name, signal.arguments, at))
                case ContextUse():
                    self._context = signal.ratio
                case _:
                    pass

    def _sound(self, samples: NDArray[np.float32], number: int) -> None:
        """One frame, at the place of tick ``number``."""
        assert self._encoder is not None
        samples = self._landing.smooth(samples)
        reflected = None
        if self._side.sidebands:
            if self._reflect_out is None:
                self._reflect_out = SoundEncoder(self._rate, PCM_24K)
            reflected = self._reflect_out.feed(samples) or None
        frame_ms = self._voice.spec.frame_ms
        start, end = self._ms(number * frame_ms), self._ms((number + 1) * frame_ms)
        encoded = self._encoder.feed(samples)
        if encoded:  # a resampler may hold the first one back
            self._do(self._side.output_audio(encoded, start, end, reflected))

    def _next_of_fixture(self, count: int) -> NDArray[np.float32]:
        assert self._fixture is not None
        frame, self._fixture = self._fixture[:count], self._fixture[count:]
        return np.pad(frame, (0, count - frame.size))

    def _count(self, now_ms: int) -> None:
        seconds = now_ms // 1000
        if seconds >= self._usage_s + USAGE_EVERY_S:
            self._usage_s = seconds
            self._do(self._side.usage(seconds, self._context))

    def _ms(self, at_ms: float) -> int:
        """A moment of the call on the session's timeline, which begins with it."""
        return max(0, round(at_ms - self._origin_ms))

    def _may_say(self, trouble: str) -> bool:
        if self.call is None:  # its last ticks are still told
            return False
        now, before = self.call.now_ms, self._said_at_ms.get(trouble)
        if before is not None and now - before < SAY_AGAIN_MS:
            return False
        self._said_at_ms[trouble] = now
        return True
