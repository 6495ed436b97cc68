"""Forks, rewinds and replays at random, among ticks, failures, aborts, resets, closes and evictions.

Every session is told independently as its *line*: how it began and the events of each chunk that still stands. A twin that
was never forked, rewound or failed lives through that line alone, in an engine of its own; pictures, and the keys and values
of every frame that the session holds, must be the twin's bit for bit. After every rule the engine recounts itself, references
included; in the end every page is free again.

Faults that were seeded into a copy of the code, one by one, each found within 60 runs of this machine (a test run makes 30):

- ``WindowTable.fork`` takes no references, or takes them for the sink only; ``decref`` frees shared pages outright
- ``WindowTable.fork`` shares the deque with its source, or counts the block in flight; ``kept_from`` ignores ``rewind_blocks``
- ``kept`` ignores ``rewind_blocks`` in what it leaves of a window that is thin far away
- the runner's fork shares ``moments`` with the parent; its rewind keeps the state, one moment too many, or the block to write
- ``remember`` keeps one moment too few; the state remembered is the one after the chunk
- ``Session.rewind`` keeps prompt, controls, reducer memory, waiting events or epoch; the memento is taken after the commit
- ``Session.fork`` inherits what waits, forgets the floor, the past, the journal or the epoch, or shares the reducer
- ``Branches.fork`` loses the seed, or the block that is still to be written; a fork evicts its parent
- ``Branches.rewind`` leaves the running tick in the batch, its waiters waiting, or takes a block to write along
- ``Journal.rewind`` keeps what was undone; ``copy`` shares the entries
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from realtime_omni.engine import commands as c
from realtime_omni.errors import (
    AbortedError,
    ArgumentError,
    CapacityError,
    OmniError,
    SessionGoneError,
    StateError,
    TickError,
)
from realtime_omni.models.base import ControlReducer, LatestWinsReducer, PreparedControls
from realtime_omni.session.journal import EventLog
from realtime_omni.session.values import Chunk, SessionId
from realtime_omni.testing.faults import at, inject
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import PROMPTS, TinyKVWorld, move

PLACES = 4
NAMES = "abcdef"
REWIND_BLOCKS = 3
MOST_CHUNKS = 14
MID_TICK = ("forward:1", "forward:2", "forward:3", "decode", "sync")
POINTS = ("reducer.prepare", *MID_TICK, "commit", "reducer.commit", "prefill:1")

Said = tuple[str | None, int | None]
"""Prompt and dx of an event."""


class CountingReducer(LatestWinsReducer):
    """The latest control, shifted by how many events there were: a memory of its own beside the session's controls."""

    def __init__(self) -> None:
        self._count = 0

    def prepare(self, current: Any, events: Any, chunk_index: int) -> PreparedControls:
        latest = super().prepare(current, events, chunk_index).controls
        count = (self._count + len(events)) % 11
        shifted = tuple(move(control.data["dx"] + count) for control in latest)
        return PreparedControls(shifted or (move(count),), carried=latest, private=count)

    def commit(self, prepared: PreparedControls) -> None:
        self._count = prepared.private

    def reset(self) -> None:
        self._count = 0

    def save(self) -> Any:
        return [self._count]

    def load(self, memory: Any) -> None:
        (self._count,) = memory


class CountingWorld(TinyKVWorld):
    """A model whose reducer remembers something."""

    def new_reducer(self) -> ControlReducer:
        return CountingReducer()


MODELS: dict[str, Callable[[], TinyKVWorld]] = {
    "plain": TinyKVWorld,
    "counting": CountingWorld,
    "prefill, two branches": lambda: CountingWorld(prefill=True, branches=("cond", "free")),
    "deferred": lambda: CountingWorld(deferred=True),
    "deferred, prefill": lambda: CountingWorld(deferred=True, prefill=True),
    "no sink": lambda: CountingWorld(sink_frames=0, window_frames=6),
    "deferred, thin": lambda: CountingWorld(sink_frames=1, window_frames=10, dense_frames=4, deferred=True),
}


