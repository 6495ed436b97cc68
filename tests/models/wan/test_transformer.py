"""The Wan transformer against diffusers' own, its checkpoints, and history through paged memory."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from models.wan.native import native
from realtime_omni.errors import ConfigError
from realtime_omni.models.common.wan.rope import rotary
from realtime_omni.models.common.wan.transformer import WanConfig, WanTransformer, patchify, unpatchify
from realtime_omni.models.common.wan.weights import load_transformer

TINY = WanConfig(
    layers=2, heads=2, head_dim=12, mlp_width=32, in_channels=4, out_channels=4, text_width=16, frequencies=32
)


def oracle(seed: int = 0) -> torch.nn.Module:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(seed)
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=64,
    ).eval()
    for parameter in model.parameters():  # tables start at zero, and zero proves nothing
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def block_only(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    parts = (part.transpose(1, 2) for part in (q, k, v))
    return functional.scaled_dot_product_attention(*parts).transpose(1, 2)


def loaded(model: torch.nn.Module, folder: Path, config: WanConfig = TINY) -> WanTransformer:
    save_file(model.state_dict(), folder / "diffusion_pytorch_model.safetensors")
    with torch.device("meta"):
        network = WanTransformer(config)
    load_transformer(network, folder, dtype=torch.float32, device="cpu")
    return network.eval()


@torch.no_grad()
def test_the_block_stack_equals_diffusers(tmp_path: Path) -> None:
    model = oracle()
    network = loaded(model, tmp_path)
    latents, text = torch.randn(2, 4, 3, 6, 8), torch.randn(2, 5, 16)
    t = torch.tensor([833.0, 250.0])
    wanted = model(latents, t, text, return_dict=False)[0]
    got = network(
        latents.transpose(1, 2), t, torch.arange(3).expand(2, 3), network.text_cache(text), block_only
    ).transpose(1, 2)
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@torch.no_grad()
def test_both_layouts_fill_the_same_network(tmp_path: Path) -> None:
    """The native names, split over two shards."""
    network = loaded(oracle(), tmp_path)
    stored = native(network)
    folder = tmp_path / "native"
    folder.mkdir()
    names = sorted(stored)
    save_file({n: stored[n] for n in names[::2]}, folder / "model-1.safetensors")
    save_file({n: stored[n] for n in names[1::2]}, folder / "model-2.safetensors")
    with torch.device("meta"):
        again = WanTransformer(TINY)
    seen: list[tuple[int, int]] = []
    load_transformer(again, folder, dtype=torch.float32, device="cpu", progress=lambda *at: seen.append(at))
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, network.state_dict()[name]), name
    assert seen[-1][0] == seen[-1][1]
    assert [a for a, _ in seen] == sorted(a for a, _ in seen)


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "twice"])
def test_a_checkpoint_that_does_not_fit_is_refused_with_its_names(tmp_path: Path, damage: str) -> None:
    state = dict(oracle().state_dict())
    name = "blocks.1.attn1.to_k.weight"
    if damage == "missing":
        del state[name]
    elif damage == "extra":
        name = "blocks.7.attn1.to_k.weight"
        state[name] = torch.zeros(2)
    elif damage == "shape":
        state[name] = state[name][:5].contiguous()
    else:
        save_file({name: state[name]}, tmp_path / "again.safetensors")
    save_file(state, tmp_path / "model.safetensors")
    with torch.device("meta"):
        network = WanTransformer(TINY)
    with pytest.raises(ConfigError) as caught:
        load_transformer(network, tmp_path, dtype=torch.float32, device="cpu")
    shown = name if damage in ("extra", "twice", "shape") else "layers.1.attention.k.weight"
    assert shown in str(caught.value)
    assert network.head.weight.is_meta  # nothing was filled


@torch.no_grad()
def test_a_camera_that_is_zero_changes_nothing_and_one_that_is_not_does(tmp_path: Path) -> None:
    plain = loaded(oracle(), tmp_path)
    with_camera = WanTransformer(WanConfig(**{**fields(TINY), "camera_channels": 3}))
    with_camera.load_state_dict(plain.state_dict(), strict=False)
    for layer in with_camera.layers:
        for part in (layer.camera.scale, layer.camera.shift):
            torch.nn.init.zeros_(part.weight)
            torch.nn.init.zeros_(part.bias)
    latents, text, frames = torch.randn(1, 3, 4, 4, 6), torch.randn(1, 5, 16), torch.arange(3)[None]
    camera = torch.randn(1, 3, 3, 4, 6)
    t = torch.tensor([500.0])

    def run(network: WanTransformer, camera: torch.Tensor | None) -> torch.Tensor:
        cache = None if camera is None else network.camera_cache(camera)
        return network(latents, t, frames, network.text_cache(text), block_only, camera=cache)

    assert torch.equal(run(with_camera, camera), run(plain, None))
    torch.nn.init.normal_(with_camera.layers[0].camera.shift.weight, std=0.2)
    assert not torch.allclose(run(with_camera, camera), run(plain, None), atol=1e-4)


def fields(config: WanConfig) -> dict[str, int | float]:
    return {name: getattr(config, name) for name in WanConfig.__dataclass_fields__}


def test_patches_come_back() -> None:
    x = torch.randn(2, 3, 5, 4, 6)
    tokens = patchify(x)
    assert tokens.shape == (2, 18, 20)
    back = unpatchify(tokens.unflatten(-1, (5, 4)).transpose(-1, -2).flatten(-2), (2, 3), 5)
    assert torch.equal(back, x)
    with pytest.raises(ValueError, match="even"):
        patchify(torch.zeros(1, 1, 4, 3, 4))


def test_positions_in_the_tens_of_millions_are_exact() -> None:
    """Against Python's float64, and relative angles against those near zero."""
    far = 40_000_001
    cos, sin = rotary(torch.tensor([[far, far + 3]]), 1, 1, 12)
    assert cos.dtype == torch.float32
    time = 12 - 4 * (12 // 6)
    for pair in range(time // 2):
        angle = far * 10_000.0 ** (-2 * pair / time)
        assert cos[0, 0, 0, pair].item() == pytest.approx(math.cos(angle), abs=1e-6)
        assert sin[0, 0, 0, pair].item() == pytest.approx(math.sin(angle), abs=1e-6)
    near_cos, near_sin = rotary(torch.tensor([[0, 3]]), 1, 1, 12)
    turned = cos[0, 0] * cos[0, 1] + sin[0, 0] * sin[0, 1]
    assert torch.allclose(turned, near_cos[0, 0] * near_cos[0, 1] + near_sin[0, 0] * near_sin[0, 1], atol=1e-6)


@pytest.mark.parametrize("camera_channels", [0, 2])
@torch.no_grad()
def test_a_pass_for_its_keys_and_values_shows_those_of_the_whole_pass(camera_channels: int) -> None:
    torch.manual_seed(0)
    network = WanTransformer(replace(TINY, camera_channels=camera_channels))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    latents, frames = torch.randn(2, 3, 4, 4, 6), torch.arange(3).expand(2, -1)
    given = (latents, torch.zeros(2), frames, network.text_cache(torch.randn(2, 5, 16)))
    camera = network.camera_cache(torch.randn(2, 3, camera_channels, 4, 6)) if camera_channels else None
    seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    attended: list[int] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        attended.append(layer)
        write(layer, k, v)
        return block_only(layer, q, k, v)

    def write(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        seen.append((layer, k, v))

    network(*given, attend, camera=camera)
    network.commit(*given, attend, write, camera=camera)
    assert attended == [0, 1, 0], "the last layer of the second pass attends to nothing"
    assert [layer for layer, _, _ in seen] == [0, 1, 0, 1]
    for whole, alone in zip(seen[:2], seen[2:], strict=True):
        assert torch.equal(whole[1], alone[1])
        assert torch.equal(whole[2], alone[2])
