"""What the robot endpoint needs from whoever computes actions, and the translation at that seam.

Owns: `PolicyBackend` (the engine fulfils it, and so does ``testing.null_policy``), how an observation is judged without
holding up the event loop, and what of an error a client may know.  Must not know: rows, connections, models.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from realtime_omni.errors import ArgumentError, ErrorCode, OmniError
from realtime_omni.server.backend import HealthReport
from realtime_omni.server.images import read_picture
from realtime_omni_protocols.openpi import (
    EncodedImage,
    Image,
    Observation,
    ObservationReader,
    PolicyCode,
    PolicyContract,
    PolicyError,
)

_log = logging.getLogger(__name__)
INLINE_FLOATS = 65_536
"""Float arrays up to this many numbers are checked on the event loop (about 0.1 ms); pictures of floats are larger."""
_CODES = {
    ErrorCode.CAPACITY: PolicyCode.CAPACITY,
    ErrorCode.QUEUE_FULL: PolicyCode.CAPACITY,
    ErrorCode.SESSION_GONE: PolicyCode.SESSION_NOT_FOUND,
    ErrorCode.SESSION_NOT_FOUND: PolicyCode.SESSION_NOT_FOUND,
    ErrorCode.PROMPT_UNKNOWN: PolicyCode.PROMPT_INVALID,
    ErrorCode.IMAGE_INVALID: PolicyCode.IMAGE_INVALID,
    ErrorCode.INVALID_ARGUMENT: PolicyCode.BAD_MESSAGE,
    ErrorCode.SUPERSEDED: PolicyCode.SESSION_BUSY,
    ErrorCode.SHUTDOWN: PolicyCode.SHUTDOWN,
}


class PolicyRequest(Struct, frozen=True):
    """One observation to answer. ``tick``, ``consumed``, ``captured_ms`` and ``rtc`` (how its chunk continues the one before)
    come from streaming clients only."""

    observation: Observation
    seed: int | None = None
    steps: int | None = None
    tick: int | None = None
    consumed: int | None = None
    captured_ms: float | None = None
    rtc: str | None = None


class PolicyAnswer(Struct, frozen=True):
    """A chunk: float ``[horizon, dim]`` in robot units.

    ``timing``, in ms: ``queue`` (waiting for a turn), ``images``, ``prefix``, ``denoise``; a stage that the policy does
    not have is left out. ``valid_from`` and ``delay_used``: rows that were committed already, and the delay (control
    steps) that was planned for.
    """

    actions: npt.NDArray[np.floating]
    timing: Mapping[str, float] = {}
    valid_from: int = 0
    delay_used: int = 0


class PolicyBackend(Protocol):
    """Who computes. Every method may be cancelled; then, and after an error, the session is as it was before the
    call."""

    @property
    def contract(self) -> PolicyContract:
        """What is taken and given, and the handshake map. Constant."""
        ...

    async def open(self, *, label: str | None = None, control_hz: float | None = None) -> str:
        """A new session; its id is secret to its connection. Raises CapacityError."""
        ...

    async def infer(self, session_id: str, request: PolicyRequest) -> PolicyAnswer:
        """Compute a chunk; one call per session at a time. Cancelled between two denoise steps.

        Raises SessionGoneError (also after an eviction), TickError.
        """
        ...

    def leave_chunk(self, session_id: str) -> None:
        """The latest chunk never reached the robot: the next one continues nothing. Harmless for an id that is gone."""
        ...

    async def reset(self, session_id: str) -> None:
        """Begin a new episode: nothing of the one before acts on what follows."""
        ...

    async def close(self, session_id: str) -> None:
        """Release everything. Harmless for an id that is gone. A release that fails is retried by the backend
        itself."""
        ...

    def health(self) -> HealthReport:
        """Whether it makes progress."""
        ...


async def read_observation(reader: ObservationReader, message: Mapping[str, object]) -> Observation:
    """Judge an observation; in a thread where pictures have to be decoded or converted. Raises PolicyError."""
    if _heavy(message):
        return await asyncio.to_thread(reader.read, message, _decode)
    return reader.read(message, _decode)


def _heavy(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.size > INLINE_FLOATS and value.dtype.kind == "f"
    if isinstance(value, dict):
        return any(map(_heavy, value.values()))
    return isinstance(value, (EncodedImage, memoryview))


def _decode(image: EncodedImage) -> Image:
    try:
        return read_picture(image.data)
    except ArgumentError as error:
        raise PolicyError(PolicyCode.IMAGE_INVALID, error.message) from None


def add_stages(timing: dict[str, float], answer: PolicyAnswer, inside_ms: float) -> None:
    """The policy's stages into ``timing``. What a policy without stages needs counts as ``denoise``."""
    queue_ms = min(answer.timing.get("queue", 0.0), inside_ms)
    timing["queue"] += queue_ms
    timing["infer_ms"] = inside_ms - queue_ms
    timing["images"] = answer.timing.get("images", 0.0)
    timing["prefix"] = answer.timing.get("prefix", 0.0)
    rest_ms = timing["infer_ms"] - timing["images"] - timing["prefix"]
    timing["denoise"] = answer.timing.get("denoise", max(0.0, rest_ms))


def policy_error(error: BaseException, **context: str) -> PolicyError:
    """What a client is told. What is not the caller's doing is logged in full, and shown as an id."""
    if isinstance(error, PolicyError) and error.code is not PolicyCode.BAD_ACTION:
        return error
    if isinstance(error, OmniError) and error.code in _CODES:
        return PolicyError(_CODES[error.code], error.message)
    error_id = secrets.token_hex(6)
    where = " ".join(f"{key}={value}" for key, value in context.items())
    _log.error("the policy failed error_id=%s %s", error_id, where, exc_info=error)
    if isinstance(error, PolicyError):
        return PolicyError(error.code, f"{error.message} (error {error_id})")
    return PolicyError(PolicyCode.POLICY_FAILED, f"error {error_id}")