@dataclass(frozen=True)
class Line:
    """How a world came about."""

    seed: int
    prompt: str
    chunks: tuple[tuple[Said, ...], ...] = ()

    def to(self, chunk_index: int) -> Line:
        return replace(self, chunks=self.chunks[:chunk_index])

    def then(self, events: tuple[Said, ...]) -> Line:
        return replace(self, chunks=(*self.chunks, events))

    @property
    def shown(self) -> str:
        """The prompt now."""
        said = [prompt for events in self.chunks for prompt, _ in events if prompt is not None]
        return said[-1] if said else self.prompt

    @property
    def dx(self) -> int | None:
        """The control now."""
        said = [dx for events in self.chunks for _, dx in events if dx is not None]
        return said[-1] if said else None


@dataclass
class Expected:
    """One live session."""

    line: Line
    state: str = "active"
    epoch: int = 0
    floor: int = -1
    past: int = 0
    pending: list[Said] = field(default_factory=list)

    @property
    def index(self) -> int:
        return len(self.line.chunks)

    def commit(self) -> None:
        self.line = self.line.then(tuple(self.pending))
        self.past = min(self.past + 1, REWIND_BLOCKS)
        self.pending.clear()

    def rewind(self, target: int) -> None:
        self.past -= self.index - target
        self.line = self.line.to(target)
        self.begin_epoch()

    def reset(self, seed: int) -> None:
        self.line, self.past = Line(seed, self.line.prompt), 0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self.pending.clear()
        self.epoch += 1
        self.state = "active"

    def fork(self) -> Expected:
        return replace(self, state="active", pending=[])


class Twins:
    """Sessions that live through a line and nothing else, by line."""

    def __init__(self, model: TinyKVWorld) -> None:
        self.engine = InlineEngine(model, sessions=48, max_batch=1, rewind_blocks=REWIND_BLOCKS)
        self._at: dict[Line, str] = {}
        self._pictures: dict[Line, bytes] = {}
        self._made = 0

    def of(self, line: Line) -> str:
        """The twin that is at the end of the line."""
        if line not in self._at:
            if len(self._at) == 48:
                self.engine.close(self._at.pop(next(iter(self._at))))
            self._made += 1
            name, here = f"twin-{self._made}", line.to(0)
            self.engine.create(name, seed=line.seed, prompt=line.prompt)
            for events in line.chunks:
                self._step(name, here, events)
                here = here.then(events)
            self._at[line] = name
        return self._at[line]

    def picture(self, line: Line) -> bytes:
        """Of the last chunk of the line."""
        if line not in self._pictures:
            before, events = line.to(len(line.chunks) - 1), line.chunks[-1]
            name = self.of(before)
            del self._at[before]
            self._step(name, before, events)
            self._at[line] = name
        return self._pictures[line]

    def _step(self, name: str, before: Line, events: tuple[Said, ...]) -> None:
        say(self.engine, name, events)
        self._pictures[before.then(events)] = picture(self.engine.next(name))


def say(engine: InlineEngine, name: str, events: tuple[Said, ...]) -> None:
    for prompt, dx in events:
        engine.accept(name, engine.view(name).event_floor + 1, prompt=prompt, controls=[] if dx is None else [move(dx)])


def picture(chunk: Chunk) -> bytes:
    data: bytes = chunk.artifacts["frames"].data.tobytes()
    return data


def bits(engine: InlineEngine, name: str) -> dict[tuple[str, int, int], bytes]:
    """Keys and values of every retained frame, by branch, layer and frame."""
    book, storage = engine.runner.book, engine.runner.storage
    found = {}
    for branch in book.spec.branches:
        for frame in book.table(name, branch.name).retained():
            for layer in range(book.spec.num_layers):
                found[branch.name, layer, frame.index] = b"".join(
                    t.numpy().tobytes() for t in storage.read(layer, (frame,))
                )
    return found


names = st.sampled_from(NAMES)
who = st.integers(0, 11)
said = st.tuples(st.none() | st.sampled_from(PROMPTS), st.integers(-2, 2))


