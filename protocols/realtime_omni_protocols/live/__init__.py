"""OpenAI's Live protocol, server side: events, configuration and the sans-I/O machine (the spec is protocols/live.md)."""

from __future__ import annotations

from .audience import PRIMARY
from .backend import FunctionTool, function_tools, tool_choice
from .client_events import MAX_APPEND_S, MAX_EVENT_BYTES, MAX_FIXTURE_S, parse_client
from .commands import (
    Append,
    Close,
    Command,
    End,
    GoOn,
    Inject,
    Injection,
    Output,
    PlayFixture,
    Send,
    Start,
    ToolOutput,
    UseTools,
)
from .config import (
    PCM_24K,
    AudioFormat,
    Delegation,
    ForkConfig,
    InitialItem,
    SessionConfig,
    SessionResource,
    UpdateConfig,
)
from .errors import LiveClose, LiveCode, LiveError
from .server_events import CloseReason, parse_server
from .server_side import LiveServerSide, LiveStatistics
from .states import LiveState

PATH = "/v1/live/sessions"

__all__ = [
    "MAX_APPEND_S",
    "MAX_EVENT_BYTES",
    "MAX_FIXTURE_S",
    "PATH",
    "PCM_24K",
    "PRIMARY",
    "Append",
    "AudioFormat",
    "Close",
    "CloseReason",
    "Command",
    "Delegation",
    "End",
    "ForkConfig",
    "FunctionTool",
    "GoOn",
    "InitialItem",
    "Inject",
    "Injection",
    "LiveClose",
    "LiveCode",
    "LiveError",
    "LiveServerSide",
    "LiveState",
    "LiveStatistics",
    "Output",
    "PlayFixture",
    "Send",
    "SessionConfig",
    "SessionResource",
    "Start",
    "ToolOutput",
    "UpdateConfig",
    "UseTools",
    "function_tools",
    "parse_client",
    "parse_server",
    "tool_choice",
]
