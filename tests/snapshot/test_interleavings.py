"""Saving and restoring at random, in the midst of everything else, on two engines that hand sessions to each other.

The oracle is a third engine in which nothing is ever saved: where a snapshot is taken, it keeps a fork, and where one is
restored, it forks that fork. After every step both engines recount themselves; in the end not a page is left.

Faults seeded on purpose, one at a time, to see that this machine bites; each was caught: the controls, the waiting events,
the prompt, the seed or the past left out or replaced; the state of an earlier boundary saved as the present one; frames
written in another order than they are read; the last frame left out; a restored session that does not know that it carries a
block; the bytes of a restored state not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from realtime_omni.errors import CapacityError, OmniError, SnapshotError
from realtime_omni.snapshot.snapshot import Snapshot
from realtime_omni.testing.faults import at, inject
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import TinyKVWorld, move
from realtime_omni.testing.recurrent import TinyRecurrentWorld

PLACES = 4
MODELS: dict[str, Callable[[], Any]] = {
    "paged": TinyKVWorld,
    "deferred": lambda: TinyKVWorld(deferred=True, prefill=True),
    "two branches": lambda: TinyKVWorld(branches=("cond", "free"), sink_frames=0),
    "thin": lambda: TinyKVWorld(window_frames=8, dense_frames=2),
    "recurrent": TinyRecurrentWorld,
}
anybody = st.integers(0, 11)


@dataclass
class Live:
    """A session of one of the engines, and the name of the one like it that was never saved."""

    engine: int
    name: str
    twin: str
    next_id: int = 0
    waiting: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class Kept:
    """A snapshot as bytes, and the fork that the oracle keeps for it."""

    data: bytes
    twin: str
    live: Live


class SavingMachine(RuleBasedStateMachine):
    """See the module docstring."""

    model: ClassVar[Callable[[], Any]]

    @initialize()
    def start(self) -> None:
        model = type(self).model
        self.engines = [InlineEngine(model(), sessions=PLACES) for _ in range(2)]
        self.oracle = InlineEngine(model(), sessions=64)
        self.prompts = self.oracle.runner.spec.prompts
        self.live: list[Live] = []
        self.kept: list[Kept] = []
        self.names = 0
        self.create(0, 1)

    def fresh(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"

    def of(self, who: int) -> Live:
        return self.live[who % len(self.live)]

    def is_full(self, engine: int) -> bool:
        return sum(s.engine == engine for s in self.live) == PLACES

    # ------------------------------------------------------------------ what any session does

    @precondition(lambda self: self.names < 50)
    @rule(engine=st.integers(0, 1), seed=st.integers(0, 3))
    def create(self, engine: int, seed: int) -> None:
        if self.is_full(engine):
            return
        name, twin = self.fresh("s"), self.fresh("o")
        self.engines[engine].create(name, seed=seed)
        self.oracle.create(twin, seed=seed)
        self.live.append(Live(engine, name, twin))
        self.hear(len(self.live) - 1, seed, seed + 1)  # a past, so that what follows has something to get wrong
        self.play(len(self.live) - 1, 1 + seed)

    @precondition(lambda self: self.live)
    @rule(who=anybody, prompt=st.integers(0, 2), dx=st.integers(-2, 2))
    def hear(self, who: int, prompt: int, dx: int) -> None:
        live = self.of(who)
        text = self.prompts[prompt % len(self.prompts)]
        if len(live.waiting) == 8:
            return
        self.engines[live.engine].accept(live.name, live.next_id, prompt=text, controls=[move(dx)])
        live.waiting.append((text, dx))
        live.next_id += 1

    @precondition(lambda self: self.live)
    @rule(who=anybody, chunks=st.integers(1, 3))
    def play(self, who: int, chunks: int) -> None:
        live = self.of(who)
        for _ in range(chunks):
            self.told(live)
            chunk = self.engines[live.engine].next(live.name)
            assert pictures(chunk) == pictures(self.oracle.next(live.twin))

    def told(self, live: Live) -> None:
        """The oracle hears what waits, under ids of its own."""
        floor = self.oracle.view(live.twin).event_floor
        for number, (prompt, dx) in enumerate(live.waiting):
            self.oracle.accept(live.twin, floor + 1 + number, prompt=prompt, controls=[move(dx)])
        live.waiting.clear()

    @precondition(lambda self: self.live)
    @rule(who=anybody)
    def rewind(self, who: int) -> None:
        live = self.of(who)
        engine = self.engines[live.engine]
        oldest = engine.view(live.name).oldest_rewind
        assert oldest == self.oracle.view(live.twin).oldest_rewind
        assert oldest is not None
        engine.rewind(live.name, oldest)
        self.oracle.rewind(live.twin, oldest)
        live.waiting.clear()

    @precondition(lambda self: self.live)
    @rule(who=anybody, point=st.sampled_from(("forward:1", "forward:2", "sync", "commit", "reducer.commit")))
    def fail(self, who: int, point: str) -> None:
        live = self.of(who)
        engine = self.engines[live.engine]
        with inject(engine, point, session_id=live.name), pytest.raises(OmniError):
            engine.next(live.name)
        engine.rollback(live.name)

    @precondition(lambda self: len(self.live) > 1)
    @rule(who=anybody)
    def close(self, who: int) -> None:
        live = self.live.pop(who % len(self.live))
        self.engines[live.engine].close(live.name)
        self.oracle.close(live.twin)

    # ------------------------------------------------------------------ saving

    @precondition(lambda self: self.live and self.names < 50)
    @rule(who=anybody, just_played=st.booleans())
    def save(self, who: int, just_played: bool) -> None:
        live = self.of(who)
        if just_played:  # a deferred clean pass is still to come then
            self.play(who, 1)
        self.keep(live, self.engines[live.engine].snapshot(live.name).to_bytes())

    @precondition(lambda self: self.live and self.names < 50)
    @rule(who=anybody, point=st.sampled_from(("forward:1", "forward:2", "decode", "sync")))
    def save_in_a_tick(self, who: int, point: str) -> None:
        live = self.of(who)
        engine, taken = self.engines[live.engine], []
        ticket = engine.post_next(live.name)

        def save() -> None:
            taken.append(engine.engine.take_snapshot(live.name).to_bytes())
            raise InterruptedError

        with at(engine, point, save, session_id=live.name):
            while not engine.answered(ticket):
                engine.cycle()
        engine.rollback(live.name)
        self.keep(live, taken[0])

    def keep(self, live: Live, data: bytes) -> None:
        twin = self.fresh("k")
        self.oracle.fork(live.twin, twin)
        self.kept.append(Kept(data, twin, Live(live.engine, live.name, twin, live.next_id, [*live.waiting])))

    @precondition(lambda self: self.kept and self.names < 50)
    @rule(which=anybody, engine=st.integers(0, 1), goes_back=st.booleans())
    def restore(self, which: int, engine: int, goes_back: bool) -> None:
        kept = self.kept[which % len(self.kept)]
        name, snapshot = self.fresh("r"), Snapshot.from_bytes(kept.data)
        if self.is_full(engine):
            with pytest.raises(CapacityError):
                self.engines[engine].restore(snapshot, name)
            return
        self.engines[engine].restore(snapshot, name)
        twin = self.fresh("o")
        self.oracle.fork(kept.twin, twin)
        self.live.append(Live(engine, name, twin, kept.live.next_id, [*kept.live.waiting]))
        view, expected = self.engines[engine].view(name), self.oracle.view(twin)
        assert view.pending_event_count == len(kept.live.waiting)
        assert (view.prompt, view.seed, view.chunk_index) == (expected.prompt, expected.seed, expected.chunk_index)
        assert view.oldest_rewind == expected.oldest_rewind
        if goes_back:
            self.rewind(len(self.live) - 1)
        self.play(len(self.live) - 1, 1)
        if self.is_full(engine):
            self.close(len(self.live) - 1)

    @precondition(lambda self: self.live and self.names < 50)
    @rule(who=anybody, engine=st.integers(0, 1), just_played=st.booleans(), goes_back=st.booleans())
    def move(self, who: int, engine: int, just_played: bool, goes_back: bool) -> None:
        """Saved here, restored there, at once: the commonest use."""
        self.save(who, just_played)
        self.restore(len(self.kept) - 1, engine, goes_back)

    @precondition(lambda self: self.kept)
    @rule(which=anybody, engine=st.integers(0, 1), at_byte=st.integers(0, 1 << 20))
    def refuse(self, which: int, engine: int, at_byte: int) -> None:
        data = bytearray(self.kept[which % len(self.kept)].data)
        data[at_byte % len(data)] ^= 64
        free = self.engines[engine].free_pages
        with pytest.raises(SnapshotError):
            self.engines[engine].restore(Snapshot.from_bytes(bytes(data)), "never")
        assert self.engines[engine].free_pages == free

    def teardown(self) -> None:
        for live in getattr(self, "live", ()):
            self.play_on(live)
        for engine in getattr(self, "engines", ()):
            for live in self.live:
                if engine is self.engines[live.engine]:
                    engine.close(live.name)
            engine.cycle()
            assert engine.runner.pages()[0] == 0
            assert engine.runner.memory().states == 0

    def play_on(self, live: Live) -> None:
        """Every session goes on as the one that was never saved; far enough that all of its window is seen."""
        for _ in range(3):
            self.told(live)
            chunk = self.engines[live.engine].next(live.name)
            assert pictures(chunk) == pictures(self.oracle.next(live.twin))


def pictures(chunk: Any) -> bytes:
    data: bytes = chunk.artifacts["frames"].data.tobytes()
    return data


@pytest.mark.parametrize("name", MODELS)
def test_sessions_are_saved_and_restored_at_random(name: str) -> None:
    machine = type(f"Saving {name}", (SavingMachine,), {"model": staticmethod(MODELS[name])})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=8, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
