"""One duplex session: what is fed to the model, what of its answers is let out, and where an interruption cuts.

Owns the fence (epoch), the frames that may be needed again, the directives that wait, the response that speaks, and, through
its parts, intake, playback and journal. One writer: whoever calls it, calls it from one thread. Must not know the engine,
tasks, sockets, or what time it is (``now_s`` is an argument).

    append, direct, mute, interrupt      what the client does; an interruption is complete when it returns
    due -> Feed*                         frames to hand to the model, in order
    settled | recover                    what became of them
    read(cursor)                         what is told, in order

Fence. Every frame is fed in an epoch. An interruption begins the next one: what was told and not read yet loses its sound, the
response has ended, and ``Cancel`` goes with the next frame. Answers to frames of an earlier epoch are let through as
silence, with what they tell of the user and without what they tell of the agent.

Replay. A model that keeps on barge-in is rewound to the first frame that was not heard; the frames since then are fed again,
now cancelled. Frames are fed again, too, when a tick has failed (``recover``). Frames that were told already are not told
twice: what is new in them goes out with the next.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise, zip_longest

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from realtime_omni.duplex.intake import SoundIntake
from realtime_omni.duplex.journal import Journal, Lost
from realtime_omni.duplex.outputs import (
    DuplexOptions,
    Ended,
    InputReport,
    Interrupted,
    InterruptReason,
    Output,
    Overlap,
    Tick,
)
from realtime_omni.duplex.playback import PlaybackLedger
from realtime_omni.duplex.spec import DuplexSpec
from realtime_omni.duplex.watch import InputWatch
from realtime_omni.errors import CapacityError, SessionGoneError
from realtime_omni.session.frame import MAX_DIRECTIVES, Cancel, Directive, Frame, Respond, Say, Truncate
from realtime_omni.session.signals import (
    IdleTimeout,
    InputTranscript,
    ResponseEnded,
    ResponseStarted,
    Signal,
    Speaking,
    SpeechStarted,
    SpeechStopped,
    TurnCommitted,
    ends_at_once,
)

MOST_FLYING = {"live": 4, "free": 48}
"""Frames that wait for the engine, by pace; it admits 64 of a session. Live, an engine that is behind makes sound be dropped
soon, instead of a conversation with seconds of delay."""
MOST_REQUESTED = 32
"""Responses that were asked for and have not begun."""
MOST_WAITING_DIRECTIVES = 4 * MAX_DIRECTIVES
RETAINED_FRAMES = 64
"""Frames that may be fed again: five seconds of 80 ms (two and a half of 40), more than playback lags behind."""
OF_THE_USER = (SpeechStarted, SpeechStopped, TurnCommitted, InputTranscript, IdleTimeout)


class Feed(Struct, frozen=True, eq=False, gc=False):
    """A frame on its way to the model. ``number``: which frame of the session's clock; ``round`` rises whenever frames are
    fed again, and answers of an earlier round count no more."""

    number: int
    epoch: int
    round: int
    frame: Frame


class _Fed(Struct, eq=False, gc=False):
    """A frame that may be fed again, and the epoch in which it was first."""

    frame: Frame
    epoch: int


class DuplexSession:
    """See the module docstring."""

    def __init__(self, spec: DuplexSpec, options: DuplexOptions, *, now_s: float, first_frame: int = 0) -> None:
        """``first_frame``: number of the model's next frame, where the session goes on from another."""
        self.spec = spec
        self.options = options
        default: Overlap = "model" if spec.yields else "barge_in_on_speech"
        self.overlap: Overlap = default if options.overlap is None else options.overlap
        self.intake = SoundIntake(
            spec.input_samples, spec.input_rate_hz, now_s, options.pace, options.idle, options.intake, first_frame
        )
        self.playback = PlaybackLedger()
        self.journal: Journal[Output] = Journal(options.journal)
        self.epoch = 0
        self.muted = False
        self.ended: str | None = None
        self.directives_refused = 0
        self._watch = InputWatch(spec.input_rate_hz)
        self._waiting: list[Directive] = []
        self._round = 0
        self._next = first_frame
        """Number of the next new frame."""
        self._told = first_frame
        """Frames below this number were told."""
        self._settled = first_frame
        """Frames below this number are in the model's state."""
        self._retained: deque[_Fed] = deque()
        """The frames before ``_next``, the oldest first."""
        self._again: deque[Feed] = deque()
        self._flying: deque[Feed] = deque()
        self._response: str | None = None
        """Which began last."""
        self._running = False
        self._requested: dict[str, None] = {}
        """Responses that were asked for and have not begun, in order."""
        self._buried: deque[str] = deque(maxlen=MOST_WAITING_DIRECTIVES)
        """Responses that ended before they began; the model may still begin them."""
        self._first_sound: int | None = None
        """The frame in which it was heard first."""
        self._carried: list[Signal] = []

    # ------------------------------------------------------------------ what the client does

    @property
    def now_ms(self) -> float:
        """The session's clock: the end of the last frame that was taken in."""
        return self._next * self.spec.frame_ms

    @property
    def response(self) -> str | None:
        """The response that runs."""
        return self._response if self._running else None

    def append(self, audio: NDArray[np.float32], now_s: float, sequence: int | None = None) -> bool:
        """Sound from the client at the model's input rate, float32 [N]; see :meth:`SoundIntake.append`."""
        self._require_open()
        taken = self.intake.append(audio, now_s, sequence)
        if taken:
            self._watch_input(audio, now_s)
        return taken

    def direct(self, *directives: Directive) -> None:
        """What acts at the beginning of the next frame, in order.

        Raises ArgumentError for one that the model cannot do, CapacityError when too many wait; nothing has changed then."""
        self._require_open()
        for directive in directives:
            self.spec.check_directive(directive)
        if len(self._waiting) + len(directives) > MOST_WAITING_DIRECTIVES:
            self.directives_refused += len(directives)
            raise CapacityError(f"more than {MOST_WAITING_DIRECTIVES} directives would wait")
        requested = {d.id: None for d in directives if isinstance(d, (Respond, Say))}
        if len(self._requested) + len(requested) > MOST_REQUESTED:
            raise CapacityError(f"{MOST_REQUESTED} responses wait already")
        self._waiting.extend(directives)
        self._requested.update(requested)

    def interrupt(
        self, now_s: float, *, heard_ms: float | None = None, reason: InterruptReason = "client_cancelled",
        oldest_rewind: int | None = None,
    ) -> int | None:  # fmt: skip
        """End the response that runs or is still heard, now. Returns the frame that the model is to be rewound to, or None.

        ``heard_ms``: how much of it was heard; None: what the playback ledger says. ``oldest_rewind``: the first frame that
        the model can go back to."""
        self._require_open()
        response, was_running = self._response, self._running
        if response is not None and not was_running and self.playback.remaining_ms(response, now_s) <= 0:
            response = None
        self.epoch += 1
        self.journal.silence()
        heard = 0.0
        if response is not None:
            heard = self._heard(response, now_s, heard_ms)
        ended = (*((response,) if was_running and response is not None else ()), *self._requested)
        self._buried.extend(self._requested)
        self._requested.clear()
        self._waiting = [d for d in self._waiting if not isinstance(d, (Respond, Say))]
        ending = self._ending(response, was_running, heard)
        self._waiting[:0] = ending  # before all that waits: no frame of this epoch may go without it
        self._running = False
        self._response = None
        self._carried.clear()
        self._tell(Interrupted(self.epoch, self._told * self.spec.frame_ms, response, heard, ended, reason), now_s)
        if response is None or oldest_rewind is None or not self.spec.keeps_on_barge_in:
            return None
        return self._rewind(heard, oldest_rewind, len(ending))

    def truncate(self, response: str, heard_ms: float, now_s: float) -> float | None:
        """The client has played no more of a response that is over; the conversation keeps no more.

        What was not sent cannot have been heard. Returns what stays, or None for a response that is not known."""
        stays = self.playback.cut(response, heard_ms)
        if stays is not None:
            self.direct(Truncate(response, stays))
        return stays

    def played(self, response: str, ms: float) -> float | None:
        """See :meth:`PlaybackLedger.played`."""
        return self.playback.played(response, ms)

    def clear(self) -> None:
        """Sound that was appended and not taken in is forgotten."""
        self.intake.clear()

    def end(self, reason: str, now_s: float) -> None:
        """The last output; whatever comes later is dropped. Harmless to repeat."""
        if self.ended is None:
            self._again.clear()
            self._flying.clear()
            self._waiting.clear()
            self._tell(Ended(reason), now_s)
            self.ended = reason

    # ------------------------------------------------------------------ the model's side

    def due(self, now_s: float) -> list[Feed]:
        """Frames to hand over now, in this order; they are flying until ``settled`` or ``recover``."""
        feeds: list[Feed] = []
        if self.ended is not None:
            return feeds
        while len(self._flying) < MOST_FLYING[self.options.pace]:
            feed = self._again.popleft() if self._again else self._new(now_s)
            if feed is None:
                break
            self._flying.append(feed)
            feeds.append(feed)
        return feeds

    def settled(
        self, feed: Feed, audio: NDArray[np.float32], signals: tuple[Signal, ...], now_s: float,
        oldest_rewind: int | None = None,
    ) -> int | None:  # fmt: skip
        """The model's answer to a feed, in order. Returns what :meth:`interrupt` does, should this be the moment of it."""
        if feed.round != self._round or self.ended is not None:
            return None
        assert self._flying.popleft() is feed, "answers came out of order"
        self._settled = feed.number + 1
        stale = feed.epoch != self.epoch
        replayed = feed.number < self._told
        rewind_to = None
        if self._barges_in(signals, now_s) and not stale and not replayed:
            rewind_to = self.interrupt(now_s, reason="turn_detected", oldest_rewind=oldest_rewind)
            stale = True
        if stale:
            signals = tuple(s for s in signals if isinstance(s, OF_THE_USER))
        if replayed:
            self._carry(signals)
            return rewind_to
        self._tell_tick(feed, audio, signals, stale, now_s)
        return rewind_to

    def recover(self, committed: int) -> None:
        """Feeds were lost: a tick failed or was aborted. The model's next frame is ``committed``; what follows is fed again."""
        self._feed_again(committed)

    def give_up_frame(self, number: int) -> None:
        """The model fails on this frame: silence without directives takes its place when it is fed again."""
        index = number - (self._next - len(self._retained))
        assert 0 <= index < len(self._retained)
        silence = np.zeros(self.spec.input_samples, np.float32)
        self._retained[index].frame = Frame(silence, (), "concealed")

    @property
    def flying(self) -> int:
        return len(self._flying)

    @property
    def settled_frames(self) -> int:
        """How many frames are in the model's state."""
        return self._settled

    # ------------------------------------------------------------------ what is told

    def read(self, cursor: int, most: int | None = None) -> list[tuple[int, Output | Lost]]:
        """What was told behind ``cursor``, with its numbers; see :meth:`Journal.after`."""
        return self.journal.after(cursor, most)

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        self.intake.check()
        self.playback.check()
        self.journal.check()
        numbers = [f.number for f in (*self._flying, *self._again)]
        assert all(b == a + 1 for a, b in pairwise(numbers)), f"frames were left out: {numbers}"
        assert not numbers or numbers[-1] == self._next - 1, "a frame was lost"
        assert self.ended is not None or numbers or self._settled == self._next, "frames are neither settled nor flying"
        assert len(self._flying) <= MOST_FLYING[self.options.pace]
        assert len(self._retained) <= RETAINED_FRAMES
        assert len(self._waiting) <= MOST_WAITING_DIRECTIVES + 1

    # ------------------------------------------------------------------ inside

    def _require_open(self) -> None:
        if self.ended is not None:
            raise SessionGoneError(f"the session has ended: {self.ended}")

    def _watch_input(self, audio: NDArray[np.float32], now_s: float) -> None:
        if not self.muted and self._watch.silent(audio):
            self._tell(InputReport("silent_microphone", self.now_ms), now_s)
        measured = self._watch.measured_hz(audio.size, now_s) if self.options.pace == "live" else None
        if measured is not None:
            self._tell(InputReport("wrong_rate", self.now_ms, measured), now_s)

    def _new(self, now_s: float) -> Feed | None:
        taken = self.intake.take(now_s, wanted=bool(self._waiting))
        if taken is None:
            return None
        audio, source = taken
        if self.muted:
            audio, source = np.zeros_like(audio), "muted"
        directives, self._waiting = tuple(self._waiting[:MAX_DIRECTIVES]), self._waiting[MAX_DIRECTIVES:]
        frame = Frame(audio, directives, source)
        self._retained.append(_Fed(frame, self.epoch))
        if len(self._retained) > RETAINED_FRAMES:
            self._retained.popleft()
        self._next += 1
        return Feed(self._next - 1, self.epoch, self._round, frame)

    def _barges_in(self, signals: tuple[Signal, ...], now_s: float) -> bool:
        if self.overlap != "barge_in_on_speech" or not any(isinstance(s, SpeechStarted) for s in signals):
            return False
        audible = self._response is not None and self.playback.remaining_ms(self._response, now_s) > 0
        return self._running or audible or bool(self._requested)

    def _heard(self, response: str, now_s: float, heard_ms: float | None) -> float:
        if heard_ms is None:
            playback = self.playback.get(response)
            heard_ms = 0.0 if playback is None else playback.estimate(now_s)
        stays = self.playback.cut(response, heard_ms)
        return 0.0 if stays is None else stays

    def _ending(self, response: str | None, was_running: bool, heard_ms: float) -> list[Directive]:
        """What ends it in the model: the one that runs, and those that frames under way ask for."""
        if response is not None and not was_running:
            return [Cancel(), Truncate(response, heard_ms)]
        if response is None and self._waiting and isinstance(self._waiting[0], Cancel):
            return []
        return [Cancel(None, None if response is None else heard_ms)]

    def _rewind(self, heard_ms: float, oldest_rewind: int, ending: int) -> int | None:
        """Feed again from the first frame that was not heard: there the response still runs, so it is cancelled there."""
        if self._first_sound is None:
            return None
        # At least its first frame stays: what made it begin is in there, and would do so again.
        first = self._first_sound + max(1, math.ceil(heard_ms / self.spec.frame_ms))
        first = max(first, oldest_rewind + len(self._flying), self._next - len(self._retained))
        if first >= self._settled:
            return None
        del self._waiting[:ending]
        cancel: tuple[Directive, ...] = (Cancel(None, heard_ms),)
        for fed in list(self._retained)[first - (self._next - len(self._retained)) :]:
            kept = tuple(d for d in fed.frame.directives if not isinstance(d, (Respond, Say, Cancel)))
            fed.frame, fed.epoch, cancel = replace(fed.frame, directives=cancel + kept), self.epoch, ()
        self._feed_again(first)
        return first

    def _feed_again(self, first: int) -> None:
        oldest = self._next - len(self._retained)
        assert first >= oldest, "frames that are not kept cannot be fed again"
        self._round += 1
        self._settled = first
        self._flying.clear()
        fed = list(self._retained)[first - oldest :]
        self._again = deque(Feed(n, f.epoch, self._round, f.frame) for n, f in enumerate(fed, first))

    def _carry(self, signals: tuple[Signal, ...]) -> None:
        """Of a frame that was told already: what it now tells of the agent goes out with the next."""
        self._carried += [s for s in signals if not isinstance(s, (*OF_THE_USER, Speaking))]

    def _tell_tick(
        self, feed: Feed, audio: NDArray[np.float32], signals: tuple[Signal, ...], stale: bool, now_s: float
    ) -> None:
        signals = (*self._carried, *signals)
        self._carried = []
        signals = self._note(signals, now_s)
        response = next((s.response for s in signals if isinstance(s, Speaking)), None)
        if stale:
            audio = np.zeros_like(audio)
        frame_ms = self.spec.frame_ms
        if response is not None:
            if self._first_sound is None:
                self._first_sound = feed.number
            self.playback.generated(response, frame_ms)
            self.playback.sent(response, frame_ms, now_s)
        start_ms = feed.number * frame_ms
        directives, source = feed.frame.directives, feed.frame.source
        tick = Tick(
            feed.number, feed.epoch, start_ms, start_ms + frame_ms, audio, response, signals, source, directives
        )
        self._told = feed.number + 1
        self.journal.put(tick, now_s, sound_bytes=audio.nbytes, mute=tick.without_sound())

    def _note(self, signals: tuple[Signal, ...], now_s: float) -> tuple[Signal, ...]:
        """Follow the responses; what concerns one that was ended by an interruption is left out."""
        kept: list[Signal] = []
        beside: set[str] = set()
        for signal, following in zip_longest(signals, signals[1:]):
            match signal:
                case ResponseStarted() if signal.response in self._buried:
                    continue
                case ResponseStarted() if self._running and ends_at_once(signal, following):
                    self._requested.pop(signal.response, None)
                    beside.add(signal.response)
                case ResponseEnded() if signal.response in beside:
                    pass
                case ResponseStarted():
                    self._requested.pop(signal.response, None)
                    if self._response is not None:
                        self.playback.commit(self._response, now_s)
                    self._response, self._running, self._first_sound = signal.response, True, None
                    self.playback.start(signal.response)
                case ResponseEnded():
                    if signal.response != self._response or not self._running:
                        continue
                    self._running = False
                case _:
                    owner = getattr(signal, "response", None)
                    if owner is not None and (owner != self._response or not self._running):
                        continue
            kept.append(signal)
        return tuple(kept)

    def _tell(self, output: Output, now_s: float) -> None:
        self.journal.put(output, now_s)
