"""A duplex session under random use: sound, silence, requests, interruptions, truncations, acknowledgements, answers that come
late, ticks that fail, readers that lag; and after every step the rules hold.

The model is the puppet, whose states are kept by frame, so that a rewind that is not what it should be is found by a frame that
comes in the wrong place or an utterance that is told twice. Seeded faults, each of which is found: see ``FAULTS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from duplex.puppeteer import FRAME, LOUD, Puppeteer
from realtime_omni.duplex.attachment import Attachment
from realtime_omni.duplex.intake import SoundIntake
from realtime_omni.duplex.journal import Journal
from realtime_omni.duplex.outputs import DuplexOptions
from realtime_omni.duplex.playback import PlaybackLedger
from realtime_omni.duplex.session import MOST_REQUESTED, DuplexSession
from realtime_omni.errors import StateError
from realtime_omni.session.frame import Respond, Say

Patch = pytest.MonkeyPatch


class DuplexMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize(
        overlap=st.sampled_from(["listen_only", "barge_in_on_speech", "model"]),
        rewinds=st.booleans(),
        yields=st.booleans(),
        pace=st.sampled_from(["live", "free"]),
    )
    def begin(self, overlap: Any, rewinds: bool, yields: bool, pace: Any) -> None:
        self.stage = Puppeteer(DuplexOptions(overlap=overlap, pace=pace), rewinds=rewinds, yields=yields)
        self.asked: list[str] = []
        self.sequence = self.tokens = 0
        self.attachment = Attachment("token 0")

    def _has_room(self) -> bool:
        return len(self.stage.session._requested) < MOST_REQUESTED

    def _name(self, kind: str) -> str:
        self.asked.append(f"{kind}{len(self.asked)}")
        return self.asked[-1]

    @rule(loud=st.booleans(), samples=st.integers(1, 3 * FRAME), again=st.booleans())
    def append(self, loud: bool, samples: int, again: bool) -> None:
        audio = np.full(samples, 0.3 if loud else 0.0, np.float32)
        self.sequence += 1
        assert self.stage.session.append(audio, self.stage.now_s, self.sequence)
        if again:
            assert not self.stage.session.append(audio, self.stage.now_s, self.sequence)

    @rule()
    def speak(self) -> None:
        """Three frames of the user's voice, answered as they come."""
        self.stage.session.clear()
        self.stage.run(3, LOUD)

    @precondition(_has_room)
    @rule(words=st.integers(0, 4))
    def say(self, words: int) -> None:
        self.stage.session.direct(Say(self._name("say"), "word " * words))

    @precondition(_has_room)
    @rule(text_only=st.booleans())
    def respond(self, text_only: bool) -> None:
        self.stage.session.direct(Respond(self._name("ask"), text_only=text_only))

    @rule(heard_ms=st.none() | st.floats(0, 1000))
    def interrupt(self, heard_ms: float | None) -> None:
        epoch = self.stage.session.epoch
        self.stage.interrupt(heard_ms)
        assert self.stage.session.epoch == epoch + 1
        assert self.stage.session.response is None

    @rule(heard_ms=st.floats(0, 2000))
    def truncate(self, heard_ms: float) -> None:
        for response in sorted(self.stage.reader.ended)[-1:]:
            stays = self.stage.session.truncate(response, heard_ms, self.stage.now_s)
            assert stays is None or stays <= heard_ms

    @rule(ms=st.floats(0, 3000))
    def played(self, ms: float) -> None:
        response = self.stage.session.response
        if response is not None:
            self.stage.session.played(response, ms)

    @rule(frames=st.integers(1, 6))
    def time_passes(self, frames: int) -> None:
        for _ in range(frames):
            self.stage.pulse()

    @precondition(lambda self: self.stage.fed)
    @rule(most=st.integers(1, 6))
    def settle(self, most: int) -> None:
        while self.stage.fed and most:
            self.stage.settle()
            most -= 1

    @precondition(lambda self: self.stage.fed)
    @rule()
    def fail(self) -> None:
        self.stage.fail()

    @rule(most=st.integers(1, 10))
    def read(self, most: int) -> None:
        self.stage.reader.read(most)

    @rule(took_over=st.booleans())
    def resume(self, took_over: bool) -> None:
        """The client is gone and comes back, or another does: it reads on behind what was read last."""
        held, generation = self.attachment, self.attachment.generation
        self.tokens += 1
        assert held.resume(f"token {self.tokens - 1}", f"token {self.tokens}") == generation + 1
        if took_over:
            with pytest.raises(StateError):
                held.require(generation)
        self.stage.reader.read()

    @rule(muted=st.booleans())
    def mute(self, muted: bool) -> None:
        self.stage.session.muted = muted

    @invariant()
    def the_session_is_sound(self) -> None:
        if hasattr(self, "stage"):
            self.stage.session.check()

    def teardown(self) -> None:
        if not hasattr(self, "stage"):
            return
        self.stage.session.muted = True
        while self.stage.fed:
            self.stage.settle()
        self.stage.drain()
        reader = self.stage.reader
        assert set(self.asked) <= set(reader.ended), "a response that was asked for never ended"
        assert reader.began <= set(reader.ended), "a response that began never ended"
        self.stage.session.end("client", self.stage.now_s)
        reader.read()
        assert reader.last == "client"


