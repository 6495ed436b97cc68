"""What a client sends becomes frames: order, gaps, lateness, pace.

Owns the samples that wait, at the model's rate, and the session's clock: a frame taken is a frame of time. Must not know
models, wires, or what time it is: ``now_s`` is an argument.

The clock follows the client's. At pace ``live`` a frame is taken when it is there and one frame's time after the last; when
more waits than the client's packets explain, one more a time, so that a client whose clock is fast does not fill the
buffer. So it is when a whole frame was left behind every one that was taken for ``SPARE_S``: what came late and at once
after a pause of the network does not stay in the way for the rest of the call. A client that is slow is waited for: only
what is ``late_ms`` behind is replaced by silence (``concealed``), and when it comes after all, as much of it is dropped. At
pace ``free`` every frame that is there is taken at once. A client that has sent nothing for ``IDLE_AFTER_S`` is not late
but idle.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from realtime_omni.errors import ArgumentError, EventQueueFullError
from realtime_omni.session.frame import Source

Pace: TypeAlias = Literal["live", "free"]
Idle: TypeAlias = Literal["silence", "hold"]

IDLE_AFTER_S = 1.0
EARLY_S = 1e-3
"""A frame may be taken so much before its time, so that clocks that are read one after the other do not skip a turn."""
LONGEST_LAG_S = 1.0
"""Idle time that could not be taken in while the engine was behind is left out beyond that."""
SPARE_S = 2.0
FORGET_PACKET_S = 10.0
"""How long the largest packet is remembered as the client's habit."""
MAX_GAP_MS = 2_000.0
"""Longest stretch of lost packets that is replaced by silence; what is longer is a pause of the client's."""
MAX_SEGMENTS = 1024
"""Stretches of idle time that ``written_ms`` remembers."""


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """``late_ms``: how long a frame is waited for. ``max_ms``: how much may wait; more is refused at pace ``free``, and at
    pace ``live`` the oldest gives way."""

    late_ms: float = 160.0
    max_ms: float = 30_000.0
    max_live_ms: float = 1_000.0


@dataclass(slots=True)
class IntakeStatistics:
    """Samples at the model's rate. ``written``: what the client sent, what was lost on its way included. ``concealed``:
    silence in place of what was late or lost; ``late``: dropped, because silence had taken its place; ``overrun``: dropped,
    because it came faster than time; ``behind``: dropped, because frames were not taken in time; ``idle``: silence because
    nothing came."""

    written: int = 0
    duplicates: int = 0
    concealed: int = 0
    late: int = 0
    overrun: int = 0
    behind: int = 0
    idle: int = 0


@dataclass(slots=True)
class _Packet:
    audio: NDArray[np.float32]
    concealed: bool


@dataclass(slots=True)
class _Idle:
    """A stretch of inserted silence: where it begins on the session's clock, and how long all up to its end are."""

    start: int
    length: int
    before: int

    @property
    def total(self) -> int:
        return self.before + self.length


