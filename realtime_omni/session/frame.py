"""What a duplex session takes in: one frame of sound, and what it is told at the frame's beginning.

Owns the checks of shapes, dtypes, names and sizes. Knows no microphone, no wire, no model: what a model can do of it is the
model's to check (:meth:`realtime_omni.models.duplex.DuplexSpec.check`). Arrays are not copied; whoever made them must not
write to them any more.

A *directive* acts at the first sample of the frame that carries it, in the given order. Names: a *response* is one stretch
of speech (or text) of the agent, an *utterance* one turn of the user. Who asks for a response names it; a response that the
model begins by itself, and every utterance, is named by the model, uniquely within the session.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from realtime_omni.errors import ArgumentError
from realtime_omni.session.values import MAX_NAME_CHARS, freeze_json

MAX_TEXT_CHARS = 65_536
MAX_DIRECTIVES = 256
"""Of one frame: a client restores a conversation of a hundred messages in one go."""
MAX_TOOLS = 128

TurnMode: TypeAlias = Literal["client", "energy", "semantic", "model"]
"""Who ends the user's turn: the client (``Commit``), a detector of speech and silence, one that also judges whether the
user has finished, or the model by itself."""
Role: TypeAlias = Literal["system", "user", "assistant"]
TextKind: TypeAlias = Literal["message", "instructions", "thinking", "commentary"]
Source: TypeAlias = Literal["heard", "concealed", "muted", "idle"]


def check_name(value: object, path: str) -> str:
    """1..128 characters. Raises ArgumentError."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
        raise ArgumentError(f"{path} must be a text of 1 to {MAX_NAME_CHARS} characters", path=path)
    return value


def check_text(value: object, path: str) -> str:
    """At most ``MAX_TEXT_CHARS`` characters, no lone surrogate. Raises ArgumentError."""
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS:
        raise ArgumentError(f"{path} must be a text of at most {MAX_TEXT_CHARS} characters", path=path)
    if any(0xD800 <= ord(c) <= 0xDFFF for c in value):
        raise ArgumentError(f"{path} holds a lone surrogate", path=path)
    return value


def check_ms(value: object, path: str) -> float:
    """A finite number of milliseconds, 0 or more. Raises ArgumentError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ArgumentError(f"{path} must be a number of milliseconds, 0 or more", path=path)
    return float(value)


@dataclass(frozen=True, slots=True)
class Turns:
    """How the user's turns are found.

    Args:
        mode: see :data:`TurnMode`.
        respond: a turn that ends begins a response by itself. In mode ``client`` only ``Respond`` does.
        threshold: of the detector's speech probability, 0..1.
        silence_ms: mode ``energy``: this much silence ends a turn.
        eagerness: mode ``semantic``: how soon an unfinished sentence ends all the same (after 8, 4 or 2 s; auto: 4 s).
        idle_ms: so long after the agent has said its last, a silent user gets a response; None: never.
    """

    mode: TurnMode = "model"
    respond: bool = True
    threshold: float = 0.5
    silence_ms: float = 500.0
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"
    idle_ms: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ArgumentError("threshold must lie in 0..1", path="turns.threshold")
        check_ms(self.silence_ms, "turns.silence_ms")
        if self.idle_ms is not None:
            check_ms(self.idle_ms, "turns.idle_ms")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the agent may ask its client to call. ``parameters``: a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.name, "tool.name")
        check_text(self.description, "tool.description")
        if not isinstance(self.parameters, Mapping):
            raise ArgumentError("parameters must be a JSON schema", path="tool.parameters")
        object.__setattr__(self, "parameters", freeze_json(self.parameters, "tool.parameters"))


# ---------------------------------------------------------------------- directives


@dataclass(frozen=True, slots=True)
class Configure:
    """Change how the session goes on; None keeps what was. ``tool_choice``: ``auto``, ``none``, ``required`` or a name."""

    instructions: str | None = None
    voice: str | None = None
    turns: Turns | None = None
    tools: tuple[Tool, ...] | None = None
    tool_choice: str | None = None

    def __post_init__(self) -> None:
        if self.instructions is not None:
            check_text(self.instructions, "instructions")
        if self.voice is not None:
            check_name(self.voice, "voice")
        if self.tools is not None and len(self.tools) > MAX_TOOLS:
            raise ArgumentError(f"at most {MAX_TOOLS} tools", path="tools")
        if self.tool_choice is not None:
            check_name(self.tool_choice, "tool_choice")


@dataclass(frozen=True, slots=True)
class AddText:
    """Text that becomes part of the conversation, by itself neither spoken nor answered.

    ``kind``: a ``message`` as if ``role`` had said it; ``instructions`` to the agent; ``thinking``, which it knows and does
    not say; ``commentary``, which it may say when it fits. ``id``: names it for :class:`RemoveText`. ``after``: the text or
    utterance or response it follows (None: at the end; ``""``: at the beginning).
    """

    text: str
    role: Role = "user"
    kind: TextKind = "message"
    id: str | None = None
    after: str | None = None

    def __post_init__(self) -> None:
        check_text(self.text, "text")
        if self.id is not None:
            check_name(self.id, "id")


@dataclass(frozen=True, slots=True)
class RemoveText:
    """Forget a text, utterance or response of this name; nothing happens when there is none."""

    id: str

    def __post_init__(self) -> None:
        check_name(self.id, "id")


@dataclass(frozen=True, slots=True)
class Commit:
    """The user's turn ends here; what was heard since the last one is an utterance. Begins no response."""


