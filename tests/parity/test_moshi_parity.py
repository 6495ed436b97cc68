"""Moshi against kyutai's moshi 0.2.13; ``make_moshi_golden.py`` made the files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from parity.moshi_calls import Calls
from parity.rebuilt import moshi
from realtime_omni.models.moshi.codec import CodecState, run
from realtime_omni.models.moshi.config import mimi_config, read_config
from realtime_omni.models.moshi.mimi import Mimi
from realtime_omni.models.moshi.network import MoshiLM
from realtime_omni.models.moshi.weights import load_lm, load_mimi

GOLDEN = moshi()
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


def codec() -> Mimi:
    config = mimi_config(json.loads((GOLDEN / "mimi" / "mimi_config.json").read_text()))
    network = Mimi(config, 4)
    load_mimi(network, GOLDEN / "mimi" / "mimi.safetensors", device="cpu")
    return network


@pytest.fixture(scope="module")
def mimi() -> Mimi:
    torch.set_num_threads(1)
    return codec()


@pytest.fixture(scope="module")
def trace() -> dict[str, Tensor]:
    return load_file(GOLDEN / "mimi" / "trace.safetensors")


def _sound(trace: dict[str, Tensor], frame_samples: int) -> Tensor:
    """What the reference was given: [calls, frames, samples]."""
    clips, _, frames = trace["codes"].shape
    noise = np.random.default_rng(5).normal(0, 0.3, (clips, frames * frame_samples)).astype(np.float32)
    return torch.from_numpy(noise).view(clips, frames, frame_samples)


@torch.inference_mode()
def test_codes_of_streamed_sound_are_the_references(mimi: Mimi, trace: dict[str, Tensor]) -> None:
    """Two calls in one batch, the second two frames late: every code, three windows long."""
    sound, late = _sound(trace, mimi.config.frame_samples), 2
    states = [CodecState.start(mimi.encoder.carried, "cpu")] * 2
    for at in range(sound.shape[1] + late):
        places = [(call, at - call * late) for call in range(2) if 0 <= at - call * late < sound.shape[1]]
        frame = torch.stack([sound[place] for place in places])
        codes, after = run(mimi.encode, mimi.config, frame, [states[call] for call, _ in places])
        for (call, when), got, state in zip(places, codes, after, strict=True):
            states[call] = state
            assert got.tolist() == trace["codes"][call, :, when].tolist(), f"frame {when} of call {call}"


@torch.inference_mode()
def test_decoded_sound_is_the_references(mimi: Mimi, trace: dict[str, Tensor]) -> None:
    """To 1e-5, past the window's edge; and a state that is kept goes on as the first time."""
    said, expected = trace["said"].long(), trace["sound"]
    states = [CodecState.start(mimi.decoder.carried, "cpu")] * 2
    kept, out = states, []
    for at in range(said.shape[2]):
        if at == 9:
            kept = states
        sound, states = run(mimi.decode, mimi.config, said[:, :, at], states)
        out.append(sound)
    assert float((torch.cat(out, 1)[:, ::7] - expected).abs().max()) <= 1e-5  # every seventh sample is kept
    again, _ = run(mimi.decode, mimi.config, said[:, :, 9], kept)
    assert torch.equal(again, out[9])