@dataclass(slots=True)
class SoundIntake:
    """The samples of one session. ``opened_s``: when its clock began; ``first_frame``: at which frame, where the session goes
    on from another."""

    frame_samples: int
    rate_hz: int
    opened_s: float
    pace: Pace = "live"
    idle: Idle = "silence"
    limits: IntakeLimits = field(default_factory=IntakeLimits)
    first_frame: int = 0
    statistics: IntakeStatistics = field(default_factory=IntakeStatistics)
    _packets: deque[_Packet] = field(default_factory=deque)
    _waiting: int = 0
    _taken: int = 0
    _debt: int = 0
    """Late samples that silence has taken the place of."""
    _sequence: int | None = None
    _heard_s: float | None = None
    _stretch_s: float = 0.0
    """Since when the client sends without a pause, and how many samples that are."""
    _stretch: int = 0
    _taken_s: float = 0.0
    _extra_s: float | None = None
    _least: int = 0
    """The fewest samples that were left behind a frame since ``_least_s``."""
    _least_s: float = 0.0
    _largest: int = 0
    _largest_s: float = 0.0
    _segments: deque[_Idle] = field(default_factory=lambda: deque(maxlen=MAX_SEGMENTS))

    def __post_init__(self) -> None:
        self._taken_s = self._least_s = self.opened_s
        self._taken = self.first_frame * self.frame_samples
        if self._taken:
            self._note_idle(0, self._taken)

    @property
    def waiting_ms(self) -> float:
        return self._waiting * 1000 / self.rate_hz

    def starves(self, now_s: float) -> bool:
        """The client sends, and what it sends is not a frame yet: it may be there a little later."""
        heard_s = self._heard_s
        return heard_s is not None and now_s - heard_s < IDLE_AFTER_S and self._waiting < self.frame_samples

    @property
    def frame_s(self) -> float:
        return self.frame_samples / self.rate_hz

    def append(self, audio: NDArray[np.float32], now_s: float, sequence: int | None = None) -> bool:
        """Samples at the model's rate, float32 [N]. False: a packet of this or a later number came already, nothing changed.

        ``sequence``: packets are numbered by ones; a number that was left out is silence of this packet's length.
        Raises ArgumentError, EventQueueFullError (pace ``free``); nothing has changed then."""
        if audio.dtype != np.float32 or audio.ndim != 1:
            raise ArgumentError("audio must be a float32 array of one dimension", path="audio")
        lost = self._lost(sequence)
        if lost is None:
            self.statistics.duplicates += 1
            return False
        gap = self._gap(lost, audio.size)
        if self.pace == "free" and self._waiting + gap + audio.size > self._samples(self.limits.max_ms):
            raise EventQueueFullError(f"more than {self.limits.max_ms:.0f} ms of sound would wait", path="audio")
        self._sequence = sequence
        if self._heard_s is None or now_s - self._heard_s >= IDLE_AFTER_S:
            self._debt = 0  # a pause, not lateness
            self._stretch_s, self._stretch = now_s, 0
            if self._heard_s is None or self.idle == "hold":
                self._taken_s = now_s - self.frame_s  # what comes first is taken at once: nothing waits behind it
        self._heard_s = now_s
        if gap:
            self.statistics.concealed += gap
            self._put(np.zeros(gap, np.float32), concealed=True)
        self._put(audio, concealed=False)
        if audio.size >= self._largest or now_s - self._largest_s > FORGET_PACKET_S:
            self._largest, self._largest_s = audio.size, now_s
        self._stretch += gap + audio.size
        if self.pace == "live":
            self._shed(now_s)
        return True

    def take(self, now_s: float, *, wanted: bool = False) -> tuple[NDArray[np.float32], Source] | None:
        """The next frame, when it is due; called until it returns None. ``wanted``: something waits for a frame to go with, so
        that silence may take its place where the clock would stand still."""
        if self._waiting >= self.frame_samples:
            return self._whole() if self._is_turn(now_s) else None
        self._least = 0
        recent = self._heard_s is not None and now_s - self._heard_s < IDLE_AFTER_S
        if self.idle == "hold" and not (recent or wanted or self._waiting):
            self._taken_s = max(self._taken_s, now_s - self.frame_s)
            return None
        self._taken_s = max(self._taken_s, now_s - LONGEST_LAG_S)
        patience_s = self.limits.late_ms / 1000 if recent else 0.0
        if now_s + EARLY_S < self._taken_s + self.frame_s + patience_s:
            return None
        self._taken_s += self.frame_s
        return self._padded("concealed" if recent and self.pace == "live" else "idle")

    def clear(self) -> None:
        """Forget what waits."""
        self._taken_or_dropped(self._waiting)

    def written_ms(self, at_ms: float) -> float:
        """A moment of the session's clock as a position in what the client has sent: idle time does not count."""
        at = at_ms * self.rate_hz / 1000
        for segment in reversed(self._segments):
            if at >= segment.start:
                inside = min(at - segment.start, segment.length)
                return (at - segment.before - inside) * 1000 / self.rate_hz
        before = self._segments[0].before if self._segments else 0
        return max(0.0, at - before) * 1000 / self.rate_hz

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        assert self._waiting == sum(p.audio.size for p in self._packets), "the samples that wait were miscounted"
        assert min(self._waiting, self._debt) >= 0, "more left than was there"
        limit = self.limits.max_live_ms if self.pace == "live" else self.limits.max_ms
        assert self.waiting_ms <= limit + 1e-6, "more waits than may"

    def _samples(self, ms: float) -> int:
        return int(ms * self.rate_hz / 1000)

    def _lost(self, sequence: int | None) -> int | None:
        """Packets that were left out before this one; None for one that came already."""
        if sequence is None or self._sequence is None:
            return 0
        return None if sequence <= self._sequence else sequence - self._sequence - 1

    def _gap(self, lost: int, size: int) -> int:
        gap = lost * size
        return gap if gap <= self._samples(MAX_GAP_MS) else 0

    def _put(self, audio: NDArray[np.float32], *, concealed: bool) -> None:
        self.statistics.written += audio.size
        late = min(self._debt, audio.size)
        self._debt -= late
        self.statistics.late += late
        audio = audio[late:]
        if audio.size:
            self._packets.append(_Packet(audio, concealed))
            self._waiting += audio.size

    def _shed(self, now_s: float) -> None:
        most = self._samples(self.limits.max_live_ms)
        excess = self._waiting - most
        if excess <= 0:
            return
        ahead = self._stretch - (now_s - self._stretch_s) * self.rate_hz
        if ahead > most / 2:  # of what waits, most is there before its time: no engine could have taken it
            self.statistics.overrun += excess
        else:
            self.statistics.behind += excess
        self._taken_or_dropped(excess)

    def _is_turn(self, now_s: float) -> bool:
        if self.pace == "free" or now_s + EARLY_S >= self._taken_s + self.frame_s:
            self._taken_s = now_s
            return True
        habit = self._largest + 2 * self.frame_samples
        if self._extra_s != now_s and (self._waiting > habit or self._has_spare(now_s)):
            self._extra_s = now_s
            return True
        return False

    def _has_spare(self, now_s: float) -> bool:
        """A whole frame was always left, for long enough."""
        if now_s - self._least_s < SPARE_S:
            return False
        least, self._least, self._least_s = self._least, self._waiting, now_s
        return least >= self.frame_samples

    def _whole(self) -> tuple[NDArray[np.float32], Source]:
        audio, concealed = self._taken_or_dropped(self.frame_samples)
        self._taken += self.frame_samples
        self._least = min(self._least, self._waiting)
        return audio, "concealed" if concealed else "heard"

    def _padded(self, source: Source) -> tuple[NDArray[np.float32], Source]:
        """What there is of a frame, and silence."""
        audio, _ = self._taken_or_dropped(self._waiting)
        silence = self.frame_samples - audio.size
        if source == "concealed":
            self._debt += silence
            self.statistics.concealed += silence
        else:
            self.statistics.idle += silence
            self._note_idle(self._taken + audio.size, silence)
        self._taken += self.frame_samples
        return np.concatenate([audio, np.zeros(silence, np.float32)]), source

    def _note_idle(self, start: int, length: int) -> None:
        last = self._segments[-1] if self._segments else None
        if last is not None and last.start + last.length == start:
            last.length += length
        else:
            self._segments.append(_Idle(start, length, last.total if last is not None else 0))

    def _taken_or_dropped(self, count: int) -> tuple[NDArray[np.float32], bool]:
        """The oldest ``count`` samples leave; whether any of them was made up."""
        parts: list[NDArray[np.float32]] = []
        concealed = False
        self._waiting -= count
        while count:
            packet = self._packets[0]
            part, packet.audio = packet.audio[:count], packet.audio[count:]
            parts.append(part)
            concealed = concealed or packet.concealed
            count -= part.size
            if not packet.audio.size:
                self._packets.popleft()
        if len(parts) == 1:
            return parts[0], concealed
        return (np.concatenate(parts) if parts else np.zeros(0, np.float32)), concealed
