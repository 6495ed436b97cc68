"""Leases: nobody listens, somebody comes back, time runs out. The clock is the test's."""

from __future__ import annotations

from typing import Any

import pytest

from realtime_omni.errors import ArgumentError, SessionGoneError
from realtime_omni.testing.faults import at
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import TinyKVWorld


def engine_with(*names: str, **how: Any) -> InlineEngine:
    engine = InlineEngine(TinyKVWorld(), **how)
    for seed, name in enumerate(names):
        engine.create(name, seed=seed)
        engine.next(name)
    return engine


def test_a_detached_session_closes_when_the_grace_is_over_and_not_before() -> None:
    engine = engine_with("a", "b")
    engine.detach("a", 30.0)
    assert not engine.view("a").attached
    assert engine.engine.next_deadline_s() == 30.0
    engine.advance(29.9)
    assert engine.next("a").chunk_index == 1
    engine.advance(0.1)
    assert "a" not in engine.engine.registry
    assert engine.notices[-1].reason == "detached_expired"
    with pytest.raises(SessionGoneError):
        engine.attach("a")
    assert engine.next("b").chunk_index == 1


def test_a_session_that_is_attached_in_time_lives_on() -> None:
    engine = engine_with("a")
    engine.detach("a", 30.0)
    engine.advance(29)
    engine.attach("a")
    assert engine.view("a").attached
    engine.advance(1000)
    assert engine.next("a").chunk_index == 1


def test_detaching_without_grace_closes_at_once() -> None:
    engine = engine_with("a")
    engine.detach("a", 0)
    assert engine.kinds("a") == ["closed"]
    assert engine.runner.pages()[0] == 0


@pytest.mark.parametrize("grace", [float("nan"), float("inf"), True, "10", None], ids=repr)
def test_a_grace_that_is_no_time_is_refused_instead_of_lasting_for_ever(grace: Any) -> None:
    engine = engine_with("a")
    with pytest.raises(ArgumentError) as refused:
        engine.detach("a", grace)
    assert refused.value.path == "grace_s"
    assert engine.view("a").attached


def test_an_expired_lease_acts_during_a_running_tick_after_it_and_tells_the_waiter() -> None:
    engine = engine_with("a", max_batch=1)
    engine.detach("a", 1.0)
    running, waiting = engine.post_next("a"), engine.post_next("a")
    with at(engine, "forward:2", lambda: engine.clock.advance(5)):
        engine.cycle(2)
    assert engine.result(running).chunk_index == 1
    assert isinstance(engine.error(waiting), SessionGoneError)


def test_a_lease_that_expires_on_a_tombstone_does_not_hurry_its_retries() -> None:
    engine = engine_with("a")
    attempts: list[float] = []

    def fail() -> None:
        attempts.append(engine.clock.now_s())
        raise OSError("busy")

    with at(engine, "release", fail, times=None):
        engine.detach("a", 1.0)
        for _ in range(20):
            engine.advance(0.5)
    assert attempts == [1.0, 2.0, 4.0, 8.0]
