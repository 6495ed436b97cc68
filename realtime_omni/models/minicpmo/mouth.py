"""Codes to sound: when which codes go to the vocoder, and what is still to be heard. The vocoder itself is a plug.

Whatever meets :class:`Vocoder` is one: the checkpoint's own (:mod:`.vocoder.token2wav`), or what ``options.vocoder`` names.

A turn begins with three codes of silence. The vocoder looks three codes ahead, so it gets 28 codes to make a second of 25, and
the last ones when the turn has ended. A turn's first sound may be short of a second: silence is put before it. Source of the
rules: OpenBMB's duplex runtime (Apache-2.0), read as facts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from realtime_omni.models.minicpmo.talker import CODES

RATE = 24_000
SECOND = 24_000
LOOKAHEAD = 3
LEAST_FRESH = 5
"""Codes beyond the lookahead for which a turn's beginning is made to sound at once."""
MOST_WAITING = LOOKAHEAD + CODES
MOST_PENDING = 3 * SECOND
"""Samples: a second to come, and what the last codes of a turn add."""

Voice = Mapping[str, Tensor]
"""What a vocoder remembers of a turn: named tensors that are never edited."""


@dataclass(frozen=True, slots=True)
class Job:
    """Codes of one row; all but the last three become sound, with ``last`` all."""

    voice: Voice
    codes: tuple[int, ...]
    last: bool


class Vocoder(Protocol):
    """A way to make sound of codes. It keeps nothing of a call; states are values."""

    @property
    def silence(self) -> int:
        """The code of silence."""
        ...

    @property
    def voice_bytes(self) -> int:
        """Of a turn's memory, at most."""
        ...

    @property
    def fingerprint(self) -> str:
        """What decides its sound: weights, options."""
        ...

    def begin(self, voice: str | None) -> Voice:
        """The memory a turn begins with, in the named voice."""
        ...

    def sound(self, jobs: Sequence[Job]) -> Sequence[tuple[Tensor, Voice]]:
        """float32 [n] at 24 kHz, -1..1, and the memory after, of every row."""
        ...

    def check(self, voice: Voice) -> Voice:
        """A saved memory, on the vocoder's device. Raises ArgumentError for one that it would not have made."""
        ...


@dataclass(frozen=True, slots=True)
class Mouth:
    """What a call has still to say. ``voice``: None between turns. ``codes``: made and not sounded. ``pending`` float32 [n]:
    sound that is to be heard."""

    voice: Voice | None
    codes: tuple[int, ...]
    pending: Tensor

    @classmethod
    def silent(cls) -> Mouth:
        return cls(None, (), torch.zeros(0))


@dataclass(frozen=True, slots=True)
class Speech:
    """What a row adds in a unit. ``last``: the turn ends with it."""

    mouth: Mouth
    codes: tuple[int, ...]
    last: bool


def pieces(
    waiting: tuple[int, ...], *, first: bool, last: bool
) -> tuple[list[tuple[tuple[int, ...], bool]], tuple[int, ...]]:
    """What goes to the vocoder now, each with whether it is the turn's last, and the codes that wait on."""
    least = LOOKAHEAD + (LEAST_FRESH if first else CODES)
    out: list[tuple[tuple[int, ...], bool]] = []
    while len(waiting) >= least:
        size = min(LOOKAHEAD + CODES, len(waiting))
        out.append((waiting[:size], False))
        waiting = waiting[size - LOOKAHEAD :]
    if last and waiting:
        out.append((waiting, True))
        waiting = ()
    return out, waiting


def speak(vocoder: Vocoder, rows: Sequence[Speech], voices: Sequence[str | None]) -> list[Mouth]:
    """The mouths after the unit's codes, sound still in them. A turn that begins cuts what is left of the one before."""
    silence = (vocoder.silence,) * LOOKAHEAD
    first = [row.mouth.voice is None for row in rows]
    plans = [
        pieces((silence if begins else row.mouth.codes) + row.codes, first=begins, last=row.last)
        for row, begins in zip(rows, first, strict=True)
    ]
    memories = [
        vocoder.begin(v) if row.mouth.voice is None else row.mouth.voice for row, v in zip(rows, voices, strict=True)
    ]
    made: list[list[Tensor]] = [[] for _ in rows]
    for turn in range(max((len(plan) for plan, _ in plans), default=0)):
        due = [place for place, (plan, _) in enumerate(plans) if len(plan) > turn]
        jobs = [Job(memories[place], *plans[place][0][turn]) for place in due]
        for place, (sound, memory) in zip(due, vocoder.sound(jobs), strict=True):
            made[place].append(sound.detach().float().cpu())
            memories[place] = memory
    out: list[Mouth] = []
    for row, begins, (_, codes), memory, sounds in zip(rows, first, plans, memories, made, strict=True):
        sound = torch.cat(sounds) if sounds else torch.zeros(0)
        if sounds and not row.last and len(sound) < SECOND:
            sound = torch.cat((torch.zeros(SECOND - len(sound)), sound))
        pending = sound if begins else torch.cat((row.mouth.pending, sound))
        out.append(Mouth(None if row.last else memory, codes, pending[:MOST_PENDING]))
    return out


def hear(mouth: Mouth) -> tuple[Tensor, Mouth]:
    """The next second, float32 [24000], silence where there is no sound; and the mouth after."""
    sound, rest = mouth.pending[:SECOND], mouth.pending[SECOND:]
    if len(sound) < SECOND:
        sound = torch.cat((sound, torch.zeros(SECOND - len(sound))))
    return sound.clamp(-1, 1), Mouth(mouth.voice, mouth.codes, rest.clone())
