"""Python clients of realtime_omni servers. Depends on msgspec, websockets and numpy; Pillow and av only for their formats."""

from __future__ import annotations

from realtime_omni_protocols.world_messages import Control

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
from .values import ClientStatistics, Outcome, Receipt, WorldChunk
from .world import WorldClient

__all__ = [
    "ClientStatistics",
    "ConnectError",
    "ConnectionLostError",
    "Control",
    "EventRefusedError",
    "MediaUnavailableError",
    "Outcome",
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