class BranchMachine(RuleBasedStateMachine):
    """See the module docstring."""

    @initialize(
        model=st.sampled_from(sorted(MODELS)), policy=st.sampled_from(["refuse", "lru"]), batch=st.integers(1, 3)
    )
    def start(self, model: str, policy: str, batch: int) -> None:
        self.engine = InlineEngine(
            MODELS[model](), sessions=PLACES, policy=policy, max_batch=batch, rewind_blocks=REWIND_BLOCKS
        )
        # Where the clean pass is deferred, a tick has no third forward.
        self.points = [p for p in POINTS if not (model.startswith("deferred") and p == "forward:3")]
        self.lru = policy == "lru"
        self.free = self.engine.free_pages
        self.live: dict[str, Expected] = {}
        self.twins = Twins(MODELS[model]())
        self.told = 0
        self.create("a", 1)
        for dx in (1, 2, 3):  # a past to go back to
            self.tick({"a"}, (PROMPTS[dx % 3], dx))

    # ------------------------------------------------------------------ rules

    @rule(name=names, seed=st.integers(0, 2))
    def create(self, name: str, seed: int) -> None:
        if name in self.live:
            return
        with self.place_for(name, None):
            self.engine.create(name, seed=seed, prompt=PROMPTS[seed])
            self.live[name] = Expected(Line(seed, PROMPTS[seed]))

    @rule(who=who, what=said)
    def say(self, who: int, what: Said) -> None:
        self.tell(self.pick(who), what)

    @rule(members=st.sets(names, min_size=1), what=st.none() | said)
    def tick(self, members: set[str], what: Said | None) -> None:
        for name in sorted(members):
            self.tell(name, what)
        self.run_tick(sorted(members))

    @rule(whats=st.lists(said, max_size=3))
    def walk(self, whats: list[Said]) -> None:
        """A tick of everybody for each of them, told to every other session."""
        for what in whats:
            for name in sorted(self.live)[::2]:
                self.tell(name, what)
            self.run_tick(sorted(self.live))

    @rule(who=who, point=st.sampled_from(POINTS), what=st.none() | said)
    def fail(self, who: int, point: str, what: Said | None) -> None:
        name = self.pick(who)
        if name is None or self.live[name].state != "active" or point not in self.points:
            return
        self.tell(name, what)
        with inject(self.engine, point, name, times=None):
            self.run_tick(sorted(self.live), doomed=name, surely=point != "prefill:1")
        if self.engine.view(name).state == "failed":  # also when the chunk had been delivered and could not be written
            self.live[name].state = "failed"

    @rule(who=who, name=names, what=st.none() | said, apart=st.none() | said)
    def fork(self, who: int, name: str, what: Said | None, apart: Said | None) -> None:
        """``what`` waits in the parent then; ``apart`` is what the fork is told alone before both go on."""
        parent = self.pick(who)
        if parent is None:
            return
        self.tell(parent, what)
        if name in self.live:
            with pytest.raises(StateError):
                self.engine.fork(parent, name)
            return
        with self.place_for(name, parent):
            self.engine.fork(parent, name)
            self.live[name] = self.live[parent].fork()
        if apart is not None and name in self.live:
            self.tell(name, apart)
            self.run_tick([parent, name])

    @rule(
        who=who,
        back=st.integers(0, REWIND_BLOCKS + 1),
        what=st.none() | said,
        again=st.lists(st.none() | said, max_size=REWIND_BLOCKS),
        at_once=st.booleans(),
    )
    def rewind(self, who: int, back: int, what: Said | None, again: list[Said | None], at_once: bool) -> None:
        """``what`` waits then; ``again`` is what is told after it, a chunk each. ``at_once``: right behind a chunk, whose
        block may not have been written yet."""
        name = self.pick(who)
        if name is None:
            return
        if at_once:
            self.run_tick([name])
        else:
            self.tell(name, what)
        session = self.live[name]
        too_far = back > REWIND_BLOCKS
        target = session.index - (session.past + 1 if too_far else min(back, session.past))
        if too_far:
            with pytest.raises(ArgumentError):
                self.engine.rewind(name, target)
            return
        waiting = len(session.pending)
        self.engine.rewind(name, target)
        discarded = [len(n.event_ids) for n in self.new_notices() if n.kind == "events_discarded"]
        assert discarded == ([waiting] if waiting else [])
        session.rewind(target)
        for event in again:
            self.tell(name, event)
            self.run_tick([name])

    @rule(who=who, seed=st.integers(0, 2))
    def reset(self, who: int, seed: int) -> None:
        name = self.pick(who)
        if name is not None:
            self.engine.reset(name, seed=seed)
            self.live[name].reset(seed)

    @rule(who=who)
    def rollback(self, who: int) -> None:
        name = self.pick(who)
        if name is not None and self.live[name].state == "failed":
            self.engine.rollback(name)
            self.live[name].state = "active"

    @rule(who=who)
    def close(self, who: int) -> None:
        name = self.pick(who)
        if name is not None:
            self.engine.close(name)
            del self.live[name]

    @rule(
        who=who,
        point=st.sampled_from([*MID_TICK, "prefill:1"]),
        how=st.sampled_from(["fork", "rewind", "abort", "close"]),
        back=st.integers(0, 3),
    )
    def interrupt(self, who: int, point: str, how: str, back: int) -> None:
        """A command between two passes of a tick, or prefill, in which the session and all others take part."""
        active = [n for n, s in sorted(self.live.items()) if s.state == "active" and s.index < MOST_CHUNKS - 1]
        if not active or point not in self.points:
            return
        name = active[who % len(active)]
        if point == "prefill:1" and (how == "abort" or not self.engine.engine.registry.get(name).needs_prefill):
            return  # an abort waits for the tick itself
        if how == "abort":
            self.engine.rest()  # a prefill has a sync too, and during it there is no chunk to abort
        session = self.live[name]
        fork = next(n for n in NAMES if n not in self.live)
        target = session.index - min(back, session.past)
        where: dict[str, Any] = {"ticket": 0, "session_id": SessionId(name)}
        command: c.Command = {
            "fork": c.Fork(**where, name=fork),
            "rewind": c.Rewind(**where, chunk_index=target),
            "abort": c.Abort(**where),
            "close": c.Close(**where),
        }[how]
        born = session.fork()
        sent: list[int] = []
        with at(self.engine, point, lambda: sent.append(self.engine.send(command)), name):
            self.run_tick([*sorted(self.live), name], leaver=None if how == "fork" else name, leaves_by=how)
        error = self.engine.error(sent[0])
        if how == "fork":
            if isinstance(error, CapacityError):
                assert len(self.live) == PLACES  # everybody else was in the batch or waited for it
                return
            for notice in self.new_notices():
                if notice.kind == "evicted":
                    del self.live[notice.session_id]
            self.live[fork] = born
        assert error is None
        if how == "rewind":
            session.rewind(target)
        elif how == "close":
            del self.live[name]

    @rule(who=who, other=who)
    def replay(self, who: int, other: int) -> None:
        """The log of one session, played in another or in itself."""
        source, target = self.pick(who), self.pick(other)
        if source is None or target is None:
            return
        line, session = self.live[source].line, self.live[target]
        log = EventLog.from_json(self.engine.log(source).to_json())
        assert (log.first_chunk, log.next_chunk) == (0, len(line.chunks))
        stays = session.line == line.to(0) and session.state == "active"
        if stays and session.pending:
            with pytest.raises(StateError):
                self.engine.replay(target, log)
            return
        played = [picture(chunk) for chunk in self.engine.replay(target, log)]
        assert played == [self.twins.picture(line.to(i + 1)) for i in range(len(line.chunks))]
        if not stays:
            session.begin_epoch()
        session.floor += sum(len(events) for events in line.chunks)
        session.line, session.past = line, min(len(line.chunks), REWIND_BLOCKS)

    @rule(who=who)
    def compare(self, who: int) -> None:
        """Keys, values and the model's own state are the twin's."""
        name = self.pick(who)
        if name is None:
            return
        twin = self.twins.of(self.live[name].line)
        self.engine.rest()
        self.twins.engine.rest()
        mine, its = bits(self.engine, name), bits(self.twins.engine, twin)
        both = mine.keys() & its.keys()
        assert {key: mine[key] for key in both} == {key: its[key] for key in both}
        if self.live[name].state == "active":  # a failed one may still have a block to write
            assert mine.keys() == both, "frames that no session with this line can hold"
            assert str(self.engine.state_of(name)) == str(self.twins.engine.state_of(twin))

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
            assert (view.prompt, view.seed) == (session.line.shown, session.line.seed), name
            assert (view.event_floor, view.pending_event_count) == (session.floor, len(session.pending)), name
            assert view.oldest_rewind == session.index - session.past, name
            controls = {} if session.line.dx is None else {"move": move(session.line.dx)}
            assert self.engine.engine.registry.get(name).session.controls == controls, name
        pages = {page for name in self.live for page in self.engine.runner.book.pages_of(name)}
        assert self.engine.free_pages == self.free - len(pages), "pages that nobody holds"
        self.told = len(self.engine.notices)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for number in range(len(self.live)):
                self.compare(number)
            for name in self.live:
                self.engine.close(name)
            assert self.engine.free_pages == self.free
            self.engine.engine.check()

    # ------------------------------------------------------------------ helpers

    def pick(self, who: int) -> str | None:
        return sorted(self.live)[who % len(self.live)] if self.live else None

    def tell(self, name: str | None, what: Said | None) -> None:
        session = self.live.get(name or "")
        if name is None or what is None or session is None or session.state != "active" or len(session.pending) > 3:
            return
        say(self.engine, name, (what,))
        session.pending.append(what)
        session.floor += 1

    def new_notices(self) -> list[c.Notice]:
        return self.engine.notices[self.told :]

    def place_for(self, name: str, parent: str | None) -> Any:
        """Opening ``name`` succeeds, or is refused, or evicts one session that is not its parent."""
        machine = self

        class Place:
            def __enter__(self) -> None:
                self.full = len(machine.live) == PLACES

            def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> bool:
                if not self.full:
                    return False
                if not machine.lru:
                    assert kind is CapacityError
                    return True
                evicted = [n.session_id for n in machine.new_notices() if n.kind == "evicted"]
                assert len(evicted) == 1, error
                assert evicted[0] != parent
                del machine.live[evicted[0]]
                return False

        return Place()

    def run_tick(
        self,
        members: list[str],
        *,
        doomed: str | None = None,
        surely: bool = True,
        leaver: str | None = None,
        leaves_by: str = "",
    ) -> None:
        """One chunk for every member, asked together; compare each outcome. ``surely``: the doomed one is hit before its
        tick is over."""
        members = [m for m in members if m not in self.live or self.live[m].index < MOST_CHUNKS]
        results = self.engine.next_all(members)
        gone: set[str] = set()
        for name, result in zip(members, results, strict=True):
            session = self.live.get(name)
            if session is None:
                assert isinstance(result, SessionGoneError)
            elif session.state != "active":
                assert isinstance(result, StateError)
            elif name == doomed and (surely or isinstance(result, Exception)):
                assert isinstance(result, TickError)
                session.state = "failed"
            elif name == leaver and (name not in gone or leaves_by != "abort"):
                gone.add(name)  # of an abort only the chunk that ran; the call behind it gets the same chunk
                expected: type[OmniError] = SessionGoneError if leaves_by == "close" else AbortedError
                assert isinstance(result, expected), result
            else:
                assert isinstance(result, Chunk), result
                assert (result.chunk_index, result.epoch) == (session.index, session.epoch)
                session.commit()
                assert picture(result) == self.twins.picture(session.line)


BranchMachine.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestBranchMachine = BranchMachine.TestCase
