"""Whatever the engine makes ready before the first session opens takes what the engine hands it."""

from __future__ import annotations

import inspect

import pytest

from models.vla import checkpoints
from realtime_omni.build import build_runner
from realtime_omni.config import Config
from realtime_omni.models import catalog
from realtime_omni.models.base import WarmedModel
from realtime_omni.models.common.vla.graphs import GraphStages
from realtime_omni.models.common.vla.serving import VLAModel


@pytest.mark.parametrize("name", catalog.CATALOG)
def test_a_models_warm_up_is_the_contracts(name: str) -> None:
    """One that has the method and not the class would never be called; the class lets mypy hold it to the contract."""
    model = catalog.load_class(name)
    assert hasattr(model, "warm_up") == issubclass(model, WarmedModel)
    if issubclass(model, WarmedModel):
        assert inspect.signature(model.warm_up) == inspect.signature(WarmedModel.warm_up)


@pytest.mark.parametrize(("name", "folder"), [("pi0", "pi0"), ("pi0.5", "pi05"), ("smolvla", "smolvla")])
def test_a_policy_of_captured_stages_starts(name: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: captured for the engine's batch once, when it is loaded."""
    asked: list[int] = []
    monkeypatch.setattr(GraphStages, "warm_up", lambda stages, rows: asked.append(rows))
    options = {"checkpoint": str(checkpoints.GOLDEN / folder), "speed": "graphs"}
    config = Config(model=name, dtype="float32", options=options)
    model = catalog.build(config)
    assert isinstance(model, VLAModel)
    assert asked == []  # there is nothing to capture on a CPU
    model._device = _Cuda()  # type: ignore[assignment]
    model.capture(config.engine.max_batch)
    build_runner(config, model)
    assert asked == [config.engine.max_batch]


class _Cuda:
    type = "cuda"
