"""The Moshi endpoint: one connection is one call. Kind byte ↔ call, Ogg/Opus ↔ samples, nothing else.

Owns the two Opus streams (sphn, kyutai's own) and the resampling to the model's rate. The rules of the wire are in
``realtime_omni_protocols.moshi``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, assert_never

import numpy as np
import soxr  # type: ignore[import-untyped]
import sphn  # type: ignore[import-untyped]
from fastapi import FastAPI, WebSocket
from fastapi.responses import JSONResponse
from numpy.typing import NDArray

from realtime_omni.duplex.outputs import Ended, Tick
from realtime_omni.errors import CapacityError, OmniError
from realtime_omni.server.codes import describe_error
from realtime_omni.server.outbox import ConnectionEnded
from realtime_omni.server.outgoing import Outgoing, PromptTransport
from realtime_omni.server.sound import QUALITY
from realtime_omni.server.transport import StarletteTransport, TransportLost
from realtime_omni.server.voice import VoiceHub
from realtime_omni.session.frame import Configure
from realtime_omni.session.signals import OutputText
from realtime_omni_protocols.moshi import (
    PATH,
    Audio,
    Close,
    MoshiCode,
    MoshiError,
    MoshiOptions,
    MoshiServerSide,
    Output,
    Send,
    read_query,
)

if TYPE_CHECKING:
    from realtime_omni.call import Call

_log = logging.getLogger(__name__)
RATE_HZ = 24_000
LAST_WORD_S = 5.0
MOST_AHEAD_S = 10.0
"""Sound that a client may send before its time; it is read no faster than that. 64 KiB of Opus can be ten minutes, a second of
decoding, and all but the last second of it would be dropped."""
SLICE_BYTES = 256
"""Decoded at once: about an Ogg page. The reader takes no more than five seconds of sound a time."""


class OpusIn:
    """A client's Ogg/Opus stream to samples at ``rate_hz``."""

    def __init__(self, rate_hz: int) -> None:
        self._reader = sphn.OpusStreamReader(RATE_HZ)
        self._resampler = None if rate_hz == RATE_HZ else soxr.ResampleStream(RATE_HZ, rate_hz, 1, "float32", QUALITY)

    def feed(self, data: bytes) -> NDArray[np.float32]:
        """Float32 [N]: what is whole so far. Raises MoshiError ``audio_invalid``."""
        try:
            samples: NDArray[np.float32] = self._reader.append_bytes(data)
        except (ValueError, RuntimeError):
            raise MoshiError(MoshiCode.AUDIO_INVALID, "this is no Ogg/Opus stream") from None
        return samples if self._resampler is None else self._resampler.resample_chunk(samples)


class OpusOut:
    """Samples at ``rate_hz`` to an Ogg/Opus stream."""

    def __init__(self, rate_hz: int) -> None:
        self._writer = sphn.OpusStreamWriter(RATE_HZ)
        self._resampler = None if rate_hz == RATE_HZ else soxr.ResampleStream(rate_hz, RATE_HZ, 1, "float32", QUALITY)

    def feed(self, samples: NDArray[np.float32]) -> bytes:
        """Of float32 [N]; what is no whole packet yet comes with the next."""
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples)
        return bytes(self._writer.append_pcm(samples)) if samples.size else b""


