"""What a peer may cost below the protocol: unfinished requests, control frames, fragments, bytes that nobody takes.

Owns the limits under uvicorn's two protocol classes; they know no session and no message. uvicorn bounds the size of what it
reads, but not how long a request may take to arrive, nor how many frames too small to be a message may come.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from realtime_omni_protocols.world import CloseCode, WireCode
from realtime_omni_protocols.world_server import TokenBucket

REQUEST_TIMEOUT_S = 10.0
"""From the first byte (or the connection) to the last byte of a request; no request here has a body worth waiting for."""
MAX_SMALL_FRAMES_PER_S = 500.0
"""Pings, pongs and fragments below :data:`SMALL_FRAGMENT_BYTES`; as many as messages."""
SMALL_FRAGMENT_BYTES = 1024


class GuardedHttp(H11Protocol):
    """HTTP/1.1 with bounded headers (h11's 64 KiB) and a time by which a request must be complete."""

    _deadline: asyncio.TimerHandle | None = None
    _upgraded = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(REQUEST_TIMEOUT_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # An upgraded connection is the WebSocket's; h11 never hears the end of that request and stays in SEND_BODY.
        if self._upgraded or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._disarm()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._upgraded = True
        self._disarm()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """A WebSocket whose small frames are counted, and that is cut when its peer takes no bytes at the end."""

    _last_call: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._small_frames = TokenBucket(MAX_SMALL_FRAMES_PER_S, self.loop.time())
        self._bytes_after_close = 0

    def data_received(self, data: bytes) -> None:
        if self.close_sent:
            self._bytes_after_close += len(data)
            if self._bytes_after_close > self.config.ws_max_size:  # more than what was under way
                self.transport.abort()
                return
        super().data_received(data)

    def handle_ping(self) -> None:
        if self._admit():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self._admit():
            super().handle_pong(event)

    def handle_cont(self, event: Frame) -> None:
        if len(event.data) >= SMALL_FRAGMENT_BYTES or self._admit():
            super().handle_cont(event)

    def _admit(self) -> bool:
        """False when the connection is over, be it by this frame."""
        if self.close_sent or self.transport.is_closing():
            return False
        if self._small_frames.take(1, self.loop.time()):
            return True
        self.conn.send_close(CloseCode.RATE, WireCode.RATE_LIMITED.value)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": int(CloseCode.RATE)})
        self._end()
        return False

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._end()

    async def run_asgi(self) -> None:
        await super().run_asgi()
        if not self.disconnected:  # the closing handshake is under way, or bytes are left that the peer does not take
            self._last_call = self.loop.call_later(self.close_timeout + 1, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._last_call is not None:
            self._last_call.cancel()
        super().connection_lost(exc)

    def _end(self) -> None:
        """Close; at once when the peer has not even taken what was written before."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()
