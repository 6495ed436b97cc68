"""Whatever fails, wherever: pages and places are as before, and nobody else notices."""

from __future__ import annotations

from typing import Any

import pytest

from realtime_omni.errors import StateError, TickError
from realtime_omni.models.base import Step, StepBatch
from realtime_omni.testing.faults import InjectedFault, at, inject
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import Knobs, TinyKVWorld, move

POINTS = (
    "reducer.prepare",
    "forward:1",
    "forward:2",
    "forward:3",
    "decode",
    "sync",
    "commit",
    "reducer.commit",
)
"""Every point of one tick of TinyKVWorld, in order; ``test_the_walk_misses_no_point`` keeps it true."""

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two branches": {"branches": ("cond", "free")},
    "prefill": {"prefill": True},
}


def engine_with(names: str, model: TinyKVWorld | None = None, **how: Any) -> InlineEngine:
    """Sessions that have committed enough chunks for their windows to roll."""
    engine = InlineEngine(model if model is not None else TinyKVWorld(), **how)
    for name in names:
        engine.create(name, seed=ord(name))
    for _ in range(4):
        engine.next_all(names)
    return engine


def free_places(engine: InlineEngine) -> tuple[int, tuple[str, ...], int]:
    book = engine.runner.book
    return book.free_pages, tuple(sorted(book.sessions)), book.statistics().in_flight


def frames(chunk: Any) -> bytes:
    data: bytes = chunk.artifacts["frames"].data.tobytes()
    return data


def test_the_walk_misses_no_point() -> None:
    seen: list[str] = []
    engine = engine_with("a")
    engine.runner.faults = lambda point, sessions: seen.append(point)
    engine.next("a")
    assert seen == [p for p in POINTS if not p.startswith("reducer")]
    engine.close("a")
    assert seen[-1] == "release"


@pytest.mark.req("AC-26")
@pytest.mark.parametrize("policy", ["keep", "release"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_fault_at_any_point_gives_back_what_the_tick_reserved(point: str, batch: int, policy: str) -> None:
    names = "abc"[:batch]
    victim = names[-1]
    engine, control = (engine_with(names, on_failure=policy) for _ in range(2))
    before, bits, state = free_places(engine), engine.kv_bits(victim), engine.state_of(victim)
    for e in (engine, control):
        e.accept(victim, 0, prompt="blue", controls=[move(3)])
    with inject(engine, point, victim, times=None) as fault:
        results = engine.next_all(names)
    assert fault.hits >= 1
    assert isinstance(results[-1], TickError)
    expected = control.next_all(names)
    for got, want in zip(results[:-1], expected[:-1], strict=True):  # the others do not notice
        assert frames(got) == frames(want)
    view = engine.view(victim)
    assert (view.state, view.chunk_index, view.pending_event_count, view.prompt) == ("failed", 4, 1, "red")
    engine.engine.check()
    if policy == "release":
        assert victim not in engine.runner.book
        assert view.pages_used == view.state_bytes == 0
        engine.reset(victim)
        assert engine.next(victim).chunk_index == 0
    else:
        if batch == 1:
            assert free_places(engine) == before
        assert engine.kv_bits(victim) == bits
        assert engine.state_of(victim) is state
        engine.rollback(victim)
        again = engine.next(victim)
        assert again.metadata.applied_event_ids == (0,)
        assert frames(again) == frames(expected[-1])
        assert engine.kv_bits(victim) == control.kv_bits(victim)
    for name in names:
        engine.close(name)
    assert engine.runner.pages()[0] == 0
    assert engine.runner.book.sessions == ()


@pytest.mark.req("AC-26")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("point", ["forward:2", "sync"])
def test_a_forward_error_and_a_device_error_restore_every_page_of_every_kind_of_model(point: str, variant: str) -> None:
    engine = InlineEngine(TinyKVWorld(**VARIANTS[variant]), on_failure="release")
    free = engine.free_pages
    engine.create("a")
    engine.next("a")
    with inject(engine, point), pytest.raises(TickError):
        engine.next("a")
    assert engine.free_pages == free
    assert engine.view("a").state_bytes == 0


@pytest.mark.req("AC-26")
@pytest.mark.parametrize("prefill", [False, True])
def test_the_device_is_waited_for_inside_the_tick_so_its_errors_are_that_ticks(prefill: bool) -> None:
    """An asynchronous device reports a failed kernel when somebody waits; that must happen before anything commits."""
    engine = InlineEngine(TinyKVWorld(prefill=prefill), on_failure="release")
    free = engine.free_pages
    waits: list[int] = []
    engine.runner._synchronize = lambda: waits.append(1)
    engine.create("a")
    engine.next("a")
    assert len(waits) == 1 + prefill

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine.runner._synchronize = fail
    with pytest.raises(TickError):
        engine.next("a")
    assert engine.free_pages == free
    assert (engine.view("a").state, engine.view("a").state_bytes) == ("failed", 0)
    with pytest.raises(TickError if prefill else StateError):
        engine.create("b") if prefill else engine.next("a")
    assert engine.free_pages == free


def test_a_fault_that_hits_the_whole_batch_once_is_retried_row_by_row_and_nobody_fails() -> None:
    engine = engine_with("abc")
    control = engine_with("abc")
    with inject(engine, "forward:3"):
        results = engine.next_all("abc")
    assert [frames(r) for r in results] == [frames(r) for r in control.next_all("abc")]
    assert engine.engine.counters.isolated_reruns == 3


def test_a_sticky_device_error_is_not_tried_again_row_by_row() -> None:
    engine = engine_with("abc")
    error = RuntimeError("CUDA error: device-side assert triggered")
    with inject(engine, "forward:2", error=error, times=None) as fault:
        results = engine.next_all("abc")
    assert fault.hits == 1
    assert all(isinstance(r, TickError) for r in results)
    assert engine.runner.pages()[0] == 0


@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(raise_in=1),
        Knobs(raise_in=3),
        Knobs(row_error=True),
        Knobs(row_result=ValueError("no")),
        Knobs(misreport="chunk_index"),
        Knobs(artifact="undeclared"),
        Knobs(skip_layer=True),
    ],
    ids=lambda k: str([n for n in k.__slots__ if getattr(k, n) not in (None, False)][0]),  # noqa: RUF015
)
def test_a_model_that_fails_for_one_member_of_a_batch_costs_only_that_member(knobs: Knobs) -> None:
    model = TinyKVWorld()
    engine, control = engine_with("abc", model), engine_with("abc")
    model.knobs = Knobs(**{n: getattr(knobs, n) for n in Knobs.__slots__ if n != "sessions"}, sessions=frozenset("b"))
    results = engine.next_all("abc")
    expected = control.next_all("abc")
    assert isinstance(results[1], TickError)
    assert [frames(results[i]) for i in (0, 2)] == [frames(expected[i]) for i in (0, 2)]
    assert [engine.kv_bits(n) for n in "ac"] == [control.kv_bits(n) for n in "ac"]
    model.knobs = Knobs(sessions=frozenset())
    engine.rollback("b")
    assert frames(engine.next("b")) == frames(expected[1])


