"""The short way to the socket: uvicorn's WebSocket protocol, with the calls that a block would otherwise make nine times.

Owns: nothing of its own. The protocol's state is uvicorn's, the connection's is :mod:`realtime_omni.server.world`'s.
Through ASGI every message is a coroutine through three layers and a system call of its own. :meth:`PeerProtocol.put` takes
the messages of a block together: one write, no coroutine, when the socket has room; what does not fit waits in the ordinary
``send``. The order is the same, because both end in the same protocol object and never wait in between. On the way in, long
messages go round websockets' buffers (:mod:`realtime_omni.server.long_frame`), and short ones round its parser
(:mod:`realtime_omni.server.short_frame`).
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from websockets.protocol import State

from realtime_omni.server.guard import GuardedWebSocket
from realtime_omni.server.long_frame import LongFrame
from realtime_omni.server.short_frame import read_short
from realtime_omni.server.transport import PEER_KEY, RECEIVED_KEY

_HEAD, _HEAD_16, _HEAD_64 = struct.Struct("!BB"), struct.Struct("!BBH"), struct.Struct("!BBQ")


class _Arrivals(asyncio.Queue[Any]):
    """uvicorn's queue of ASGI messages; each says when it came."""

    def _put(self, item: Any) -> None:
        item[RECEIVED_KEY] = time.perf_counter()
        super()._put(item)


class PeerProtocol(GuardedWebSocket):
    """uvicorn's ``websockets-sansio``, which offers itself to the application as a :class:`~.transport.Peer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.queue = _Arrivals()
        self._take: Callable[[str | bytes], bool] | None = None
        self._long: LongFrame | None = None
        self._between_frames = False
        self._wait_for_frame = self.conn.reader.at_eof
        self.conn.reader.at_eof = self._at_frame  # type: ignore[method-assign]

    def _at_frame(self) -> Generator[None, None, bool]:
        """websockets' parser waits here for the next frame, and nowhere else."""
        self._between_frames = True
        ended = yield from self._wait_for_frame()
        self._between_frames = False
        return ended

    def data_received(self, data: bytes) -> None:
        at, most = 0, self.config.ws_max_size
        while self._long is None and self._may_begin() and (short := read_short(data, at, most)) is not None:
            payload, at = short
            self.curr_msg_data_type, self.frames = "text", [payload]
            self.send_receive_event_to_app()
        if at == len(data):
            return
        data = data[at:]
        rest = memoryview(data)
        if self._long is None:
            begun = LongFrame.begin(data, self.config.ws_max_size) if self._may_begin() else None
            if begun is None:
                super().data_received(data)
                return
            self._long, rest = begun
        rest = self._long.take(rest)
        if not self._long.done:
            return
        message, self._long = self._long.message(), None
        if not self.close_sent:
            self.curr_msg_data_type, self.frames = "bytes", [message]
            self.send_receive_event_to_app()
        if rest:
            self.data_received(bytes(rest))

    def _may_begin(self) -> bool:
        """Between two frames, and no message in fragments."""
        conn = self.conn
        return self._between_frames and conn.state is State.OPEN and conn.current_size is None and not self.close_sent

    def connection_lost(self, exc: Exception | None) -> None:
        """Lets go of an unfinished message now: this object is part of cycles, and `serve` looks for those seldom."""
        self._long, self.frames = None, []
        self.conn.reader.buffer.clear()
        self.conn.parser.close()
        super().connection_lost(exc)

    async def run_asgi(self) -> None:
        self.scope["state"][PEER_KEY] = self
        app = self.app

        async def answered(*call: Any) -> None:
            await app(*call)
            if self.initial_response is not None:  # a refused upgrade: uvicorn would log that the application forgot it
                self.handshake_complete = True

        self.app = answered
        await super().run_asgi()

    def listen(self, take: Callable[[str | bytes], bool]) -> None:
        """Offer every message to ``take`` as it comes, while none waits in the queue. A queue costs a task's turn and two
        system calls (uvicorn stops reading at each message, and goes on when it was taken)."""
        self._take = take

    def send_receive_event_to_app(self) -> None:
        """uvicorn's name for: a message is complete."""
        if self._take is not None and self.queue.empty() and not self.close_sent:
            data = b"".join(self.frames)
            try:
                message = data.decode() if self.curr_msg_data_type == "text" else data
            except UnicodeDecodeError:
                pass  # uvicorn says so to the client
            else:
                if self._take(message):
                    self.frames = []
                    return
        super().send_receive_event_to_app()

    def put(self, messages: Sequence[str | bytes]) -> bool:
        """Write messages in one piece; False, and nothing is written, when the socket is full or no longer open."""
        conn = self.conn
        if not self.writable.is_set() or self.disconnected or self.close_sent or self.transport.is_closing():
            return False
        if conn.state is not State.OPEN or conn.extensions:  # the peer has begun to close; or frames are not plain
            return False
        self.transport.write(b"".join(_framed(messages)))
        return True

    def abort(self) -> None:
        """Cut the connection without waiting for a peer that takes no bytes."""
        self.transport.abort()


def _framed(messages: Sequence[str | bytes]) -> Iterator[bytes]:
    """Each message as one frame of RFC 6455, 5.2, from a server: whole and not masked."""
    for message in messages:
        opcode, payload = (0x81, message.encode()) if isinstance(message, str) else (0x82, message)
        size = len(payload)
        if size < 126:
            yield _HEAD.pack(opcode, size)
        elif size < 65_536:
            yield _HEAD_16.pack(opcode, 126, size)
        else:
            yield _HEAD_64.pack(opcode, 127, size)
        yield payload


__all__ = ["PeerProtocol"]
