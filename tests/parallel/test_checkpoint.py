"""From a recipe and a checkpoint to ranks: each reads its share, and the world is that of one process."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from models.lingbot.tiny import HashedText
from models.wan.native import native
from parallel.tiny_ranks import SETTINGS, SHAPE, fill_share, whole
from realtime_omni.config import Config, load
from realtime_omni.errors import ConfigError
from realtime_omni.models.common.wan.sharded import ShardedTransformer
from realtime_omni.models.common.wan.weights import load_transformer
from realtime_omni.models.lingbot import loader
from realtime_omni.parallel.mesh import Grid
from realtime_omni.testing.inline import InlineEngine


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "lingbot" / "transformers"
    folder.mkdir(parents=True)
    save_file(native(whole()), folder / "model.safetensors")
    return tmp_path / "lingbot"


def recipe(checkpoint: Path, *changes: str) -> Config:
    given: dict[str, Any] = {
        "checkpoint": checkpoint,
        "head_dim": SHAPE.head_dim,
        "pixels": "false",
        "compile": "false",
    }
    shapes = {name: asdict(SETTINGS)[name] for name in ("height", "width", "window_frames", "sink_frames")}
    overrides = [f"options.{name}={value}" for name, value in (given | shapes).items()]
    device = ["device=cpu", "dtype=float32", "kv.memory_bytes=67108864", "engine.threads=1", "parallel.timeout_s=20"]
    return load("lingbot-world", {}, [*overrides, *device, *changes])


def test_a_recipe_spreads_a_checkpoint_over_ranks(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "UMT5", lambda *given, **how: HashedText(SHAPE.text_width))
    seen: list[list[np.ndarray]] = []
    for changes in ([], ["parallel.sp=1", "parallel.tp=2"]):
        config = recipe(checkpoint, *changes)
        engine = InlineEngine(loader.load(config), config)
        engine.create("a", seed=3)
        seen.append([engine.next("a").artifacts["latents"].data for _ in range(2)])
        engine.close("a")
        engine.runner.close()
    for ours, theirs in zip(*seen, strict=True):
        assert np.abs(ours - theirs).max() <= 1e-5


@pytest.mark.parametrize("rank", [0, 1])
def test_a_share_read_from_a_checkpoint_is_that_of_the_whole_network(checkpoint: Path, rank: int) -> None:
    grid = Grid(rank, 1, 2)
    read, cut = (ShardedTransformer(SHAPE, SimpleNamespace(grid=grid)) for _ in range(2))  # type: ignore[arg-type]
    load_transformer(read, checkpoint / "transformers", dtype=torch.float32, device="cpu", grid=grid)
    fill_share(cut, whole(), grid)
    for (name, ours), theirs in zip(read.named_parameters(), cut.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        (["options.prompt_switch=recache", "parallel.sp=2"], "options.prompt_switch"),
        (["options.prompt_switch=recache", "kv.window_frames=3"], "kv.window_frames"),
        (["options.graphs=true", "parallel.sp=2"], "options.graphs"),
    ],
    ids=["recache on ranks", "recache under another window", "graphs on ranks"],
)
def test_what_does_not_go_together_is_refused_before_a_weight_is_read(
    checkpoint: Path, changes: list[str], path: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        loader.load(recipe(checkpoint, *changes))
    assert refused.value.path == path


def test_a_recipe_whose_ranks_cannot_share_the_heads_is_refused_before_one_is_started(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="4 heads cannot be shared by 3") as refused:
        loader.load(recipe(checkpoint, "parallel.sp=3"))
    assert refused.value.path == "parallel"