class MoshiConnection:
    """One connection, and its call."""

    def __init__(self, hub: VoiceHub, transport: PromptTransport, options: MoshiOptions) -> None:
        self.id = f"moshi_{secrets.token_hex(12)}"
        self.side = MoshiServerSide()
        self._hub = hub
        self._transport = transport
        self._options = options
        self._call: Call | None = None
        self._out = Outgoing(transport)
        self._in = OpusIn(hub.spec.input_rate_hz)
        self._speech = OpusOut(hub.spec.output_rate_hz)
        self._heard_until_s = hub.clock.now_s()
        """When all sound that came would have been spoken."""
        self._ticks = 0
        self._said: str | None = None

    async def run(self) -> None:
        """Serve to the end. Leaves no task and no call."""
        writer = asyncio.create_task(self._out.run())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow(writer))
                group.create_task(self._end_in_time())
                group.create_task(self._converse(group))
        except* (ConnectionEnded, TransportLost):
            self.side.lost()
        except* MoshiError as errors:
            (error, *_) = errors.exceptions
            assert isinstance(error, MoshiError)
            self._do(self.side.fail(error))
        except* Exception as faults:
            fault = describe_error(faults, session=self.id)
            self._do(self.side.fail(MoshiError(MoshiCode.INTERNAL, fault.message)))
        finally:
            self._out.close(1000, "")
            if self._call is not None:
                await self._hub.release(self._call)
            with contextlib.suppress(TimeoutError, ConnectionEnded, TransportLost):
                async with asyncio.timeout(LAST_WORD_S):
                    await writer
            writer.cancel()
            _log.info("moshi connection gone session_id=%s %s", self.id, self.side.statistics())

    @staticmethod
    async def _follow(writer: asyncio.Task[None]) -> None:
        await asyncio.wait([writer])
        raise TransportLost

    async def _end_in_time(self) -> None:
        clock = self._hub.clock
        await clock.wait(self._hub.stopped, clock.now_s() + self._hub.max_session_s)
        if self._hub.stopping:
            raise MoshiError(MoshiCode.SHUTDOWN, "the server stops")
        raise MoshiError(MoshiCode.EXPIRED, "the session is as long as sessions may be")

    async def _converse(self, group: asyncio.TaskGroup) -> None:
        self._call = call = await self._open()
        self._do([self.side.ready()])
        group.create_task(self._read(call))
        await self._tell(call)

    async def _open(self) -> Call:
        options, spec = self._options, self._hub.spec
        if options.voice is not None and options.voice not in spec.voices:
            raise MoshiError(MoshiCode.VOICE_INVALID, "this model has no such voice")
        try:
            opening = self._hub.calls.open(session_id=self.id, seed=options.audio_seed)
            call = await self._hub.opened(opening)
        except CapacityError:
            raise MoshiError(MoshiCode.CAPACITY, "no room for another call now") from None
        instructions = options.text if spec.takes_text else None
        if instructions is not None or options.voice is not None:
            call.direct(Configure(instructions=instructions, voice=options.voice))
        return call

    async def _read(self, call: Call) -> None:
        pace = self._hub.reading_pace()
        while True:
            frame = await self._transport.receive()
            await pace.admit()
            for command in self.side.receive(frame):
                if isinstance(command, Audio):
                    await self._hear(command.data, call)
                else:
                    self._do([command])

    async def _hear(self, data: bytes, call: Call) -> None:
        """Decode a little at a time, and no more than is about due: everybody's calls share the event loop."""
        clock, never, rate_hz = self._hub.clock, asyncio.Event(), self._hub.spec.input_rate_hz
        for start in range(0, len(data), SLICE_BYTES):
            samples = self._in.feed(data[start : start + SLICE_BYTES])
            if not samples.size:
                continue
            with contextlib.suppress(OmniError):  # it has ended: the next output says so
                call.append(samples)
            now_s = clock.now_s()
            self._heard_until_s = max(self._heard_until_s, now_s) + samples.size / rate_hz
            if self._heard_until_s - now_s > MOST_AHEAD_S:
                await clock.wait(never, self._heard_until_s - MOST_AHEAD_S)

    async def _tell(self, call: Call) -> None:
        async for _, output in call.outputs():
            match output:
                case Tick():
                    self._on_tick(output)
                case Ended():
                    raise MoshiError(MoshiCode.INTERNAL, "the session failed; the server's log says why")
                case _:
                    pass
            await self._out.room()

    def _on_tick(self, tick: Tick) -> None:
        for signal in tick.signals:
            if isinstance(signal, OutputText):
                between = self._said is not None and signal.response != self._said and not signal.text[:1].isspace()
                self._said = signal.response
                self._do(self.side.text((" " if between else "") + signal.text))
        samples = tick.audio if tick.audio.size else np.zeros(self._hub.spec.output_samples, np.float32)
        self._do(self.side.audio(self._speech.feed(samples)))
        self._ticks += 1
        if self._options.max_steps is not None and self._ticks >= self._options.max_steps:
            raise MoshiError(MoshiCode.EXPIRED, "max_steps is reached")

    def _do(self, commands: Iterable[Output]) -> None:
        for command in commands:
            match command:
                case Send(data):
                    self._out.put(data)
                case Close(code, reason):
                    self._hub.metrics.count("voice_errors_total", protocol="moshi")
                    self._out.close(code, reason)
                case _:
                    assert_never(command)


# -- routes ----------------------------------------------------------------------------------------------------------


def add_moshi_routes(app: FastAPI, hub: VoiceHub) -> None:
    @app.websocket(PATH)
    async def chat(socket: WebSocket) -> None:
        try:
            if hub.full or hub.stopping:
                code = MoshiCode.SHUTDOWN if hub.stopping else MoshiCode.CAPACITY
                raise MoshiError(code, "no more connections are accepted now")
            options = read_query(socket.query_params.multi_items())
        except MoshiError as error:
            await socket.send_denial_response(_denial(error))
            return
        await socket.accept()
        with hub.connection("moshi"):
            await MoshiConnection(hub, StarletteTransport(socket, hub.settings.send_timeout_s), options).run()


def _denial(error: MoshiError) -> JSONResponse:
    status = 503 if error.code in (MoshiCode.CAPACITY, MoshiCode.SHUTDOWN) else 400
    body = {"code": error.code.value, "message": error.message, "param": error.param}
    return JSONResponse({"error": body}, status)


__all__ = ["MoshiConnection", "OpusIn", "OpusOut", "add_moshi_routes"]
