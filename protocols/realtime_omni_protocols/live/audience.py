"""`Audience`: the connections of one session, and what each of them is sent.

Owns: who is connected, the numbers of events, which copy of an event says whose command it answers.  Must not know:
states, what an event means.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct, structs

from .commands import Close, Command, Send
from .errors import LiveClose, LiveCode, LiveError
from .server_events import AnyServerEvent, ErrorBody, ErrorEvent, InputAudio, OutputAudioDelta, ServerEvent, encode

PRIMARY: Final = 0
"""The connection that started the session."""
MAX_SIDEBANDS = 8
MAX_ERROR_CHARS = 400


class Origin(Struct, frozen=True):
    """Whose command is answered."""

    peer: int
    client_event_id: str | None


class Audience:
    """One session's connections: the primary one from the beginning, sidebands as they come."""

    def __init__(self) -> None:
        self._peers: list[int] = [PRIMARY]
        self._next_peer = PRIMARY + 1
        self._ids = 0
        self._last_audio, self._last_delta = b"", ""
        self.sent = self.errors = 0

    def __contains__(self, peer: int) -> bool:
        return peer in self._peers

    @property
    def sidebands(self) -> int:
        return len(self._peers) - (PRIMARY in self._peers)

    def add(self) -> int:
        """A sideband's number. Raises LiveError ``capacity_exceeded``."""
        if self.sidebands >= MAX_SIDEBANDS:
            raise LiveError(LiveCode.CAPACITY, f"a session has at most {MAX_SIDEBANDS} sidebands")
        peer, self._next_peer = self._next_peer, self._next_peer + 1
        self._peers.append(peer)
        return peer

    def remove(self, peer: int) -> None:
        if peer in self._peers:
            self._peers.remove(peer)

    def dismiss(self, code: LiveClose, reason: str) -> list[Command]:
        """End every connection."""
        peers, self._peers = self._peers, []
        return [Close(peer, code, reason) for peer in peers]

    def new_id(self) -> str:
        self._ids += 1
        return f"event_{self._ids}"

    def tell(self, event: ServerEvent, origin: Origin | None = None) -> list[Command]:
        """The event to every connection; ``origin`` finds its own id in it."""
        plain = _text(event)
        sent: list[Command] = []
        for peer in self._peers:
            text = plain
            if origin is not None and peer == origin.peer and origin.client_event_id is not None:
                text = _text(structs.replace(event, client_event_id=origin.client_event_id))
            sent.append(self._send(peer, text))
        return sent

    def audio(self, audio: bytes, start_ms: int, end_ms: int, reflected: bytes | None) -> list[Command]:
        """Output audio: as it is to the primary connection, with its times to sidebands."""
        sent: list[Command] = []
        if PRIMARY in self._peers:
            if audio != self._last_audio:  # silence, mostly, comes again and again and is encoded once
                self._last_audio, self._last_delta = audio, encode(OutputAudioDelta(delta=audio))
            sent.append(self._send(PRIMARY, self._last_delta))
        if reflected is not None:
            sent += self._reflect(OutputAudioDelta(delta=reflected, start_ms=start_ms, end_ms=end_ms))
        return sent

    def reflect(self, audio: bytes) -> list[Command]:
        """Input audio, to sidebands only."""
        return self._reflect(InputAudio(audio=audio))

    def refuse(self, origin: Origin, error: LiveError) -> list[Command]:
        """The error to the one that caused it, if it is still there."""
        if origin.peer not in self._peers:
            return []
        self.errors += 1
        return [self._send(origin.peer, self._error(error, origin.client_event_id), error.code)]

    def complain(self, error: LiveError) -> list[Command]:
        """The error to everybody; nobody's event caused it."""
        self.errors += 1
        text = self._error(error, None)
        return [self._send(peer, text, error.code) for peer in self._peers]

    def _error(self, error: LiveError, client_event_id: str | None) -> str:
        body = ErrorBody(
            type=error.kind,
            code=error.code.value,
            message=error.message[:MAX_ERROR_CHARS],
            param=error.param,
            client_event_id=client_event_id,
        )
        return encode(ErrorEvent(event_id=self.new_id(), error=body))

    def _reflect(self, event: OutputAudioDelta | InputAudio) -> list[Command]:
        text = encode(event)
        return [self._send(peer, text) for peer in self._peers if peer != PRIMARY]

    def _send(self, peer: int, text: str, error: LiveCode | None = None) -> Send:
        self.sent += 1
        return Send(peer, text, error)


def _text(event: ServerEvent) -> str:
    every: AnyServerEvent = event  # type: ignore[assignment]  # the base of a closed union
    return encode(every)
