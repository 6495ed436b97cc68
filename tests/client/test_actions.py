"""The plan of a robot: chunks merged by control step, epoch and age."""

from __future__ import annotations

import random

import numpy as np
import pytest

from realtime_omni_client import ActionQueue


def chunk(*values: float) -> np.ndarray:
    return np.array([[value] for value in values], np.float32)


def planned(queue: ActionQueue, ticks: range) -> list[float | None]:
    actions = [queue.pop(tick) for tick in ticks]
    return [None if action is None else float(action[0]) for action in actions]


def test_a_chunk_is_executed_from_its_tick() -> None:
    queue = ActionQueue()
    assert queue.merge(chunk(1, 2, 3), seq=1, epoch=0, start_tick=10) == 3
    assert queue.dry_in(10) == 3
    assert [float(action[0]) for action in queue.planned(11)] == [2, 3]
    assert queue.planned(9) == []
    assert planned(queue, range(9, 14)) == [None, 1, 2, 3, None]


def test_rows_of_ticks_that_are_past_are_dropped() -> None:
    queue = ActionQueue()
    queue.pop(11)
    assert queue.merge(chunk(1, 2, 3, 4), seq=1, epoch=0, start_tick=10) == 2
    assert planned(queue, range(12, 15)) == [3, 4, None]


def test_a_newer_chunk_replaces_the_plan_from_its_first_valid_tick_on() -> None:
    queue = ActionQueue()
    queue.merge(chunk(1, 2, 3, 4), seq=1, epoch=0, start_tick=0)
    assert planned(queue, range(1)) == [1]
    assert queue.merge(chunk(9, 9, 30, 40, 50), seq=2, epoch=0, start_tick=0, valid_from=2) == 3
    assert planned(queue, range(1, 6)) == [2, 30, 40, 50, None]


def test_a_chunk_behind_a_newer_one_changes_nothing() -> None:
    queue = ActionQueue()
    queue.merge(chunk(5, 6), seq=2, epoch=0, start_tick=0)
    assert queue.merge(chunk(1, 2), seq=1, epoch=0, start_tick=0) == 0
    assert queue.late == 1
    assert planned(queue, range(2)) == [5, 6]


def test_a_chunk_of_another_epoch_changes_nothing() -> None:
    queue = ActionQueue()
    queue.merge(chunk(1), seq=1, epoch=0, start_tick=0)
    queue.reset(1)
    assert len(queue) == 0
    assert queue.merge(chunk(2), seq=2, epoch=0, start_tick=0) == 0
    assert queue.merge(chunk(3), seq=3, epoch=1, start_tick=0) == 1
    assert planned(queue, range(1)) == [3]


def test_the_delay_is_what_was_executed_since_the_merge() -> None:
    queue = ActionQueue()
    queue.merge(chunk(1, 2, 3), seq=1, epoch=0, start_tick=0)
    planned(queue, range(2))
    queue.pop(7)  # nothing was planned for it
    assert queue.consumed == 2
    queue.merge(chunk(1, 2), seq=2, epoch=0, start_tick=8)
    assert queue.consumed == 0


def test_ticks_never_go_back() -> None:
    queue = ActionQueue()
    queue.pop(3)
    with pytest.raises(ValueError, match="past"):
        queue.pop(3)


@pytest.mark.parametrize("seed", range(20))
def test_random_merges_equal_a_plan_written_out(seed: int) -> None:
    """Against the rule said plainly: the newest chunk merged so far owns every tick from its first valid one on."""
    rng = random.Random(seed)
    queue, plan, newest, tick, due = ActionQueue(), dict[int, float](), 0, 0, 0
    for number in range(200):
        if rng.random() < 0.5:
            found = queue.pop(tick)
            assert (None if found is None else float(found[0])) == plan.get(tick)
            due = tick + 1
            tick += rng.choice((1, 1, 2))
        else:
            seq, start, valid, length = rng.randrange(number + 2), tick + rng.randrange(-4, 4), rng.randrange(3), 6
            if start < 0:
                continue
            rows = chunk(*(number + row / 8 for row in range(length)))
            queue.merge(rows, seq=seq, epoch=0, start_tick=start, valid_from=valid)
            past = max(due, start + valid)
            if seq > newest and past < start + length:
                newest = seq
                plan = {at: value for at, value in plan.items() if at < past}
                plan |= {start + row: number + row / 8 for row in range(length) if start + row >= past}
