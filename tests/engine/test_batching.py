"""A batch of N equals N batches of one; order of service; shared thread fairness."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realtime_omni.engine.scheduler import Due, choose
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.models import TinyKVWorld, move

EVERYTHING = ("frames", "latent", "sound")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two branches": {"branches": ("cond", "free")},
    "prefill": {"prefill": True},
    "no sink": {"sink_frames": 0, "window_frames": 6},
}


def bits(chunk: Any) -> tuple[bytes, ...]:
    return tuple(artifact.data.tobytes() for artifact in chunk.artifacts.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_of_n_equals_n_batches_of_one_bit_for_bit(variant: str) -> None:
    names = "abcd"
    together, alone = (InlineEngine(TinyKVWorld(**VARIANTS[variant])) for _ in range(2))
    for engine in (together, alone):
        for seed, name in enumerate(names):
            engine.create(name, seed=seed, prompt=("red", "green", "blue")[seed % 3])
        for extra in range(3):  # histories of different lengths share the batches that follow
            for name in names[: extra + 1]:
                engine.next(name)
    for number in range(6):
        for engine in (together, alone):
            engine.accept("b", number, prompt=("green", "blue")[number % 2], controls=[move(number)])
        batch = together.next_all(names, outputs=EVERYTHING)
        singles = [alone.next(name, outputs=EVERYTHING) for name in names]
        assert [bits(c) for c in batch] == [bits(c) for c in singles]
        assert {c.timings.batch_size for c in batch} == {4}  # type: ignore[union-attr]
        assert {c.timings.batch_size for c in singles} == {1}
        assert len({bits(c) for c in singles}) == 4
    assert [together.kv_bits(n) for n in names] == [alone.kv_bits(n) for n in names]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sets(st.sampled_from("abc"), min_size=1), min_size=1, max_size=6), st.integers(1, 3))
def test_who_shares_a_batch_with_whom_never_changes_a_world(rounds: list[set[str]], max_batch: int) -> None:
    engine, alone = InlineEngine(TinyKVWorld(), max_batch=max_batch), InlineEngine(TinyKVWorld())
    for e in (engine, alone):
        for name in "abc":
            e.create(name, seed=ord(name))
    for members in rounds:
        names = sorted(members)
        assert [bits(c) for c in engine.next_all(names)] == [bits(alone.next(n)) for n in names]


def test_seed_prompt_control_history_and_start_all_change_the_picture() -> None:
    """The model that the other tests trust is sensitive to everything it should be sensitive to."""

    def world(
        chunks: int = 3, *, seed: int = 1, prompt: str = "red", dx: int | None = None, **how: Any
    ) -> tuple[bytes, ...]:
        engine = InlineEngine(TinyKVWorld(**how))
        engine.create("a", seed=seed, prompt=prompt)
        if dx is not None:
            engine.accept("a", 0, controls=[move(dx)])
        return bits([engine.next("a") for _ in range(chunks)][-1])

    base = world()
    assert base == world()
    different = {
        "seed": world(seed=2),
        "prompt": world(prompt="blue"),
        "control": world(dx=1),
        "chunk": world(4),
        "window": world(4, window_frames=2, sink_frames=0),
        "start": world(prefill=True),
        "guidance": world(branches=("cond", "free")),
    }
    assert len({base, *different.values()}) == len(different) + 1


def test_an_event_changes_the_chunk_that_names_it_and_none_before() -> None:
    quiet, told = InlineEngine(TinyKVWorld()), InlineEngine(TinyKVWorld())
    for engine in (quiet, told):
        engine.create("a", seed=1)
    assert bits(quiet.next("a")) == bits(told.next("a"))
    told.accept("a", 0, prompt="blue")
    assert bits(quiet.next("a")) != bits(told.next("a"))


def test_the_longest_waiting_sessions_are_served_first() -> None:
    due = [Due("a", 3), Due("b", 1), Due("c", 2), Due("d", 1)]
    assert choose(due, 2) == ("b", "d")
    assert choose(due, 9) == ("b", "d", "c", "a")
    assert choose([], 4) == ()


def test_with_fewer_places_than_sessions_nobody_starves() -> None:
    engine = InlineEngine(TinyKVWorld(), sessions=5, max_batch=2)
    names = "abcde"
    for name in names:
        engine.create(name)
    waiting = {name: engine.post_next(name) for name in names}
    since = dict.fromkeys(names, 0)
    for _ in range(20):
        engine.cycle()
        for name in names:
            since[name] += 1
            if engine.answered(waiting[name]):
                waiting[name], since[name] = engine.post_next(name), 0
        assert max(since.values()) < 3  # ceil(5 waiting / 2 places)


def test_sessions_of_different_outputs_share_a_batch() -> None:
    engine = InlineEngine(TinyKVWorld())
    for name in "ab":
        engine.create(name)
    tickets = [engine.post_next("a", outputs=("latent",)), engine.post_next("b", outputs=("sound",))]
    engine.cycle()
    chunks = [engine.result(t) for t in tickets]
    assert [tuple(c.artifacts) for c in chunks] == [("latent",), ("sound",)]
    assert {c.timings.batch_size for c in chunks} == {2}
