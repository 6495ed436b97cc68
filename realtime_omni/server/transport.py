"""A WebSocket as three calls, so that the world endpoint can be driven without a socket.

Owns nothing but the adapter to Starlette. Losing the peer is :class:`TransportLost`, whichever layer noticed it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

PEER_KEY = "realtime_omni.peer"
"""Name in the ASGI state under which ``server.peer`` leaves the connection itself, a :class:`Peer`."""

RECEIVED_KEY = "realtime_omni.received_s"
"""Name in an ASGI message under which ``server.peer`` leaves when it came from the socket (``time.perf_counter``)."""


class Peer(Protocol):
    """The connection below ASGI, where the server offers it (another server than ours need not)."""

    def put(self, messages: Sequence[str | bytes]) -> bool:
        """Write messages in one piece, now; False, and nothing is written, when there is no room or no connection."""
        ...

    def listen(self, take: Callable[[str | bytes], bool]) -> None:
        """Offer every message to ``take`` as it comes; what it does not take waits for ASGI's ``receive``, in order."""
        ...

    def abort(self) -> None:
        """Cut the TCP connection."""
        ...


class TransportLost(ConnectionError):
    """The peer is gone; nothing more can be sent or received."""


class Transport(Protocol):
    """One accepted WebSocket."""

    received_s: float
    """When the latest message came from the socket (``time.perf_counter``)."""

    def listen(self, take: Callable[[str | bytes], bool]) -> None:
        """Offer every message to ``take`` as it comes, where the connection can; what it does not take (False), and what
        comes while such a one waits, is `receive`'s, in order. ``take`` must not raise."""
        ...

    def put(self, messages: Sequence[str | bytes]) -> bool:
        """Write messages in one piece, now; False, and nothing is written, when that would wait."""
        ...

    async def receive(self) -> str | bytes:
        """The next message. Raises TransportLost."""
        ...

    async def send(self, *messages: str | bytes) -> None:
        """Send messages in order; returns when the socket took them. Raises TransportLost."""
        ...

    async def close(self, code: int, reason: str) -> None:
        """Send the close frame. Harmless when the peer is gone."""
        ...


class StarletteTransport:
    """An accepted Starlette WebSocket. A send that makes no progress for ``send_timeout_s`` cuts the connection."""

    def __init__(self, socket: WebSocket, send_timeout_s: float) -> None:
        self._socket = socket
        self._send_timeout_s = send_timeout_s
        self._peer: Peer | None = socket.scope.get("state", {}).get(PEER_KEY)
        self.received_s = 0.0

    async def receive(self) -> str | bytes:
        try:
            message = await self._socket.receive()
        except (WebSocketDisconnect, RuntimeError, OSError):
            raise TransportLost from None
        if message["type"] != "websocket.receive":
            raise TransportLost
        self.received_s = message.get(RECEIVED_KEY) or time.perf_counter()
        text = message.get("text")
        data: str | bytes = text if text is not None else message["bytes"]
        return data

    def listen(self, take: Callable[[str | bytes], bool]) -> None:
        if self._peer is not None:
            self._peer.listen(take)

    def put(self, messages: Sequence[str | bytes]) -> bool:
        """Write messages in one piece, now; False, and nothing is written, when that would wait."""
        return self._peer is not None and self._peer.put(messages)

    async def send(self, *messages: str | bytes) -> None:
        if self.put(messages):
            return
        for message in messages:
            await self._send(message)

    async def _send(self, message: str | bytes) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                if isinstance(message, str):
                    await self._socket.send_text(message)
                else:
                    await self._socket.send_bytes(message)
        except TimeoutError:
            self._abort()
            raise TransportLost from None
        except (WebSocketDisconnect, RuntimeError, OSError):
            raise TransportLost from None

    async def close(self, code: int, reason: str) -> None:
        if self._socket.application_state is not WebSocketState.CONNECTED:
            return
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._socket.close(code, reason)
        except TimeoutError:
            self._abort()
        except (WebSocketDisconnect, RuntimeError, OSError):
            pass  # gone already

    def _abort(self) -> None:
        """Closing politely would wait for a buffer that the peer never reads."""
        if self._peer is not None:
            self._peer.abort()
