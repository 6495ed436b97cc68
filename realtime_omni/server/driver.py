"""When a block starts: the driver of one connection, and the keeper of its deadlines.

Owns nothing that outlives the connection. A block starts when the stream has credit, the client asked (on demand) or the
media clock is near (paced), and nothing else of the session is in flight; it starts as late as it can still be in time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING

from realtime_omni.errors import AbortedError, ErrorCode, OmniError, SessionGoneError
from realtime_omni.server.codes import describe_error
from realtime_omni.server.outbox import Sender
from realtime_omni.server.sessions import WireSession
from realtime_omni_protocols.world import Close, Reply, WireState, WorldServerSide

if TYPE_CHECKING:
    from realtime_omni.server.hub import WorldHub

_log = logging.getLogger(__name__)
RETRY_S = 0.05
"""Pause before a block is asked for again while the session is busy with something else (a reset, an external call)."""


class Driver:
    """Runs the blocks of the attached session."""

    def __init__(self, hub: WorldHub, side: WorldServerSide, sender: Sender, changed: asyncio.Event) -> None:
        self._hub = hub
        self._clock = hub.clock
        self._side = side
        self._sender = sender
        self._changed = changed
        self._record: WireSession | None = None
        self._not_before: float | None = None
        self._since_s = 0.0

    def attach(self, record: WireSession) -> None:
        self._record = record
        self._since_s = time.perf_counter()

    @property
    def may_start(self) -> bool:
        """Nothing but the media clock keeps a block from being started."""
        record = self._record
        return record is not None and not record.resetting and record.stream.may_start_block()

    def heard(self, at_s: float) -> None:
        """A message that the next block waits for, or reflects, came from the socket (``time.perf_counter``)."""
        self._since_s = max(self._since_s, at_s)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._changed.clear()
            now = self._clock.now_s()
            wake_at = self._handshake(now) if self._record is None else await self._session(self._record, now)
            if wake_at is None or wake_at > now:
                await self._clock.wait(self._changed, wake_at)

    def _handshake(self, now: float) -> float | None:
        """The deadline for the first message. Returns when to look again."""
        for command in self._side.handle_timeout(now):
            match command:
                case Reply(message=message):
                    self._sender.put(message)
                case Close():
                    pass  # follows the fatal error
        return self._side.deadline()

    async def _session(self, record: WireSession, now: float) -> float | None:
        """Start a block, or say when to look again (``now``: at once; None: when something changes)."""
        stream = record.stream
        stalled_at = self._stalled_at(record)
        if stalled_at is not None and now >= stalled_at:
            _log.info("session stalled session=%s", record.id)
            await self._hub.close_session(record, "stalled")
            return None
        if not self.may_start:
            return stalled_at
        start_at = record.pacer.start_at(stream.generated) if stream.cadence == "paced" else None
        if self._not_before is not None:
            start_at = max(self._not_before, start_at or now)
        if start_at is not None and start_at > now:
            look_at = min(start_at, math.inf if stalled_at is None else stalled_at)
            return None if look_at == math.inf else look_at
        if start_at is not None:
            self._hub.metrics.observe("start_lateness_seconds", now - start_at)
            self.heard(time.perf_counter() - (now - start_at))
        self._not_before = None
        record.pacer.started()
        await self._block(record, now)
        self._since_s = time.perf_counter()  # not before now could the next one be begun
        return now

    def _stalled_at(self, record: WireSession) -> float | None:
        """When the session ends for lack of acks (frames are outstanding) or of any input (it is parked)."""
        if record.stream.state is WireState.CLOSED:
            return None
        limit_s = self._hub.settings.stalled_input_s
        deadlines = [record.stream.stall_deadline(), record.last_input_s + limit_s if limit_s > 0 else None]
        return min((at for at in deadlines if at is not None), default=None)

    async def _block(self, record: WireSession, started_s: float) -> None:
        sending, since_s = False, self._since_s
        try:
            async with record.block:
                try:
                    replay = record.replay
                    chunk = await (
                        record.door.committed_chunk(record.outputs) if replay is None else anext(replay.chunks)
                    )
                    sending = record.emit_chunk(chunk, started_s, self._clock.now_s, since_s)
                    if replay is not None and chunk.chunk_index == replay.last_chunk:
                        record.end_replay(complete=True)
                finally:
                    record.tell_failure()
        except AbortedError:
            record.end_replay(complete=False)
            return  # the abort's own answer says so; the block is asked for again
        except SessionGoneError:
            record.end_replay(complete=False)
            self._not_before = self._clock.now_s() + RETRY_S  # it is closing: the manager's notice will say why
            self._hub.bury_if_unknown(record)
        except OmniError as error:
            record.end_replay(complete=False)
            if error.code == ErrorCode.SESSION_STATE:
                self._not_before = self._clock.now_s() + RETRY_S
                return
            fault = describe_error(error, session=record.id)
            record.emit_failed(fault.code, fault.message)
        except Exception as error:  # a bug here or in the engine: this session stops, the server goes on
            record.end_replay(complete=False)
            fault = describe_error(error, session=record.id)
            record.emit_failed(fault.code, fault.message)
        else:
            self._hub.metrics.count("blocks_total")
            self._hub.metrics.observe("tick_seconds", chunk.timings.tick_ms / 1000)
        finally:
            if not sending:
                record.pacer.restart()  # nobody will report this block's delivery
