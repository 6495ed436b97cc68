"""Recorded passes: the same worlds as without them, over rolling windows, in batches that lose rows, with and without a
clean pass. On the CPU buffers are filled and used as on a GPU; what is not seen here is the capture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.lingbot.tiny import CONFIG, HashedText, tiny_network
from realtime_omni.engine import commands as c
from realtime_omni.models.common.wan import graphs
from realtime_omni.models.common.wan.graphs import GraphedNetwork
from realtime_omni.models.lingbot.model import LingBot, Settings
from realtime_omni.session.values import ControlInput, SessionId
from realtime_omni.testing.inline import InlineEngine, small_config

SMALL = Settings(height=32, width=48, window_frames=6, sink_frames=3)


def world(*, recorded: bool, dtype: torch.dtype = torch.float32, settings: Settings = SMALL) -> InlineEngine:
    model = LingBot(tiny_network(dtype), HashedText(CONFIG.text_width), settings, graphs=recorded, fingerprint="0" * 64)
    return InlineEngine(model, small_config(dtype=str(dtype).removeprefix("torch.")))


def recorded_passes(engine: InlineEngine) -> int:
    passes: Any = engine.runner.model
    assert isinstance(passes._passes, GraphedNetwork)
    return passes._passes.recorded


def lived(engine: InlineEngine, names: tuple[str, ...]) -> list[np.ndarray]:
    """Two sessions out of step at first, then in one batch; a prompt, keys, an abort, a fork, a close."""
    found = []
    engine.create(names[0], seed=1)
    found += [engine.next(names[0]).artifacts["latents"].data for _ in range(4)]
    engine.create(names[1], seed=2)
    engine.accept(names[1], 0, controls=[ControlInput("camera", "realtime_omni.held_keys.v1", {"keys": ["w", "l"]})])
    for block in range(6):
        if block == 3:
            engine.accept(names[0], 0, prompt="a red room")
        for chunk in engine.next_all(names):
            assert not isinstance(chunk, Exception)
            found.append(chunk.artifacts["latents"].data)
    tickets = [engine.post_next(name) for name in names]
    engine.absorb()
    engine.plan()
    engine.send(c.Close(ticket=0, session_id=SessionId(names[1])))
    engine.rest()
    found.append(engine.result(tickets[0]).artifacts["latents"].data)
    return [*found, *(engine.next(names[0]).artifacts["latents"].data for _ in range(2))]


@pytest.mark.parametrize("clean_pass", [True, False])
def test_recorded_worlds_are_the_plain_ones(clean_pass: bool) -> None:
    settings = Settings(height=32, width=48, window_frames=6, sink_frames=3, clean_pass=clean_pass)
    plain, recorded = world(recorded=False, settings=settings), world(recorded=True, settings=settings)
    for wanted, got in zip(lived(plain, ("a", "b")), lived(recorded, ("a", "b")), strict=True):
        assert np.array_equal(wanted, got)
    assert recorded_passes(recorded) == 4  # of one row and of two, each with and without history to write
    plain.runner.check()


def test_the_least_recently_used_size_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 1)
    plain, recorded = world(recorded=False), world(recorded=True)
    for wanted, got in zip(lived(plain, ("a", "b")), lived(recorded, ("a", "b")), strict=True):
        assert np.array_equal(wanted, got)
    assert recorded_passes(recorded) == 2


def test_windows_that_fill_and_float64_run_plainly() -> None:
    for dtype, blocks in ((torch.float32, 2), (torch.float64, 6)):
        engine = world(recorded=True, dtype=dtype)
        engine.create("a", seed=1)
        for _ in range(blocks):
            engine.next("a")
        assert recorded_passes(engine) == 0


def test_a_pass_has_run_over_its_own_tensors_before_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiler does for new tensors, and the timing of its kernels, may not fall into a capture."""
    engine, ran = world(recorded=True), []
    network: Any = engine.runner.model
    plain, repeated = network.network.trunk, graphs._repeated

    def trunk(latents: torch.Tensor, *rest: Any, **more: Any) -> Any:
        ran.append(latents)
        return plain(latents, *rest, **more)

    def captured(work: Any) -> Any:
        before = ran[-1]
        found = repeated(work)
        assert ran[-1] is before
        return found

    monkeypatch.setattr(network.network, "trunk", trunk)
    monkeypatch.setattr(graphs, "_repeated", captured)
    engine.create("a", seed=1)
    for _ in range(4):
        engine.next("a")
    assert recorded_passes(engine) == 2


def test_a_size_that_cannot_be_recorded_runs_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: GraphedNetwork, buffers: Any, kind: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(GraphedNetwork, "_record", fails)
    plain, recorded = world(recorded=False), world(recorded=True)
    for wanted, got in zip(lived(plain, ("a", "b")), lived(recorded, ("a", "b")), strict=True):
        assert np.array_equal(wanted, got)
    assert recorded_passes(recorded) == 0
