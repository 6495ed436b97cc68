"""`WorldLink`: the task under a `WorldClient` that keeps one session connected.

Owns: the socket, decoding, reconnecting with back-off, and who waits for which answer.  Must not know: what the user does with
chunks.  The rules of the protocol are in `WorldClientSide`; a `WorldClient` reads the fields here and wakes on ``changed``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
from collections import deque
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from realtime_omni_protocols.errors import WireError
from realtime_omni_protocols.world import Arrival, ChunkDone, Frame, Send, WireState, WorldClientSide
from realtime_omni_protocols.world_messages import (
    AnyServerMessage,
    Cadence,
    Chunk,
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
    SessionReplayed,
    SessionResetDone,
    SessionResumed,
    SessionRewound,
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
from .transport import Connector, Transport, TransportClosedError
from .values import Outcome, WorldChunk

T = TypeVar("T")

MAX_CHUNKS_WAITING = 64
"""A server that keeps the credit rule never has more than a few chunks under way; past this it is broken."""
MAX_NOTICES = 1_024
STABLE_S = 5.0
"""A connection that lived this long was a good one: the next drop begins a new series of attempts."""
DECODE_INLINE_PIXELS = 128 * 128
"""Up to here decoding takes less time than handing it to a thread."""


@dataclass(frozen=True)
class Reconnect:
    """How a broken connection is resumed: attempts in a row, full jitter between 0 and ``base_s * 2**n``, at most ``cap_s``."""

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


class WorldLink:
    """One session's connection. `run` is its task."""

    def __init__(
        self,
        connector: Connector,
        options: StartOptions,
        reconnect: Reconnect,
        rng: random.Random,
        side: WorldClientSide | None = None,
    ) -> None:
        """``side``: of a session that exists (a branch), which is resumed instead of started."""
        self.connector = connector
        self.options = options
        self.side = WorldClientSide() if side is None else side
        self.changed = asyncio.Event()
        self.started: asyncio.Future[SessionStarted] = asyncio.get_running_loop().create_future()
        self.chunks: deque[WorldChunk] = deque()
        self.notices: deque[SessionMessage | SessionClosed | ErrorMessage] = deque()
        self.accepted: dict[int, asyncio.Future[EventAccepted]] = {}
        self.outcomes: dict[int, asyncio.Future[Outcome]] = {}
        self.requests: dict[str, tuple[str, bool, asyncio.Future[AnyServerMessage]]] = {}
        self.failure: SessionFailedError | None = None
        self.ask_error: RefusedError | None = None
        self.ended: WorldError | None = None
        self.leaving = False  # the session is over, and `run` ends by itself when the socket is closed
        self.displayed = self.side.next_frame
        self.replayed: asyncio.Future[bool] | None = None  # of the log that is being played: whether to its end
        self.dropped = self.notices_dropped = 0
        self._reconnect = reconnect
        self._rng = rng
        self._attempt = 0
        self._transport: Transport | None = None
        self._decoder: Decoder | None = None
        self._arriving: list[Picture] = []
        self._latents: NDArray[np.float16] | None = None
        self._chunk_shape: tuple[int, ...] | None = None

    # ---- sending -------------------------------------------------------------------------------------------------------

    async def push(self, text: str) -> None:
        """Send now. A dead socket is the reader's business: what mattered is said again after the resume."""
        if self._transport is not None:
            with contextlib.suppress(TransportClosedError):
                await self._transport.send(text)

    async def acknowledge(self) -> None:
        if self.side.state in LIVE and self.side.epoch_displayable(self.displayed):
            await self.push(self.side.ack(self.displayed, self.side.epoch))

    # ---- the connection's task ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        end = WorldError("the client's task broke; the log says why")
        try:
            while True:
                transport = await self._open()
                if transport is not None:
                    await self._converse(transport)
                    if not self.side.can_resume:
                        end = self._reason()
                        return
                await self._back_off()
        except asyncio.CancelledError:
            end = SessionClosedError("client")
            raise
        except WorldError as error:
            end = error
        except WireError as error:
            end = ProtocolViolation(error.message, code=error.code, path=error.path)
        finally:
            self.end(end)

    async def _open(self) -> Transport | None:
        """A socket; None when this attempt failed and another one may follow."""
        try:
            return await self.connector()
        except ConnectError as error:
            if not self.side.can_resume or error.code is not None:
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
        closed = self.side.closed
        if closed is not None:
            return SessionClosedError(closed.reason, code=closed.code, message=closed.message)
        return ConnectionLostError("the connection broke before the session had started")

    async def _converse(self, transport: Transport) -> None:
        """One connection, until it ends."""
        since = asyncio.get_running_loop().time()
        self.side.connection_made()
        self._transport = transport
        try:
            while self.side.state is not WireState.CLOSED:
                data = await transport.receive()
                take = self.side.receive_text if isinstance(data, str) else self._receive_binary
                for arrival in take(data):  # type: ignore[arg-type]
                    await self._arrived(arrival)
                self.changed.set()
        except TransportClosedError:
            pass
        finally:
            self._transport = None
            self.side.connection_lost()
            if asyncio.get_running_loop().time() - since >= STABLE_S:
                self._attempt = 0
            self.leaving = not self.side.can_resume
            await transport.close()

    def _receive_binary(self, data: bytes) -> list[Arrival]:
        return self.side.receive_binary(data)

    async def _arrived(self, arrival: Arrival) -> None:
        match arrival:
            case Send(text):
                await self.push(text)
            case Frame():
                await self._frame(arrival)
            case ChunkDone(chunk):
                self._finish(chunk)
            case Hello():
                await self.push(self.side.resume() if self.side.can_resume else self._start_text())
            case _:
                self._message(arrival)
                if isinstance(arrival, SessionResumed):
                    await self._after_resume()

    def _start_text(self) -> str:
        options = self.options
        try:
            return self.side.start(
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
        self._new_decoder()
        if self.side.started is not None:
            _resolve(self.started, self.side.started)
        await self.acknowledge()
        for text, repeat, _ in list(self.requests.values()):
            if repeat:
                await self.push(text)

    def _message(self, message: AnyServerMessage) -> None:
        match message:
            case SessionStarted():
                self._new_decoder()
                _resolve(self.started, message)
            case ErrorMessage():
                self._error(message)
            case EventAccepted(event_id=event_id):
                _resolve(self.accepted.pop(event_id, None), message)
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
                self.failure = SessionFailedError(
                    message.message, code=message.code, chunk_index=message.chunk_index, can=message.can
                )
            case SessionRecovered():
                self.failure = None
            case SessionResetDone():
                self._new_epoch(0)
            case SessionRewound():
                self._new_epoch(message.next_frame)
            case SessionReplayed(complete=complete):
                _resolve(self.replayed, complete)
            case _:
                pass
        key = getattr(message, "re", None)
        if key in self.requests and not isinstance(message, ErrorMessage):
            _resolve(self.requests[key][2], message)
        if isinstance(message, SessionMessage | SessionClosed | ErrorMessage) and not isinstance(message, Chunk):
            if len(self.notices) >= MAX_NOTICES:
                self.notices.popleft()
                self.notices_dropped += 1
            self.notices.append(message)

    def _new_epoch(self, first_frame: int) -> None:
        self.dropped += len(self.chunks)
        self.chunks.clear()
        self.failure, self.displayed = None, first_frame

    def _error(self, error: ErrorMessage) -> None:
        refused = RefusedError(error.message, code=error.code, path=error.path)
        if error.event_id is not None and error.event_id in self.accepted:
            _fail(
                self.accepted.pop(error.event_id),
                EventRefusedError(error.message, event_id=error.event_id, code=error.code, path=error.path),
            )
            _cancel(self.outcomes.pop(error.event_id, None))
        elif error.re in self.requests:
            _fail(self.requests[error.re or ""][2], refused)
        elif error.re is not None and error.re.startswith("n"):
            self.ask_error = refused
        if self.side.state is WireState.OPEN:  # the start or the resume was refused
            if self.side.can_resume:
                raise ConnectionLostError(error.message, code=error.code)
            raise StartRefusedError(error.message, code=error.code, path=error.path)
        if error.fatal and not self.side.can_resume:
            raise StartRefusedError(error.message, code=error.code, path=error.path)

    def _settle(self, outcome: Outcome) -> None:
        _resolve(self.outcomes.pop(outcome.event_id, None), outcome)

    @property
    def _size(self) -> tuple[int, int]:
        started = self.side.started
        return (0, 0) if started is None else (started.width, started.height)

    def _new_decoder(self) -> None:
        started, kind = self.side.started, self.side.format
        if started is not None and kind is not None:
            self._decoder = make_decoder(kind, started.width, started.height)

    async def _frame(self, frame: Frame) -> None:
        if self._chunk_shape is not None:
            self._latents = latent(frame.payload, self._chunk_shape)
        elif self._decoder is None:
            raise ProtocolViolation("a frame of a format that was not agreed on")
        elif self._size[0] * self._size[1] <= DECODE_INLINE_PIXELS:
            self._arriving.append(self._decoder.decode(frame.payload))
        else:
            self._arriving.append(await asyncio.to_thread(self._decoder.decode, frame.payload))

    def _finish(self, chunk: Chunk) -> None:
        if len(self.chunks) >= MAX_CHUNKS_WAITING:
            raise ProtocolViolation("the server generates ahead of its credit")
        height, width = self._size[1], self._size[0]
        frames = np.stack(self._arriving) if self._arriving else np.zeros((0, height, width, 3), np.uint8)
        self.chunks.append(
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
        self._attempt = 0  # progress: not a resume alone, or a server that drops us at once would be asked forever

    def end(self, error: WorldError) -> None:
        """The session is over for this client: everybody who waits is told why."""
        if self.ended is not None:
            return
        self.ended = error
        waiting: list[asyncio.Future[object]] = [*self.accepted.values(), *self.outcomes.values()]  # type: ignore[list-item]
        waiting += [answer for _, _, answer in self.requests.values()]  # type: ignore[misc]
        waiting.append(self.started)  # type: ignore[arg-type]
        if self.replayed is not None:
            waiting.append(self.replayed)  # type: ignore[arg-type]
        for future in waiting:
            _fail(future, error)
        self.accepted.clear()
        self.outcomes.clear()
        self.changed.set()


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
