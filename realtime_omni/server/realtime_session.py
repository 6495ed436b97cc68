"""One Realtime session: machine, call and journal, across its connections.

Owns: what was told (numbered, bounded), who is attached, the resume token, the session's end.  Must not know: sockets. A plain
session ends with its connection; one in the duplex dialect waits for ``grace_s`` that somebody comes back with its token.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from realtime_omni.duplex.intake import IntakeLimits
from realtime_omni.duplex.journal import Journal, JournalLimits, Lost
from realtime_omni.duplex.outputs import DuplexOptions
from realtime_omni.server.codes import describe_error
from realtime_omni.server.outbox import ConnectionEnded
from realtime_omni.server.realtime_call import Out, RealtimeCall
from realtime_omni.server.realtime_words import profile_of
from realtime_omni.server.voice import VoiceHub
from realtime_omni_protocols.realtime import (
    Close,
    RealtimeClose,
    RealtimeCode,
    RealtimeError,
    RealtimeServerSide,
    encode,
)
from realtime_omni_protocols.realtime.server_events import AudioDelta, ErrorEvent, ResponseDone

if TYPE_CHECKING:
    from realtime_omni.call import Call

_log = logging.getLogger(__name__)
# A client may send a recording at once: as much as one append carries (15 MiB of PCM).
OPTIONS: Final = DuplexOptions(pace="free", intake=IntakeLimits(max_ms=330_000.0))
LIMITS: Final = JournalLimits(max_bytes=8 * 1024 * 1024, max_age_s=60.0)
"""Of what a client has not read: a minute, or two of PCM in base64. Sound is the first to go."""
MOST_READ = 16


def mint(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


class RealtimeSession:
    """See the module docstring. ``session``: a patch that the client begins with; ``duplex``: in the duplex dialect."""

    def __init__(self, hub: VoiceHub, call: Call, session: dict[str, Any], *, duplex: bool = False) -> None:
        self._hub = hub
        self._call = call
        profile = profile_of(hub.spec, call.id, hub.model, int(time.time() + hub.max_session_s))
        self.side = RealtimeServerSide(profile, mint, session, duplex=duplex)
        self._bridge = RealtimeCall(self.side, call, mint)
        self._journal: Journal[str] = Journal(LIMITS)
        self._grace_s = hub.settings.grace_s if duplex else 0.0
        self._token = self._spent = b""
        """Digests: of the token that is good, and of the one before while its successor may have been lost on its way."""
        self._attachment = 0
        self._changed = asyncio.Event()
        self._closed = asyncio.Event()
        self._left = asyncio.Event()
        self._back = asyncio.Event()
        self.last: Close | None = None
        """How the connection is to be closed, once everything is written."""
        self._put(self._bridge.carry(self.side.open()))
        if duplex:
            self._put(self._bridge.carry(self.side.resumable(self._new_token(), self._grace_s)))

    @property
    def id(self) -> str:
        return self._call.id

    async def run(self) -> None:
        """The session's life. Releases the call, whatever happens."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._tell())
                group.create_task(self._until_closed())
                group.create_task(self._end_in_time())
                group.create_task(self._end_alone())
        except* ConnectionEnded:
            pass
        except* Exception as faults:
            self.fail(faults)
        finally:
            if self.last is None:
                self.last = Close(RealtimeClose.NORMAL, "")
                self._wake()
            await self._hub.release(self._call)
            _log.info("realtime session over session_id=%s %s", self.id, self.side.statistics())

    def fail(self, fault: Exception) -> None:
        """Something of ours failed: the log has it, the client a code."""
        described = describe_error(fault, session=self.id)
        self._end(RealtimeCode.INTERNAL, described.message, RealtimeClose.INTERNAL)

    # ---- connections

    def attach(self) -> int:
        """A connection is there; the one before it is not served any more. Its number."""
        self._attachment += 1
        self._left.clear()
        self._back.set()
        self._wake()
        return self._attachment

    def resume(self, token: str) -> str | None:
        """The next token, for who has this one; None for anybody else, and when the session is over.

        The one that was shown stays good until the client says something on its new connection."""
        shown = _digest(token)
        known = [hmac.compare_digest(shown, digest) for digest in (self._token, self._spent)]
        if self.last is not None or not any(known):
            return None
        self._spent = shown
        return self._new_token()

    def detach(self, attachment: int) -> None:
        """That connection is gone."""
        if attachment == self._attachment:
            self._back.clear()
            self._left.set()

    def receive(self, frame: str | bytes, attachment: int) -> None:
        """A frame of a client's; of one that was replaced it is ignored."""
        if attachment == self._attachment:
            self._spent = b""
            outputs = self.side.receive(frame) if isinstance(frame, str) else self.side.receive_binary()
            self._put(self._bridge.carry(outputs))

    async def read(self, after: int, attachment: int) -> list[tuple[int, str | Lost]]:
        """What was told behind number ``after``, when there is something; nothing: that was all, or another one reads now."""
        while attachment == self._attachment:
            found = self._journal.after(after, MOST_READ)
            if found or self.last is not None:
                return found
            self._changed.clear()
            await self._changed.wait()
        return []

    def is_replaced(self, attachment: int) -> bool:
        return attachment != self._attachment

    # ---- inside

    def _new_token(self) -> str:
        token = secrets.token_urlsafe(32)
        self._token = _digest(token)
        return token

    async def _tell(self) -> None:
        async for _, output in self._call.outputs():
            if isinstance(output, Lost):
                _log.warning("outputs were lost session_id=%s", self.id)
            else:
                self._put(self._bridge.tell(output))
        raise ConnectionEnded

    async def _until_closed(self) -> None:
        await self._closed.wait()
        raise ConnectionEnded

    async def _end_in_time(self) -> None:
        """With the server, or when the session's time is over."""
        await self._hub.clock.wait(self._hub.stopped, self._hub.clock.now_s() + self._hub.max_session_s)
        if self._hub.stopping:
            self._end(RealtimeCode.SHUTDOWN, "the server stops", RealtimeClose.SHUTDOWN)
        else:
            self._end(RealtimeCode.EXPIRED, "the session has come to its end", RealtimeClose.SHUTDOWN)
        raise ConnectionEnded

    async def _end_alone(self) -> None:
        """Nobody is attached, and nobody came back in time."""
        while True:
            await self._left.wait()
            await self._hub.clock.wait(self._back, self._hub.clock.now_s() + self._grace_s)
            if self._left.is_set():
                raise ConnectionEnded

    def _end(self, code: RealtimeCode, message: str, close: RealtimeClose) -> None:
        self._put(self._bridge.carry(self.side.end(RealtimeError(code, message), close)))

    def _put(self, outputs: Iterable[Out]) -> None:
        now_s = self._hub.clock.now_s()
        for output in outputs:
            if isinstance(output, Close):
                self.last = output
                self._closed.set()
                continue
            event = output.event
            if isinstance(event, ErrorEvent):
                self._hub.metrics.count("voice_errors_total", protocol="realtime")
            if isinstance(event, ResponseDone) and event.response.status == "cancelled":
                self._journal.silence()  # what nobody has read of it is not to be heard any more
            text = encode(event).decode()
            sound, other = (len(text), 0) if isinstance(event, AudioDelta) else (0, len(text))
            self._journal.put(text, now_s, sound_bytes=sound, other_bytes=other)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()


class RealtimeSessions:
    """The sessions of one server that can be resumed, by id."""

    def __init__(self, hub: VoiceHub) -> None:
        self.hub = hub
        self._sessions: dict[str, RealtimeSession] = {}

    async def open(self, session: dict[str, Any], *, duplex: bool) -> tuple[RealtimeSession, asyncio.Task[None]]:
        """A new session and its life. Raises OmniError."""
        call = await self.hub.opened(self.hub.calls.open(OPTIONS, session_id=mint("sess")))
        try:
            made = RealtimeSession(self.hub, call, session, duplex=duplex)
        except BaseException:
            await self.hub.release(call)
            raise
        return made, self.hub.keep(self._live(made))

    async def _live(self, session: RealtimeSession) -> None:
        self._sessions[session.id] = session
        try:
            await session.run()
        finally:
            del self._sessions[session.id]

    def get(self, session_id: str) -> RealtimeSession | None:
        return self._sessions.get(session_id)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


__all__ = ["OPTIONS", "RealtimeSession", "RealtimeSessions", "mint"]
