"""What the parts of a frame share: the state that they change one after the other, the signals, and whom they ask.

Lives as long as a frame. Owns the names of responses and the bounds of queues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as with_fields
from datetime import datetime

import numpy as np
from msgspec.structs import replace

from realtime_omni.duplex.spec import DuplexSpec
from realtime_omni.models.voice import conversation
from realtime_omni.models.voice.activity import RATE
from realtime_omni.models.voice.asking import Asking
from realtime_omni.models.voice.deciding import Decision, decide
from realtime_omni.models.voice.lm.language import MOST_TOKENS
from realtime_omni.models.voice.speaker import Speaker
from realtime_omni.models.voice.state import MOST_PENDING, Entry, Facts, Kept, Response, VoiceState
from realtime_omni.session.signals import ResponseEnded, ResponseStarted, Signal


@dataclass(frozen=True, slots=True)
class Cast:
    """Who takes part in every frame. ``skills``: rules answer before the language model. ``now``: the user's wall clock."""

    spec: DuplexSpec
    asking: Asking
    language: Speaker | None
    skills: bool
    now: Callable[[], datetime]


class Board:
    """See the module docstring. ``signals`` and ``state`` are the frame's result. ``call``: the session's name."""

    def __init__(self, state: VoiceState, start_ms: float, cast: Cast, call: str) -> None:
        self.state = state
        self.signals: list[Signal] = []
        self.start_ms = start_ms
        self.end_ms = start_ms + cast.spec.frame_ms
        self.cast = cast
        self.call = call

    @property
    def facts(self) -> Facts:
        return self.state.facts

    @property
    def detected_ms(self) -> float:
        """How far the detector has listened: whole windows."""
        return self.end_ms - len(self.state.hearing.waiting) / RATE * 1000

    @property
    def most_tokens(self) -> int:
        """Of an answer."""
        return MOST_TOKENS if self.cast.language is None else self.cast.language.most_tokens

    def set(self, **fields: object) -> None:
        """Change fields of the facts."""
        self.state = with_fields(self.state, facts=replace(self.state.facts, **fields))

    def keep(self, *, heard: tuple[Kept, ...], turns: tuple[Kept, ...] | None = None) -> None:
        """Change the sound that is remembered."""
        self.state = with_fields(self.state, heard=heard, turns=self.state.turns if turns is None else turns)

    def heard(self) -> Kept:
        """All that is kept of what the user says, in one piece."""
        return np.concatenate((*self.state.heard, np.zeros(0, np.int16)))

    def add(self, entry: Entry) -> None:
        """To the conversation."""
        self.set(entries=conversation.add(self.facts.entries, entry))

    def queue(self, response: Response) -> None:
        """It begins when those before it have ended; too many fail at once."""
        if len(self.facts.pending) < MOST_PENDING:
            self.set(pending=(*self.facts.pending, response))
        else:
            self.signals += (ResponseStarted(response.id), ResponseEnded(response.id, "failed"))

    def name_response(self) -> str:
        self.set(responses=self.facts.responses + 1)
        return f"r{self.facts.responses}"

    def by_rule(self, response: Response, entries: conversation.Entries) -> Decision | None:
        """What needs no language model."""
        return decide(response, entries, self.facts, self.cast.now()) if self.cast.skills else None

    def drop_guess(self) -> None:
        """The user went on, or something else is answered."""
        if self.facts.guess is not None and self.cast.language is not None:
            self.cast.language.drop(self.facts.guess, self.call)
        self.set(guess=None)

    def prepare(self, entries: conversation.Entries | None = None) -> None:
        """Let the language model read what the next question will begin with. ``entries``: the conversation by then."""
        if self.cast.language is not None:
            entries = self.facts.entries if entries is None else entries
            self.cast.language.prepare(*conversation.reading(self.facts.instructions, entries))
