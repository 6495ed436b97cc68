"""Captured stages are the plain ones: any rows, out of step, forked, back again, after a fault. On the CPU everything runs but
the capture. All rules of a model are held against them in ``test_contract``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from models.moshi.tiny import checkpoint, persona, recipe
from realtime_omni.engine import commands as c
from realtime_omni.models import catalog
from realtime_omni.models.moshi import captured
from realtime_omni.models.moshi.captured import CapturedStages, fitting
from realtime_omni.models.moshi.codec import CodecState
from realtime_omni.models.moshi.model import Moshi
from realtime_omni.models.moshi.stages import Stages
from realtime_omni.session.frame import Configure, Frame
from realtime_omni.session.values import Chunk, SessionId
from realtime_omni.testing.faults import inject
from realtime_omni.testing.inline import InlineEngine, small_config


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("moshi") / "tiny")


def test_the_recipe_says_whether_there_are_graphs(folder: Path) -> None:
    for speed, kind in (("auto", Stages), ("plain", Stages), ("graphs", CapturedStages)):
        model = catalog.build(recipe(folder, speed=speed))
        assert isinstance(model, Moshi)
        assert type(model._stages) is kind


def test_a_batch_is_filled_up_to_the_next_size() -> None:
    assert [fitting(rows) for rows in (1, 3, 33, 64, 129)] == [1, 4, 48, 64, 129]


def _hear(engine: InlineEngine, name: str, number: int) -> np.ndarray:
    sound = np.random.default_rng((ord(name[0]), number)).normal(0, 0.1, 1920).astype(np.float32)
    chunk = engine.ask(c.Next(ticket=0, session_id=SessionId(name), frame=Frame(sound)))
    assert isinstance(chunk, Chunk)
    return np.asarray(chunk.artifacts["speech"].data)


def test_calls_that_fork_and_go_back_say_what_they_do_without_graphs(folder: Path) -> None:
    """Over three windows, with tokens drawn by chance; the fork and its parent run on from one value."""

    def conversation(speed: str) -> list[np.ndarray]:
        config = recipe(folder, speed=speed)
        engine = InlineEngine(catalog.build(config), config)
        for number, name in enumerate("ab"):
            engine.create(name, seed=number)
        said = [_hear(engine, name, n) for n in range(20) for name in ("ab" if n % 3 else "a")]
        engine.fork("a", "c")
        said += [_hear(engine, name, n) for n in range(20, 24) for name in "acb"]
        engine.rewind("a", 21)
        return said + [_hear(engine, name, n) for n in range(21, 26) for name in "ac"]

    for plain, graphs in zip(conversation("plain"), conversation("graphs"), strict=True):
        assert np.abs(plain - graphs).max() <= 1e-5


def test_prompts_of_calls_out_of_step_are_what_they_are_without_graphs(tmp_path: Path) -> None:
    """A voice of embeddings beside one of codes and a text, rows that come and go, one that fails in the middle."""

    def conversation(captured_rows: int | None) -> list[np.ndarray]:
        model = persona(tmp_path, captured_rows=captured_rows)
        engine = InlineEngine(model, small_config(dtype="float32", rewind_blocks=4))
        said = []
        for number, (name, voice) in enumerate((("a", "north"), ("b", "south"), ("c", "south"))):
            engine.create(name, seed=number)
            frame = Frame(np.zeros(1920, np.float32), (Configure(instructions="hello " * number, voice=voice),))
            engine.ask(c.Next(ticket=0, session_id=SessionId(name), frame=frame))
            engine.cycle(4)
            if name == "b":
                with inject(engine, "prefill:1"):
                    engine.rest()
                failed = [each for each in "ab" if engine.view(each).state == "failed"]
                assert failed
                for each in failed:
                    engine.rollback(each)
        engine.rest()
        for number in range(6):
            said += [_hear(engine, name, number) for name in "abc"]
        return said

    plain, graphs = (conversation(rows) for rows in (None, 4))
    assert any(np.abs(each).max() > 0 for each in plain)
    for one, two in zip(plain, graphs, strict=True):
        assert np.abs(one - two).max() <= 1e-5


# ---------------------------------------------------------------------- the codec's rows


def _frames(model: Moshi, rows: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return 0.1 * torch.randn(rows, model.mimi.config.frame_samples, generator=generator)


def _both(model: Moshi, states: Sequence[CodecState], number: int) -> list[CodecState]:
    """One frame of every state both ways; the captured way's states."""
    plain = Stages(model._thinking, model.mimi)
    sound = _frames(model, len(states), number)
    want, expected = plain.listen(sound, states)
    codes, after = model._stages.listen(sound, states)
    assert torch.equal(codes, want)
    for got, state in zip(after, expected, strict=True):
        assert got.frames == state.frames
        assert float((got.memory - state.memory).abs().max()) <= 1e-5
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got.recent, state.recent, strict=True))
    return after


@pytest.fixture
def model(tmp_path: Path) -> Moshi:
    return persona(tmp_path, captured_rows=4)


@torch.no_grad()
def test_more_calls_than_rows_take_turns(model: Moshi) -> None:
    """Three batches of four over four rows: nobody's value is lost, whoever's row is taken."""
    start = CodecState.start(model.mimi.encoder.carried, "cpu")
    groups = [[start] * 4 for _ in range(3)]
    for number in range(8):
        for group in range(3):
            groups[group] = _both(model, groups[group], 10 * number + group)
    mixed = _both(model, [groups[0][3], groups[1][0], groups[2][2]], 99)
    _both(model, [mixed[1], groups[0][0], mixed[1], mixed[0]], 100)  # one value twice, as of two forks


@torch.no_grad()
def test_a_value_goes_on_from_where_it_was_whatever_became_of_its_row(
    model: Moshi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that fails behind the graph has changed the row, and not the value."""
    states = [CodecState.start(model.mimi.encoder.carried, "cpu")] * 3
    for number in range(7):
        states = _both(model, states, number)

    def broken(rows: torch.Tensor) -> list[torch.Tensor]:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(captured, "owned", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            model._stages.listen(_frames(model, 3, 50), states)
    later = _both(model, states, 7)
    _both(model, later, 8)
    _both(model, states, 9)  # and once more from before


@torch.no_grad()
def test_rows_of_calls_that_are_gone_are_taken_first(model: Moshi) -> None:
    start = CodecState.start(model.mimi.encoder.carried, "cpu")
    assert isinstance(model._stages, CapturedStages)
    ears = model._stages._ears
    first = _both(model, [start] * 3, 0)
    assert [ref is not None for ref in ears._held] == [True, True, True, False]
    del first[1]
    (new,) = _both(model, [start], 1)
    assert ears._held[1]() is new
    _both(model, [start], 2)
    assert [ears._held[row]() for row in (0, 1, 2)] == [first[0], new, first[1]]
