"""What a language model is to the voice: a conversation in, an answer that grows. The embedded one and endpoints are alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from realtime_omni.models.voice.state import Call, Offer, Prompt

SYSTEM = "You are a friendly voice assistant. Answer in one short sentence."
"""Where a client gives no instructions."""
Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Called:
    """The assistant called a tool. ``arguments``: JSON."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Returned:
    """What that call gave."""

    call_id: str
    output: str


Said: TypeAlias = tuple[Role, str] | Called | Returned


@dataclass(frozen=True, slots=True)
class Draft:
    """An answer so far. ``failed``: there will be no more of it. ``calls``: all of them, once it is done. ``tokens`` of it,
    and ``read`` ones of its prompt where they are counted."""

    text: str
    tokens: int
    done: bool
    failed: bool
    calls: tuple[Call, ...] = ()
    read: int = 0


class Speaker(Protocol):
    """``context``: tokens it can read, None where nobody says. ``most_tokens``: of an answer. ``calls_tools``: it chooses among
    the tools that it is offered, so tool results are its to read."""

    @property
    def context(self) -> int | None: ...

    @property
    def most_tokens(self) -> int: ...

    @property
    def calls_tools(self) -> bool: ...

    def prompt(self, system: str | None, said: Sequence[Said], offer: Offer = ...) -> Prompt:
        """What asks for the assistant's next turn; equal for equal conversations."""

    def draft(self, prompt: Prompt, limit: int = ..., call: str = ...) -> Draft:
        """The answer to a prompt of its own so far; asking begins it. ``call``: who asks."""

    def prepare(self, system: str | None, said: Sequence[Said]) -> None:
        """The conversation will go on from here."""

    def watch(self, notice: Callable[[], None]) -> None:
        """``notice`` is called, by any thread, whenever an answer has grown or ended."""

    def drop(self, prompt: Prompt, call: str = ...) -> None:
        """This call does not want the answer any more; who does asks again."""

    def close(self) -> None: ...
