"""`PolicyClientSide`: a client's end of one alternating connection, sans I/O.

Owns: the turn, and what a frame means in it: handshake, chunk, reset reply, error.  Must not know: sockets, time,
brokers.
Invariant: what the server says is wrong is raised (`PolicyServerError`) and never returned, on every row.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import LocalError
from .codec import pack, unpack
from .errors import PolicyCode, PolicyError
from .rows import RESET_TEXT, ROWS, Row
from .server_side import Turn


class PolicyServerError(RuntimeError):
    """The server's refusal of a request. ``code`` is None where the server (another one than ours) gives none."""

    def __init__(self, message: str, code: str | None, *, open_: bool) -> None:
        super().__init__(message if code is None else f"{code}: {message}")
        self.code = code
        self.open = open_


class PolicyClientSide:
    """One connection. On ``Row.BARE`` an error leaves it open; on the others it is over then."""

    def __init__(self, row: Row = Row.OPENPI) -> None:
        self.row = row
        self.turn = Turn.NEW
        self.metadata: Mapping[str, object] = {}

    def handshake(self, frame: str | bytes) -> Mapping[str, object]:
        """The first frame. `PolicyServerError` or `PolicyError` when it is none."""
        self._expect(Turn.NEW)
        value = self._value(frame)
        if not isinstance(value, dict):
            raise self._violation("the first frame is no map")
        self.metadata, self.turn = value, Turn.CLIENT
        return self.metadata

    def infer(self, observation: Mapping[str, object]) -> bytes:
        """The frame that asks for a chunk."""
        self._expect(Turn.CLIENT)
        named = {"endpoint": "infer"} if self._has_endpoints else {}
        frame = pack({**observation, **named})
        self.turn = Turn.INFER
        return frame

    def reset(self) -> bytes:
        """The frame that begins a new episode; only roboarena's rows have one (`LocalError`)."""
        self._expect(Turn.CLIENT)
        if not self._has_endpoints:
            raise LocalError(f"the row {self.row.value} has no reset")
        self.turn = Turn.RESET
        return pack({"endpoint": "reset"})

    def receive(self, frame: str | bytes) -> dict[str, object] | None:
        """The answer: a map with ``actions`` (a bare array is put into one), or None for a reset.

        Raises:
            PolicyServerError: the server refused the request.
            PolicyError: the server sent something that is no answer; give the connection up.
        """
        if self.turn is Turn.RESET and frame == RESET_TEXT:
            self.turn = Turn.CLIENT
            return None
        self._expect(Turn.INFER)
        value = self._value(frame)
        if isinstance(value, np.ndarray):
            value = {"actions": value}
        if not isinstance(value, dict):
            raise self._violation("an answer is an array or a map")
        if value.get("type") == "error":
            self.turn = Turn.CLIENT
            code = value.get("code")
            raise PolicyServerError(str(value.get("message")), code if isinstance(code, str) else None, open_=True)
        if "actions" not in value and ROWS[self.row].reply != "array":
            raise self._violation("an answer without actions")
        self.turn = Turn.CLIENT
        return value

    @property
    def _has_endpoints(self) -> bool:
        return self.row in (Row.ROBOARENA, Row.DREAMZERO)

    def _expect(self, turn: Turn) -> None:
        if self.turn is not turn:
            raise LocalError(f"turn is {self.turn.value}, not {turn.value}")

    def _value(self, frame: str | bytes) -> object:
        """A binary frame's value. Text is an error everywhere but after a reset."""
        if isinstance(frame, str):
            self.turn = Turn.CLOSED
            code, colon, message = frame.partition(": ")
            known = bool(colon) and code in set(PolicyCode)
            raise PolicyServerError(message if known else frame, code if known else None, open_=False)
        try:
            return unpack(frame)
        except PolicyError:
            self.turn = Turn.CLOSED
            raise

    def _violation(self, message: str) -> PolicyError:
        self.turn = Turn.CLOSED
        return PolicyError(PolicyCode.BAD_FRAME, message)
