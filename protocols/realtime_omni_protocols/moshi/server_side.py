"""`MoshiServerSide`: the server's end of one connection of Moshi's protocol, sans I/O.

Owns: kind bytes, bounds, the order handshake, stream, error.  Must not know: Ogg, Opus, sockets, models.
Invariants: the handshake is first; after a close nothing is sent; an error is said at most once, with the close;
`receive` never raises for what a peer sent.

The shell reads nothing before `ready`: the first pages of the client's stream hold its headers, and a session that is not
there yet cannot keep them.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import TypeAlias

from msgspec import Struct

from ..errors import LocalError
from .errors import CLOSES, MoshiClose, MoshiCode, MoshiError

PATH = "/api/chat"
MAX_MESSAGE_BYTES = 64 * 1024
"""An Ogg page is at most 65,307 bytes; clients send one of a few hundred."""
MAX_ERROR_CHARS = 400


class Kind(IntEnum):
    """First byte of a message."""

    HANDSHAKE = 0
    AUDIO = 1
    TEXT = 2
    CONTROL = 3
    METADATA = 4
    ERROR = 5
    PING = 6


class MoshiState(StrEnum):
    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


class Send(Struct, frozen=True):
    """Send this binary frame."""

    data: bytes


class Close(Struct, frozen=True):
    """End the connection."""

    code: MoshiClose
    reason: str


class Audio(Struct, frozen=True):
    """The next bytes of the client's Ogg/Opus stream, 24 kHz mono."""

    data: bytes


Output: TypeAlias = Send | Close
Command: TypeAlias = Output | Audio


class MoshiStatistics(Struct, frozen=True, kw_only=True):
    """``ignored``: messages of other kinds, of unknown kinds, empty ones and text frames."""

    state: str
    audio_received: int
    audio_sent: int
    texts_sent: int
    ignored: int


class MoshiServerSide:
    """One connection."""

    def __init__(self) -> None:
        self.state = MoshiState.NEW
        self._audio_received = self._audio_sent = self._texts_sent = self._ignored = 0

    def ready(self) -> Send:
        """The session is there: the handshake. One byte, as kyutai's Python server says it; its other servers append two
        version numbers, which no client reads."""
        if self.state is not MoshiState.NEW:
            raise LocalError(f"state is {self.state.value}, not new")
        self.state = MoshiState.OPEN
        return Send(bytes([Kind.HANDSHAKE]))

    def receive(self, frame: str | bytes) -> list[Command]:
        """One frame of the client. What is not audio means nothing to a full-duplex model and is discarded."""
        if self.state is not MoshiState.OPEN:
            return []
        if len(frame) > MAX_MESSAGE_BYTES:
            text = f"a message has at most {MAX_MESSAGE_BYTES} bytes"
            return [*self.fail(MoshiError(MoshiCode.MESSAGE_TOO_LARGE, text))]
        if isinstance(frame, str) or len(frame) < 2 or frame[0] != Kind.AUDIO:
            self._ignored += 1
            return []
        self._audio_received += 1
        return [Audio(frame[1:])]

    def audio(self, data: bytes) -> list[Output]:
        """The next bytes of the server's Ogg/Opus stream; none is no message."""
        if self.state is not MoshiState.OPEN or not data:
            return []
        self._audio_sent += 1
        return [Send(bytes([Kind.AUDIO]) + data)]

    def text(self, piece: str) -> list[Output]:
        """A piece of what the agent says; pieces are joined as they are."""
        if self.state is not MoshiState.OPEN or not piece:
            return []
        self._texts_sent += 1
        return [Send(bytes([Kind.TEXT]) + piece.encode("utf-8", "replace"))]

    def fail(self, error: MoshiError) -> list[Output]:
        """The error and the close. Nothing when it is over."""
        if self.state is MoshiState.CLOSED:
            return []
        self.state = MoshiState.CLOSED
        said = f"{error.code.value}: {error.message}"[:MAX_ERROR_CHARS]
        return [Send(bytes([Kind.ERROR]) + said.encode()), Close(CLOSES[error.code], error.code.value)]

    def lost(self) -> None:
        """The connection is gone."""
        self.state = MoshiState.CLOSED

    def statistics(self) -> MoshiStatistics:
        return MoshiStatistics(
            state=self.state.value,
            audio_received=self._audio_received,
            audio_sent=self._audio_sent,
            texts_sent=self._texts_sent,
            ignored=self._ignored,
        )
