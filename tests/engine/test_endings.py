"""How sessions end: release then bury, tombstones, N closes, and nobody else harmed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from realtime_omni.engine import commands as c
from realtime_omni.engine.consumer import Done
from realtime_omni.errors import CleanupError, SessionGoneError, StateError, TickError
from realtime_omni.session.values import SessionId
from realtime_omni.testing.faults import at, inject
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import TinyKVWorld


class SlowRelease:
    """A release that takes ``polls`` looks, then succeeds or raises."""

    def __init__(self, engine: InlineEngine, session_id: str, polls: int, error: Exception | None = None) -> None:
        self.release = type(engine.runner).release
        self.engine, self.session_id, self.polls, self.error = engine, session_id, polls, error

    def poll(self) -> bool:
        self.polls -= 1
        if self.polls >= 0:
            return False
        if self.error is not None:
            raise self.error
        return self.release(self.engine.runner, SessionId(self.session_id)).poll()


def slow(engine: InlineEngine, polls: int, errors: list[Exception | None] | None = None) -> list[str]:
    """Make releases of this engine slow; returns the list that collects what was released."""
    begun: list[str] = []

    def release(session_id: str) -> Any:
        begun.append(session_id)
        return SlowRelease(engine, session_id, polls, errors.pop(0) if errors else None)

    engine.runner.release = release  # type: ignore[method-assign, assignment]
    return begun


def engine_with(*names: str, **how: Any) -> InlineEngine:
    engine = InlineEngine(TinyKVWorld(), **how)
    for seed, name in enumerate(names):
        engine.create(name, seed=seed)
        engine.next(name)
    return engine


@pytest.mark.req("AC-12")
@pytest.mark.parametrize("state", ["active", "failed kept", "failed released"])
def test_close_frees_all_pages_and_the_id_can_be_used_again(state: str) -> None:
    engine = InlineEngine(TinyKVWorld(), on_failure="release" if state == "failed released" else "keep")
    free = engine.free_pages
    engine.create("a")
    engine.next("a")
    assert engine.free_pages < free
    if state != "active":
        with inject(engine, "forward:2"), pytest.raises(TickError):
            engine.next("a")
        assert engine.view("a").state == "failed"
        assert (engine.free_pages == free) is (state == "failed released")
    engine.close("a")
    assert engine.notices[-1].kind == "closed"
    assert engine.notices[-1].view.state == "closed"
    assert engine.free_pages == free
    assert "a" not in engine.engine.registry
    engine.create("a")
    assert engine.next("a").chunk_index == 0


@pytest.mark.req("AC-13")
def test_a_failed_cleanup_leaves_a_tombstone_that_refuses_everything_but_close() -> None:
    engine = engine_with("a", "b")
    with inject(engine, "release", "a"):
        with pytest.raises(CleanupError):
            engine.close("a")
        assert engine.view("a").state == "cleanup_failed"
        with pytest.raises(StateError) as exists:
            engine.create("a")
        assert exists.value.code == "session_exists"
        for call in (engine.reset, engine.next, engine.rollback, engine.abort, engine.attach):
            with pytest.raises(StateError) as refused:
                call("a")
            assert refused.value.code == "cleanup_failed"
        with pytest.raises(StateError):
            engine.accept("a", 0, prompt="red")
        assert engine.next("b").chunk_index == 1
    engine.close("a")
    assert "a" not in engine.engine.registry
    engine.create("a")
    assert engine.kinds("a") == ["cleanup_failed", "closed"]


@pytest.mark.req("AC-13")
def test_a_tombstone_is_retried_with_growing_pauses_until_it_succeeds() -> None:
    engine = engine_with("a", "b")
    attempts: list[float] = []

    def fail() -> None:
        attempts.append(engine.clock.now_s())
        raise OSError("the device is busy")

    with at(engine, "release", fail, "a", times=None):
        with pytest.raises(CleanupError):
            engine.close("a")
        while engine.clock.now_s() < 200:
            engine.advance(0.25)
    pauses = [b - a for a, b in pairwise(attempts)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    engine.advance(60)
    assert "a" not in engine.engine.registry
    assert engine.next("b").chunk_index == 1


def test_the_engine_knows_when_to_wake_up_for_a_tombstone() -> None:
    engine = engine_with("a")
    assert engine.engine.next_deadline_s() is None
    with inject(engine, "release"), pytest.raises(CleanupError):
        engine.close("a")
    assert engine.engine.next_deadline_s() == engine.clock.now_s() + 1


def test_failed_release_of_a_failed_tick_is_a_tombstone_and_cannot_be_reset() -> None:
    engine = engine_with("a", "b", on_failure="release")
    with inject(engine, "release", "a", times=None):
        with inject(engine, "forward:1", "a"), pytest.raises(TickError):
            engine.next("a")
        assert engine.view("a").state == "cleanup_failed"
        with pytest.raises(StateError) as refused:
            engine.reset("a")
        assert refused.value.code == "cleanup_failed"
        assert engine.next("b").chunk_index == 1
    engine.advance(1)
    assert "a" not in engine.engine.registry
    assert engine.kinds("a") == ["cleanup_failed", "failed", "closed"]


@pytest.mark.req("AC-15")
def test_many_closes_while_cleanup_runs_clean_up_once_and_all_succeed() -> None:
    engine = engine_with("a")
    begun = slow(engine, polls=3)
    tickets = [engine.post_close("a") for _ in range(3)]
    engine.cycle()
    tickets.append(engine.post_close("a"))
    assert engine.view("a").state == "closing"
    assert not any(engine.answered(t) for t in tickets)
    engine.cycle(4)
    assert [engine.error(t) for t in tickets] == [None] * 4
    assert begun == ["a"]
    assert engine.runner.pages()[0] == 0


@pytest.mark.req("AC-15")
@pytest.mark.parametrize("polls", [1, 2])
def test_many_closes_of_a_session_whose_cleanup_fails_try_once_and_all_fail(polls: int) -> None:
    engine = engine_with("a")
    begun = slow(engine, polls, [OSError("busy")])
    tickets = [engine.post_close("a") for _ in range(4)]
    engine.cycle(3)
    assert [type(engine.error(t)) for t in tickets] == [CleanupError] * 4
    assert begun == ["a"]
    assert engine.view("a").state == "cleanup_failed"
    engine.close("a")
    assert begun == ["a", "a"]


def test_closing_holds_the_place_until_the_release_is_done() -> None:
    engine = engine_with("a", sessions=1)
    slow(engine, polls=2)
    ticket = engine.post_close("a")
    engine.absorb()
    with pytest.raises(StateError):
        engine.create("a")
    engine.cycle(3)
    assert engine.error(ticket) is None
    engine.runner.release = type(engine.runner).release.__get__(engine.runner)  # type: ignore[method-assign]
    engine.create("a")


@pytest.mark.parametrize("call", ["next", "accept", "reset"])
def test_calls_during_closing_are_told_that_the_session_is_gone(call: str) -> None:
    engine = engine_with("a")
    slow(engine, polls=10)
    engine.post_close("a")
    engine.cycle()
    with pytest.raises(SessionGoneError):
        engine.accept("a", 0, prompt="red") if call == "accept" else getattr(engine, call)("a")


@pytest.mark.parametrize("point", ["forward:1", "forward:2", "forward:3", "decode", "sync"])
@pytest.mark.parametrize("how", ["close", "abort", "reset", "detach"])
def test_close_abort_and_reset_act_between_two_passes_and_the_others_of_the_batch_do_not_notice(
    how: str, point: str
) -> None:
    work: list[tuple[str, tuple[str, ...]]] = []
    engine = InlineEngine(TinyKVWorld(trace=lambda what, sessions: work.append((what, sessions))))
    alone = InlineEngine(TinyKVWorld())
    for e, names in ((engine, "abc"), (alone, "ac")):
        for name in names:
            e.create(name, seed=ord(name))
            e.next(name)
    work.clear()
    where = {"ticket": 0, "session_id": SessionId("b")}
    command = {
        "close": c.Close(**where),
        "abort": c.Abort(**where),
        "reset": c.Reset(**where),
        "detach": c.Detach(**where, grace_s=0),
    }[how]
    with at(engine, point, lambda: engine.send(command)):
        a, b, rest = engine.next_all("abc")
    assert isinstance(b, SessionGoneError if how in ("close", "detach") else TickError)
    order = ["forward:1", "forward:2", "forward:3", "decode", "sync"]
    done = [what for what, sessions in work if "b" in sessions]
    # The command was put just before `point` ran, so b is in that piece of work and in none after it.
    assert done == order[: order.index(point) + 1][:4]
    expected = alone.next_all("ac")
    for got, want in zip((a, rest), expected, strict=True):
        assert got.artifacts["frames"].data.tobytes() == want.artifacts["frames"].data.tobytes()  # type: ignore[union-attr]
    assert [engine.kv_bits(s) for s in "ac"] == [alone.kv_bits(s) for s in "ac"]
    if how == "abort":
        assert engine.view("b").state == "active"
        assert engine.next("b").chunk_index == 1
    if how == "reset":
        assert engine.next("b").chunk_index == 0


def test_close_does_not_wait_for_the_running_tick() -> None:
    engine = engine_with("a", "b")
    order: list[str] = []
    tickets: dict[str, int] = {}

    def close() -> None:
        tickets["close"] = engine.post_close("a")

    def look() -> None:
        order.append("answered" if engine.answered(tickets["close"]) else "waiting")

    tickets["a"], tickets["b"] = engine.post_next("a"), engine.post_next("b")
    with at(engine, "forward:2", close), at(engine, "forward:3", look):
        engine.cycle()
    assert order == ["answered"]
    assert engine.result(tickets["b"]).chunk_index == 1


def test_a_device_that_is_broken_for_good_releases_even_where_the_policy_is_to_keep() -> None:
    engine = engine_with("a")
    with inject(engine, "sync", error=RuntimeError("CUDA error: an illegal memory access")), pytest.raises(TickError):
        engine.next("a")
    assert engine.runner.pages()[0] == 0
    with pytest.raises(StateError, match="released"):
        engine.rollback("a")


def test_a_reset_that_the_worker_fails_releases_the_session_and_can_be_tried_again() -> None:
    engine = engine_with("a")
    with inject(engine, "release"), pytest.raises(TickError):
        engine.reset("a")
    assert engine.view("a").state == "failed"
    assert engine.runner.pages()[0] == 0
    engine.reset("a")
    assert engine.view("a").epoch == 1
    assert engine.next("a").chunk_index == 0


def test_a_reset_whose_release_fails_twice_is_a_tombstone() -> None:
    engine = engine_with("a")
    with inject(engine, "release", times=2), pytest.raises(TickError):
        engine.reset("a")
    assert engine.view("a").state == "cleanup_failed"
    engine.advance(1)
    assert "a" not in engine.engine.registry


@pytest.mark.parametrize("then", ["reset", "close"])
@pytest.mark.parametrize("error", [None, OSError("busy")], ids=["succeeds", "fails"])
def test_a_failed_session_whose_release_still_runs_takes_reset_and_close(then: str, error: Exception | None) -> None:
    engine = engine_with("a", on_failure="release")
    begun = slow(engine, 2, [error])
    with inject(engine, "forward:1"), pytest.raises(TickError):
        engine.next("a")
    where = {"ticket": 0, "session_id": SessionId("a")}
    ticket = engine.send(c.Reset(**where) if then == "reset" else c.Close(**where))
    engine.cycle(6)
    if then == "close" and error is None:
        assert engine.error(ticket) is None
        assert begun == ["a"]
        assert "a" not in engine.engine.registry
    elif then == "close":
        assert isinstance(engine.error(ticket), CleanupError)
        assert engine.view("a").state == "cleanup_failed"
    elif error is None:
        assert engine.error(ticket) is None
        assert engine.next("a").chunk_index == 0
    else:
        assert isinstance(engine.error(ticket), TickError)
        assert engine.view("a").state == "failed"
        engine.reset("a")
        assert engine.next("a").chunk_index == 0


def test_shutdown_takes_every_session_down_the_close_path() -> None:
    engine = engine_with("a", "b")
    engine.engine.close_all("shutdown")
    assert [(n.session_id, n.kind, n.reason) for n in engine.notices] == [
        ("a", "closed", "shutdown"),
        ("b", "closed", "shutdown"),
    ]
    assert engine.runner.pages()[0] == 0


def test_a_release_that_is_done_at_once_is_a_release() -> None:
    assert Done().poll() is True
