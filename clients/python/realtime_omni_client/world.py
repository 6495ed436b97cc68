"""`WorldClient`: play one world session over a WebSocket.

    async with WorldClient.connect("ws://127.0.0.1:8000", prompt="a lantern maze at night") as world:
        await world.hold({"w"})
        async for chunk in world:
            show(chunk.frames)          # numpy uint8 [F, H, W, 3]

Owns: the socket's task, decoding, waiting, acknowledging, reconnecting.  The rules of the protocol are in `WorldClientSide`.
A chunk counts as displayed when it is handed to the caller; at most the server's lead is generated ahead of that.
A broken connection is resumed in the background: no chunk is lost or comes twice. One event loop; threads only for decoding.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from realtime_omni_protocols.errors import LocalError, WireCode, WireError
from realtime_omni_protocols.world import Arrival, ChunkDone, Frame, Send, WireState, WorldClientSide
from realtime_omni_protocols.world_messages import (
    PATH,
    AnyServerMessage,
    Cadence,
    Chunk,
    ChunkAborted,
    Control,
    ErrorMessage,
    EventAccepted,
    EventApplied,
    EventDiscarded,
    Format,
    Hello,
    SessionClosed,
    SessionFailed,
    SessionMessage,
    SessionRecovered,
    SessionResetDone,
    SessionResumed,
    SessionStarted,
)
from realtime_omni_protocols.world_table import LIVE

from .errors import (
    ConnectError,
    ConnectionLostError,
    EventRefusedError,
    ProtocolViolation,
    RefusedError,
    SessionClosedError,
    SessionFailedError,
    StartRefusedError,
    WorldError,
)
from .media import Decoder, Picture, latent, make_decoder
from .transport import Connector, Transport, TransportClosedError, websocket_connector
from .values import ClientStatistics, Outcome, Receipt, WorldChunk

T = TypeVar("T")

CAMERA_TRACK = "camera"
HELD_KEYS_SCHEMA = "realtime_omni.held_keys.v1"
MAX_CHUNKS_WAITING = 64
"""A server that keeps the credit rule never has more than a few chunks under way; past this it is broken."""
MAX_NOTICES = 1_024
DECODE_INLINE_PIXELS = 128 * 128
"""Up to here decoding takes less time than handing it to a thread."""


@dataclass(frozen=True)
class Reconnect:
    """How a broken connection is resumed: attempts in a row, and full jitter between 0 and ``base_s * 2**n`` (at most ``cap_s``)."""

    attempts: int = 8
    base_s: float = 0.1
    cap_s: float = 5.0


@dataclass(frozen=True)
class StartOptions:
    """What `session.start` says."""

    format: Format = "jpeg"
    model: str | None = None
    session_id: str | None = None
    prompt: str | None = None
    seed: int | None = None
    image: bytes | None = None
    start: str | None = None
    fps: float | None = None
    cadence: Cadence = "paced"
    lead_frames: int | None = None


class WorldClient:
    """One session. Make it with `connect`, use it as an async context manager."""

    def __init__(
        self,
        connector: Connector,
        options: StartOptions,
        *,
        reconnect: Reconnect = Reconnect(),
        timeout_s: float = 30.0,
        rng: random.Random | None = None,
    ) -> None:
        self._connector = connector
        self._options = options
        self._reconnect = reconnect
        self._timeout_s = timeout_s
        self._rng = rng or random.Random()  # noqa: S311 (jitter, not a secret)
        self._side = WorldClientSide()
        self._transport: Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[SessionStarted] | None = None
        self._changed = asyncio.Event()
        self._decoder: Decoder | None = None
        self._arriving: list[Picture] = []
        self._latents: NDArray[np.float16] | None = None
        self._chunk_shape: tuple[int, ...] | None = None
        self._chunks: deque[WorldChunk] = deque()
        self._notices: deque[SessionMessage | SessionClosed | ErrorMessage] = deque()
        self._accepted: dict[int, asyncio.Future[EventAccepted]] = {}
        self._outcomes: dict[int, asyncio.Future[Outcome]] = {}
        self._requests: dict[str, tuple[str, bool, asyncio.Future[AnyServerMessage]]] = {}
        self._failure: SessionFailedError | None = None
        self._ask_error: RefusedError | None = None
        self._ended: WorldError | None = None
        self._displayed = 0
        self._waiting = 0
        self._attempt = 0
        self._dropped = self._notices_dropped = 0

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        model: str | None = None,
        prompt: str | None = None,
        seed: int | None = None,
        image: bytes | None = None,
        start: str | None = None,
        session_id: str | None = None,
        format: Format = "jpeg",  # noqa: A002 (the wire's name)
        cadence: Cadence = "paced",
        fps: float | None = None,
        lead_frames: int | None = None,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        reconnect: Reconnect = Reconnect(),
    ) -> WorldClient:
        """A client that is not connected yet; ``async with`` connects. ``url`` may leave out the path; http(s) means ws(s).

        `MediaUnavailableError` at once when the format needs a library that is not here.
        """
        make_decoder(format, 16, 16)
        options = StartOptions(format, model, session_id, prompt, seed, image, start, fps, cadence, lead_frames)
        connector = websocket_connector(world_url(url), api_key=api_key, open_timeout_s=timeout_s)
        return cls(connector, options, reconnect=reconnect, timeout_s=timeout_s)

    # ---- life ----------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Connect and start the session: `ConnectError`, `StartRefusedError` or a started session."""
        if self._task is not None:
            raise LocalError("a WorldClient is used once")
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="realtime_omni world client")
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(self._started)
        except TimeoutError:
            await self._stop()
            raise ConnectError("the server did not start the session in time") from None
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session and the connection. Harmless when repeated."""
        if self._ended is None and self._side.state in LIVE:
            with contextlib.suppress(WorldError, TimeoutError):
                async with asyncio.timeout(min(5.0, self._timeout_s)):
                    await self._request(self._side.close, repeat=True)
        await self._stop()

    async def _stop(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._end(SessionClosedError("client"))

    @property
    def session(self) -> SessionStarted:
        """What the server said when the session started: size, fps, controls, limits, prompts."""
        if self._side.started is None:
            raise LocalError("the session has not started")
        return self._side.started

    @property
    def state(self) -> WireState:
        return self._side.state

    # ---- playing -----------------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[WorldChunk]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[WorldChunk]:
        while True:
            try:
                chunk = await self.next_chunk()
            except SessionClosedError as error:
                if error.reason == "client":
                    return
                raise
            yield chunk

    async def next_chunk(self) -> WorldChunk:
        """The next chunk, in order (an on-demand session is asked for one). It counts as displayed from now on.

        `SessionFailedError` after a failed block, `SessionClosedError` at the end, `ConnectionLostError` when resuming failed.
        """
        self._waiting += 1
        try:
            while not self._chunks:
                if self._failure is not None:
                    raise self._failure
                if self._ended is not None:
                    raise self._ended
                if self._ask_error is not None:
                    error, self._ask_error = self._ask_error, None
                    raise error
                await self._ask()
                self._changed.clear()
                await self._changed.wait()
            chunk = self._chunks.popleft()
        finally:
            self._waiting -= 1
        self._displayed = chunk.first_frame + chunk.frame_count
        await self._acknowledge()
        return chunk

    async def _ask(self) -> None:
        side = self._side
        if (
            self._options.cadence == "on_demand"
            and side.state is WireState.PLAYING
            and side.asks < min(4, self._waiting)
        ):
            await self._push(side.ask())

    async def send(
        self,
        *,
        prompt: str | None = None,
        keys: Iterable[str] | None = None,
        controls: Sequence[Control] = (),
    ) -> Receipt:
        """One event: a new prompt, keys held from now on, other controls. Returns when the server has accepted it.

        `EventRefusedError` when it has not. While the connection is being resumed the event waits, it is not lost.
        """
        everything = list(controls)
        if keys is not None:
            t_ms = round(asyncio.get_running_loop().time() * 1000)
            everything.append(
                Control(track=CAMERA_TRACK, schema=HELD_KEYS_SCHEMA, data={"keys": sorted(set(keys)), "t_ms": t_ms})
            )
        if self._ended is not None:
            raise self._ended
        try:
            event_id, text = self._side.event(prompt=prompt, controls=everything)
        except WireError as error:
            raise RefusedError(error.message, code=error.code, path=error.path) from None
        except LocalError as error:
            raise RefusedError(str(error), code=self._state_code()) from None
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[EventAccepted] = loop.create_future()
        self._accepted[event_id], self._outcomes[event_id] = accepted, loop.create_future()
        outcome = self._outcomes[event_id]
        if text is not None:
            await self._push(text)
        message = await asyncio.shield(accepted)
        return Receipt(event_id, message.status, message.pending, message.prompt, outcome)

    async def hold(self, keys: Iterable[str]) -> Receipt:
        """The set of keys held from now on; an empty set lets go."""
        return await self.send(keys=keys)

    async def pause(self) -> None:
        """No new blocks until `play`."""
        await self._request(self._side.pause, repeat=True)

    async def play(self) -> None:
        await self._request(self._side.resume_play, repeat=True)

    async def reset(
        self,
        *,
        prompt: str | None = None,
        seed: int | None = None,
        image: bytes | None = None,
        start: str | None = None,
    ) -> SessionResetDone:
        """Begin again (a new epoch). Chunks of the old epoch that nobody took yet are dropped."""
        picture = None if image is None else base64.b64encode(image).decode("ascii")
        answer = await self._request(lambda: self._side.reset(prompt=prompt, seed=seed, image=picture, start=start))
        assert isinstance(answer, SessionResetDone)
        return answer

    async def abort(self) -> int | None:
        """Abort the block in flight: its index, or None when nothing ran."""
        answer = await self._request(self._side.abort)
        assert isinstance(answer, ChunkAborted)
        return answer.chunk_index

    async def rollback(self) -> int:
        """Go on after a failed block, from the last committed chunk: the index of the next one."""
        answer = await self._request(self._side.rollback)
        assert isinstance(answer, SessionRecovered)
        return answer.chunk_index

    async def events(self) -> AsyncIterator[SessionMessage | SessionClosed | ErrorMessage]:
        """Everything the server says but chunks: receipts, pauses, failures, errors. One reader; the oldest of more than
        1,024 unread ones is dropped (and counted)."""
        while True:
            while self._notices:
                yield self._notices.popleft()
            if self._ended is not None:
                return
            self._changed.clear()
            await self._changed.wait()

    def statistics(self) -> ClientStatistics:
        side = self._side.statistics()
        return ClientStatistics(
            state=side.state,
            connections=side.connections,
            resumes=side.resumes,
            chunks=side.chunks,
            frames=side.frames,
            replayed_frames=side.replayed_frames,
            bytes_received=side.bytes_received,
            events_sent=side.events_sent,
            events_refused=side.events_refused,
            events_applied=side.events_applied,
            events_discarded=side.events_discarded,
            events_waiting=side.events_waiting,
            chunks_waiting=len(self._chunks),
            chunks_dropped_by_reset=self._dropped,
            notices_dropped=self._notices_dropped,
        )

    # ---- sending inside ----------------------------------------------------------------------------------------------------

    async def _push(self, text: str) -> None:
        """Send now. A dead socket is the reader's business: what mattered is said again after the resume."""
        if self._transport is not None:
            with contextlib.suppress(TransportClosedError):
                await self._transport.send(text)

    async def _acknowledge(self) -> None:
        if self._side.state in LIVE and self._side.epoch_displayable(self._displayed):
            await self._push(self._side.ack(self._displayed, self._side.epoch))

    async def _request(self, make: Callable[[], str], *, repeat: bool = False) -> AnyServerMessage:
        """Send a request and wait for its answer; ``repeat``: say it again after a resume, because saying it twice is harmless."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._side.state not in LIVE:
                    if self._ended is not None:
                        raise self._ended
                    self._changed.clear()
                    await self._changed.wait()
                try:
                    text = make()
                except WireError as error:
                    raise RefusedError(error.message, code=error.code, path=error.path) from None
                except LocalError as error:
                    raise RefusedError(str(error), code=self._state_code()) from None
                answer: asyncio.Future[AnyServerMessage] = asyncio.get_running_loop().create_future()
                key = self._side.last_id
                self._requests[key] = (text, repeat, answer)
                try:
                    await self._push(text)
                    return await answer
                finally:
                    self._requests.pop(key, None)
        except TimeoutError:
            raise ConnectionLostError("the server did not answer in time") from None

    def _state_code(self) -> WireCode:
        return WireCode.SESSION_FAILED if self._side.state is WireState.FAILED else WireCode.SESSION_STATE

    # ---- the connection's task ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        end: WorldError = SessionClosedError("client")
        try:
            while True:
                transport = await self._open()
                if transport is not None:
                    await self._converse(transport)
                    if not self._side.can_resume:
                        end = self._reason()
                        return
                await self._back_off()
        except WorldError as error:
            end = error
        except WireError as error:
            end = ProtocolViolation(error.message, code=error.code, path=error.path)
        finally:
            self._end(end)

    async def _open(self) -> Transport | None:
        """A socket; None when this attempt failed and another one may follow."""
        try:
            return await self._connector()
        except ConnectError as error:
            if not self._side.can_resume or error.code is not None:
                raise
            return None

    async def _back_off(self) -> None:
        if self._attempt >= self._reconnect.attempts:
            raise ConnectionLostError(f"the session could not be resumed in {self._attempt} attempts")
        if self._attempt:  # the first attempt is immediate: most drops are a moment long
            ceiling = min(self._reconnect.cap_s, self._reconnect.base_s * 2**self._attempt)
            await asyncio.sleep(self._rng.uniform(0, ceiling))
        self._attempt += 1

    def _reason(self) -> WorldError:
        closed = self._side.closed
        if closed is not None:
            return SessionClosedError(closed.reason, code=closed.code, message=closed.message)
        return ConnectionLostError("the connection broke before the session had started")

    async def _converse(self, transport: Transport) -> None:
        """One connection, until it ends."""
        self._side.connection_made()
        self._transport = transport
        try:
            while self._side.state is not WireState.CLOSED:
                data = await transport.receive()
                take = self._side.receive_text if isinstance(data, str) else self._receive_binary
                for arrival in take(data):  # type: ignore[arg-type]
                    await self._arrived(arrival)
                self._changed.set()
        except TransportClosedError:
            pass
        finally:
            self._transport = None
            self._side.connection_lost()
            await transport.close()

    def _receive_binary(self, data: bytes) -> list[Arrival]:
        return self._side.receive_binary(data)

    async def _arrived(self, arrival: Arrival) -> None:
        match arrival:
            case Send(text):
                await self._push(text)
            case Frame():
                await self._frame(arrival)
            case ChunkDone(chunk):
                self._finish(chunk)
            case Hello():
                await self._push(self._side.resume() if self._side.can_resume else self._start_text())
            case _:
                self._message(arrival)
                if isinstance(arrival, SessionResumed):
                    await self._after_resume()

    def _start_text(self) -> str:
        options = self._options
        try:
            return self._side.start(
                format=options.format,
                model=options.model,
                session_id=options.session_id,
                prompt=options.prompt,
                seed=options.seed,
                image=None if options.image is None else base64.b64encode(options.image).decode("ascii"),
                start=options.start,
                fps=options.fps,
                cadence=options.cadence,
                lead_frames=options.lead_frames,
            )
        except WireError as error:
            raise StartRefusedError(error.message, code=error.code, path=error.path) from None

    async def _after_resume(self) -> None:
        self._attempt = 0
        self._new_decoder()
        await self._acknowledge()
        for text, repeat, _ in list(self._requests.values()):
            if repeat:
                await self._push(text)

    def _message(self, message: AnyServerMessage) -> None:
        match message:
            case SessionStarted():
                self._new_decoder()
                if self._started is not None and not self._started.done():
                    self._started.set_result(message)
            case ErrorMessage():
                self._error(message)
            case EventAccepted(event_id=event_id):
                _resolve(self._accepted.pop(event_id, None), message)
                if message.status == "discarded":
                    self._settle(Outcome(event_id, "discarded", reason="reset"))
            case EventApplied(event_ids=ids):
                for event_id in ids:
                    self._settle(Outcome(event_id, "applied", message.chunk_index, message.first_frame))
            case EventDiscarded(event_ids=ids):
                for event_id in ids:
                    self._settle(Outcome(event_id, "discarded", reason=message.reason))
            case Chunk():
                self._arriving, self._latents, self._chunk_shape = [], None, message.latent_shape
            case SessionFailed():
                self._failure = SessionFailedError(
                    message.message, code=message.code, chunk_index=message.chunk_index, can=message.can
                )
            case SessionRecovered():
                self._failure = None
            case SessionResetDone():
                self._dropped += len(self._chunks)
                self._chunks.clear()
                self._failure, self._displayed = None, 0
            case _:
                pass
        key = getattr(message, "re", None)
        if key in self._requests and not isinstance(message, ErrorMessage):
            _resolve(self._requests[key][2], message)
        if isinstance(message, SessionMessage | SessionClosed | ErrorMessage) and not isinstance(message, Chunk):
            if len(self._notices) >= MAX_NOTICES:
                self._notices.popleft()
                self._notices_dropped += 1
            self._notices.append(message)

    def _error(self, error: ErrorMessage) -> None:
        refused = RefusedError(error.message, code=error.code, path=error.path)
        if error.event_id is not None and error.event_id in self._accepted:
            _fail(
                self._accepted.pop(error.event_id),
                EventRefusedError(error.message, event_id=error.event_id, code=error.code, path=error.path),
            )
            _cancel(self._outcomes.pop(error.event_id, None))
        elif error.re in self._requests:
            _fail(self._requests[error.re or ""][2], refused)
        elif error.re is not None and error.re.startswith("n"):
            self._ask_error = refused
        if self._side.state is WireState.OPEN:  # the start or the resume was refused
            if self._side.can_resume:
                raise ConnectionLostError(error.message, code=error.code)
            raise StartRefusedError(error.message, code=error.code, path=error.path)
        if error.fatal and not self._side.can_resume:
            raise StartRefusedError(error.message, code=error.code, path=error.path)

    def _settle(self, outcome: Outcome) -> None:
        _resolve(self._outcomes.pop(outcome.event_id, None), outcome)

    def _new_decoder(self) -> None:
        started, kind = self._side.started, self._side.format
        if started is not None and kind is not None:
            self._decoder = make_decoder(kind, started.width, started.height)

    async def _frame(self, frame: Frame) -> None:
        if self._chunk_shape is not None:
            self._latents = latent(frame.payload, self._chunk_shape)
        elif self._decoder is None:
            raise ProtocolViolation("a frame of a format that was not agreed on")
        elif self.session.width * self.session.height <= DECODE_INLINE_PIXELS:
            self._arriving.append(self._decoder.decode(frame.payload))
        else:
            self._arriving.append(await asyncio.to_thread(self._decoder.decode, frame.payload))

    def _finish(self, chunk: Chunk) -> None:
        if len(self._chunks) >= MAX_CHUNKS_WAITING:
            raise ProtocolViolation("the server generates ahead of its credit")
        height, width = self.session.height, self.session.width
        frames = np.stack(self._arriving) if self._arriving else np.zeros((0, height, width, 3), np.uint8)
        self._chunks.append(
            WorldChunk(
                epoch=chunk.epoch,
                chunk_index=chunk.chunk_index,
                first_frame=chunk.first_frame,
                frame_count=chunk.frames,
                frames=frames,
                latents=self._latents,
                applied_event_ids=chunk.applied_event_ids,
                prompt=chunk.prompt,
                timings_ms=chunk.timings_ms,
                kv=chunk.kv,
            )
        )
        self._arriving = []

    def _end(self, error: WorldError) -> None:
        """The session is over for this client: everybody who waits is told why."""
        if self._ended is not None:
            return
        self._ended = error
        waiting: list[asyncio.Future[object]] = [*self._accepted.values(), *self._outcomes.values()]  # type: ignore[list-item]
        waiting += [answer for _, _, answer in self._requests.values()]  # type: ignore[misc]
        if self._started is not None:
            waiting.append(self._started)  # type: ignore[arg-type]
        for future in waiting:
            _fail(future, error)
        self._accepted.clear()
        self._outcomes.clear()
        self._changed.set()


def world_url(url: str) -> str:
    """The WebSocket URL for what a user types."""
    for http, ws in (("http://", "ws://"), ("https://", "wss://")):
        if url.startswith(http):
            url = ws + url.removeprefix(http)
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return url if slash and path else f"{scheme}://{host}{PATH}"


def _resolve(future: asyncio.Future[T] | None, value: T) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[T], error: WorldError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # mark as seen: nobody has to await a receipt


def _cancel(future: asyncio.Future[T] | None) -> None:
    if future is not None:
        future.cancel()
