"""Moshi against kyutai's moshi 0.2.13; ``make_moshi_golden.py`` made the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from parity.moshi_calls import Calls
from realtime_omni.models.moshi.config import read_config
from realtime_omni.models.moshi.network import MoshiLM
from realtime_omni.models.moshi.weights import load_lm

GOLDEN = Path(__file__).parent / "golden" / "moshi"
NOT_YET = -2
"""In the reference's frames: nothing whole yet, or the call did not run."""


def language_model(name: str) -> MoshiLM:
    torch.set_num_threads(1)
    config = read_config(GOLDEN / name)
    assert config is not None
    network = MoshiLM(config)
    load_lm(network, GOLDEN / name / "model.safetensors", dtype=torch.float32, device="cpu")
    return network


@pytest.fixture(scope="module", params=["lm-8", "lm-16"])
def case(request: pytest.FixtureRequest) -> tuple[MoshiLM, dict[str, Tensor]]:
    return language_model(request.param), load_file(GOLDEN / request.param / "trace.safetensors")


def _expected(frame: Tensor) -> list[int]:
    return [-1 if token == NOT_YET else token for token in frame.tolist()]


def test_greedy_tokens_of_calls_out_of_step_are_the_references(case: tuple[MoshiLM, dict[str, Tensor]]) -> None:
    """Three calls in one batch, each running when it likes, for three and more windows: every token of text and sound."""
    network, trace = case
    user, running, frames = trace["user"].long(), trace["running"], trace["frames"]
    calls = Calls(network, frames.shape[-1])
    names = [str(call) for call in range(user.shape[1])]
    for name in names:
        calls.begin(name)
    for at in range(len(user)):
        due = [call for call in range(len(names)) if running[at, call]]
        got = calls.step({names[call]: user[at, call] for call in due})
        for call in due:
            assert got[names[call]].tolist() == _expected(frames[at, call]), f"step {at} of call {call}"
    assert min(calls.book.completed_frames(name) for name in names) > 2 * network.config.context


def test_one_call_alone_and_one_that_begins_late_are_the_references(case: tuple[MoshiLM, dict[str, Tensor]]) -> None:
    """The second call alone; then its place is taken by the third, which hears what it heard and says what it said."""
    network, trace = case
    user, running, frames = trace["user"].long(), trace["running"], trace["frames"]
    calls = Calls(network, frames.shape[-1])
    for call in (1, 2):
        calls.begin("a")
        for at in torch.nonzero(running[:, call]).flatten().tolist():
            assert calls.step({"a": user[at, call]})["a"].tolist() == _expected(frames[at, call])
        calls.end("a")
