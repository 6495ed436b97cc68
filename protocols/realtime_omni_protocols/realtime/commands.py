"""What the Realtime machine asks of the session (commands), and what a session tells it (facts).

Owns: these values.  Must not know: how either is done.
Times are ms. ``audio_start_ms`` and ``audio_end_ms`` of input count all audio that was ever appended; ``start_ms`` and
``end_ms`` are the session's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .codes import RealtimeClose, RealtimeCode
from .items import Item, Usage
from .server_events import ServerEvent
from .session import AudioFormat, ResponseConfig, SessionConfig

# ---- outputs of the machine, to be carried out in order


@dataclass(frozen=True, slots=True)
class Send:
    """Put this event on the wire."""

    event: ServerEvent


@dataclass(frozen=True, slots=True)
class Close:
    """End the connection."""

    code: RealtimeClose
    reason: str


@dataclass(frozen=True, slots=True)
class Configure:
    """The session's configuration is this from now on."""

    config: SessionConfig


@dataclass(frozen=True, slots=True)
class AppendAudio:
    """More of what the user says: whole samples in this format."""

    audio: bytes
    format: AudioFormat


@dataclass(frozen=True, slots=True)
class ClearInput:
    """Forget the audio that is not committed, and the speech under way in it."""


@dataclass(frozen=True, slots=True)
class CommitInput:
    """The audio since the last commit is this item: a user's turn is over. Transcripts name the item.

    ``by_client``: a client said so; else it follows from a fact of the session's own.
    """

    item_id: str
    by_client: bool


@dataclass(frozen=True, slots=True)
class AddItem:
    """A client's item is in the conversation, after ``previous`` (None: first); ``last``: it is its end."""

    item: Item
    previous: str | None
    last: bool


@dataclass(frozen=True, slots=True)
class RemoveItem:
    item_id: str


@dataclass(frozen=True, slots=True)
class TruncateItem:
    """Of what the assistant said in that response, only this was heard; the model must not remember more."""

    item_id: str
    response_id: str
    heard_ms: int
    transcript: str


@dataclass(frozen=True, slots=True)
class StartResponse:
    """Answer. ``context``: the items to answer from, in order; ``own_context``: they are not the conversation's.

    ``out_of_band``: nothing of it becomes history.
    """

    response_id: str
    config: ResponseConfig
    context: tuple[Item, ...]
    own_context: bool = False
    out_of_band: bool = False


@dataclass(frozen=True, slots=True)
class CancelResponse:
    """Stop; its terminal events are out already, and facts about it are ignored from now on."""

    response_id: str


@dataclass(frozen=True, slots=True)
class Played:
    """The client has played so much of what a response said."""

    response_id: str
    played_ms: int


@dataclass(frozen=True, slots=True)
class ClearOutput:
    """Drop audio that waits to be sent."""


Command: TypeAlias = (
    Configure
    | AppendAudio
    | ClearInput
    | CommitInput
    | AddItem
    | RemoveItem
    | TruncateItem
    | StartResponse
    | CancelResponse
    | ClearOutput
    | Played
)
Output: TypeAlias = Send | Close | Command

# ---- facts


@dataclass(frozen=True, slots=True)
class UserStarted:
    """Speech began; the prefix padding is in ``audio_start_ms`` already."""

    audio_start_ms: int


@dataclass(frozen=True, slots=True)
class UserStopped:
    """Speech ended: a turn; the silence that proved it is in ``audio_end_ms``."""

    audio_end_ms: int


@dataclass(frozen=True, slots=True)
class IdleTimeout:
    """Nobody spoke for ``idle_timeout_ms``."""

    audio_start_ms: int
    audio_end_ms: int


@dataclass(frozen=True, slots=True)
class UserTranscript:
    """More of what the user said in this item."""

    item_id: str
    delta: str
    start_ms: int | None = None
    end_ms: int | None = None


@dataclass(frozen=True, slots=True)
class UserTranscribed:
    """All that the user said in this item."""

    item_id: str
    transcript: str
    seconds: float


@dataclass(frozen=True, slots=True)
class UserTranscriptFailed:
    item_id: str
    message: str


@dataclass(frozen=True, slots=True)
class ResponseOpened:
    """The model began to speak by itself. Only while no response writes the conversation."""

    response_id: str


@dataclass(frozen=True, slots=True)
class ResponseSpeech:
    """More audio of a response: whole samples in its format."""

    response_id: str
    audio: bytes
    start_ms: float | None = None
    end_ms: float | None = None


@dataclass(frozen=True, slots=True)
class ResponseText:
    """More text of a response: what its speech says, or the answer itself where it is a text.

    ``start_ms``, ``end_ms``: when it is spoken. Without them it is taken to be spoken in the audio that follows.
    """

    response_id: str
    text: str
    start_ms: float | None = None
    end_ms: float | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The model calls a function. ``arguments`` is JSON text."""

    response_id: str
    name: str
    arguments: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseCompleted:
    response_id: str
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class ResponseStopped:
    """It ended early: at a bound, or cancelled by the session (``turn_detected``: the user speaks)."""

    response_id: str
    reason: Literal["max_output_tokens", "content_filter", "turn_detected", "client_cancelled"]
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class ResponseFailed:
    """``message`` goes on the wire: no path, no traceback."""

    response_id: str
    message: str
    code: RealtimeCode = RealtimeCode.MODEL_FAILED
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class InputTrouble:
    """What a client sends is digital silence, or comes at another rate than was agreed."""

    kind: Literal["silent_microphone", "wrong_rate"]
    at_ms: float
    measured_hz: float | None = None


@dataclass(frozen=True, slots=True)
class ContextUsed:
    """How much of the model's context is used, 0..1."""

    ratio: float


ResponseFact: TypeAlias = (
    ResponseSpeech | ResponseText | ToolCall | ResponseCompleted | ResponseStopped | ResponseFailed
)
Fact: TypeAlias = (
    UserStarted
    | UserStopped
    | IdleTimeout
    | UserTranscript
    | UserTranscribed
    | UserTranscriptFailed
    | InputTrouble
    | ContextUsed
    | ResponseOpened
    | ResponseSpeech
    | ResponseText
    | ToolCall
    | ResponseCompleted
    | ResponseStopped
    | ResponseFailed
)
