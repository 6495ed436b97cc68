"""What a call with the embedded voice remembers: plain values, and the sound that is still to be understood.

Work under way is not among them. It is a function of what is (:mod:`.work`), so it is asked for again wherever the state goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from realtime_omni.models.voice.activity import SILENCE, Hearing

Number = Annotated[int, Meta(ge=0)]
Ms = Annotated[float, Meta(ge=0)]
Sound = NDArray[np.float32]
Kept = NDArray[np.int16]
"""Sound that is remembered: half the bytes."""
Prompt = tuple[int, ...] | str
"""What a language model is asked: tokens, or an endpoint's messages as JSON."""

MOST_ENTRIES = 96
KEPT_ENTRIES = 64
"""Of a conversation that has become long, once an answer is over (:func:`.conversation.shorten`)."""
MOST_PENDING = 8
MOST_UNTOLD = 2
MOST_TIMERS = 16
MOST_HEARD_MS = 30_000.0
"""Of one turn; the beginning of a longer one is forgotten."""
BEFORE_SPEECH_MS = 480.0
"""Kept in front of speech, for its soft beginning."""


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a saved call may hold."""


class Word(Struct, frozen=True):
    """A word of a response with its blank, and where in the response's sound it begins."""

    text: str
    at_ms: Ms


class Entry(Struct, frozen=True):
    """One text of the conversation. ``words``: of a response that was spoken, so that what was not heard can be taken back.

    ``kind`` ``call`` is a client's tool ``name`` that was called with the arguments ``text``, ``result`` what it returned;
    both have the call's id."""

    id: str
    role: Literal["system", "user", "assistant"]
    text: str
    kind: Literal["message", "instructions", "thinking", "commentary", "call", "result"] = "message"
    words: tuple[Word, ...] = ()
    name: str = ""


class Manners(Struct, frozen=True):
    """How the user's turns are found; see :class:`~realtime_omni.session.frame.Turns`."""

    mode: Literal["semantic", "energy", "client"] = "semantic"
    respond: bool = True
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    silence_ms: Ms = 500.0
    patience_ms: Ms = 4000.0
    """Of silence, mode ``semantic``: ends an unfinished sentence."""
    idle_ms: Ms | None = None


class Ears(Struct, frozen=True):
    """``run``: windows of speech in a row. ``utterance`` is under way since ``began_ms`` and was heard last before ``last_ms``,
    ``voiced`` windows of it. ``heard_from_ms``: where the kept sound begins. ``loudest``: how loud speech was lately."""

    run: Number = 0
    utterance: str | None = None
    began_ms: Ms = 0.0
    last_ms: Ms = 0.0
    voiced: Number = 0
    heard_from_ms: Ms = 0.0
    loudest: Annotated[float, Meta(ge=0)] = 0.0


class Untold(Struct, frozen=True):
    """A turn that is over and whose words are not known yet. ``respond``: they are to be answered."""

    utterance: str
    start_ms: Ms
    end_ms: Ms
    voiced: Number
    respond: bool


class Call(Struct, frozen=True):
    """A client's tool to be called. ``arguments``: JSON."""

    name: str
    arguments: str


class Offered(Struct, frozen=True):
    """A client's tool. ``parameters``: its JSON schema, as text."""

    name: str
    description: str = ""
    parameters: str = "{}"


class Offer(Struct, frozen=True):
    """What may be called. ``choice``: ``auto``, ``none``, ``required`` or one tool's name."""

    tools: tuple[Offered, ...] = ()
    choice: str = "auto"

    @property
    def names(self) -> tuple[str, ...]:
        return () if self.choice == "none" else tuple(tool.name for tool in self.tools)


NO_TOOLS = Offer()


class Response(Struct, frozen=True):
    """A response on its way. Its text is ``said``, or what the language model answers to ``prompt``; undecided without both.

    ``read`` tokens of prompt were read, ``tokens`` of the answer are there; its calls were ``called``; ``broken``: there was
    none. ``cut`` characters of the text have become clauses; ``clauses`` are not over yet, ``offset`` samples and ``told``
    words of the first one have sounded; ``sounded_ms`` of all, in which ``words`` were told."""

    id: str
    text_only: bool = False
    remember: bool = True
    instructions: str | None = None
    context: tuple[Entry, ...] | None = None
    tools: tuple[Offered, ...] | None = None
    tool_choice: str | None = None
    limit: Number = 0
    read: Number = 0
    tokens: Number = 0
    said: str | None = None
    prompt: Prompt | None = None
    called: bool = False
    broken: bool = False
    cut: Number = 0
    clauses: tuple[str, ...] = ()
    offset: Number = 0
    told: Number = 0
    sounded_ms: Ms = 0.0
    words: tuple[Word, ...] = ()


class Timer(Struct, frozen=True):
    due_ms: Ms
    alarm: str


class Facts(Struct, frozen=True):
    """Everything but sound. ``quiet_from_ms``: since when nobody says anything."""

    instructions: str | None = None
    manners: Manners = Manners()
    ears: Ears = Ears()
    entries: tuple[Entry, ...] = ()
    offer: Offer = NO_TOOLS
    untold: tuple[Untold, ...] = ()
    guess: Prompt | None = None
    """A prompt whose answer was begun before it was sure that the turn is over."""
    response: Response | None = None
    pending: tuple[Response, ...] = ()
    timers: tuple[Timer, ...] = ()
    utterances: Number = 0
    responses: Number = 0
    calls: Number = 0
    quiet_from_ms: Ms = 0.0
    context_used: Annotated[float, Meta(ge=0, le=1)] = 0.0


@dataclass(frozen=True, slots=True)
class VoiceState:
    """``heard``: sound at 16 kHz since ``facts.ears.heard_from_ms``. ``turns``: the sound of each of ``facts.untold``."""

    facts: Facts
    hearing: Hearing = SILENCE
    heard: tuple[Kept, ...] = ()
    turns: tuple[Kept, ...] = ()