def run(examples: int, **how: Any) -> None:
    run_state_machine_as_test(
        DuplexMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **how,
        ),
    )


@pytest.mark.req("AC-42", "AC-43")
def test_a_session_keeps_its_rules_whatever_happens() -> None:
    run(25)


# ---------------------------------------------------------------------- seeded faults


def _no_fence(patch: Patch) -> None:
    settled = DuplexSession.settled

    def unfenced(self: DuplexSession, feed: Any, audio: Any, *rest: Any, **named: Any) -> int | None:
        feed_now = replace(feed, epoch=self.epoch)
        self._flying[0] = feed_now if self._flying and self._flying[0] is feed else self._flying[0]
        return settled(self, feed_now, audio, *rest, **named)

    patch.setattr(DuplexSession, "settled", unfenced)


def _sound_left_in_the_journal(patch: Patch) -> None:
    patch.setattr(Journal, "silence", lambda self: None)


def _no_cancel(patch: Patch) -> None:
    interrupt = DuplexSession.interrupt

    def silent(self: DuplexSession, *args: Any, **named: Any) -> int | None:
        before = len(self._waiting)
        rewind_to = interrupt(self, *args, **named)
        del self._waiting[min(before, len(self._waiting)) :]
        return rewind_to

    patch.setattr(DuplexSession, "interrupt", silent)


def _requests_survive(patch: Patch) -> None:
    interrupt = DuplexSession.interrupt

    def forgetful(self: DuplexSession, *args: Any, **named: Any) -> int | None:
        kept = [d for d in self._waiting if isinstance(d, (Respond, Say))]
        rewind_to = interrupt(self, *args, **named)
        self._waiting += kept
        return rewind_to

    patch.setattr(DuplexSession, "interrupt", forgetful)


def _frames_are_forgotten(patch: Patch) -> None:
    patch.setattr(DuplexSession, "recover", lambda self, committed: self._feed_again(committed + 1))


def _told_twice(patch: Patch) -> None:
    def carry(self: DuplexSession, signals: Any) -> None:
        self._carried += signals

    patch.setattr(DuplexSession, "_carry", carry)


def _one_frame_too_far(patch: Patch) -> None:
    rewind = DuplexSession._rewind

    def further(self: DuplexSession, *args: Any) -> int | None:
        first = rewind(self, *args)
        return None if first is None else max(0, first - 1)

    patch.setattr(DuplexSession, "_rewind", further)


def _played_before_sent(patch: Patch) -> None:
    def played(self: PlaybackLedger, response: str, ms: float) -> float | None:
        playback = self._responses.get(response)
        if playback is not None:
            playback.played_ms = ms
        return ms

    patch.setattr(PlaybackLedger, "played", played)


def _duplicates_are_taken(patch: Patch) -> None:
    patch.setattr(SoundIntake, "_lost", lambda self, sequence: 0)


def _ends_are_told_twice(patch: Patch) -> None:
    patch.setattr(DuplexSession, "_note", lambda self, signals, now_s: signals)


FAULTS = (
    _no_fence,
    _sound_left_in_the_journal,
    _no_cancel,
    _requests_survive,
    _frames_are_forgotten,
    _told_twice,
    _one_frame_too_far,
    _played_before_sent,
    _duplicates_are_taken,
    _ends_are_told_twice,
)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_seeded_fault_is_found(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017 - which rule it breaks depends on what comes first
        run(200, database=None, phases=(Phase.generate,), derandomize=True)
