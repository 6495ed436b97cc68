"""Moshi's protocol, server side: query parameters and the sans-I/O machine (the spec is protocols/moshi.md)."""

from __future__ import annotations

from .errors import MoshiClose, MoshiCode, MoshiError
from .options import MoshiOptions, read_query
from .server_side import (
    MAX_MESSAGE_BYTES,
    PATH,
    Audio,
    Close,
    Command,
    Kind,
    MoshiServerSide,
    MoshiState,
    MoshiStatistics,
    Output,
    Send,
)

__all__ = [
    "MAX_MESSAGE_BYTES",
    "PATH",
    "Audio",
    "Close",
    "Command",
    "Kind",
    "MoshiClose",
    "MoshiCode",
    "MoshiError",
    "MoshiOptions",
    "MoshiServerSide",
    "MoshiState",
    "MoshiStatistics",
    "Output",
    "Send",
    "read_query",
]
