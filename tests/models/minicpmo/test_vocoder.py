"""MiniCPM-o with its own vocoder, converted: a call's turn, saved and gone on with; and what the converter refuses."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import torch

from models.minicpmo.test_contract import hear, speech
from models.minicpmo.tiny import checkpoint, recipe, with_vocoder
from realtime_omni.build import kv_spec
from realtime_omni.errors import ConfigError
from realtime_omni.models import catalog
from realtime_omni.models.minicpmo.model import MiniCPMO
from realtime_omni.models.minicpmo.mouth import Job
from realtime_omni.models.minicpmo.vocoder import convert
from realtime_omni.models.minicpmo.vocoder.convert import convert_weights
from realtime_omni.session.frame import Respond
from realtime_omni.session.values import SessionId
from realtime_omni.testing.inline import InlineEngine

OWN = {"vocoder": "", "vocoder_options": {"steps": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return with_vocoder(checkpoint(tmp_path_factory.mktemp("minicpm") / "tiny"))


@pytest.mark.req("AC-43")
def test_a_call_speaks_and_goes_on_alike_when_it_was_saved_in_a_turn(folder: Path) -> None:
    """And holds no more than is planned for it, the states of its rewinds among it."""
    config = recipe(folder, **OWN)
    model = catalog.build(config)
    engine = InlineEngine(model, config)
    engine.create("a", seed=0)
    planned, loud = kv_spec(config, model.spec).model_owned_bytes_per_session, 0
    for number in range(7):
        loud += bool(np.abs(speech(hear(engine, "a", number, Respond(f"x{number}")))).max() > 0.01)
        assert engine.runner.state_bytes(SessionId("a")) <= planned
    assert loud >= 3
    engine.rest()
    assert engine.state_of("a").mouth.voice is not None
    engine.restore(engine.snapshot("a"), "b")
    for number in (7, 8):
        assert np.array_equal(speech(hear(engine, "a", number)), speech(hear(engine, "b", number)))


@torch.no_grad()
def test_on_a_cpu_a_calls_sound_is_bit_for_bit_what_it_is_alone(folder: Path) -> None:
    """In float32, where a second of phase makes 1e-2 of a product's last digit."""
    model = catalog.build(recipe(folder, **OWN))
    assert isinstance(model, MiniCPMO)
    vocoder = model._vocoder
    alone, together = ([vocoder.begin(None)] * 3 for _ in range(2))
    for second in range(2):
        jobs = [tuple((5 * row + second + code) % 40 for code in range(28)) for row in range(3)]
        made = vocoder.sound([Job(voice, codes, False) for voice, codes in zip(together, jobs, strict=True)])
        single = [vocoder.sound([Job(voice, codes, False)])[0] for voice, codes in zip(alone, jobs, strict=True)]
        for (sound, memory), (expected, kept) in zip(made, single, strict=True):
            assert torch.equal(sound, expected)
            assert all(torch.equal(memory[name], kept[name]) for name in kept)
        together, alone = ([memory for _, memory in each] for each in (made, single))


def test_a_folder_without_a_converted_vocoder_says_what_to_run(tmp_path: Path) -> None:
    bare = checkpoint(tmp_path / "bare")
    with pytest.raises(ConfigError, match=r"run python -m realtime_omni\.models\.minicpmo\.vocoder\.convert"):
        catalog.build(recipe(bare, **OWN))
    with_vocoder(bare)
    with pytest.raises(ConfigError, match="stepz"):
        catalog.build(recipe(bare, vocoder="", vocoder_options={"stepz": 2}))
    next((bare / "assets" / "token2wav").glob("voice-*")).unlink()
    with pytest.raises(ConfigError, match="speaks in a voice's sample"):
        catalog.build(recipe(bare, **OWN))


class Other:
    """Not a tensor."""


