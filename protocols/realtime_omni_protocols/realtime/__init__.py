"""The OpenAI Realtime protocol, server's end: values, events and a sans-I/O machine (the spec is protocols/realtime.md)."""

from __future__ import annotations

from .codes import RealtimeClose, RealtimeCode, RealtimeError
from .commands import (
    AddItem,
    AppendAudio,
    CancelResponse,
    ClearInput,
    ClearOutput,
    Close,
    CommitInput,
    Configure,
    Fact,
    IdleTimeout,
    InputTrouble,
    Output,
    Played,
    RemoveItem,
    ResponseCompleted,
    ResponseFailed,
    ResponseOpened,
    ResponseSpeech,
    ResponseStopped,
    ResponseText,
    Send,
    StartResponse,
    ToolCall,
    TruncateItem,
    UserStarted,
    UserStopped,
    UserTranscribed,
    UserTranscript,
    UserTranscriptFailed,
)
from .items import MAX_FRAME_BYTES, Usage
from .server_events import encode, event_type
from .server_side import RealtimeServerSide
from .session import Profile

PATH = "/v1/realtime"
DUPLEX_PATH = "/v1/duplex"
"""The same in the duplex dialect, as ``PATH?duplex=1`` is."""

__all__ = [
    "DUPLEX_PATH",
    "MAX_FRAME_BYTES",
    "PATH",
    "AddItem",
    "AppendAudio",
    "CancelResponse",
    "ClearInput",
    "ClearOutput",
    "Close",
    "CommitInput",
    "Configure",
    "Fact",
    "IdleTimeout",
    "InputTrouble",
    "Output",
    "Played",
    "Profile",
    "RealtimeClose",
    "RealtimeCode",
    "RealtimeError",
    "RealtimeServerSide",
    "RemoveItem",
    "ResponseCompleted",
    "ResponseFailed",
    "ResponseOpened",
    "ResponseSpeech",
    "ResponseStopped",
    "ResponseText",
    "Send",
    "StartResponse",
    "ToolCall",
    "TruncateItem",
    "Usage",
    "UserStarted",
    "UserStopped",
    "UserTranscribed",
    "UserTranscript",
    "UserTranscriptFailed",
    "encode",
    "event_type",
]
