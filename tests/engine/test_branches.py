"""Fork and rewind in the engine: what a branch has, what it costs, and who is not disturbed by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from realtime_omni.engine import commands as c
from realtime_omni.errors import AbortedError, ArgumentError, CapacityError, SessionGoneError, StateError, TickError
from realtime_omni.models.base import StepBatch
from realtime_omni.session.values import Chunk, SessionId
from realtime_omni.testing.faults import at, inject
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import TinyKVWorld, move
from realtime_omni.testing.recurrent import WIDTH, TinyRecurrentWorld

POINTS = ("reducer.prepare", "forward:1", "forward:2", "forward:3", "decode", "sync", "commit", "reducer.commit")
MID_TICK = ("forward:1", "forward:2", "forward:3", "decode", "sync")


def engine(model: TinyKVWorld | None = None, *, rewind_blocks: int = 4, **settings: Any) -> InlineEngine:
    return InlineEngine(model if model is not None else TinyKVWorld(), rewind_blocks=rewind_blocks, **settings)


def picture(chunk: Chunk) -> bytes:
    data: bytes = chunk.artifacts["frames"].data.tobytes()
    return data


def walk(e: InlineEngine, name: str, chunks: int, first_event: int = 0) -> list[bytes]:
    """Chunks of which each has an event of its own; every other one a prompt too."""
    seen = []
    for i in range(chunks):
        e.accept(name, first_event + i, prompt=("green", "blue")[i % 2] if i % 2 else None, controls=[move(i + 1)])
        seen.append(picture(e.next(name)))
    return seen


def branched(chunks: int = 5, **settings: Any) -> tuple[InlineEngine, InlineEngine]:
    """An engine whose session a was forked to b after some chunks, and one where both lived that life by themselves."""
    forked, twins = engine(**settings), engine(**settings)
    forked.create("a", seed=3)
    walk(forked, "a", chunks)
    forked.fork("a", "b")
    for name in "ab":
        twins.create(name, seed=3)
        walk(twins, name, chunks)
    return forked, twins


# ---------------------------------------------------------------------- fork


def test_a_fork_equals_its_parent_and_costs_no_page() -> None:
    e = engine()
    parent = e.create("a", seed=3, prompt="blue", outputs=("frames", "latent"))
    walk(e, "a", 5)
    before, free, bits = e.view("a"), e.free_pages, e.kv_bits("a")
    fork = e.fork("a", "b")
    assert e.free_pages == free
    assert e.runner.book.statistics().shared_pages == before.pages_used
    assert e.runner.book.pages_of("a") == e.runner.book.pages_of("b")
    assert e.state_of("b") is e.state_of("a")
    same = (
        "state",
        "epoch",
        "chunk_index",
        "prompt",
        "seed",
        "event_floor",
        "pages_used",
        "state_bytes",
        "oldest_rewind",
    )
    assert [getattr(fork, n) for n in same] == [getattr(before, n) for n in same]
    assert fork.session_id == "b"
    assert fork.generation > parent.generation
    assert (e.kv_bits("a"), e.kv_bits("b")) == (bits, bits)
    assert set(e.next("b").artifacts) == {"frames", "latent"}, "the outputs that the parent asked for"


def test_both_branches_go_on_as_two_sessions_that_never_shared_anything() -> None:
    forked, twins = branched()
    for round_ in range(6):  # past everything that they share
        for name, dx in (("a", 2), ("b", 5)):
            for e in (forked, twins):
                e.accept(name, 100 + round_, controls=[move(dx)])
        for name in "ab":
            assert picture(forked.next(name)) == picture(twins.next(name))
            assert forked.kv_bits(name) == twins.kv_bits(name)
    assert forked.kv_bits("a") != forked.kv_bits("b")
    sink = 2
    assert forked.runner.book.statistics().shared_pages == sink, "nothing but the sink is still shared"
    assert forked.free_pages == twins.free_pages + sink


def test_event_ids_start_at_the_parents_floor_and_what_waits_is_not_inherited() -> None:
    e = engine()
    e.create("a")
    e.accept("a", 7, prompt="green")
    e.next("a")
    e.accept("a", 9, prompt="blue")
    fork = e.fork("a", "b")
    assert (fork.pending_event_count, fork.event_floor, fork.prompt) == (0, 9, "green")
    assert e.view("a").pending_event_count == 1
    with pytest.raises(ValueError, match="not above 9"):
        e.accept("b", 9, prompt="blue")
    assert e.accept("b", 10, prompt="red").status == "accepted"
    assert e.accept("a", 10, prompt="blue").status == "accepted"
    assert (e.next("a").prompt, e.next("b").prompt) == ("blue", "red")


@pytest.mark.parametrize("closed", ["a", "b"])
def test_either_branch_may_end_first(closed: str) -> None:
    free = engine().free_pages
    forked, twins = branched()
    other = "ab".replace(closed, "")
    forked.close(closed)
    for _ in range(3):
        assert picture(forked.next(other)) == picture(twins.next(other))
        assert forked.kv_bits(other) == twins.kv_bits(other)
    forked.close(other)
    assert forked.free_pages == free


def test_a_fork_of_a_fork_and_all_closed_in_the_order_of_their_making() -> None:
    e = engine()
    free = e.free_pages
    e.create("a", seed=1)
    for parent, name in (("a", "b"), ("b", "c"), ("c", "d")):
        walk(e, parent, 1, first_event=10 * ord(name))
        e.fork(parent, name)
    pictures = {picture(e.next(name)) for name in "cd"}
    assert len(pictures) == 1
    for name in "abcd":
        e.close(name)
    assert e.free_pages == free


def test_a_reset_of_one_branch_leaves_the_other_alone() -> None:
    forked, twins = branched()
    first = picture(forked.reset("a") and forked.next("a"))
    assert first == picture(twins.reset("a") and twins.next("a"))
    assert picture(forked.next("b")) == picture(twins.next("b"))
    assert forked.kv_bits("b") == twins.kv_bits("b")
    forked.reset("b")
    assert picture(forked.next("b")) == first, "a fork is reset to where its line began"


@pytest.mark.parametrize("point", MID_TICK)
def test_a_fork_while_the_parents_tick_runs_is_of_the_last_committed_chunk(point: str) -> None:
    e, twins = engine(), engine()
    for one in (e, twins):
        one.create("a", seed=3)
        walk(one, "a", 4)
    sent: list[int] = []
    fork = c.Fork(ticket=0, session_id=SessionId("a"), name="b")
    with at(e, point, lambda: sent.append(e.send(fork))):
        fifth = picture(e.next("a"))
    view = e.result(sent[0])
    assert (view.chunk_index, e.view("a").chunk_index) == (4, 5)
    assert fifth == picture(twins.next("a")) == picture(e.next("b"))
    assert e.kv_bits("a") == e.kv_bits("b") == twins.kv_bits("a")


def test_a_fork_between_plan_run_and_settle() -> None:
    e = engine(max_batch=1)
    e.create("a", seed=3)
    walk(e, "a", 3)
    tickets = [e.post_next("a")]
    e.absorb()
    assert e.plan()
    e.send(c.Fork(ticket=0, session_id=SessionId("a"), name="b"))
    e.absorb()
    e.run()
    e.send(c.Fork(ticket=0, session_id=SessionId("a"), name="d"))
    e.absorb()
    e.settle()
    assert [e.view(n).chunk_index for n in "abd"] == [4, 3, 3]
    parents = picture(e.result(tickets[0]))
    assert [picture(e.next(n)) for n in "bd"] == [parents, parents]


@pytest.mark.parametrize("point", POINTS)
def test_a_failure_at_any_point_of_a_fork_leaves_the_parents_keys_and_values_alone(point: str) -> None:
    forked, twins = branched()
    bits = forked.kv_bits("a")
    with inject(forked, point, "b"), pytest.raises(TickError):
        forked.next("b")
    assert forked.kv_bits("a") == forked.kv_bits("b") == bits
    forked.rollback("b")
    assert [picture(forked.next(n)) for n in "ba"] == [picture(twins.next(n)) for n in "ba"]


def test_a_failed_session_can_be_forked_where_it_could_be_rolled_back() -> None:
    forked, twins = branched()
    with inject(forked, "sync", "a"), pytest.raises(TickError):
        forked.next("a")
    view = forked.fork("a", "c")
    assert (view.state, forked.view("a").state) == ("active", "failed")
    assert picture(forked.next("c")) == picture(twins.next("a"))
    released = engine(on_failure="release")
    released.create("a")
    with inject(released, "sync"), pytest.raises(TickError):
        released.next("a")
    for call in (lambda: released.fork("a", "b"), lambda: released.rewind("a", 0)):
        with pytest.raises(StateError, match="released"):
            call()
    assert released.view("a").oldest_rewind is None


def test_a_fork_is_refused_and_nothing_changes() -> None:
    e = engine(sessions=2)
    e.create("a")
    e.create("b")
    before, free = (e.view("a"), e.view("b")), e.free_pages
    for fork, error, code in (
        (lambda: e.fork("nobody", "c"), SessionGoneError, "session_not_found"),
        (lambda: e.fork("a", "b"), StateError, "session_exists"),
        (lambda: e.fork("a", "a"), StateError, "session_exists"),
        (lambda: e.fork("a", "no spaces"), ArgumentError, "invalid_argument"),
        (lambda: e.fork("a", "c"), CapacityError, "capacity"),
        (lambda: e.fork("a", "c", generation=99), SessionGoneError, "session_gone"),
    ):
        with pytest.raises(error) as refused:
            fork()
        assert refused.value.code == code
    e.engine.check()
    assert (e.view("a"), e.view("b")) == before
    assert (e.free_pages, len(e.engine.registry)) == (free, 2)


def test_a_full_server_with_eviction_never_evicts_the_parent() -> None:
    e = engine(sessions=2, policy="lru")
    e.create("a")
    e.create("b")
    e.next("b")  # a is the least recently used one
    assert e.fork("a", "c").chunk_index == 0
    assert e.kinds("b") == ["evicted"]
    alone = engine(sessions=1, policy="lru")
    alone.create("a")
    with pytest.raises(CapacityError):
        alone.fork("a", "b")
    assert alone.view("a").state == "active"


def test_a_model_whose_states_are_no_values_forks_and_rewinds_nothing() -> None:
    e = engine(TinyKVWorld(rollback_safe=False))
    e.create("a")
    e.next("a")
    for call in (lambda: e.fork("a", "b"), lambda: e.rewind("a", 0)):
        with pytest.raises(StateError) as refused:
            call()
        assert refused.value.code == "unsupported"
    assert e.view("a").oldest_rewind is None


def test_a_fork_of_a_session_that_still_waits_for_its_start_block_prefills_by_itself() -> None:
    e = engine(TinyKVWorld(prefill=True))
    opening = e.send(c.Create(ticket=0, session_id="a", prompt=None, seed=5))
    e.absorb()
    forking = e.send(c.Fork(ticket=0, session_id=SessionId("a"), name="b"))
    e.cycle()
    assert [e.result(t).session_id for t in (opening, forking)] == ["a", "b"]
    assert picture(e.next("a")) == picture(e.next("b"))
    assert e.kv_bits("a") == e.kv_bits("b")


def test_branches_share_a_batch_like_any_sessions() -> None:
    forked, twins = branched()
    batch = forked.next_all("ab")
    assert all(isinstance(got, Chunk) and got.timings.batch_size == 2 for got in batch)
    assert [picture(got) for got in batch if isinstance(got, Chunk)] == [picture(twins.next(n)) for n in "ab"]


# ---------------------------------------------------------------------- rewind


@pytest.mark.parametrize(
    "model",
    [
        TinyKVWorld,
        lambda: TinyKVWorld(prefill=True, branches=("cond", "free")),
        lambda: TinyKVWorld(deferred=True),
    ],
)
@pytest.mark.parametrize("chunks", [2, 4, 9])
def test_every_retained_chunk_can_be_run_again_with_the_same_bits(
    model: Callable[[], TinyKVWorld], chunks: int
) -> None:
    for target in range(max(0, chunks - 4), chunks + 1):
        e = engine(model())
        e.create("a", seed=3)
        seen = walk(e, "a", chunks)
        e.rest()
        bits, drift = e.kv_bits("a"), e.state_of("a")
        view = e.rewind("a", target)
        assert (view.chunk_index, view.epoch, view.event_floor) == (target, 1, chunks - 1)
        assert view.oldest_rewind == max(0, chunks - 4)
        again = []
        for i in range(target, chunks):
            e.accept("a", chunks + i, prompt=("green", "blue")[i % 2] if i % 2 else None, controls=[move(i + 1)])
            chunk = e.next("a")
            assert (chunk.chunk_index, chunk.epoch) == (i, 1)
            again.append(picture(chunk))
        assert again == seen[target:]
        e.rest()
        assert e.state_of("a") == drift
        kept = e.kv_bits("a")
        assert bits.endswith(kept) or kept == bits


def test_prompt_and_controls_are_those_of_the_moment() -> None:
    e = engine()
    e.create("a", prompt="red")
    e.accept("a", 0, prompt="green", controls=[move(1)])
    e.next("a")
    e.accept("a", 1, prompt="blue", controls=[move(2)])
    e.next("a")
    e.accept("a", 2, prompt="red")
    view = e.rewind("a", 1)
    session = e.engine.registry.get("a").session
    assert (view.prompt, session.controls, view.pending_event_count) == ("green", {"move": move(1)}, 0)
    told = [n for n in e.notices if n.kind == "events_discarded"]
    assert [(n.reason, n.event_ids, n.view.epoch) for n in told] == [("rewind", (2,), 1)]
    assert e.accept("a", 2, prompt="red").status == "discarded"
    assert e.accept("a", 1, prompt="blue", controls=[move(2)]).status == "duplicate"
    assert e.rewind("a", 0).prompt == "red"
    assert e.engine.registry.get("a").session.controls == {}


def test_what_is_no_longer_retained_is_refused_with_the_oldest_that_is() -> None:
    e = engine(rewind_blocks=3)
    e.create("a")
    walk(e, "a", 9)
    before, bits = e.view("a"), e.kv_bits("a")
    assert before.oldest_rewind == 6
    for target, code in ((5, "not_retained"), (0, "not_retained"), (10, "invalid_argument"), (-1, "invalid_argument")):
        with pytest.raises(ArgumentError) as refused:
            e.rewind("a", target)
        assert (refused.value.code, refused.value.path) == (code, "chunk_index")
        if code == "not_retained":
            assert "is 6" in refused.value.message
        else:
            assert "6..9" in refused.value.message
    for wrong in (True, 1.0, "6", None):
        with pytest.raises(ArgumentError):
            e.rewind("a", wrong)  # type: ignore[arg-type]
    assert (e.view("a"), e.kv_bits("a")) == (before, bits)
    assert e.rewind("a", 6).oldest_rewind == 6
    with pytest.raises(ArgumentError):
        e.rewind("a", 5)
    e.next("a")
    assert e.view("a").oldest_rewind == 6


@pytest.mark.parametrize("point", MID_TICK)
@pytest.mark.parametrize("target", [2, 4])
def test_a_rewind_stops_the_running_tick_and_everybody_who_waits(point: str, target: int) -> None:
    e, twin = engine(), engine()
    for one in (e, twin):
        one.create("a", seed=3)
        one.create("n", seed=4)
    seen = walk(e, "a", 4)
    rewind = c.Rewind(ticket=0, session_id=SessionId("a"), chunk_index=target)
    sent: list[int] = []
    with at(e, point, lambda: sent.append(e.send(rewind)), "a"):
        results = e.next_all(["a", "n", "a"])
    assert [type(results[0]), type(results[2])] == [AbortedError, AbortedError]
    assert isinstance(results[1], Chunk)
    assert picture(results[1]) == picture(twin.next("n"))
    assert e.result(sent[0]).chunk_index == target
    for i in range(target, 4):
        e.accept("a", 10 + i, prompt=("green", "blue")[i % 2] if i % 2 else None, controls=[move(i + 1)])
        assert picture(e.next("a")) == seen[i]


@pytest.mark.parametrize("point", POINTS)
def test_a_rewind_recovers_a_failed_session(point: str) -> None:
    e = engine()
    e.create("a", seed=3)
    seen = walk(e, "a", 4)
    with inject(e, point), pytest.raises(TickError):
        e.next("a")
    assert e.rewind("a", 3).state == "active"
    e.accept("a", 10, prompt="blue", controls=[move(4)])
    assert picture(e.next("a")) == seen[3]


def test_a_rewind_to_the_next_chunk_undoes_nothing_that_was_committed() -> None:
    e, twin = engine(), engine()
    for one in (e, twin):
        one.create("a", seed=3)
        walk(one, "a", 2)
    e.accept("a", 9, prompt="red")
    view = e.rewind("a", 2)
    assert (view.chunk_index, view.epoch, view.pending_event_count, view.oldest_rewind) == (2, 1, 0, 0)
    assert picture(e.next("a")) == picture(twin.next("a"))


def test_a_fork_has_its_parents_past_and_each_goes_back_by_itself() -> None:
    forked, twins = branched()
    assert forked.view("b").oldest_rewind == 1
    forked.rewind("b", 2)
    twins.rewind("b", 2)
    forked.engine.check()
    for _ in range(4):
        for name in "ab":
            assert picture(forked.next(name)) == picture(twins.next(name))
            assert forked.kv_bits(name) == twins.kv_bits(name)
    forked.close("a")
    forked.rewind("b", forked.view("b").oldest_rewind or 0)
    assert forked.runner.book.statistics().shared_pages == 0


def test_a_reset_forgets_the_past_and_keeps_nothing_of_it() -> None:
    e = engine()
    e.create("a", seed=3)
    walk(e, "a", 4)
    e.reset("a")
    assert e.view("a").oldest_rewind == 0
    with pytest.raises(ArgumentError):
        e.rewind("a", 3)
    assert e.rewind("a", 0).epoch == 2


def test_the_blocks_of_rewind_are_paid_for_before_anything_is_allocated() -> None:
    one, four = engine(rewind_blocks=1), engine(rewind_blocks=4)
    total = [e.runner.pages()[1] for e in (one, four)]
    sessions, more_blocks, frames = 4, 3, 2
    assert total[1] - total[0] == sessions * more_blocks * frames
    for name in "abcd":
        four.create(name)
        walk(four, name, 9)
    assert four.view("a").pages_used == 2 + 4 + more_blocks * frames


def test_the_bytes_of_states_that_a_rewind_can_go_back_to_are_counted_once_each() -> None:
    class Still(TinyRecurrentWorld):
        """Its state never changes."""

        def step(self, batch: StepBatch) -> Any:
            results = yield from super().step(batch)
            state = {row: batch.rows[row].state for row in results}
            return {r: changed(out, next_state=state[r]) for r, out in results.items()}

    moving, still = engine(TinyRecurrentWorld()), engine(Still())
    for e in (moving, still):
        e.create("a")
        for _ in range(9):
            e.next("a")
    assert (moving.view("a").state_bytes, still.view("a").state_bytes) == (5 * 8 * WIDTH, 8 * WIDTH)


class Emptied(TinyKVWorld):
    """Its window of two blocks is emptied whenever it is full."""

    @property
    def spec(self) -> Any:
        spec = super().spec
        return replace(spec, kv=replace(spec.kv, reset_at_boundary=True))


@pytest.mark.parametrize(("rewind_blocks", "ways"), [(1, {0, 1}), (3, {2, 3})])
def test_where_the_window_is_emptied_no_rewind_goes_to_what_was_seen_before(rewind_blocks: int, ways: set[int]) -> None:
    found = set()
    for chunks in range(3, 9):
        e = engine(Emptied(sink_frames=0), rewind_blocks=rewind_blocks)
        e.create("a", seed=3)
        seen = walk(e, "a", chunks)
        oldest = e.view("a").oldest_rewind
        assert oldest is not None
        found.add(chunks - oldest)
        if oldest:
            with pytest.raises(ArgumentError) as refused:
                e.rewind("a", oldest - 1)
            assert (refused.value.code, f"is {oldest}" in refused.value.message) == ("not_retained", True)
        e.rewind("a", oldest)
        assert walk_again(e, oldest, chunks) == seen[oldest:]
    assert found == ways


@pytest.mark.parametrize("model", [TinyKVWorld, lambda: Emptied(sink_frames=0)])
def test_a_refused_rewind_costs_no_tick(model: Callable[[], TinyKVWorld]) -> None:
    e = engine(model(), rewind_blocks=1)
    e.create("a", seed=3)
    walk(e, "a", 4)
    sent: list[int] = []
    rewind = c.Rewind(ticket=0, session_id=SessionId("a"), chunk_index=1)
    with at(e, "forward:2", lambda: sent.append(e.send(rewind))):
        assert e.next("a").chunk_index == 4
    assert isinstance(e.error(sent[0]), ArgumentError)


def walk_again(e: InlineEngine, first: int, chunks: int) -> list[bytes]:
    """The chunks that ``walk`` made of session a, with the same events under later ids."""
    seen = []
    for i in range(first, chunks):
        floor = e.view("a").event_floor
        e.accept("a", floor + 1, prompt=("green", "blue")[i % 2] if i % 2 else None, controls=[move(i + 1)])
        seen.append(picture(e.next("a")))
    return seen
