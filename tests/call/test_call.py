"""Calls through the whole engine: who speaks, who is interrupted, what is left behind. The test moves the calls' clock."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest

from realtime_omni.call import Call, Calls
from realtime_omni.duplex.outputs import DuplexOptions, Ended, Interrupted, Output, Tick
from realtime_omni.errors import ArgumentError, ConfigError, ErrorCode, OmniError, SessionGoneError
from realtime_omni.manager import SessionManager
from realtime_omni.models.null.model import NullWorld
from realtime_omni.models.puppet.model import Puppet, PuppetOptions
from realtime_omni.session.frame import AddText, Cancel, Configure, Directive, Respond, Say, Tool, ToolResult, Turns
from realtime_omni.session.signals import (
    OutputText,
    ResponseEnded,
    ResponseStarted,
    Signal,
    SpeechStarted,
    ToolCall,
    TurnCommitted,
)
from realtime_omni.testing.faults import inject
from realtime_omni.testing.inline import small_config

FRAME = 640
LOUD = np.full(FRAME, 0.3, np.float32)
QUIET = np.zeros(FRAME, np.float32)


class Line:
    """A call and all that it told, driven frame by frame."""

    def __init__(self, calls: Calls, call: Call) -> None:
        self.calls = calls
        self.call = call
        self.outputs: list[Output] = []
        self._seq = 0

    async def frame(self, *directives: Directive, audio: np.ndarray = QUIET) -> list[Signal]:
        """One frame in, and what came of it."""
        if directives:
            self.call.direct(*directives)
        self.call.append(audio)
        self.calls.pulse(self.calls.now_s())
        await self.settle()
        return self.read()

    async def settle(self) -> None:
        """Until nothing of the call is under way."""
        async with asyncio.timeout(20):
            while self.call._futures or self.call._mending is not None or self.call.duplex._again:
                await asyncio.sleep(0)
                self.call.pulse(self.calls.now_s())

    def read(self) -> list[Signal]:
        signals: list[Signal] = []
        for seq, output in self.call.duplex.read(self._seq):
            self._seq = seq
            assert isinstance(output, (Tick, Interrupted, Ended))
            self.outputs.append(output)
            signals += output.signals if isinstance(output, Tick) else ()
        return signals

    async def until(self, found: Callable[[Signal], bool], audio: np.ndarray = QUIET, most: int = 100) -> Signal:
        for _ in range(most):
            for signal in await self.frame(audio=audio):
                if found(signal):
                    return signal
        raise AssertionError("it never came")

    @property
    def text(self) -> str:
        ticks = [o for o in self.outputs if isinstance(o, Tick)]
        return "".join(s.text for t in ticks for s in t.signals if isinstance(s, OutputText))


@asynccontextmanager
async def lines(count: int = 1, options: DuplexOptions | None = None, **how: Any) -> AsyncIterator[list[Line]]:
    puppet = Puppet(PuppetOptions(input_rate_hz=8000, output_rate_hz=8000, **how))
    config = small_config(sessions=count + 2, max_batch=count + 2, rewind_blocks=25)
    async with SessionManager(puppet, config) as manager, Calls(manager, clocked=False) as calls:
        options = options if options is not None else DuplexOptions(pace="free", idle="hold")
        made = [Line(calls, await calls.open(options)) for _ in range(count)]
        yield made
        for line in made:
            line.call.duplex.check()
            await line.call.close()
        assert len(calls) == 0
        assert manager.statistics().sessions == 0
        assert not manager._futures, "a call left something behind"


def is_end(signal: Signal) -> bool:
    return isinstance(signal, ResponseEnded)


async def test_a_conversation_of_two_polite_turns() -> None:
    async with lines() as (line,):
        for expected in ("I hear you.", "Please go on."):
            for _ in range(5):
                await line.frame(audio=LOUD)
            turn = await line.until(lambda s: isinstance(s, TurnCommitted))
            assert isinstance(turn, TurnCommitted)
            assert turn.end_ms - turn.start_ms == 400.0
            await line.until(is_end)
            assert line.text == expected
            line.outputs.clear()


async def test_a_call_that_has_ended_leaves_nothing_for_the_collector() -> None:
    """What it told and nobody has read is most of a megabyte, and full collections are minutes apart."""
    async with lines() as (line,):
        await line.frame(audio=LOUD)
        other = await line.calls.open()
        other.append(LOUD)
        line.calls.pulse(line.calls.now_s())
        told = weakref.ref(other.duplex)
        gc.disable()
        try:
            await other.close()
            other = None  # type: ignore[assignment]
            async with asyncio.timeout(20):
                while told() is not None:  # an answer of the engine's may still be under way
                    await asyncio.sleep(0)
        finally:
            gc.enable()


@pytest.mark.req("AC-42", "AC-43")
@pytest.mark.parametrize("rewinds", [True, False])
async def test_a_barge_in_ends_the_response_and_the_next_one_starts(rewinds: bool) -> None:
    async with lines(rewinds=rewinds) as (line,):
        await line.frame(Say("long", "one two three four five six seven eight nine ten"))
        for _ in range(5):
            await line.frame()
        await line.frame(audio=LOUD)
        (cut,) = [o for o in line.outputs if isinstance(o, Interrupted)]
        assert (cut.response, cut.ended, cut.reason) == ("long", ("long",), "turn_detected")
        told = len(line.outputs)
        await line.until(lambda s: isinstance(s, ResponseStarted))
        for output in line.outputs[told:-1]:
            assert not isinstance(output, Tick) or not output.audio.any(), "it goes on after it was interrupted"
        await line.until(is_end)
        assert line.text.endswith("I hear you.")


@pytest.mark.req("AC-43")
async def test_a_response_that_waits_is_cancelled_and_the_one_that_runs_is_heard_to_its_end() -> None:
    async with lines() as (line,):
        await line.frame(Say("x", "one two three four"), Say("y", "five"))
        told = await line.frame(Cancel("y"))
        assert [s.response for s in told if isinstance(s, ResponseEnded)] == ["y"]
        end = await line.until(is_end)
        assert isinstance(end, ResponseEnded)
        assert (end.response, line.text) == ("x", "one two three four")


async def test_a_listener_is_not_interrupted() -> None:
    async with lines(options=DuplexOptions(pace="free", idle="hold", overlap="listen_only")) as (line,):
        await line.frame(Say("r", "one two three four"))
        await line.until(is_end, audio=LOUD)
        assert line.text == "one two three four"
        assert not any(isinstance(o, Interrupted) for o in line.outputs)


async def test_a_model_that_yields_decides_by_itself() -> None:
    async with lines(yields=True) as (line,):
        await line.frame(Say("r", "one two three four five six seven"))
        end = await line.until(is_end, audio=LOUD)
        assert isinstance(end, ResponseEnded)
        assert end.reason == "yielded"
        assert not any(isinstance(o, Interrupted) for o in line.outputs)


async def test_only_what_was_heard_is_remembered() -> None:
    async with lines() as (line,):
        await line.frame(Say("r", "one two three four"))
        for _ in range(8):
            await line.frame()
        line.call.interrupt(heard_ms=200.0)
        await line.frame()
        await line.frame(AddText("repeat", "user"), Respond("again"))
        line.outputs.clear()
        await line.until(is_end)
        assert "three" not in line.text
        state = [t for t in line.outputs if isinstance(t, Tick)]
        assert state


async def test_what_was_asked_for_right_after_a_cancel_is_said() -> None:
    async with lines() as (line,):
        await line.frame(Say("first", "one two three four"))
        line.call.interrupt()
        line.call.direct(Say("second", "hello"))
        signals = await line.frame()
        assert ResponseStarted("second") in signals
        assert not any(isinstance(s, ResponseEnded) and s.response == "first" for s in signals)
        await line.until(is_end)


async def test_a_tool_is_called_and_its_result_is_said() -> None:
    async with lines() as (line,):
        await line.frame(Configure(tools=(Tool("weather"),)), AddText('call weather {"city": "Oslo"}'), Respond("ask"))
        call = next(s for o in line.outputs if isinstance(o, Tick) for s in o.signals if isinstance(s, ToolCall))
        assert (call.response, call.name, call.arguments) == ("ask", "weather", '{"city": "Oslo"}')
        line.outputs.clear()
        await line.frame(ToolResult(call.call_id, "it snows"), Respond("tell"))
        await line.until(is_end)
        assert line.text == "it snows"


@pytest.mark.req("AC-41")
async def test_two_calls_never_get_each_others_frames() -> None:
    async with lines(2) as (one, two):
        for line, name in ((one, "left"), (two, "right")):
            line.call.direct(Say(name, f"{name} {name} {name}"))
        for _ in range(12):
            for line in (one, two):
                line.call.append(QUIET)
            one.calls.pulse(one.calls.now_s())
            await one.settle()
            await two.settle()
        for line, name in ((one, "left"), (two, "right")):
            line.read()
            assert line.text == f"{name} {name} {name}"
            assert {o.response for o in line.outputs if isinstance(o, Tick)} == {name, None}


async def test_a_frame_that_fails_is_taken_in_again() -> None:
    async with lines() as (line,):
        manager = line.calls._manager
        with inject(manager, "sync"):
            await line.frame(Say("r", "hello there"))
        await line.until(is_end)
        numbers = [o.number for o in line.outputs if isinstance(o, Tick)]
        assert numbers == list(range(len(numbers)))
        assert line.text == "hello there"


async def test_a_call_that_cannot_go_on_ends_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with lines() as (line,):
        manager = line.calls._manager
        with inject(manager, "sync", times=100):
            await line.frame()
        line.read()
        assert line.outputs[-1] == Ended("failed")
        with pytest.raises(SessionGoneError):
            line.call.append(QUIET)


async def test_a_fault_of_one_call_ends_that_one_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with lines(2) as (broken, well):
        monkeypatch.setattr(broken.call.duplex, "due", lambda now_s: 1 / 0)
        broken.call.append(QUIET)
        await well.frame(Say("r", "hello"))
        broken.read()
        assert broken.outputs == [Ended("failed")]
        await well.until(is_end)
        async with asyncio.timeout(10):
            while well.calls._manager.statistics().sessions > 1:
                await asyncio.sleep(0)
        assert "a call broke" in caplog.text


async def test_what_a_model_cannot_do_is_refused_at_once() -> None:
    async with lines() as (line,):
        with pytest.raises(ArgumentError):
            line.call.direct(Configure(voice="nobody"))
        with pytest.raises(ArgumentError):
            line.call.direct(Say("x", "y"), Configure(voice="nobody"))
        assert not await line.frame()


async def test_muted_the_model_hears_nothing() -> None:
    async with lines() as (line,):
        line.call.mute(True)
        for _ in range(5):
            await line.frame(audio=LOUD)
        assert not any(isinstance(s, SpeechStarted) for o in line.outputs if isinstance(o, Tick) for s in o.signals)
        assert {o.source for o in line.outputs if isinstance(o, Tick)} == {"muted"}


async def test_a_fork_remembers_and_has_a_clock_of_its_own() -> None:
    async with lines() as (line,):
        await line.frame(Say("r", "hello"))
        for _ in range(5):
            await line.frame()
        twin = Line(line.calls, await line.calls.fork(line.call))
        await twin.frame(AddText("repeat"), Respond("again"))
        await twin.until(is_end)
        assert twin.text == "hello"
        assert next(o.number for o in twin.outputs if isinstance(o, Tick)) == 6
        await twin.call.close()


async def test_readers_wait_for_what_comes_and_end_with_the_call() -> None:
    async with lines() as (line,):

        async def read() -> list[Output]:
            return [output async for _, output in line.call.outputs()]  # type: ignore[misc]

        readers = [asyncio.create_task(read()) for _ in range(2)]
        for _ in range(3):
            await line.frame(Configure(turns=Turns(mode="client")))
        await line.call.close()
        for outputs in await asyncio.gather(*readers):
            assert [type(o) for o in outputs] == [Tick, Tick, Tick, Ended]


async def test_the_clock_ticks_by_itself_and_silence_takes_the_place_of_a_silent_client() -> None:
    puppet = Puppet(PuppetOptions(input_rate_hz=8000, output_rate_hz=8000, frame_ms=20.0, phases=2))
    async with SessionManager(puppet, small_config()) as manager, Calls(manager) as calls:
        call = await calls.open()
        call.direct(Say("r", "hello"))
        async with asyncio.timeout(20):
            async for _, output in call.outputs():
                if isinstance(output, Tick) and any(is_end(s) for s in output.signals):
                    break
        assert output.source == "idle"


async def test_a_world_makes_no_calls() -> None:
    async with SessionManager(NullWorld()) as manager:
        with pytest.raises(ConfigError):
            Calls(manager)


async def _talk(line: Line) -> None:
    """Everything that can be done with a call, with an await at every turn."""
    call = await line.calls.open(DuplexOptions(pace="free"))
    talk = Line(line.calls, call)
    await talk.frame(Say("r", "one two three"))
    await talk.frame(audio=LOUD)
    await call.detach(30.0)
    await call.attach()
    call.interrupt()
    await talk.frame(Configure(instructions="be brief"))
    await line.calls.resume(call.id, call.resume_token or "")
    twin = await line.calls.fork(call)
    await twin.close()
    await call.close()


async def test_a_task_that_is_cancelled_at_any_await_leaves_nothing_behind() -> None:
    """Whatever the moment: sessions without an owner end when the calls do, and nothing is left with the engine."""
    for moment in range(0, 400, 3):
        async with lines() as (line,):
            task = asyncio.create_task(_talk(line))
            for _ in range(moment):
                await asyncio.sleep(0)
            finished = task.done()
            task.cancel()
            with suppress(asyncio.CancelledError, OmniError):
                await task
            for call in tuple(line.calls._calls.values()):
                if call is not line.call:
                    await call.close()
            async with asyncio.timeout(10):
                while line.calls._manager._futures or line.calls._manager.statistics().sessions > 1:
                    await asyncio.sleep(0)
        if finished:
            break


async def test_a_lost_call_is_resumed_where_its_holder_left_and_the_old_holder_is_told() -> None:
    async with lines() as (line,):
        calls, call = line.calls, line.call
        token = call.resume_token
        assert token is not None
        old = call.outputs(generation=1)
        await line.frame(Say("r", "one two three four"))
        seq, first = await anext(old)
        await call.detach(30.0)
        for _ in range(3):
            await line.frame()
        resumed, fresh = await calls.resume(call.id, token)
        assert resumed is call
        assert fresh != token
        assert [output async for _, output in old] == [Ended("taken_over")]
        missed = [output for _, output in call.duplex.read(seq)]
        assert [t.number for t in missed if isinstance(t, Tick)] == [1, 2, 3]
        assert isinstance(first, Tick)
        with pytest.raises(SessionGoneError):
            await calls.resume(call.id, "guessed")
        await call.close()
        with pytest.raises(SessionGoneError) as gone:
            await calls.resume(call.id, fresh)
        assert gone.value.code is ErrorCode.SESSION_GONE


async def test_a_lost_call_ends_after_its_grace() -> None:
    async with lines() as (line,):
        await line.call.detach(0.0)
        outputs = [output async for _, output in line.call.outputs()]
        assert outputs[-1] == Ended("detached_expired")


async def test_instants_come_to_lie_behind_the_clients_packets() -> None:
    """A client whose packets begin to come just behind its instants waits a hundredth of a second more, not a frame."""
    puppet = Puppet(PuppetOptions(input_rate_hz=8000, output_rate_hz=8000, phases=8))
    async with SessionManager(puppet, small_config()) as manager, Calls(manager, clocked=False) as calls:
        call, instants = await calls.open(DuplexOptions(idle="hold")), []
        began_s, call.phase = calls.now_s(), 3
        for hundredth in range(12 * 8):
            now_s, frame, phase = began_s + hundredth * 0.01, hundredth // 8, hundredth % 8
            if phase == 3 and frame < 5:
                call.duplex.append(QUIET, now_s)
            before = call.duplex.now_ms
            calls.pulse(now_s, phase)
            if call.duplex.now_ms > before:
                instants.append(phase)
            if phase == 3 and frame >= 5:
                call.duplex.append(QUIET, now_s)
            while call._futures:
                await asyncio.sleep(0)
    assert instants == [3] * 5 + [4] * 7
