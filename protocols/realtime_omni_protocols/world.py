"""The world protocol's machines and values under one name (the spec is protocols/world.md).

`WorldSessionStream` lives with a session, `WorldServerSide` with one of its connections, `WorldClientSide` with a client.
"""

from __future__ import annotations

from .errors import CloseCode, LocalError, WireCode, WireError
from .world_client import Arrival, ChunkDone, Frame, Send, WorldClientSide
from .world_entries import ControlEntry, Entry, FrameEntry, ResumePlan, StreamLimits
from .world_frames import FrameHeader, pack_frame, unpack_frame
from .world_messages import PATH, PROTOCOL, AnyClientMessage, AnyServerMessage, parse_client, parse_server
from .world_server import Close, Command, Reply, ServerLimits, WorldServerSide, close_code
from .world_stream import WorldSessionStream
from .world_table import TABLE, WireState

__all__ = [
    "PATH",
    "PROTOCOL",
    "TABLE",
    "AnyClientMessage",
    "AnyServerMessage",
    "Arrival",
    "ChunkDone",
    "Close",
    "CloseCode",
    "Command",
    "ControlEntry",
    "Entry",
    "Frame",
    "FrameEntry",
    "FrameHeader",
    "LocalError",
    "Reply",
    "ResumePlan",
    "Send",
    "ServerLimits",
    "StreamLimits",
    "WireCode",
    "WireError",
    "WireState",
    "WorldClientSide",
    "WorldServerSide",
    "WorldSessionStream",
    "close_code",
    "pack_frame",
    "parse_client",
    "parse_server",
    "unpack_frame",
]
