"""What a duplex session tells beside its sound: the signals of one tick.

Plain values; a model makes them, everybody reads them. Times are milliseconds on the session's clock: 0 is the first sample
that the session took in, and tick n takes in, and sounds during, ``[n * frame_ms, (n + 1) * frame_ms)``. Signals of a tick
stand in the order in which they happened.

The grammar, which ``check_model`` holds models to. Of an utterance: SpeechStarted, SpeechStopped and TurnCommitted in one
tick, InputTranscript at any time after it has started (the last one ``final``); a turn that the client commits without speech
having been found has only TurnCommitted. Of a response: ResponseStarted, then Speaking, OutputText and ToolCall, then exactly
one ResponseEnded, also when it was cancelled. One response speaks at a time. One that ends before its turn comes (cancelled, or
one too many) is told as started and ended in one go, beside whichever runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

EndReason: TypeAlias = Literal["completed", "cancelled", "yielded", "max_tokens", "failed"]
"""``cancelled``: by a directive; ``yielded``: the model gave way to the user by itself."""


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """The user began to speak at ``at_ms`` (the first sample of speech, before any padding)."""

    utterance: str
    at_ms: float


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """The user's last sample of speech was before ``at_ms``; what found it out waited until this tick."""

    utterance: str
    at_ms: float


@dataclass(frozen=True, slots=True)
class TurnCommitted:
    """The user's turn is over: an utterance from ``start_ms`` to ``end_ms`` belongs to the conversation."""

    utterance: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class InputTranscript:
    """What the user said between two times. Fragments are joined as they are; a ``final`` one ends the utterance's text (it
    may be empty). Where ``whole``, it replaces all fragments before it."""

    utterance: str
    text: str
    start_ms: float
    end_ms: float
    final: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class ResponseStarted:
    response: str


@dataclass(frozen=True, slots=True)
class Speaking:
    """This tick's sound is of that response. At most one a tick."""

    response: str


@dataclass(frozen=True, slots=True)
class OutputText:
    """A fragment of what a response says, told in the tick in which its sound begins at the latest.

    ``[start_ms, end_ms)`` is when it sounds; both are the tick's beginning for text that is not spoken."""

    response: str
    text: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The agent asks its client to call a function. ``arguments``: JSON text."""

    response: str
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one response; a model that counts none says 0."""

    input_text: int = 0
    input_audio: int = 0
    input_cached: int = 0
    output_text: int = 0
    output_audio: int = 0


@dataclass(frozen=True, slots=True)
class ResponseEnded:
    response: str
    reason: EndReason
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True)
class IdleTimeout:
    """The user was silent for ``Turns.idle_ms``, from ``start_ms`` to ``end_ms``; a response follows."""

    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class ContextUse:
    """How much of the model's context is used, 0..1. Told when it has changed by a hundredth."""

    ratio: float


def ends_at_once(started: ResponseStarted, following: Signal | None) -> bool:
    """Whether a response never has its turn: its end follows its beginning."""
    return isinstance(following, ResponseEnded) and following.response == started.response


Signal: TypeAlias = (
    SpeechStarted
    | SpeechStopped
    | TurnCommitted
    | InputTranscript
    | ResponseStarted
    | Speaking
    | OutputText
    | ToolCall
    | ResponseEnded
    | IdleTimeout
    | ContextUse
)
