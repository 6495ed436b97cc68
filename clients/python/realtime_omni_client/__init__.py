"""Python clients of realtime_omni servers. Depends on msgspec, websockets and numpy; Pillow and av only for their formats."""

from __future__ import annotations

from realtime_omni_protocols.openpi import PolicyServerError
from realtime_omni_protocols.world_messages import Control

from .actions import ActionQueue
from .errors import (
    ConnectError,
    ConnectionLostError,
    EventRefusedError,
    MediaUnavailableError,
    ProtocolViolation,
    RefusedError,
    SessionClosedError,
    SessionFailedError,
    StartRefusedError,
    WorldError,
)
from .link import Reconnect, StartOptions
from .policy import PolicyClient, PolicyTimeoutError
from .policy_stream import PolicyStream
from .values import ClientStatistics, Outcome, Receipt, WorldChunk
from .world import WorldClient

__all__ = [
    "ActionQueue",
    "ClientStatistics",
    "ConnectError",
    "ConnectionLostError",
    "Control",
    "EventRefusedError",
    "MediaUnavailableError",
    "Outcome",
    "PolicyClient",
    "PolicyServerError",
    "PolicyStream",
    "PolicyTimeoutError",
    "ProtocolViolation",
    "Receipt",
    "Reconnect",
    "RefusedError",
    "SessionClosedError",
    "SessionFailedError",
    "StartOptions",
    "StartRefusedError",
    "WorldChunk",
    "WorldClient",
    "WorldError",
]
