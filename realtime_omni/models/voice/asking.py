"""What a frame asks of the parts that hear and speak, answered with what is known so far, and asked again in the next frame.

Owns who is asked: an endpoint where there is one, the embedded network where there is none or where it failed. Answers are
functions of what is asked (:mod:`.work`), so nobody owns a question.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from realtime_omni.models.voice.parts import Parts
from realtime_omni.models.voice.state import Kept, Sound
from realtime_omni.models.voice.work import Workshop


@dataclass(frozen=True, slots=True)
class Heard:
    """Words of a turn. ``failed``: nobody could say."""

    text: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Clip:
    """Sound of a clause at 24 kHz, as far as it is made; ``done``: there will be no more."""

    audio: Sound
    done: bool = True


_NOTHING = Clip(np.zeros(0, np.float32))


class Asking:
    """See the module docstring."""

    def __init__(self, parts: Parts, workshop: Workshop) -> None:
        """Used by one thread at a time."""
        self._parts = parts
        self._workshop = workshop

    @property
    def speaks(self) -> bool:
        """Whether there is anything that makes sound of text."""
        return self._parts.say is not None or self._parts.synthesizer is not None

    def finished(self, turn: Kept) -> float | None:
        """Probability that a turn is over; 1 where nobody can say."""
        return self._workshop.look(("finished", turn.tobytes()), lambda: self._parts.finished(_loud(turn)), 1.0)

    def words(self, turn: Kept) -> Heard | None:
        """What was said."""
        if self._parts.recognizer is not None:
            transcript = self._parts.recognizer.look(turn)
            if not transcript.done:
                return None
            if not transcript.failed:
                return Heard(transcript.text)
        recognize = self._parts.recognize
        if recognize is None:
            return Heard("", failed=True)
        return self._workshop.look(
            ("words", turn.tobytes()), lambda: Heard(recognize(_loud(turn))), Heard("", failed=True)
        )

    def clip(self, clause: str, call: str) -> Clip | None:
        """How a clause sounds. No sound where nobody can say it: it is told as text."""
        if not any(c.isalnum() for c in clause):
            return _NOTHING
        if self._parts.synthesizer is not None:
            spoken = self._parts.synthesizer.look(clause, call)
            done = spoken.done  # before the sound: what is done is all there
            if not spoken.failed or len(spoken.audio):
                return Clip(spoken.audio, done)
        return self._said(clause)

    def expect(self, clause: str) -> None:
        """It may be said soon. An endpoint is not asked: what is asked of it has to be dropped again, and may cost money."""
        if self._parts.synthesizer is None and any(c.isalnum() for c in clause):
            self._said(clause)

    def _said(self, clause: str) -> Clip | None:
        say = self._parts.say
        if say is None:
            return _NOTHING
        return self._workshop.look(("say", clause), lambda: Clip(say(clause)), _NOTHING)

    def forgive(self, clauses: tuple[str, ...], call: str) -> None:
        """These were said, by whoever could: an endpoint that failed is asked again when they are said again."""
        if self._parts.synthesizer is not None:
            for clause in clauses:
                self._parts.synthesizer.forgive(clause, call)

    def drop(self, clauses: tuple[str, ...], call: str) -> None:
        """The call does not want these any more."""
        if self._parts.synthesizer is not None:
            for clause in clauses:
                self._parts.synthesizer.drop(clause, call)


def _loud(kept: Kept) -> Sound:
    return kept.astype(np.float32) / np.float32(32768)
