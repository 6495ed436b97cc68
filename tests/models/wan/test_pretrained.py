"""Parts that other libraries read: whole or refused. The text encoder and the vision tower need transformers, which the
ordinary environment does not have; ``pip install transformers`` lets their tests run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.lingbot.tiny import tiny_vae
from realtime_omni.errors import ArgumentError, ConfigError
from realtime_omni.models.common.wan.clip import MEAN, STD, CLIPVision, prepared
from realtime_omni.models.common.wan.text import TOKENS, UMT5
from realtime_omni.models.common.wan.vae import CodecState, WanVAE

HOW: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
transformers_only = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the package transformers"
)


def change(file: Path, kind: str) -> str:
    """Break a file of weights; returns the name of the tensor that is wrong, or the empty string."""
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:1000])
        return ""
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if tensors[name].dim() > 1)
    if kind == "missing":
        del tensors[name]
    else:
        tensors[name] = torch.zeros(3, 3, 3)
    save_file(tensors, file, metadata={"format": "pt"})
    return name if kind == "missing" else ""


@pytest.fixture
def vae_folder(tmp_path: Path) -> Path:
    tiny_vae()._vae.save_pretrained(tmp_path / "vae")
    return tmp_path / "vae"


def test_an_autoencoder_comes_back_as_it_was_written(vae_folder: Path) -> None:
    latents = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(1))
    expected, _ = tiny_vae().decode(latents, CodecState())
    assert torch.equal(WanVAE.load(vae_folder, **HOW).decode(latents, CodecState())[0], expected)


@pytest.mark.parametrize("kind", ["missing", "truncated", "other shape", "pickled", "no folder"])
def test_an_autoencoder_that_is_not_whole_is_refused(vae_folder: Path, kind: str) -> None:
    (file,) = vae_folder.glob("*.safetensors")
    name = ""
    if kind == "pickled":
        file.rename(file.with_suffix(".bin"))
    elif kind == "no folder":
        vae_folder = vae_folder / "none"
    else:
        name = change(file, kind)
    with pytest.raises(ConfigError) as caught:
        WanVAE.load(vae_folder, **HOW)
    assert caught.value.path == "options.vae"
    assert name in str(caught.value)


def test_a_picture_is_prepared_as_the_tower_was_trained() -> None:
    white = torch.full((3, 30, 50), 255, dtype=torch.uint8)
    expected = (1 - torch.tensor(MEAN)) / torch.tensor(STD)
    assert torch.allclose(prepared(white, 28).mean(dim=(1, 2)), expected, atol=1e-5)
    assert prepared(white, 28).shape == (3, 28, 28)


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """``tokenizer``, ``text_encoder`` and ``image_encoder`` in transformers' layout, tiny and random."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import (
        CLIPVisionConfig,
        CLIPVisionModel,
        PreTrainedTokenizerFast,
        UMT5Config,
        UMT5EncoderModel,
    )

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((c, -3.0) for c in "▁abcdefghijklmnopqrstuvwxyz.")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "tokenizer")
    torch.manual_seed(0)
    text = UMT5Config(vocab_size=len(pieces), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    UMT5EncoderModel(text).save_pretrained(tmp_path / "text_encoder")
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=14
    )
    CLIPVisionModel(vision).save_pretrained(tmp_path / "image_encoder")
    return tmp_path


@transformers_only
@torch.no_grad()
def test_a_prompt_is_read_as_if_it_were_padded_and_masked(pipeline: Path) -> None:
    from transformers import UMT5EncoderModel

    text, prompt = UMT5(pipeline, **HOW), "a walk in the town."
    count = len(prompt) + 2
    got = text.encode(prompt)
    assert got.shape == (TOKENS, 32)
    assert not got[count:].any()
    ids = torch.tensor([text._ids(prompt) + [0] * (TOKENS - count)])
    mask = (torch.arange(TOKENS) < count).long()[None]
    reference = UMT5EncoderModel.from_pretrained(pipeline / "text_encoder")
    expected = reference(input_ids=ids, attention_mask=mask).last_hidden_state[0]
    assert torch.allclose(got[:count], expected[:count], atol=1e-5)
    with pytest.raises(ArgumentError, match="602 tokens, at most 512") as caught:
        text.check("a " * 300)
    assert caught.value.path == "prompt"


@transformers_only
@torch.no_grad()
def test_a_picture_gives_the_layer_before_the_last(pipeline: Path) -> None:
    from transformers import CLIPVisionModel

    picture = torch.randint(0, 256, (3, 32, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    tower = CLIPVision(pipeline / "image_encoder", **HOW)
    reference = CLIPVisionModel.from_pretrained(pipeline / "image_encoder")
    states = reference(pixel_values=prepared(picture, 28)[None], output_hidden_states=True).hidden_states
    assert tower.tokens == 5
    assert torch.allclose(tower.encode(picture), states[2][0], atol=1e-5)


@transformers_only
@pytest.mark.parametrize("kind", ["missing", "truncated", "other shape"])
@pytest.mark.parametrize("part", ["text_encoder", "image_encoder"])
def test_an_encoder_that_is_not_whole_is_refused(pipeline: Path, part: str, kind: str) -> None:
    name = change(pipeline / part / "model.safetensors", kind)
    with pytest.raises(ConfigError) as caught:
        UMT5(pipeline, **HOW) if part == "text_encoder" else CLIPVision(pipeline / part, **HOW)
    assert caught.value.path == ("options.checkpoint" if part == "text_encoder" else "options.image_encoder")
    assert name in str(caught.value)


@transformers_only
@pytest.mark.parametrize("part", ["text_encoder", "tokenizer"])
def test_a_folder_that_is_missing_or_empty_is_named(pipeline: Path, part: str) -> None:
    (pipeline / part).rename(pipeline / "elsewhere")
    with pytest.raises(ConfigError, match=part):
        UMT5(pipeline, **HOW)
    (pipeline / part).mkdir()
    with pytest.raises(ConfigError, match=part):
        UMT5(pipeline, **HOW)
