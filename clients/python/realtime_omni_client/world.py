"""`WorldClient`: play one world session over a WebSocket.

    async with WorldClient.connect("ws://127.0.0.1:8000", prompt="a lantern maze at night") as world:
        await world.hold({"w"})
        async for chunk in world:
            show(chunk.frames)          # numpy uint8 [F, H, W, 3]

Owns: what a user calls, and when a chunk counts as displayed.  Must not know: sockets and
reconnecting (`WorldLink`), the rules of the protocol (`WorldClientSide`).
A chunk counts as displayed when it is handed to the caller; at most the server's lead is generated ahead of that.
A broken connection is resumed in the background: no chunk is lost or comes twice. One event loop; threads only for decoding.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Self

from realtime_omni_protocols.errors import LocalError, WireCode, WireError
from realtime_omni_protocols.world import WireState, WorldClientSide
from realtime_omni_protocols.world_messages import (
    PATH,
    AnyServerMessage,
    Cadence,
    ChunkAborted,
    Control,
    ErrorMessage,
    EventAccepted,
    Format,
    SessionClosed,
    SessionForked,
    SessionLogged,
    SessionMessage,
    SessionRecovered,
    SessionReplaying,
    SessionResetDone,
    SessionRewound,
    SessionStarted,
)
from realtime_omni_protocols.world_table import LIVE

from .errors import (
    ConnectError,
    ConnectionLostError,
    RefusedError,
    SessionClosedError,
    WorldError,
)
from .link import Reconnect, StartOptions, WorldLink
from .media import make_decoder
from .transport import Connector, websocket_connector
from .values import ClientStatistics, Receipt, WorldChunk

CAMERA_TRACK = "camera"
HELD_KEYS_SCHEMA = "realtime_omni.held_keys.v1"
DEFAULT_RECONNECT = Reconnect()


class WorldClient:
    """One session. Make it with `connect`, use it as an async context manager."""

    def __init__(
        self,
        connector: Connector,
        options: StartOptions,
        *,
        reconnect: Reconnect = DEFAULT_RECONNECT,
        timeout_s: float = 30.0,
        rng: random.Random | None = None,
        side: WorldClientSide | None = None,
    ) -> None:
        self._side = side
        self._connector = connector
        self._start_options = options
        self._reconnect = reconnect
        self._timeout_s = timeout_s
        self._rng = rng or random.Random()  # noqa: S311 (jitter, not a secret)
        self._link: WorldLink | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting = 0

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
        reconnect: Reconnect = DEFAULT_RECONNECT,
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
        if self._side is None or self._task is None:  # a branch is connected already
            await self._connect()
        return self

    async def _connect(self) -> None:
        if self._task is not None:
            raise LocalError("a WorldClient is used once")
        self._link = WorldLink(self._connector, self._start_options, self._reconnect, self._rng, self._side)
        self._task = asyncio.create_task(self._link.run(), name="realtime_omni world client")
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(self._live.started)
        except TimeoutError:
            await self._stop()
            raise ConnectError("the server did not start the session in time") from None
        except BaseException:
            await self._stop()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session and the connection. Harmless when repeated."""
        if self._link is None:
            return
        if self._link.ended is None and self._link.side.state in LIVE:
            with contextlib.suppress(WorldError, TimeoutError):
                async with asyncio.timeout(min(5.0, self._timeout_s)):
                    await self._request(self._live.side.close, repeat=True)
        await self._stop()

    async def _stop(self) -> None:
        if self._task is not None:
            if not self._live.leaving:
                self._task.cancel()
            await asyncio.wait([self._task])
        self._live.end(SessionClosedError("client"))

    @property
    def session(self) -> SessionStarted:
        """What the server said when the session started: size, fps, controls, limits, prompts."""
        if self._live.side.started is None:
            raise LocalError("the session has not started")
        return self._live.side.started

    @property
    def state(self) -> WireState:
        return self._live.side.state

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
            while not self._live.chunks:
                if self._live.failure is not None:
                    raise self._live.failure
                if self._live.ended is not None:
                    raise self._live.ended
                if self._live.ask_error is not None:
                    error, self._live.ask_error = self._live.ask_error, None
                    raise error
                await self._ask()
                self._live.changed.clear()
                await self._live.changed.wait()
            chunk = self._live.chunks.popleft()
        finally:
            self._waiting -= 1
        self._live.displayed = chunk.first_frame + chunk.frame_count
        await self._live.acknowledge()
        return chunk

    async def _ask(self) -> None:
        side = self._live.side
        if (
            self._live.options.cadence == "on_demand"
            and side.state is WireState.PLAYING
            and side.asks < min(4, self._waiting)
        ):
            await self._live.push(side.ask())

    async def send(
        self,
        *,
        prompt: str | None = None,
        keys: Iterable[str] | None = None,
        controls: Sequence[Control] = (),
    ) -> Receipt:
        """One event: a new prompt, keys held from now on, other controls. Returns when the server has accepted it.

        `EventRefusedError` when it has not. While the connection is being resumed the event waits, it is not lost;
        `ConnectionLostError` when the server did not answer in time (it may still come to act then).
        """
        everything = list(controls)
        if keys is not None:
            t_ms = round(asyncio.get_running_loop().time() * 1000)
            everything.append(
                Control(track=CAMERA_TRACK, schema=HELD_KEYS_SCHEMA, data={"keys": sorted(set(keys)), "t_ms": t_ms})
            )
        if self._live.ended is not None:
            raise self._live.ended
        try:
            event_id, text = self._live.side.event(prompt=prompt, controls=everything)
        except WireError as error:
            raise RefusedError(error.message, code=error.code, path=error.path) from None
        except LocalError as error:
            raise RefusedError(str(error), code=self._state_code()) from None
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[EventAccepted] = loop.create_future()
        self._live.accepted[event_id], self._live.outcomes[event_id] = accepted, loop.create_future()
        outcome = self._live.outcomes[event_id]
        if text is not None:
            await self._live.push(text)
        try:
            async with asyncio.timeout(self._timeout_s):
                message = await asyncio.shield(accepted)
        except TimeoutError:
            raise ConnectionLostError("the server did not answer in time") from None
        return Receipt(event_id, message.status, message.pending, message.prompt, outcome)

    async def hold(self, keys: Iterable[str]) -> Receipt:
        """The set of keys held from now on; an empty set lets go."""
        return await self.send(keys=keys)

    async def pause(self) -> None:
        """No new blocks until `play`."""
        await self._request(self._live.side.pause, repeat=True)

    async def play(self) -> None:
        await self._request(self._live.side.resume_play, repeat=True)

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
        answer = await self._request(
            lambda: self._live.side.reset(prompt=prompt, seed=seed, image=picture, start=start)
        )
        assert isinstance(answer, SessionResetDone)
        return answer

    async def fork(self, session_id: str | None = None) -> Self:
        """A branch: another session that goes on from this one's last committed chunk, as a client of its own.

        The branch is connected already and has to be closed (``async with await world.fork() as branch`` does). It is what
        this session is, events that wait excepted; neither disturbs the other from then on.
        `RefusedError`: ``unsupported`` (the model's sessions cannot be forked), ``capacity``, ``session_exists``.
        """
        answer = await self._request(lambda: self._live.side.fork(session_id))
        assert isinstance(answer, SessionForked)
        branch = type(self)(
            self._connector,
            self._start_options,
            reconnect=self._reconnect,
            timeout_s=self._timeout_s,
            rng=self._rng,
            side=self._live.side.branch(answer),
        )
        await branch._connect()
        return branch

    async def rewind(self, chunk_index: int) -> SessionRewound:
        """Go back to the moment when ``chunk_index`` was the next chunk (a new epoch); the same events give the same chunks.

        Chunks that nobody took yet are dropped, events that wait are discarded (reason ``rewind``).
        `RefusedError`: ``not_retained`` (see `oldest_rewind`), ``invalid_argument`` (still to come), ``unsupported``.
        """
        answer = await self._request(lambda: self._live.side.rewind(chunk_index))
        assert isinstance(answer, SessionRewound)
        return answer

    async def log(self) -> bytes:
        """What made the present world, as JSON text (protocols/sessions.md): keep it, or play it with `replay`."""
        answer = await self._request(self._live.side.log, repeat=True)
        assert isinstance(answer, SessionLogged)
        return base64.b64decode(answer.log)

    async def replay(self, log: bytes) -> AsyncIterator[WorldChunk]:
        """Play a log, here or in another session of its model: the same chunks come again, bit for bit.

        A session that does not stand where the log begins starts over. Take and send nothing else meanwhile, and begin with an
        on-demand or paused session, or chunks of before may come between. `RefusedError`: ``invalid_argument`` (no log),
        ``unsupported`` (another model's), ``image_invalid``, ``not_retained``, ``session_state``; `WorldError`: it ended early.
        """
        live = self._live
        live.replayed = asyncio.get_running_loop().create_future()
        text = base64.b64encode(log).decode("ascii")
        answer = await self._request(lambda: live.side.replay(text))
        assert isinstance(answer, SessionReplaying)
        for index in range(answer.chunk_index, answer.chunk_index + answer.chunks):
            more = asyncio.create_task(self._chunk(index))
            waiting: set[asyncio.Future[Any]] = {more, live.replayed}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not more.done() and not live.replayed.result():
                more.cancel()
                break
            yield await more
        if not await asyncio.shield(live.replayed):
            raise WorldError("the log was not played to its end")

    async def _chunk(self, index: int) -> WorldChunk:
        """The next chunk of that index: what was under way before a replay is passed over."""
        while (chunk := await self.next_chunk()).chunk_index != index:
            pass
        return chunk

    @property
    def oldest_rewind(self) -> int | None:
        """The smallest chunk that `rewind` can go back to, as of the last chunk; None: neither rewind nor fork."""
        return self._live.side.oldest_rewind

    async def abort(self) -> int | None:
        """Abort the block in flight: its index, or None when nothing ran."""
        answer = await self._request(self._live.side.abort)
        assert isinstance(answer, ChunkAborted)
        return answer.chunk_index

    async def rollback(self) -> int:
        """Go on after a failed block, from the last committed chunk: the index of the next one."""
        answer = await self._request(self._live.side.rollback)
        assert isinstance(answer, SessionRecovered)
        return answer.chunk_index

    async def events(self) -> AsyncIterator[SessionMessage | SessionClosed | ErrorMessage]:
        """Everything the server says but chunks: receipts, pauses, failures, errors. One reader; the oldest of more than
        1,024 unread ones is dropped (and counted)."""
        while True:
            while self._live.notices:
                yield self._live.notices.popleft()
            if self._live.ended is not None:
                return
            self._live.changed.clear()
            await self._live.changed.wait()

    def statistics(self) -> ClientStatistics:
        side = self._live.side.statistics()
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
            chunks_waiting=len(self._live.chunks),
            chunks_dropped_by_reset=self._live.dropped,
            notices_dropped=self._live.notices_dropped,
        )

    # ---- inside -------------------------------------------------------------------------------------------------------

    async def _request(self, make: Callable[[], str], *, repeat: bool = False) -> AnyServerMessage:
        """Send a request and wait for its answer; ``repeat``: say it again after a resume, since twice is harmless."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._live.side.state not in LIVE:
                    if self._live.ended is not None:
                        raise self._live.ended
                    self._live.changed.clear()
                    await self._live.changed.wait()
                try:
                    text = make()
                except WireError as error:
                    raise RefusedError(error.message, code=error.code, path=error.path) from None
                except LocalError as error:
                    raise RefusedError(str(error), code=self._state_code()) from None
                answer: asyncio.Future[AnyServerMessage] = asyncio.get_running_loop().create_future()
                key = self._live.side.last_id
                self._live.requests[key] = (text, repeat, answer)
                try:
                    await self._live.push(text)
                    return await answer
                finally:
                    self._live.requests.pop(key, None)
        except TimeoutError:
            raise ConnectionLostError("the server did not answer in time") from None

    def _state_code(self) -> WireCode:
        return WireCode.SESSION_FAILED if self._live.side.state is WireState.FAILED else WireCode.SESSION_STATE

    @property
    def _live(self) -> WorldLink:
        if self._link is None:
            raise LocalError("the session has not started: use `async with`")
        return self._link


def world_url(url: str) -> str:
    """The WebSocket URL for what a user types."""
    for http, ws in (("http://", "ws://"), ("https://", "wss://")):
        if url.startswith(http):
            url = ws + url.removeprefix(http)
    url = url if "://" in url else f"ws://{url}"
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return url if slash and path else f"{scheme}://{host}{PATH}"
