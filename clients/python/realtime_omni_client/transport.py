"""The socket under a client.

Owns: opening a WebSocket with the right subprotocol and key.  Must not know: messages, sessions.
Anything with these four methods will do: tests put an in-memory pair here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from realtime_omni_protocols.errors import WireCode
from realtime_omni_protocols.world_messages import PROTOCOL

from .errors import ConnectError, answered

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""One raw 4K frame is 25 MB; nothing legitimate is larger than this."""


class TransportClosedError(Exception):
    """The connection is gone, for whatever reason."""


class Transport(Protocol):
    """One connection."""

    async def send(self, data: str | bytes) -> None:
        """`TransportClosedError` when the connection is gone."""

    async def receive(self) -> str | bytes:
        """`TransportClosedError` when the connection is gone."""
        ...

    async def close(self) -> None:
        """Afterwards the socket is closed, also when this was cancelled."""


Connector: TypeAlias = Callable[[], Awaitable[Transport]]


class WebSocketTransport:
    def __init__(self, ws: ClientConnection) -> None:
        self._ws = ws

    async def send(self, data: str | bytes) -> None:
        try:
            await self._ws.send(data)
        except ConnectionClosed:
            raise TransportClosedError from None

    async def receive(self) -> str | bytes:
        try:
            return await self._ws.recv()
        except ConnectionClosed:
            raise TransportClosedError from None

    async def close(self) -> None:
        """The closing handshake; who is cancelled within it leaves a socket that is closed all the same."""
        try:
            await self._ws.close()
        except BaseException:
            self._ws.transport.abort()
            raise


def websocket_connector(url: str, *, api_key: str | None, open_timeout_s: float, protocol: str = PROTOCOL) -> Connector:
    """Opens ``url``; the key goes into the Authorization header, never into the URL (URLs end up in logs)."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    async def open_socket() -> Transport:
        try:
            ws = await connect(
                url,
                subprotocols=[Subprotocol(protocol)],
                additional_headers=headers,
                open_timeout=open_timeout_s,
                max_size=MAX_MESSAGE_BYTES,
                compression=None,  # pictures are compressed already
            )
        except InvalidStatus as error:
            status = error.response.status_code
            code = {401: WireCode.UNAUTHORIZED, 403: WireCode.ORIGIN_REFUSED}.get(status)
            raise ConnectError(answered(status), status=status, code=code) from None
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI, ConnectionClosed, ValueError) as error:
            # ValueError: what urllib says of an address, ours or the one a server redirects to
            raise ConnectError(f"no connection to the server: {error}") from error
        transport = WebSocketTransport(ws)
        if ws.subprotocol != protocol:
            await transport.close()
            raise ConnectError(f"the server does not speak {protocol}")
        return transport

    return open_socket
