"""`PolicyServerSide`: the server's end of one alternating connection (every row of `rows`), sans I/O.

Owns: the turn (one request, one answer), the row, envelope fields, the form of replies and errors.  Must not know:
sockets, clocks, policies, what an observation means.
Invariants: the handshake is first; a request is answered exactly once, and the next is not taken before; a client of a
text-error row never gets an error as a binary frame; after a close nothing is sent; `receive` returns commands and
never raises for what a peer sent.

A shell does, in a loop::

    for command in side.receive(frame):
        match command:
            case Send(data): await ws.send(data)
            case Close(code, reason): await ws.close(code, reason)
            case Infer(): ... side.answer(side.encode(actions), timing), or side.fail(error)
            case Reset(): ... side.reset_done(), or side.fail(error)
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeAlias

import msgspec
from msgspec import Struct

from ..errors import LocalError
from .codec import MAX_FRAME_BYTES, pack, unpack
from .contract import PolicyContract
from .errors import PolicyClose, PolicyCode, PolicyError
from .rows import RESET_TEXT, ROWS, WITH_ENDPOINT, Row

MAX_LABEL_CHARS = 128
MAX_SEED = 2**63 - 1


class Turn(StrEnum):
    """Whose turn it is."""

    NEW = "new"
    CLIENT = "client"
    INFER = "infer"
    RESET = "reset"
    CLOSED = "closed"


class Send(Struct, frozen=True):
    """Send this frame: text or binary. ``error`` is the code when the frame says one (for counting)."""

    data: str | bytes
    error: PolicyCode | None = None


class Close(Struct, frozen=True):
    """End the connection."""

    code: PolicyClose
    reason: str


class Infer(Struct, frozen=True, kw_only=True):
    """Answer this observation. ``switched``: the client changed its session label, so the session before is over."""

    observation: Mapping[str, object]
    switched: bool
    seed: int | None = None
    steps: int | None = None


class Reset(Struct, frozen=True):
    """Begin a new episode."""


Output: TypeAlias = Send | Close
Command: TypeAlias = Output | Infer | Reset


class PolicyServerStatistics(Struct, frozen=True, kw_only=True):
    row: str
    turn: str
    requests: int
    chunks: int
    resets: int
    errors: int


class PolicyServerSide:
    """One connection."""

    def __init__(self, row: Row, contract: PolicyContract, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.row = row
        self.turn = Turn.NEW
        self._contract = contract
        self._max_bytes = max_bytes
        self.label: str | None = None
        """What the client calls its session; it means nothing outside this connection."""
        self._requests = self._chunks = self._resets = self._errors = 0

    def hello(self) -> Send:
        """The first frame of the connection."""
        self._expect(Turn.NEW)
        self.turn = Turn.CLIENT
        if ROWS[self.row].handshake == "roboarena":
            return Send(pack(self._contract.roboarena_metadata()))
        return Send(pack(self._contract.handshake))

    def receive(self, frame: str | bytes) -> list[Command]:
        """One frame of the client: a command for the shell, or the refusal."""
        self._expect(Turn.CLIENT)
        self._requests += 1
        try:
            return [self._request(frame)]
        except PolicyError as error:
            return list(self._refuse(error))

    def encode(self, actions: object) -> bytes:
        """The checked chunk as this row's reply carries it (msgpack).

        Raises:
            PolicyError: ``bad_action``.
        """
        chunk, fields = self._contract.check_actions(actions), self._contract.action.fields
        if ROWS[self.row].reply != "array" or not fields:
            return pack(chunk)
        named, at = {}, 0
        for field in fields:
            named[field.name] = chunk[None, :, at : at + field.dim]
            at += field.dim
        return pack(named)

    def answer(self, encoded: bytes, timing: Mapping[str, float]) -> list[Output]:
        """The reply to the `Infer` under way. ``timing``: ms by stage, with ``infer_ms``; only openpi's reply has room
        for it."""
        self._expect(Turn.INFER)
        self.turn = Turn.CLIENT
        self._chunks += 1
        match ROWS[self.row].reply:
            case "array":
                return [Send(encoded)]
            case "actions":
                return [Send(pack({"actions": msgspec.Raw(encoded)}))]
            case "timed":
                policy = {"infer_ms": timing.get("infer_ms", 0.0)}
                reply = {"actions": msgspec.Raw(encoded), "policy_timing": policy, "server_timing": dict(timing)}
                return [Send(pack(reply))]

    def reset_done(self) -> list[Output]:
        """The reply to the `Reset` under way."""
        self._expect(Turn.RESET)
        self.turn = Turn.CLIENT
        self._resets += 1
        return [Send(RESET_TEXT)]

    def fail(self, error: PolicyError) -> list[Output]:
        """The error that answers the request under way, in the row's form."""
        if self.turn not in (Turn.INFER, Turn.RESET):
            raise LocalError(f"no request is under way (turn {self.turn.value})")
        return self._refuse(error)

    def end(self, error: PolicyError, close: PolicyClose) -> list[Output]:
        """The server ends the connection: the error where an answer is owed, and the close. Nothing when it is over."""
        if self.turn is Turn.CLOSED:
            return []
        owed = self.turn in (Turn.INFER, Turn.RESET)
        self.turn = Turn.CLOSED
        last: list[Output] = [self._error_frame(error)] if owed else []
        return [*last, Close(close, error.code.value)]

    def statistics(self) -> PolicyServerStatistics:
        return PolicyServerStatistics(
            row=self.row.value,
            turn=self.turn.value,
            requests=self._requests,
            chunks=self._chunks,
            resets=self._resets,
            errors=self._errors,
        )

    # ---- inside

    def _expect(self, turn: Turn) -> None:
        if self.turn is not turn:
            raise LocalError(f"turn is {self.turn.value}, not {turn.value}")

    def _refuse(self, error: PolicyError) -> list[Output]:
        self._errors += 1
        frame = self._error_frame(error)
        if error.code is PolicyCode.TOO_LARGE:
            self.turn = Turn.CLOSED
            return [frame, Close(PolicyClose.TOO_LARGE, error.code.value)]
        if ROWS[self.row].errors == "text":
            self.turn = Turn.CLOSED
            return [frame, Close(PolicyClose.ERROR, error.code.value)]
        self.turn = Turn.CLIENT
        return [frame]

    def _error_frame(self, error: PolicyError) -> Send:
        if ROWS[self.row].errors == "text":
            return Send(f"{error.code.value}: {error.text}", error.code)
        return Send(pack({"type": "error", "message": error.text, "code": error.code.value}), error.code)

    def _request(self, frame: str | bytes) -> Command:
        if isinstance(frame, str):
            raise PolicyError(PolicyCode.BAD_MESSAGE, "a request is a binary frame")
        message = unpack(frame, self._max_bytes)
        if not isinstance(message, dict):
            raise PolicyError(PolicyCode.BAD_MESSAGE, "a request is a map")
        endpoint = self._endpoint(message)
        if endpoint == "reset":
            self.turn = Turn.RESET
            return Reset()
        seed, steps = _seed(message), _steps(message, self._contract.max_steps)
        switched = self._switch(_label(message))
        self.turn = Turn.INFER
        return Infer(observation=message, switched=switched, seed=seed, steps=steps)

    def _endpoint(self, message: dict[str, object]) -> str:
        """The request's endpoint, taken out of the message; naming one decides the row."""
        if "endpoint" not in message:
            if self.row in (Row.ROBOARENA, Row.DREAMZERO):
                raise PolicyError(PolicyCode.BAD_MESSAGE, "endpoint is missing: infer or reset", "$.endpoint")
            return "infer"
        endpoint = message.pop("endpoint")
        self.row = WITH_ENDPOINT.get(self.row, self.row)
        if not isinstance(endpoint, str) or endpoint not in ("infer", "reset"):
            raise PolicyError(PolicyCode.BAD_MESSAGE, "an endpoint is infer or reset", "$.endpoint")
        return endpoint

    def _switch(self, label: str | None) -> bool:
        """Whether this request leaves the session before it. A request without a label stays in the current one."""
        before = self.label
        self.label = label or before
        return before is not None and label is not None and label != before