@dataclass(frozen=True, slots=True)
class Clear:
    """What was heard since the last committed turn is forgotten."""


@dataclass(frozen=True, slots=True)
class Respond:
    """Begin a response named ``id``.

    Args:
        instructions: for this response instead of the session's.
        text_only: no speech.
        context: instead of the conversation (None): these texts alone.
        remember: the response becomes part of the conversation.
        tools, tool_choice: for this response instead of the session's.
        max_tokens: of text; None: the model's own bound.
    """

    id: str
    instructions: str | None = None
    text_only: bool = False
    context: tuple[AddText, ...] | None = None
    remember: bool = True
    tools: tuple[Tool, ...] | None = None
    tool_choice: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_name(self.id, "id")
        if self.instructions is not None:
            check_text(self.instructions, "instructions")
        if self.max_tokens is not None and (isinstance(self.max_tokens, bool) or self.max_tokens < 1):
            raise ArgumentError("max_tokens must be at least 1", path="max_tokens")


@dataclass(frozen=True, slots=True)
class Say:
    """Speak this text, word for word, as a response named ``id``."""

    id: str
    text: str

    def __post_init__(self) -> None:
        check_name(self.id, "id")
        check_text(self.text, "text")


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop the response (None: whichever runs, and all that were asked for and wait); this frame's sound is silence already.
    Nothing happens when none runs.

    ``heard_ms``: how much of its sound the user heard, from its beginning; the conversation keeps no more. None: all that
    was yielded."""

    response: str | None = None
    heard_ms: float | None = None

    def __post_init__(self) -> None:
        if self.response is not None:
            check_name(self.response, "response")
        if self.heard_ms is not None:
            check_ms(self.heard_ms, "heard_ms")


@dataclass(frozen=True, slots=True)
class Truncate:
    """Of a response that has ended only the first ``heard_ms`` were heard; the conversation keeps no more.

    Nothing happens for one that is not known, or was heard less."""

    response: str
    heard_ms: float

    def __post_init__(self) -> None:
        check_name(self.response, "response")
        check_ms(self.heard_ms, "heard_ms")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the client's function returned. Begins no response by itself, except in models that wait for it."""

    call_id: str
    output: str

    def __post_init__(self) -> None:
        check_name(self.call_id, "call_id")
        check_text(self.output, "output")


Directive: TypeAlias = (
    Configure | AddText | RemoveText | Commit | Clear | Respond | Say | Cancel | Truncate | ToolResult
)


class Frame(Struct, frozen=True, eq=False, gc=False):
    """What one tick of a duplex session takes in. Plain values, so it is never in a cycle (``gc=False``).

    Args:
        audio: float32 [N], mono, -1..1, N samples at the model's input rate: exactly one frame.
        directives: what acts at its first sample, in order.
        source: ``heard`` from the client; ``concealed``: silence in place of what did not come in time; ``muted``: silence
            because the client asked for it; ``idle``: silence because the client sends nothing.
    """

    audio: NDArray[np.float32]
    directives: tuple[Directive, ...] = ()
    source: Source = "heard"

    def __post_init__(self) -> None:
        audio = self.audio
        if not isinstance(audio, np.ndarray) or audio.dtype != np.float32 or audio.ndim != 1:
            raise ArgumentError("audio must be a float32 array of one dimension", path="audio")
        if len(self.directives) > MAX_DIRECTIVES:
            raise ArgumentError(f"a frame carries at most {MAX_DIRECTIVES} directives", path="directives")
