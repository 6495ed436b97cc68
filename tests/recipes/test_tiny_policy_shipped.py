"""The policy of the package: the files that were measured, and that they solve the task by looking and by reading."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from realtime_omni.config import load as load_config  # noqa: E402
from realtime_omni.models import catalog  # noqa: E402
from realtime_omni.models.pi0.model import TINY_POLICY, TinyPolicy  # noqa: E402
from recipes.tiny_policy import evaluate  # noqa: E402
from recipes.tiny_policy.shape import EXECUTED, HORIZON  # noqa: E402
from recipes.tiny_policy.table import TASKS  # noqa: E402

CARD = Path(evaluate.__file__).with_name("MODEL_CARD.md")
MAX_WEIGHT_BYTES = 10_000_000


def measured(capsys: pytest.CaptureFixture[str], tasks: tuple[int, ...], *flags: str) -> dict[str, Any]:
    """One episode of each of these tasks, by the command."""
    numbers = map(str, tasks)
    assert evaluate.main(["--episodes", str(len(tasks)), "--json", "--tasks", *numbers, *flags]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["episodes"] == len(tasks)
    return told


def test_the_weights_are_the_ones_that_the_model_card_is_about():
    weights = (TINY_POLICY / "model.safetensors").read_bytes()
    assert f"`{hashlib.sha256(weights).hexdigest()}`" in CARD.read_text(encoding="utf-8")
    assert sum(file.stat().st_size for file in TINY_POLICY.iterdir()) < MAX_WEIGHT_BYTES


def test_the_recipe_serves_it_and_says_what_it_is():
    config = load_config("tiny-policy", {}, [])
    model = catalog.build(config)
    assert isinstance(model, TinyPolicy)
    assert (model.spec.name, model.spec.policy.horizon, model.spec.policy.joins) == ("tiny-policy", HORIZON, True)
    assert config.kv.memory_bytes >= config.kv.requested_sessions * model.spec.kv.model_owned_bytes_per_session


def test_an_episode_of_every_task_is_solved_and_none_blindly(capsys: pytest.CaptureFixture[str]):
    assert measured(capsys, tuple(range(len(TASKS))))["success_rate"] == 1.0
    assert measured(capsys, (0, 4), "--cameras", "blank")["success_rate"] == 0.0


def test_chunks_that_come_late_solve_it_too(capsys: pytest.CaptureFixture[str]):
    late = measured(capsys, (0, 7), "--delay", str(EXECUTED - 1), "--rtc", "trained")
    assert late["success_rate"] == 1.0
