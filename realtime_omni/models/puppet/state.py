"""What a puppet remembers: plain values, so that it can be saved as they are."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from realtime_omni.models.puppet.ears import Ears

Number = Annotated[int, Meta(ge=0)]
MOST_TURNS = 64
MOST_PENDING = 64
"""Lines that wait; a session lets fewer wait, so that none is lost."""


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a saved puppet may hold."""


class Manners(Struct, frozen=True):
    """How the user's turns are found; see :class:`~realtime_omni.session.frame.Turns`."""

    mode: Literal["client", "energy", "semantic", "model"]
    respond: bool
    threshold: Annotated[float, Meta(ge=0, le=1)]
    silence_ms: Annotated[float, Meta(ge=0)]
    idle_ms: Annotated[float, Meta(ge=0)] | None


class Turn(Struct, frozen=True):
    """One turn of the conversation, as it is remembered."""

    id: str
    role: Literal["system", "user", "assistant"]
    text: str


class Call(Struct, frozen=True):
    """A function to be called in place of speech."""

    name: str
    arguments: str


class Line(Struct, frozen=True):
    """A response: what it says (or calls), and since which frame. ``remember``: it becomes a turn."""

    id: str
    text: str
    text_only: bool = False
    remember: bool = True
    call: Call | None = None
    began: Number = 0


class PuppetState(Struct, frozen=True):
    """``frames`` taken in; ``line`` runs, ``pending`` wait."""

    manners: Manners
    frames: Number = 0
    ears: Ears = Ears()
    utterances: Number = 0
    responses: Number = 0
    calls: Number = 0
    lines: Number = 0
    """Of the script that were said."""
    line: Line | None = None
    pending: tuple[Line, ...] = ()
    turns: tuple[Turn, ...] = ()
    tools: tuple[str, ...] = ()
    heard_from_ms: float = 0.0
    """Since when what is heard belongs to no turn yet."""
    quiet_from_ms: float = 0.0
    """Since when nobody says anything."""
    transcript: str | None = None
    """Utterance that is under way."""
