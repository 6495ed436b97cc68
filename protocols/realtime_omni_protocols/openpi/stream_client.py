"""`StreamClientSide`: a client's end of `realtime-omni.vla.v1`, sans I/O.

Owns: the numbers (``seq``, ``epoch``), the resume token, and the fence: no chunk of an old epoch comes out.  Must not
know: sockets, time, how actions are executed.
Invariant: a chunk that comes out answers an observation of the current epoch, and answers rise: what is late is counted
and dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from ..errors import LocalError
from .errors import PolicyCode, PolicyError
from .stream_messages import (
    ActionChunk,
    AnyServerMessage,
    Bye,
    Closed,
    ErrorMessage,
    Hello,
    Observe,
    Ping,
    Pong,
    ResetDone,
    ResetEpisode,
    Resume,
    Resumed,
    Start,
    Started,
    Superseded,
    encode,
    parse_server,
)
from .stream_server import StreamState

Event: TypeAlias = Hello | Started | Resumed | ActionChunk | Superseded | ResetDone | ErrorMessage | Pong | Closed


class StreamClientStatistics(Struct, frozen=True, kw_only=True):
    state: str
    epoch: int
    observations: int
    chunks: int
    late: int
    superseded: int
    errors: int


class StreamClientSide:
    """One session over one or more connections: `disconnected`, then `connect` again."""

    def __init__(self) -> None:
        self.state = StreamState.NEW
        self.epoch = 0
        self.seq = 0
        self.answered = 0
        """The highest observation that was answered with a chunk; 0: none."""
        self.session_id: str | None = None
        self.hello: Hello | None = None
        self.owes_reset = False
        """A reset was under way when the connection was lost, and the server did not see it: `reset` once more."""
        self._token: str | None = None
        self._chunks = self._late = self._superseded = self._errors = 0

    # ---- sending

    def start(self, session_id: str | None = None, control_hz: float | None = None) -> bytes:
        """After `Hello`: begin a session, or go on with the one there was."""
        self._expect(StreamState.OPEN)
        self.state = StreamState.STARTING
        if self.session_id is not None and self._token is not None:
            return encode(
                Resume(session_id=self.session_id, resume_token=self._token, last_chunk=self.answered or None)
            )
        return encode(Start(session_id=session_id, control_hz=control_hz))

    def observe(
        self,
        observation: Mapping[str, object],
        tick: int,
        *,
        captured_ms: float | None = None,
        consumed: int | None = None,
        seed: int | None = None,
        steps: int | None = None,
        rtc: str | None = None,
    ) -> bytes:
        """The newest observation, as a frame; its number is `seq` afterwards."""
        self._expect(StreamState.LIVE)
        frame = encode(
            Observe(
                seq=self.seq + 1,
                epoch=self.epoch,
                tick=tick,
                observation=dict(observation),
                captured_ms=captured_ms,
                consumed=consumed,
                seed=seed,
                steps=steps,
                rtc=rtc,
            )
        )
        self.seq += 1
        return frame

    def reset(self) -> bytes:
        """A new episode. From here on nothing of the old one comes out."""
        self._expect(StreamState.LIVE)
        self.state, self.owes_reset = StreamState.RESETTING, False
        self.epoch += 1
        return encode(ResetEpisode())

    def close(self) -> bytes:
        if self.state not in (StreamState.LIVE, StreamState.RESETTING):
            raise LocalError(f"no session to close in state {self.state.value}")
        self.state = StreamState.CLOSING
        return encode(Bye())

    def ping(self, t: float | None = None) -> bytes:
        return encode(Ping(t=t))

    # ---- receiving

    def receive(self, frame: str | bytes) -> Event | None:
        """What a frame says; None for what is late (of an old epoch, or behind a newer answer).

        Raises:
            PolicyError: the server broke the protocol; give the connection up.
        """
        message = parse_server(frame)
        match message:
            case Hello():
                self._expect_server(StreamState.NEW, message)
                self.state, self.hello = StreamState.OPEN, message
            case Started():
                self._expect_server(StreamState.STARTING, message)
                self.state, self.session_id, self._token = StreamState.LIVE, message.session_id, message.resume_token
                self.epoch = message.epoch
            case Resumed():
                self._expect_server(StreamState.STARTING, message)
                self.owes_reset = message.epoch < self.epoch
                self.state, self._token, self.epoch = StreamState.LIVE, message.resume_token, message.epoch
                self.seq = max(self.seq, message.last_seq)
            case ResetDone():
                self._expect_server(StreamState.RESETTING, message)
                self.state, self.epoch = StreamState.LIVE, message.epoch
            case ActionChunk():
                return self._chunk(message)
            case Superseded():
                self._superseded += 1
            case ErrorMessage():
                return self._error(message)
            case Closed():
                self.state = StreamState.CLOSED
            case Pong():
                pass
        return message

    def _chunk(self, message: ActionChunk) -> ActionChunk | None:
        if message.seq > self.seq or self.state not in (StreamState.LIVE, StreamState.RESETTING, StreamState.CLOSING):
            raise self._violation("a chunk for an observation that was not sent")
        actions = message.actions
        if not isinstance(actions, np.ndarray) or actions.dtype != np.float32 or actions.ndim != 2:
            raise self._violation("actions are a float32 array [H, A]")
        if not np.isfinite(actions).all() or message.valid_from > len(actions):
            raise self._violation("actions are finite, and valid_from lies within them")
        if message.epoch != self.epoch or message.seq <= self.answered:
            self._late += 1
            return None
        self.answered = message.seq
        self._chunks += 1
        return message

    def _error(self, message: ErrorMessage) -> ErrorMessage | None:
        self._errors += 1
        if message.fatal:
            self.state = StreamState.CLOSED
        elif self.state is StreamState.STARTING and message.seq is None:
            self.state = StreamState.OPEN
        return message

    def disconnected(self) -> bool:
        """The connection is gone; True when the session may be resumed on another one."""
        may = self.session_id is not None and self.state not in (StreamState.CLOSED, StreamState.CLOSING)
        self.state = StreamState.NEW if may else StreamState.CLOSED
        return may

    def forget(self) -> None:
        """The session is over; `start` begins a new one, on this connection or the next. Numbers go on rising."""
        self.session_id = self._token = None
        self.owes_reset = False
        self.epoch = 0
        if self.state is StreamState.CLOSED:
            self.state = StreamState.NEW

    def statistics(self) -> StreamClientStatistics:
        return StreamClientStatistics(
            state=self.state.value,
            epoch=self.epoch,
            observations=self.seq,
            chunks=self._chunks,
            late=self._late,
            superseded=self._superseded,
            errors=self._errors,
        )

    # ---- inside

    def _expect(self, state: StreamState) -> None:
        if self.state is not state:
            raise LocalError(f"state is {self.state.value}, not {state.value}")

    def _expect_server(self, state: StreamState, message: AnyServerMessage) -> None:
        if self.state is not state:
            raise self._violation(f"{type(message).__struct_config__.tag} in state {self.state.value}")

    def _violation(self, message: str) -> PolicyError:
        self.state = StreamState.CLOSED
        return PolicyError(PolicyCode.BAD_MESSAGE, message)
