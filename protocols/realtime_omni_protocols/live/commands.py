"""What the machine wants done: frames to send, connections to end, and what the session has to do.

Owns: nothing; values only.  Must not know: states.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from .backend import FunctionTool
from .config import SessionConfig
from .errors import LiveClose, LiveCode
from .server_events import CloseReason

Injection: TypeAlias = Literal["instructions", "thinking", "commentary"]


class Send(Struct, frozen=True):
    """Send this text frame. ``error`` is the code when the frame says one (for counting)."""

    peer: int
    data: str
    error: LiveCode | None = None


class Close(Struct, frozen=True):
    """End this connection."""

    peer: int
    code: LiveClose
    reason: str


class Start(Struct, frozen=True):
    """Open a session, then `started` (or `refuse_start`)."""

    config: SessionConfig


class Append(Struct, frozen=True):
    """Raw audio in the session's format, at least one sample. Not ``heard``: silence takes its place at the model,
    while sidebands are still shown what came (`reflect_input`)."""

    audio: bytes
    heard: bool


class Inject(Struct, frozen=True):
    """Text for the model at its next tick, then `injected` (or `refuse_injection`)."""

    ticket: int
    kind: Injection
    text: str
    delegation_id: str | None


class UseTools(Struct, frozen=True):
    """The functions that the model may call from now on; None keeps what was."""

    tools: tuple[FunctionTool, ...] | None
    choice: str | None


class ToolOutput(Struct, frozen=True):
    """What a function returned that the model called (`called`)."""

    call_id: str
    output: str


class GoOn(Struct, frozen=True):
    """The model may speak now: its calls are answered, or it was asked to."""


class PlayFixture(Struct, frozen=True):
    """PCM16 at 24 kHz that takes the place of the model's output from now on, then `fixture_played`."""

    audio: bytes


class End(Struct, frozen=True):
    """Close the session, then `closed`."""

    reason: CloseReason


Output: TypeAlias = Send | Close
Command: TypeAlias = Output | Start | Append | Inject | UseTools | ToolOutput | GoOn | PlayFixture | End
