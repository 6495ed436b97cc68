"""Policies in the engine: an observation per tick, the newest wins, and everything acts between two denoise steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from realtime_omni.engine import commands as c
from realtime_omni.errors import AbortedError, ArgumentError, SessionGoneError, SupersededError
from realtime_omni.models.null.policy import NullPolicy, NullPolicyOptions
from realtime_omni.session.observation import Join, Observation
from realtime_omni.session.values import Chunk, SessionId
from realtime_omni.testing.faults import at, inject
from realtime_omni.testing.inline import InlineEngine

PICTURE = np.zeros((4, 4, 3), np.uint8)
A = SessionId("a")


def observation(first: float = 0.0, **fields: Any) -> Observation:
    """``first`` is every channel of the state, and so the first action."""
    given = {"images": {"base_0_rgb": PICTURE}, "state": np.full(3, first, np.float32)} | fields
    return Observation(**given)


def engine(**settings: Any) -> InlineEngine:
    made = InlineEngine(NullPolicy(NullPolicyOptions(state_dim=3, action_dim=2, horizon=4, steps=3)), **settings)
    made.create(A, seed=1)
    return made


def ask(inline: InlineEngine, state: float, session: SessionId = A) -> int:
    return inline.send(c.Next(ticket=0, session_id=session, observation=observation(state)))


def first_action(chunk: Chunk) -> float:
    return float(chunk.artifacts["actions"].data[0, 0])


def test_a_chunk_answers_its_own_observation() -> None:
    inline = engine()
    for state in (1.0, 2.0):
        chunk = inline.ask(c.Next(ticket=0, session_id=A, observation=observation(state)))
        np.testing.assert_array_equal(chunk.artifacts["actions"].data, [[state + i] * 2 for i in range(4)])
    assert chunk.chunk_index == 1
    inline.engine.check()


def test_the_newest_observation_takes_the_place_of_one_that_waits() -> None:
    inline = engine()
    old, new = ask(inline, 1.0), ask(inline, 2.0)
    inline.cycle()
    assert isinstance(inline.error(old), SupersededError)
    assert first_action(inline.result(new)) == 2.0
    assert inline.engine.counters.ticks_settled == 1


def test_an_observation_that_is_computed_is_finished_and_only_the_newest_follows() -> None:
    inline = engine()
    tickets: list[int] = []
    at(inline, "forward:2", lambda: tickets.extend((ask(inline, 2.0), ask(inline, 3.0))))
    running = ask(inline, 1.0)
    inline.cycle()
    inline.cycle()
    assert first_action(inline.result(running)) == 1.0
    assert isinstance(inline.error(tickets[0]), SupersededError)
    assert first_action(inline.result(tickets[1])) == 3.0


def test_the_newest_observation_inherits_the_turn() -> None:
    """Whoever sends often is served neither earlier nor later for it."""
    inline = engine(max_batch=1)
    inline.create("b", seed=1)
    ask(inline, 1.0)
    other = ask(inline, 5.0, SessionId("b"))
    newest = ask(inline, 2.0)
    inline.cycle()
    assert first_action(inline.result(newest)) == 2.0
    assert not inline.answered(other)
    inline.cycle()
    assert first_action(inline.result(other)) == 5.0


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (c.Close(ticket=0, session_id=A), SessionGoneError),
        (c.Reset(ticket=0, session_id=A), AbortedError),
        (c.Abort(ticket=0, session_id=A), AbortedError),
    ],
)
def test_close_reset_and_abort_act_between_two_denoise_steps(command: c.Command, error: type[Exception]) -> None:
    inline = engine()
    steps = []
    at(inline, "forward:1", lambda: inline.send(command))
    at(inline, "forward:3", lambda: steps.append("third"), times=None)
    ticket = ask(inline, 1.0)
    inline.cycle()
    assert isinstance(inline.error(ticket), error)
    assert not steps
    inline.engine.check()


def test_a_reset_begins_a_new_epoch_at_chunk_0() -> None:
    inline = engine()
    inline.ask(c.Next(ticket=0, session_id=A, observation=observation(1.0)))
    inline.ask(c.Reset(ticket=0, session_id=A))
    chunk = inline.ask(c.Next(ticket=0, session_id=A, observation=observation(1.0)))
    assert (chunk.epoch, chunk.chunk_index) == (1, 0)


def test_one_members_fault_stays_its_own() -> None:
    inline = engine()
    inline.create("b", seed=1)
    inject(inline, "forward:2", session_id="b", times=None)
    good, bad = ask(inline, 1.0), ask(inline, 2.0, SessionId("b"))
    inline.cycle()
    assert first_action(inline.result(good)) == 1.0
    assert inline.error(bad) is not None


def test_timings_tell_the_stages() -> None:
    inline = engine()
    chunk = inline.ask(c.Next(ticket=0, session_id=A, observation=observation()))
    assert set(chunk.timings.stages_ms) == {"begin", "denoise"}
    assert sum(chunk.timings.stages_ms.values()) == pytest.approx(chunk.timings.model_ms)


def test_a_policy_needs_an_observation_and_a_world_takes_none() -> None:
    with pytest.raises(ArgumentError, match="a policy computes from an observation"):
        engine().ask(c.Next(ticket=0, session_id=A))
    world = InlineEngine()
    world.create(A, seed=1)
    with pytest.raises(ArgumentError, match="this model takes no observations"):
        world.ask(c.Next(ticket=0, session_id=A, observation=observation()))


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"images": {"top": PICTURE}}, "images.top"),
        ({"images": {"base_0_rgb": PICTURE[None]}}, "images.base_0_rgb"),
        ({"images": {}}, "images"),
        ({"state": np.zeros(4, np.float32)}, "state"),
        ({"steps": 101}, "steps"),
    ],
)
def test_what_the_policy_cannot_use_is_refused_and_supersedes_nothing(fields: dict[str, Any], path: str) -> None:
    inline = engine()
    waiting = ask(inline, 1.0)
    refused = inline.send(c.Next(ticket=0, session_id=A, observation=observation(**fields)))
    inline.cycle()
    error = inline.error(refused)
    assert isinstance(error, ArgumentError)
    assert error.path == path
    assert first_action(inline.result(waiting)) == 1.0


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"images": {"base_0_rgb": PICTURE.astype(np.float32)}}, "images.base_0_rgb"),
        ({"images": {"base_0_rgb": PICTURE[..., :2]}}, "images.base_0_rgb"),
        ({"images": {"base_0_rgb": PICTURE[:0]}}, "images.base_0_rgb"),
        ({"images": {"base_0_rgb": PICTURE[None, None]}}, "images.base_0_rgb"),
        ({"images": {"base_0_rgb": [[0]]}}, "images.base_0_rgb"),
        ({"state": np.zeros(3)}, "state"),
        ({"state": np.zeros((3, 1), np.float32)}, "state"),
        ({"state": np.array([0, np.nan, 0], np.float32)}, "state"),
        ({"state": np.array([0, np.inf, 0], np.float32)}, "state"),
        ({"prompt": " "}, "prompt"),
        ({"noise": np.zeros(3, np.float32)}, "noise"),
        ({"noise": np.full((4, 2), np.nan, np.float32)}, "noise"),
        ({"noise": np.zeros((4, 2), np.float32), "seed": 1}, "seed"),
        ({"seed": -1}, "seed"),
        ({"seed": True}, "seed"),
        ({"steps": 0}, "steps"),
    ],
)
def test_an_observation_is_checked_when_it_is_made(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        observation(**fields)
    assert refused.value.path == path


@pytest.mark.parametrize("fields", [{"tick": -1}, {"tick": 0, "delay": -1}, {"tick": 0, "follows": 1.0}])
def test_a_join_counts_from_0(fields: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        Join(**fields)
