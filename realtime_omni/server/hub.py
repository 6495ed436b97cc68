"""What all world connections of a server share, and how a connection gets its session: start, resume, detach, shutdown.

Owns the set of connections, the encode pool and the session records. Policy-free: capacity, grace and eviction are the
manager's; tokens and replay are the stream's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from importlib.metadata import PackageNotFoundError, version

from realtime_omni.errors import CleanupError, OmniError, SessionGoneError
from realtime_omni.media import EncodeLane, EncodePool, codec_string
from realtime_omni.server.backend import Backend, ModelDescription, SessionDoor
from realtime_omni.server.clock import Clock, LoopClock
from realtime_omni.server.metrics import Metrics
from realtime_omni.server.outbox import Batch
from realtime_omni.server.pacing import Pacer
from realtime_omni.server.sessions import WireSession, WireSessions
from realtime_omni.server.settings import ServerSettings
from realtime_omni.server.transport import Transport
from realtime_omni.server.world import WorldConnection
from realtime_omni.session.values import Modality, Representation
from realtime_omni_protocols.world import (
    LocalError,
    ServerLimits,
    StreamLimits,
    WireCode,
    WireError,
    WorldServerSide,
    WorldSessionStream,
)
from realtime_omni_protocols.world_messages import ControlInfo, Format, Limits, SessionFork, SessionResume, SessionStart
from realtime_omni_protocols.world_table import LIVE

_log = logging.getLogger(__name__)
MAX_LEAD_BLOCKS = 4
LAST_WORD_S = 1.0
"""At a shutdown that ran out of time: how long the last messages may take to leave."""


class WorldHub:
    """The world protocol of one server."""

    def __init__(
        self, manager: Backend, settings: ServerSettings, metrics: Metrics, clock: Clock | None = None
    ) -> None:
        self.manager = manager
        self.settings = settings
        self.metrics = metrics
        self.clock = clock if clock is not None else LoopClock()
        self.pool = EncodePool(settings.encode_threads)
        self.sessions = WireSessions(metrics)
        self.connections: set[WorldConnection] = set()
        self.stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    # -- connections -----------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        return len(self.connections) >= self.settings.max_connections

    async def serve(self, transport: Transport) -> None:
        """Serve one accepted connection to its end."""
        connection = WorldConnection(self, transport)
        self.connections.add(connection)
        self._idle.clear()
        self.metrics.add("open_connections", 1)
        try:
            await connection.run()
        finally:
            self.connections.discard(connection)
            self.metrics.add("open_connections", -1)
            if not self.connections:
                self._idle.set()

    def new_side(self) -> WorldServerSide:
        limits = ServerLimits(
            handshake_timeout_s=self.settings.handshake_timeout_s,
            max_start_bytes=self.settings.max_message_bytes,
            max_events_per_s=self.settings.max_events_per_s,
            max_messages_per_s=self.settings.max_messages_per_s,
        )
        models = (self.manager.describe().name,)
        return WorldServerSide(server=_server_name(), models=models, limits=limits, now=self.clock.now_s())

    async def shutdown(self, timeout_s: float) -> None:
        """Close every session with reason ``shutdown`` and let the clients hear it, within ``timeout_s``."""
        self.stopping = True
        try:
            async with asyncio.timeout(timeout_s):
                for connection in tuple(self.connections):
                    connection.shut_down()
                await asyncio.gather(*(self.close_session(record, "shutdown") for record in self.sessions))
                await self._idle.wait()
        except TimeoutError:
            _log.warning("shutdown left connections=%d", len(self.connections))
            for record in self.sessions:  # the engine hangs; its clients hear the last word all the same
                self.sessions.finish(record, "shutdown", WireCode.SHUTDOWN)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await self._idle.wait()

    def close(self) -> None:
        """End the encoder threads. No connection may be running."""
        self.pool.close()

    # -- sessions --------------------------------------------------------------------------------------------------

    async def start(self, connection: WorldConnection, command: SessionStart) -> None:
        """`session.start`: create the session, then attach the connection and say `session.started`."""
        model = self.manager.describe()
        if command.model not in (None, model.name):
            raise WireError(WireCode.MODEL_UNKNOWN, f"this server runs {model.name}", path="$.model")
        if model.policy is not None and not model.policy.imagines:
            raise WireError(WireCode.UNSUPPORTED, f"{model.name} is a policy, no world; robots have their own endpoint")
        if model.duplex is not None:
            raise WireError(WireCode.UNSUPPORTED, f"{model.name} is a voice, no world; voices have their own endpoints")
        lead = model.pictures_per_block if command.lead_frames is None else command.lead_frames
        if lead > MAX_LEAD_BLOCKS * model.pictures_per_block:
            raise WireError(WireCode.INVALID_ARGUMENT, f"at most {MAX_LEAD_BLOCKS} blocks", path="$.lead_frames")
        if self.stopping:
            raise WireError(WireCode.SHUTDOWN, "the server is stopping")
        outputs = _outputs(model, command.format)
        fps = command.fps or self.manager.config.session.fps or model.fps
        image = await connection.picture(command.image)
        lane, codec = await self._open_lane(command.format, model, fps)
        door: SessionDoor | None = None
        try:
            door = await self.manager.create_session(
                command.session_id,
                prompt=command.prompt,
                seed=command.seed,
                image=image,
                start=command.start,
                outputs=outputs,
            )
            record = self._record(door, model, command, fps, lead, codec, outputs)
            connection.sender.use(lane, command.format)
            connection.attach(record)
        except BaseException:
            lane.close()
            if door is not None and self.sessions.get(door.id) is None:
                await asyncio.shield(door.close("client"))
            raise
        self._say_started(record, model, command, codec)
        _log.info(
            "session started session=%s connection=%s format=%s fps=%g cadence=%s",
            record.id, connection.id, command.format, fps, command.cadence,
        )  # fmt: skip

    def _record(
        self,
        door: SessionDoor,
        model: ModelDescription,
        command: SessionStart,
        fps: float,
        lead: int,
        codec: str | None,
        outputs: tuple[str, ...],
    ) -> WireSession:
        stream = WorldSessionStream(
            session_id=door.id,
            fps=fps,
            frames_per_block=model.pictures_per_block,
            lead_frames=lead,
            cadence=command.cadence,
            limits=StreamLimits(stall_timeout_s=self.settings.stall_timeout_s, grace_s=self.settings.grace_s),
            now=self.clock.now_s(),
        )
        pacer = Pacer(fps, model.pictures_per_block)
        record = WireSession(door, stream, model, command.format, codec, pacer, outputs)
        self.sessions.add(record)
        return record

    def _say_started(
        self, record: WireSession, model: ModelDescription, command: SessionStart, codec: str | None
    ) -> None:
        config, settings = self.manager.config, self.settings
        horizon = (
            config.session.horizon_frames or model.horizon_frames
        )  # in the model's frames; a client counts pictures
        record.emit(
            record.stream.started(
                resume_token=_new_token(),
                model=model.name,
                prompt=record.door.prompt,
                seed=record.door.seed,
                format=command.format,
                codec=codec,
                width=model.width,
                height=model.height,
                limits=Limits(
                    max_pending_events=config.engine.max_pending_events,
                    max_message_bytes=ServerLimits().max_message_bytes,
                    max_events_per_s=settings.max_events_per_s,
                    grace_s=settings.grace_s,
                    stall_timeout_s=settings.stall_timeout_s,
                    horizon_frames=None
                    if horizon is None
                    else model.pictures_before(horizon // model.frames_per_block),
                ),
                controls=[
                    ControlInfo(
                        track=item.track,
                        schema=item.schema,
                        json_schema=dict(item.json_schema),
                        description=item.description,
                    )
                    for item in model.controls
                ],
                prompts=tuple(model.prompts),
                starts=tuple(model.starts),
                oldest_rewind=record.door.view.oldest_rewind,
                re=command.id,
            )
        )

    async def fork(self, connection: WorldConnection, record: WireSession, command: SessionFork) -> None:
        """`session.fork`: the branch gets a record of its own and waits, detached, for a connection to resume it."""
        if self.stopping:
            raise WireError(WireCode.SHUTDOWN, "the server is stopping")
        door: SessionDoor = await record.door.fork(command.session_id)
        stream = record.stream.branch(
            door.id,
            epoch=door.epoch,
            chunk_index=door.chunk_index,
            next_frame=record.model.pictures_before(door.chunk_index),
            next_event_id=max(record.stream.next_event_id, door.view.event_floor + 1),
            now=self.clock.now_s(),
        )
        grace_s = max(self.settings.grace_s, self.settings.handshake_timeout_s)  # a client needs a moment to open it
        try:
            forked = record.stream.forked(
                stream,
                resume_token=_new_token(),
                prompt=door.prompt,
                seed=door.seed,
                oldest_rewind=door.view.oldest_rewind,
                grace_s=grace_s,
                re=connection.re(record, command),
            )
        except LocalError:  # the parent has ended meanwhile: nobody would ever hear of the branch
            await asyncio.shield(door.close("client"))
            raise
        branch = WireSession(
            door,
            stream,
            record.model,
            record.format,
            record.codec,
            Pacer(stream.fps, stream.frames_per_block),
            record.outputs,
            last_input_s=self.clock.now_s(),
        )
        self.sessions.add(branch)
        record.emit(forked)
        _log.info("session forked session=%s branch=%s", record.id, branch.id)
        await asyncio.shield(self._let_go(branch, grace_s))

    async def resume(self, connection: WorldConnection, command: SessionResume) -> None:
        """`session.resume`: check the token, take the session over, replay what the client lacks."""
        try:
            await self._resume(connection, command)
        except WireError as error:
            outcome = {WireCode.SESSION_GONE: "gone", WireCode.SESSION_BUSY: "busy"}.get(error.code, "refused")
            self.metrics.count("resumes_total", outcome=outcome)
            raise

    async def _resume(self, connection: WorldConnection, command: SessionResume) -> None:
        record = self._claimed(command)
        format_name = command.format or record.format
        if (format_name == "latent") != (record.format == "latent"):
            raise WireError(
                WireCode.UNSUPPORTED_FORMAT, "a session cannot change between latents and pixels", path="$.format"
            )
        record.stream.replay_after(command.last_seq)
        lane, codec = await self._open_lane(format_name, record.model, record.stream.fps)
        try:
            took_over = await self._take_over(command)
            async with record.hands:
                await self._attach(record)
                self._claimed(command)  # the token may have been used while we waited
                if record.connection is not None:
                    raise WireError(WireCode.SESSION_BUSY, "another connection was faster")
                record.end_replay(complete=False)  # the connection that it was played for is gone
                entries = record.stream.resume(
                    command.last_seq,
                    resume_token=_new_token(),
                    format=format_name,
                    codec=codec,
                    now=self.clock.now_s(),
                    re=command.id,
                )
        except BaseException:
            lane.close()
            if record.connection is None and self.sessions.get(record.id) is record:
                await asyncio.shield(self.detach(record))
            raise
        record.format, record.codec = format_name, codec
        record.pacer.restart()
        connection.sender.use(lane, format_name)
        connection.sender.put(entries.resumed)
        connection.attach(record)
        if entries.entries:
            connection.emit(Batch(entries.entries, replay=True, fill=record.fill))
        self.metrics.count("resumes_total", outcome="taken_over" if took_over else "resumed")
        _log.info(
            "session resumed session=%s connection=%s replayed=%d", record.id, connection.id, len(entries.entries)
        )

    def _claimed(self, command: SessionResume) -> WireSession:
        """The record that the command's token opens. A wrong token looks like an unknown id."""
        record = self.sessions.get(command.session_id)
        if record is None:
            if command.session_id in self.sessions.graves:
                raise WireError(WireCode.SESSION_GONE, "the session is closed", path="$.session_id")
            raise WireError(WireCode.SESSION_NOT_FOUND, "no session has this id and token", path="$.session_id")
        if not record.stream.token_matches(command.resume_token):
            raise WireError(WireCode.SESSION_NOT_FOUND, "no session has this id and token", path="$.session_id")
        if record.stream.state not in LIVE:
            raise WireError(WireCode.SESSION_GONE, "the session is closed", path="$.session_id")
        return record

    async def _take_over(self, command: SessionResume) -> bool:
        record = self._claimed(command)
        if record.connection is None:
            return False
        if not command.takeover:
            raise WireError(WireCode.SESSION_BUSY, "another connection drives this session", path="$.takeover")
        self.metrics.count("sessions_closed_total", reason="taken_over")
        await record.connection.give_up()
        return True

    async def _attach(self, record: WireSession) -> None:
        try:
            await record.door.attach()
        except SessionGoneError:
            raise WireError(WireCode.SESSION_GONE, "the session is closed", path="$.session_id") from None

    async def detach(self, record: WireSession) -> None:
        """Nobody is attached any more: the grace begins (none: the session closes)."""
        if self.sessions.get(record.id) is not record:
            return
        record.stream.detach(self.clock.now_s())
        self.sessions.changed()
        if self.stopping:
            await self.close_session(record, "shutdown")
            return
        await asyncio.shield(self._let_go(record, self.settings.grace_s))

    async def _let_go(self, record: WireSession, grace_s: float) -> None:
        async with record.hands:
            if record.connection is not None:
                return  # a resume was faster, and its session must not expire
            try:
                await record.door.detach(grace_s)
                _log.info("session detached session=%s grace_s=%g", record.id, grace_s)
            except SessionGoneError:
                self.sessions.finish(record, "detached_expired")
            except OmniError as error:
                _log.warning("detach failed session=%s code=%s", record.id, error.code)

    async def close_session(self, record: WireSession, reason: str) -> None:
        """Close through the manager, whose notice says the last word; a release that fails is retried by the engine."""
        try:
            await record.door.close(reason)
        except CleanupError:
            _log.warning("cleanup failed session=%s reason=%s", record.id, reason)
        except OmniError as error:
            _log.warning("close failed session=%s code=%s", record.id, error.code)
        self.sessions.finish(record, reason)

    def bury_if_unknown(self, record: WireSession) -> None:
        """End the record of a session that the manager does not know any more (its notice was missed)."""
        try:
            known = self.manager.get_session(record.id) is record.door  # else a later one of the same name
        except SessionGoneError:
            known = False
        if not known:
            self.sessions.finish(record, "failed", WireCode.SESSION_GONE, "the session is gone")

    async def _open_lane(
        self, format_name: Format, model: ModelDescription, fps: float
    ) -> tuple[EncodeLane, str | None]:
        """A fresh encoder, opened in the pool. Raises ArgumentError when the format cannot be made here."""
        codec = await self.pool.run(lambda: codec_string(format_name, model.width, model.height, fps))
        return await self.pool.lane(format_name, model.width, model.height, fps), codec


def _outputs(model: ModelDescription, format_name: Format) -> tuple[str, ...]:
    """The artifact that a wire format carries."""
    wanted = Representation.LATENT if format_name == "latent" else Representation.DECODED
    matching = [s for s in model.artifacts if s.representation is wanted and s.modality is Modality.VIDEO]
    if not matching:
        others = "h264, jpeg or rgb24" if format_name == "latent" else "latent"
        raise WireError(
            WireCode.UNSUPPORTED_FORMAT,
            f"{model.name} has nothing for {format_name}; ask for {others}",
            path="$.format",
        )
    matching.sort(key=lambda spec: not spec.primary)
    return (matching[0].name,)


def _new_token() -> str:
    """256 random bits; only its SHA-256 is kept."""
    return secrets.token_urlsafe(32)


def _server_name() -> str:
    try:
        return f"realtime-omni/{version('realtime-omni')}"
    except PackageNotFoundError:
        return "realtime-omni"