def test_the_converter_reads_tensors_of_the_known_names_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    files = folder / "assets" / "token2wav"
    flow, hift = (torch.load(files / f"{name}.pt", weights_only=True) for name in ("flow", "hift"))

    def refused(match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            convert_weights(tmp_path)
        assert not list(tmp_path.glob("*.safetensors"))

    refused("lacks flow.pt")
    torch.save({"weight": Other()}, tmp_path / "flow.pt")
    refused("more than tensors")
    torch.save(flow, tmp_path / "flow.pt")
    torch.save({f"generator.{name}": tensor for name, tensor in hift.items()}, tmp_path / "hift.pt")
    convert_weights(tmp_path).unlink()
    (tmp_path / "flow.pt").write_bytes(b"PK")
    refused("damaged")
    torch.save({**flow, "encoder.more": torch.zeros(1)}, tmp_path / "flow.pt")
    refused("unexpected: encoder.more")
    torch.save({**flow, "encoder.after_norm.bias": torch.zeros(3)}, tmp_path / "flow.pt")
    refused(r"other shapes: encoder.after_norm.bias is \[3\]")
    torch.save(hift, tmp_path / "flow.pt")
    refused("not a flow of token2wav")
    torch.save(flow, tmp_path / "flow.pt")
    del hift["conv_post.bias"]
    torch.save(hift, tmp_path / "hift.pt")
    refused("missing: conv_post.bias")


def test_a_crafted_checkpoint_is_refused_before_it_costs_anything(folder: Path, tmp_path: Path) -> None:
    files = folder / "assets" / "token2wav"
    flow, hift = (torch.load(files / f"{name}.pt", weights_only=True) for name in ("flow", "hift"))
    name, lengths = "input_embedding.weight", "conv_pre.parametrizations.weight.original0"

    def refused(match: str, flow: object = flow, hift: object = hift) -> None:
        torch.save(flow, tmp_path / "flow.pt")
        torch.save(hift, tmp_path / "hift.pt")
        with pytest.raises(ConfigError, match=match):
            convert_weights(tmp_path)
        assert not list(tmp_path.glob("*.safetensors"))

    for wrong in (
        torch.zeros(1).expand(1 << 40, 2),
        torch.zeros(2, 2, dtype=torch.int64),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, 2, device="meta"),
    ):
        refused("'input_embedding.weight' is no tensor of floating point numbers", {name: wrong}, {})
    refused("5 is no tensor", {5: torch.zeros(1)}, {})
    refused("input_embedding.weight is not finite", {**flow, name: flow[name] * math.nan})
    refused("missing: .* and .* more", {**flow, "decoder.estimator.blocks.99999999999.x": torch.zeros(1)})
    refused("no network's", {**flow, "encoder.encoders.0.self_attn.pos_bias_u": torch.zeros(0, 3)})
    refused("no length beside it, or of another shape", hift={**hift, lengths: torch.ones(7, 1, 1)})
    refused("conv_pre.weight is there twice", hift={**hift, "conv_pre.weight": torch.ones(1)})
    torch.save({name: torch.zeros(10_000)}, tmp_path / "stored.pt")
    with ZipFile(tmp_path / "stored.pt") as stored, ZipFile(tmp_path / "flow.pt", "w", ZIP_DEFLATED) as packed:
        for part in stored.namelist():
            packed.writestr(part, stored.read(part))
    with pytest.raises(ConfigError, match=r"flow\.pt is compressed"):
        convert_weights(tmp_path)


def test_a_conversion_that_fails_leaves_what_was_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flow", "hift"):
        shutil.copy(folder / "assets" / "token2wav" / f"{name}.pt", tmp_path)
    before = convert_weights(tmp_path).read_bytes()

    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left on the device")

    monkeypatch.setattr(convert, "save_file", full)
    with pytest.raises(ConfigError, match=r"token2wav\.safetensors cannot be written: no space left"):
        convert_weights(tmp_path)
    assert (tmp_path / "token2wav.safetensors").read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["flow.pt", "hift.pt", "token2wav.safetensors"]
