"""Checkpoints in the real layouts: dimensions read off the tensors, and what is refused before a weight is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.lingbot.tiny import CONFIG, tiny_network
from models.wan.native import native
from realtime_omni.config import load
from realtime_omni.errors import ConfigError
from realtime_omni.models.common.fp8 import quantise
from realtime_omni.models.common.packing import fingerprint_of_files
from realtime_omni.models.common.wan.transformer import WanTransformer
from realtime_omni.models.common.wan.vae import WanVAE
from realtime_omni.models.common.wan.weights import load_transformer, shards
from realtime_omni.models.lingbot.loader import dimensions
from realtime_omni.models.lingbot.loader import load as load_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "lingbot" / "transformers"
    folder.mkdir(parents=True)
    tensors = native(tiny_network(torch.float32))
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[::2]}, folder / "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in names[1::2]}, folder / "model-00002-of-00002.safetensors")
    return tmp_path / "lingbot"


def test_dimensions_are_read_off_the_tensors_and_the_weights_arrive(checkpoint: Path) -> None:
    folder = checkpoint / "transformers"
    assert dimensions(folder, head_dim=CONFIG.head_dim) == CONFIG
    with torch.device("meta"):
        network = type(tiny_network())(CONFIG)
    load_transformer(network, folder, dtype=torch.float32, device="cpu")
    for name, tensor in tiny_network(torch.float32).state_dict().items():
        assert torch.equal(network.state_dict()[name], tensor), name


def test_the_head_size_can_come_from_the_configuration(checkpoint: Path) -> None:
    folder = checkpoint / "transformers"
    (folder / "config.json").write_text(json.dumps({"attention_head_dim": CONFIG.head_dim}))
    assert dimensions(folder).heads == CONFIG.heads
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        dimensions(folder)


@pytest.mark.parametrize("size", ["128", 0, -12, 12.0, None, True])
def test_a_head_size_that_is_none_is_refused(checkpoint: Path, size: object) -> None:
    folder = checkpoint / "transformers"
    (folder / "config.json").write_text(json.dumps({"attention_head_dim": size}))
    with pytest.raises(ConfigError, match="has no heads of"):
        dimensions(folder)


@pytest.mark.parametrize(
    "name", ["patch_embedding.weight", "blocks.0.ffn.0.weight", "patch_embedding_wancamctrl.weight"]
)
def test_a_matrix_that_is_a_number_is_missing(checkpoint: Path, name: str) -> None:
    folder = checkpoint / "transformers"
    (path,) = (path for path in folder.glob("*.safetensors") if name in load_file(path))
    save_file(load_file(path) | {name: torch.zeros(())}, path)
    with pytest.raises(ConfigError, match=f"missing: {name}"):
        dimensions(folder, CONFIG.head_dim)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"patches.bias": torch.zeros(24)}, "patch_embedding.bias and patches.bias are the same tensor"),
        ({"patch_embedding.bias": torch.zeros(24, dtype=torch.int8)}, "patch_embedding.bias is I8"),
    ],
)
def test_a_tensor_that_is_stored_twice_or_quantised_is_refused(
    checkpoint: Path, extra: dict[str, torch.Tensor], words: str
) -> None:
    folder = checkpoint / "transformers"
    (path,) = (path for path in folder.glob("*.safetensors") if "patch_embedding.bias" in load_file(path))
    save_file(load_file(path) | extra, path)
    with torch.device("meta"):
        network = type(tiny_network())(CONFIG)
    with pytest.raises(ConfigError, match=words):
        load_transformer(network, folder, dtype=torch.float32, device="cpu")
    assert all(parameter.is_meta for parameter in network.parameters())


def test_the_fingerprint_knows_the_weights_and_the_settings(checkpoint: Path) -> None:
    folder = checkpoint / "transformers"
    before = fingerprint_of_files(shards(folder), "a")
    assert fingerprint_of_files(shards(folder), "a") == before
    assert fingerprint_of_files(shards(folder), "b") != before
    path = folder / "model-00002-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert fingerprint_of_files(shards(folder), "a") != before


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        (["options.checkpoint=/no/such/folder"], "options.checkpoint"),
        (["options.head_dim=16"], "options.head_dim"),
        (["options.head_dim=12"], "options.vae"),
        (["options.head_dim=12", "options.pixels=false"], "options.checkpoint"),
    ],
    ids=["absent", "heads", "a pickled autoencoder", "a pickled text encoder"],
)
def test_what_is_missing_is_named(checkpoint: Path, changes: list[str], path: str) -> None:
    given = [f"options.checkpoint={checkpoint}", "device=cpu", "dtype=float32", "options.compile=false", *changes]
    with pytest.raises(ConfigError) as caught:
        load_model(load("lingbot-world", {}, given))
    assert caught.value.path == path


@pytest.mark.parametrize(
    "change", ["options.height=100", "options.labels=[]", "options.shift=0", "options.horizon=3", "options.sinks=1"]
)
def test_options_out_of_bounds_are_refused(checkpoint: Path, change: str) -> None:
    given = [f"options.checkpoint={checkpoint}", "device=cpu", "dtype=float32", change]
    with pytest.raises(ConfigError):
        load_model(load("lingbot-world", {}, given))


def test_matrices_in_eight_bits_are_made_while_loading(tmp_path: Path) -> None:
    """Equal to a loaded network whose matrices are quantised afterwards; other weights untouched."""
    config = replace(CONFIG, head_dim=16)
    generator = torch.Generator().manual_seed(3)
    plain = WanTransformer(config)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    save_file(native(plain), tmp_path / "model.safetensors")
    with torch.device("meta"):
        network = WanTransformer(config)
    load_transformer(network, tmp_path, dtype=torch.float32, device="cpu", fp8=network.heavy_matrices())
    quantise(plain, plain.heavy_matrices())
    wanted = plain.state_dict()
    assert network.state_dict().keys() == wanted.keys()
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor.float(), wanted[name].float()), name
    assert network.layers[1].up.weight.dtype == torch.float8_e4m3fn
    assert network.layers[1].cross.kv.weight.dtype == torch.float32


def test_a_small_decoder_that_is_not_there_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WanVAE, "load", lambda folder, **how: None)
    (checkpoint / "vae").mkdir()
    given = [f"options.checkpoint={checkpoint}", "device=cpu", "dtype=float32", "options.head_dim=12"]
    with pytest.raises(ConfigError) as caught:
        load_model(load("lingbot-world", {}, [*given, "options.decoder=taew2_1.safetensors", "options.compile=false"]))
    assert caught.value.path == "options.decoder"


def test_widths_without_an_eight_bit_kernel_are_refused(checkpoint: Path) -> None:
    given = [f"options.checkpoint={checkpoint}", "device=cpu", "options.fp8=true", "options.head_dim=12"]
    with pytest.raises(ConfigError, match="24 and 32"):
        load_model(load("lingbot-world", {}, given))
