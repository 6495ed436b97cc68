"""What a duplex session tells, and what it may be told how to behave: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from realtime_omni.duplex.intake import Idle, IntakeLimits, Pace
from realtime_omni.duplex.journal import JournalLimits
from realtime_omni.session.frame import Directive, Source
from realtime_omni.session.signals import Signal, Speaking

Overlap: TypeAlias = Literal["listen_only", "barge_in_on_speech", "model"]
"""What happens when the user speaks while the agent does: nothing; the agent is interrupted; what the model decides."""


@dataclass(frozen=True, slots=True)
class DuplexOptions:
    """How one session behaves.

    Args:
        overlap: None: ``model`` where the model yields by itself, else ``barge_in_on_speech``.
        pace: ``live``: the client sends at the pace of speech, what is late is replaced, what is too much is dropped;
            ``free``: everything that comes is taken at once (a client may send a recording), too much is refused.
        idle: a client that sends nothing is silent (``silence``), or time stands still until it sends (``hold``).
    """

    overlap: Overlap | None = None
    pace: Pace = "live"
    idle: Idle = "silence"
    intake: IntakeLimits = field(default_factory=IntakeLimits)
    journal: JournalLimits = field(default_factory=JournalLimits)


class Tick(Struct, frozen=True, eq=False, gc=False):
    """One frame of time: what was taken in became this. Plain values, so it is never in a cycle (``gc=False``).

    Args:
        number: of the frame; it lasts from ``start_ms`` to ``end_ms`` on the session's clock.
        epoch: rises with every interruption.
        audio: float32 [N] at the model's output rate, -1..1, silence included. Empty: it is not kept any more (read too late,
            or interrupted before it was read).
        response: whose speech it is; None: silence.
        signals: in order. A response that was interrupted has none here: see :class:`Interrupted`.
        source: what the frame was made of.
        directives: what acted at its beginning.
    """

    number: int
    epoch: int
    start_ms: float
    end_ms: float
    audio: NDArray[np.float32]
    response: str | None
    signals: tuple[Signal, ...]
    source: Source
    directives: tuple[Directive, ...]

    def without_sound(self) -> Tick | None:
        """What is kept of it when its sound is not; None: nothing."""
        signals = tuple(s for s in self.signals if not isinstance(s, Speaking))
        if not signals and not self.directives:
            return None
        return replace(self, audio=self.audio[:0], response=None, signals=signals)


InterruptReason: TypeAlias = Literal["turn_detected", "client_cancelled"]


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A new epoch: nothing of what was said before is heard any more, and nothing that was made before it comes.

    ``response``: whose speech was cut off, heard for ``heard_ms`` of its sound; None: nobody spoke. ``ended``: the responses
    whose end this is, so that no ResponseEnded follows: that one, if it had not ended before, and those that were asked for
    and had not begun."""

    epoch: int
    at_ms: float
    response: str | None
    heard_ms: float
    ended: tuple[str, ...]
    reason: InterruptReason


@dataclass(frozen=True, slots=True)
class InputReport:
    """Something is wrong with what the client sends; said once per trouble.

    ``silent_microphone``: digital silence, or almost, for ``SILENT_AFTER_S``. ``wrong_rate``: ``measured_hz`` samples come
    in a second instead of what was agreed."""

    kind: Literal["silent_microphone", "wrong_rate"]
    at_ms: float
    measured_hz: float | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The last output: why the session is over."""

    reason: str


Output: TypeAlias = Tick | Interrupted | InputReport | Ended