def _label(message: dict[str, object]) -> str | None:
    label = message.pop("session_id", None)
    if label is None:
        return None
    if not isinstance(label, str) or not 1 <= len(label) <= MAX_LABEL_CHARS:
        text = f"a session_id is a text of 1 to {MAX_LABEL_CHARS} characters"
        raise PolicyError(PolicyCode.BAD_MESSAGE, text, "$.session_id")
    return label


def _seed(message: dict[str, object]) -> int | None:
    seed = message.pop("seed", None)
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise PolicyError(PolicyCode.SEED_INVALID, "a seed is a whole number from 0 to 2^63 - 1", "$.seed")
    return seed


def _steps(message: dict[str, object], most: int | None) -> int | None:
    """``sampling_params.num_inference_steps``, the only sampling parameter there is."""
    path, sampling = "$.sampling_params", message.pop("sampling_params", None)
    if sampling is None:
        return None
    if not isinstance(sampling, dict) or sampling.keys() - {"num_inference_steps"}:
        raise PolicyError(PolicyCode.KEY_UNKNOWN, "sampling_params has num_inference_steps only", path)
    steps = sampling.get("num_inference_steps")
    if steps is None:
        return None
    if most is None:
        raise PolicyError(PolicyCode.STEPS_INVALID, "this deployment fixes the number of steps", path)
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= most:
        raise PolicyError(PolicyCode.STEPS_INVALID, f"num_inference_steps is a whole number from 1 to {most}", path)
    return steps