def test_a_model_that_cannot_even_begin_with_one_member_costs_only_that_member() -> None:
    class Eager(TinyKVWorld):
        """``step`` is no generator function: it works, and fails, when it is called."""

        bad = False

        def step(self, batch: StepBatch) -> Step:
            if self.bad and any(row.tick.session_id == "b" for row in batch.rows):
                raise ValueError("not with b")
            return super().step(batch)

    model = Eager()
    engine = engine_with("abc", model)
    model.bad = True
    results = engine.next_all("abc")
    assert [isinstance(r, TickError) for r in results] == [False, True, False]
    assert engine.runner.book.statistics().in_flight == 0


def test_a_row_without_a_result_fails_alone() -> None:
    class Forgetful(TinyKVWorld):
        def step(self, batch: StepBatch) -> Step:
            results = yield from super().step(batch)
            return {r: out for r, out in results.items() if batch.rows[r].tick.session_id != "b"}

    engine = InlineEngine(Forgetful())
    for name in "ab":
        engine.create(name)
    good, bad = engine.next_all("ab")
    assert isinstance(bad, TickError)
    assert good.chunk_index == 0  # type: ignore[union-attr]


def test_a_plan_that_cannot_reserve_fails_its_rows_and_leaks_nothing() -> None:
    engine = engine_with("ab")
    before = free_places(engine)
    plan_block = engine.runner.book.plan_block

    def broken(session: str, *args: Any, **kwargs: Any) -> Any:
        if session == "b":
            raise RuntimeError("no lane")
        return plan_block(session, *args, **kwargs)

    engine.runner.book.plan_block = broken  # type: ignore[method-assign]
    a, b = engine.next_all("ab")
    assert isinstance(b, TickError)
    assert a.chunk_index == 4  # type: ignore[union-attr]
    engine.runner.book.plan_block = plan_block  # type: ignore[method-assign]
    engine.rollback("b")
    engine.next("b")
    assert free_places(engine)[1:] == before[1:]


def test_a_fault_is_armed_counted_and_disarmed() -> None:
    engine = engine_with("a")
    with pytest.raises(ValueError, match="no point"):
        inject(engine, "forward:0")
    fault = inject(engine, "decode", times=2)
    for _ in range(2):
        with pytest.raises(TickError) as failed:
            engine.next("a")
        assert isinstance(failed.value, TickError)
        engine.rollback("a")
    engine.next("a")
    assert fault.hits == 2
    again = inject(engine.runner, "sync", error=InjectedFault("x"))
    again.remove()
    again.remove()
    engine.next("a")
    with pytest.raises(TypeError):
        inject(object(), "sync")


def test_two_faults_at_once_and_a_fault_of_somebody_else() -> None:
    engine = engine_with("ab")
    with inject(engine, "sync", "b", times=None), inject(engine, "commit", "a"):
        with pytest.raises(TickError):
            engine.next("a")
        engine.rollback("a")
        assert engine.next("a").chunk_index == 4
        with pytest.raises(TickError):
            engine.next("b")
    with pytest.raises(StateError):
        engine.next("b")


def test_a_batch_in_which_everybody_left_ends_early() -> None:
    work: list[str] = []
    engine = engine_with("ab", TinyKVWorld(trace=lambda what, _: work.append(what)))
    tickets = [engine.post_next(n) for n in "ab"]
    work.clear()

    def leave() -> None:
        for name in "ab":
            engine.post_close(name)

    with at(engine, "forward:1", leave):
        engine.cycle()
    assert [w for w in work if w != "close"] == ["forward:1"]
    assert all(engine.error(t) is not None for t in tickets)
    assert engine.runner.pages()[0] == 0
