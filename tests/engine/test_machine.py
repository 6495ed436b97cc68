"""The engine under random use: create, accept, tick, fail, abort, reset, rollback, close, evict, detach, expire, churn.

After every rule the whole engine recounts itself and every session is compared with an independent account of it
(``world_model.py``); every picture is compared with a replay of committed history alone, whose clean passes are not deferred.

Faults that were seeded into a copy of the code, one by one, each found within 100 runs of this machine (a test run makes 25):

- ``Session.abort_tick`` leaves the tick in flight; ``fail_tick`` advances the index, or drops the waiting events
- ``commit_tick`` keeps an applied event in the queue, or forgets the prompt, or the controls
- ``finish_reset`` keeps the prompt, the controls or the epoch; the intake's floor falls in ``discard_pending``
- a discarded event is answered ``duplicate``; ``recall`` ignores the payload
- ``BatchRun.rollback`` keeps the reservation; ``precommit`` publishes the model's state before it can fail
- ``_withdraw`` leaves the row in the batch, or commits it; ``_drive`` gives the whole batch the error of one row
- the calls behind a failed one are kept waiting; a failed session ticks; a tombstone is reset
- ``_fail`` does not release under ``on_failure: release``; rollback is allowed after a release
- ``Endings._bury`` leaves the id taken; a failed release is not tried again, or is tried without a pause
- eviction without a notice; a lease that never expires; ``attach`` that does not end the lease
- the runner's ``reset`` keeps the old model state; noise that is not a function of (seed, chunk, step)
- ``Registry.claim`` repeats a generation
- a deferred clean pass is forgotten by the commit of its chunk; its failure takes the chunk back
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.world_model import Event, Expected, Replay, picture
from realtime_omni.engine import commands as c
from realtime_omni.errors import (
    AbortedError,
    CapacityError,
    CleanupError,
    EventConflictError,
    EventQueueFullError,
    OmniError,
    SessionGoneError,
    StaleEventError,
    StateError,
    TickError,
)
from realtime_omni.session.values import SessionId
from realtime_omni.testing.faults import at, inject
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import PROMPTS, TinyKVWorld, move

PLACES = 3
NAMES = "abcde"
POINTS = ("reducer.prepare", "forward:1", "forward:2", "forward:3", "decode", "sync", "commit", "reducer.commit")
MID_TICK = ("forward:1", "forward:2", "forward:3", "decode", "sync")
REFUSALS: dict[str, type[OmniError]] = {
    "refused": StateError,
    "conflict": EventConflictError,
    "stale": StaleEventError,
    "full": EventQueueFullError,
}

names = st.sampled_from(NAMES)
somebody = st.integers(0, 11)
"""Mostly one of the live sessions, sometimes an id that nobody has; see ``pick``."""
seeds = st.integers(0, 3)
prompts = st.sampled_from(PROMPTS)
words = st.tuples(st.sampled_from([1, 1, 1, 2, 0, -1]), st.none() | prompts, st.integers(-2, 2))
"""How far the id rises above the highest one, a prompt, a control."""


class EngineMachine(RuleBasedStateMachine):
    """See the module docstring."""

    @initialize(
        policy=st.sampled_from(["refuse", "lru"]),
        on_failure=st.sampled_from(["keep", "release"]),
        batch=st.integers(1, 3),
        deferred=st.booleans(),
    )
    def start(self, policy: str, on_failure: str, batch: int, deferred: bool) -> None:
        self.engine = InlineEngine(
            TinyKVWorld(deferred=deferred),
            sessions=PLACES,
            policy=policy,
            on_failure=on_failure,
            max_batch=batch,
            max_pending_events=4,
        )
        self.deferred = deferred
        self.lru, self.keep = policy == "lru", on_failure == "keep"
        self.free = self.engine.free_pages
        self.live: dict[str, Expected] = {}
        self.replay = Replay()
        self.lives = 0
        self.last_generation = 0
        self.told = 0
        for name in NAMES[:PLACES]:
            self.create(name, seed=1, prompt=PROMPTS[0])

    # ------------------------------------------------------------------ rules

    @rule(name=names, seed=seeds, prompt=prompts)
    def create(self, name: str, seed: int, prompt: str) -> None:
        if self.lives >= 25:
            return
        evictable = [n for n, s in self.live.items() if s.state in ("active", "failed")]
        if name in self.live:
            error: type[OmniError] | None = StateError
        else:
            error = CapacityError if len(self.live) == PLACES and not (self.lru and evictable) else None
        view = self.attempt(error, lambda: self.engine.create(name, seed=seed, prompt=prompt))
        if error is not None:
            return
        if len(self.live) == PLACES:
            evicted = [n.session_id for n in self.new_notices() if n.kind == "evicted"]
            assert len(evicted) == 1
            assert evicted[0] in evictable
            del self.live[evicted[0]]
        assert view.generation > self.last_generation
        self.last_generation = view.generation
        self.lives += 1
        self.live[name] = Expected(self.lives, seed, prompt, prompt)

    @rule(who=somebody, said=st.lists(words, min_size=1, max_size=5))
    def accept(self, who: int, said: list[tuple[int, str | None, int]]) -> None:
        name = self.pick(who)
        for step, prompt, dx in said:
            session = self.live.get(name)
            self.send(name, (max((session.floor if session else 0) + step, 0), prompt, dx))

    def busy(self, name: str) -> None:
        """Give a session a past and something that waits, so that what follows has something to get wrong."""
        session = self.live.get(name)
        if session is None or session.state != "active":
            return
        for prompt in PROMPTS[1:]:
            self.send(name, (session.floor + 1, prompt, session.floor))
            if prompt == PROMPTS[1]:
                self.run_tick([name], doomed=None)

    def send(self, name: str, event: Event) -> None:
        session = self.live.get(name)
        fate = "gone" if session is None else session.fate(event)
        controls = [] if event[2] is None else [move(event[2])]
        error = SessionGoneError if session is None else REFUSALS.get(fate)
        receipt = self.attempt(error, lambda: self.engine.accept(name, event[0], prompt=event[1], controls=controls))
        if error is None:
            assert session is not None
            session.accept(event)
            assert (str(receipt.status), receipt.pending_event_count) == (fate, len(session.pending))

    @rule(who=somebody, which=st.integers(0, 20), other=st.booleans())
    def repeat(self, who: int, which: int, other: bool) -> None:
        """An event that was sent before, as it was or with another payload."""
        session = self.live.get(self.pick(who))
        known = [] if session is None else [*session.applied.values(), *session.discarded.values(), *session.pending]
        if not known:
            return
        event_id, prompt, dx = known[which % len(known)]
        if other:
            dx = 7
        self.send(self.pick(who), (event_id, prompt, dx))

    @rule()
    def tick_all(self) -> None:
        self.run_tick(sorted(self.live), doomed=None)

    @rule(members=st.sets(names, min_size=1))
    def tick(self, members: set[str]) -> None:
        self.run_tick(sorted(members), doomed=None)

    @rule(who=somebody, members=st.sets(names), point=st.sampled_from(POINTS))
    def fail(self, who: int, members: set[str], point: str) -> None:
        name = self.pick(who)
        if self.deferred and point == "forward:3":
            return
        together = [*sorted(members | {name}), name]  # a second call waits behind the one that fails
        with inject(self.engine, point, name, times=None):
            self.run_tick(together, doomed=name)

    @rule(who=somebody, point=st.sampled_from(["prefill:1", "sync", "commit"]))
    def fail_clean_pass(self, who: int, point: str) -> None:
        name = self.pick(who)
        carried = self.unwritten(name)
        with inject(self.engine, point, name, times=None):
            self.engine.rest()
        if carried and self.live[name].state == "active":
            self.live[name].fail(keep=self.keep)

    @rule()
    def rest(self) -> None:
        self.engine.rest()
        assert not any(self.unwritten(n) for n, s in self.live.items() if s.state == "active")

    @rule(
        who=somebody,
        point=st.sampled_from(MID_TICK),
        how=st.sampled_from(["abort", "reset", "close", "detach"]),
        seed=seeds,
    )
    def interrupt(self, who: int, point: str, how: str, seed: int) -> None:
        """A command between two passes of a tick in which the session and all others take part."""
        active = [n for n, s in sorted(self.live.items()) if s.state == "active"]
        if not active or (self.deferred and point == "forward:3"):
            return
        self.engine.rest()  # so that the first pass is one of the tick
        name = active[who % len(active)]
        session = self.live[name]
        where: dict[str, Any] = {"ticket": 0, "session_id": SessionId(name)}
        command: c.Command = {
            "abort": c.Abort(**where),
            "reset": c.Reset(**where, seed=seed),
            "close": c.Close(**where),
            "detach": c.Detach(**where, grace_s=0.0),
        }[how]
        sent: list[int] = []
        with at(self.engine, point, lambda: sent.append(self.engine.send(command)), name):
            self.run_tick([*sorted(self.live), name], doomed=None, leaver=name, leaves_by=how)
        assert self.engine.error(sent[0]) is None
        if how == "reset":
            session.reset(seed)
        elif how in ("close", "detach"):
            del self.live[name]

    @rule(who=somebody, seed=st.none() | seeds, busy=st.booleans())
    def reset(self, who: int, seed: int | None, busy: bool) -> None:
        name = self.pick(who)
        if busy:
            self.busy(name)
        session = self.live.get(name)
        allowed = session is not None and session.state in ("active", "failed")
        self.attempt(None if allowed else StateError, lambda: self.engine.reset(name, seed=seed))
        if allowed:
            assert session is not None
            waiting = tuple(event[0] for event in session.pending)
            session.reset(seed)
            discarded = [n.event_ids for n in self.new_notices() if n.kind == "events_discarded"]
            assert discarded == ([waiting] if waiting else [])

    @rule(who=somebody)
    def rollback(self, who: int) -> None:
        name = self.pick(who)
        session = self.live.get(name)
        allowed = session is not None and session.state == "failed" and session.kept
        self.attempt(None if allowed else StateError, lambda: self.engine.rollback(name))
        if allowed:
            assert session is not None
            session.state = "active"

    @rule(who=somebody)
    def close(self, who: int) -> None:
        name = self.pick(who)
        self.attempt(None if name in self.live else SessionGoneError, lambda: self.engine.close(name))
        if name in self.live:
            assert self.new_notices()[-1].kind == "closed"
            del self.live[name]

    @rule(who=somebody)
    def close_and_fail_to_release(self, who: int) -> None:
        name = self.pick(who)
        session = self.live.get(name)
        if session is None or (not session.kept and session.state == "failed"):
            return
        with inject(self.engine, "release", name):
            self.attempt(CleanupError, lambda: self.engine.close(name))
        assert self.new_notices()[-1].kind == "cleanup_failed"
        session.bury_failed(self.now)

    @rule(
        who=somebody, grace=st.sampled_from([0.5, 3.0]), comes_back=st.booleans(), seconds=st.sampled_from([0.25, 3.0])
    )
    def leave(self, who: int, grace: float, comes_back: bool, seconds: float) -> None:
        name = self.pick(who)
        session = self.live.get(name)
        allowed = session is not None and session.state in ("active", "failed")
        if allowed:
            assert session is not None
            self.engine.detach(name, grace)
            session.lease_until = None if comes_back else self.now + grace
        if comes_back:
            self.attempt(None if allowed else StateError, lambda: self.engine.attach(name))
        self.wait(seconds)

    @rule(seconds=st.sampled_from([0.25, 1.0, 2.5]))
    def wait(self, seconds: float) -> None:
        self.engine.advance(seconds)
        for name, session in list(self.live.items()):
            ends = [t for t in (session.lease_until, session.retry_at) if t is not None]
            if ends and min(ends) <= self.now:
                del self.live[name]
                assert [n.session_id for n in self.new_notices(keep=True) if n.kind == "closed"].count(name) == 1

    @precondition(lambda self: not self.live)
    @rule()
    def churn(self) -> None:
        """Ten times more sessions than places, one after another and overlapping."""
        for number in range(10 * PLACES):
            name = f"churn-{number}"
            self.engine.create(name, seed=number)
            self.engine.next(name)
            if number >= PLACES - 1:
                self.engine.close(f"churn-{number - PLACES + 1}")
        for number in range(10 * PLACES - PLACES + 1, 10 * PLACES):
            self.engine.close(f"churn-{number}")
        self.last_generation += 10 * PLACES
        assert self.engine.free_pages == self.free

    # ------------------------------------------------------------------ what must always hold

    @invariant()
    def everything_is_as_the_account_says(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.engine.check()
        assert {e.session.id for e in self.engine.engine.registry} == set(self.live)
        for name, session in self.live.items():
            view = self.engine.view(name)
            assert (view.state, view.epoch, view.chunk_index) == (session.state, session.epoch, session.index), name
            assert (view.prompt, view.seed) == (session.prompt, session.seed), name
            assert (view.pending_event_count, view.event_floor) == (len(session.pending), session.floor), name
            assert view.pages_used == self.pages(name), name
            controls = {} if session.dx is None else {"move": move(session.dx)}
            assert self.engine.engine.registry.get(name).session.controls == controls, name
            assert view.attached == (session.lease_until is None), name
        assert self.engine.free_pages == self.free - sum(map(self.pages, self.live))
        assert all(not entry.waiters for entry in self.engine.engine.registry)
        self.told = len(self.engine.notices)

    # ------------------------------------------------------------------ helpers

    def pick(self, who: int) -> str:
        return sorted(self.live)[who % len(self.live)] if self.live and who else "nobody"

    def unwritten(self, name: str) -> bool:
        """A block of the session was delivered and is not history yet."""
        session = self.live.get(name)
        return session is not None and session.kept and self.engine.state_of(name).unwritten is not None

    def pages(self, name: str) -> int:
        return self.live[name].pages(unwritten=self.unwritten(name))

    @property
    def now(self) -> float:
        return self.engine.clock.now_s()

    def new_notices(self, *, keep: bool = False) -> list[c.Notice]:
        return self.engine.notices[self.told :]

    def attempt(self, error: type[OmniError] | None, call: Any) -> Any:
        """Do it, and insist on success or on this kind of refusal."""
        if error is None:
            return call()
        with pytest.raises(error):
            call()
        return None

    def run_tick(
        self, members: list[str], *, doomed: str | None, leaver: str | None = None, leaves_by: str = ""
    ) -> None:
        """One chunk for every member, asked together; compare each outcome."""
        results = self.engine.next_all(members)
        aborted: set[str] = set()
        for name, result in zip(members, results, strict=True):
            session = self.live.get(name)
            if session is None:
                assert isinstance(result, SessionGoneError)
            elif session.state != "active":
                assert isinstance(result, StateError)
            elif name == doomed:
                assert isinstance(result, TickError)
                session.fail(keep=self.keep)
            elif name == leaver and name not in aborted:
                if leaves_by == "abort":
                    aborted.add(name)  # only the chunk that ran; the call behind it gets the same chunk
                kind = SessionGoneError if leaves_by in ("close", "detach") else AbortedError
                assert isinstance(result, kind), result
            else:
                assert not isinstance(result, Exception), result
                ids = tuple(event[0] for event in session.pending)
                assert (result.chunk_index, result.metadata.applied_event_ids) == (session.index, ids)
                assert picture(result) == self.replay.chunk(name, session)
                session.commit()


EngineMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestEngineMachine = EngineMachine.TestCase
