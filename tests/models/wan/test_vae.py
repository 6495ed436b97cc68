"""The streaming autoencoder against diffusers' whole-clip one and against itself, and the image condition's fixed point."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from realtime_omni.errors import ArgumentError
from realtime_omni.models.common.wan.vae import CodecState, ImageCondition, WanVAE, next_condition


@pytest.fixture(scope="module")
def modules() -> torch.nn.Module:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    return diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.5, 2.0, 1.0],
    ).eval()


def whole(modules: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
    config = modules.config
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
    with torch.no_grad():
        return modules.decode(latents.transpose(0, 1)[None] * std + mean).sample[0].transpose(0, 1)


@pytest.mark.parametrize("cut", [(3, 3), (6,), (1,) * 6, (2, 4)])
def test_decoding_in_pieces_is_decoding_the_clip(modules: torch.nn.Module, cut: tuple[int, ...]) -> None:
    latents = torch.randn(6, 4, 2, 2, generator=torch.Generator().manual_seed(1))
    vae, state, pictures = WanVAE(modules), CodecState(), []
    for end, size in zip(accumulate(cut), cut, strict=True):
        some, state = vae.decode(latents[end - size : end], state)
        pictures.append(some)
    assert torch.equal(torch.cat(pictures), vae.decode(latents, CodecState())[0])
    assert torch.allclose(torch.cat(pictures), whole(modules, latents), atol=1e-6)
    assert sum(len(p) for p in pictures) == 4 * 6 - 3


def test_a_state_is_a_snapshot(modules: torch.nn.Module) -> None:
    """Decoding on from it twice gives the same twice, and its tensors are what they were."""
    latents = torch.randn(3, 4, 2, 2)
    vae = WanVAE(modules)
    _, before = vae.decode(latents, CodecState())
    kept = [slot.clone() if isinstance(slot, torch.Tensor) else slot for slot in before.slots]
    once, _ = vae.decode(latents[:1], before)
    again, _ = vae.decode(latents[:1], before)
    assert torch.equal(once, again)
    assert before.equals(CodecState(tuple(kept)))


def test_a_packed_state_goes_on_the_same(modules: torch.nn.Module) -> None:
    vae = WanVAE(modules)
    _, state = vae.decode(torch.randn(1, 4, 2, 2), CodecState())  # some upsamplers have seen one frame only
    tensors, kinds = state.pack()
    like = vae.slot_shapes(16, 16)[1]
    back = CodecState.unpack({n: t.clone() for n, t in tensors.items()}, kinds, like)
    assert back.equals(state)
    assert "Rep" in back.slots
    following = torch.randn(2, 4, 2, 2)
    assert torch.equal(vae.decode(following, state)[0], vae.decode(following, back)[0])
    assert CodecState.unpack({}, [], like).is_fresh
    name = next(iter(tensors))
    swapped = [{"slot0": "slot1", "slot1": "slot0"}.get(k, k) if k else k for k in kinds]
    for bad_tensors, bad_kinds in (
        ({}, kinds),
        (tensors, kinds[:-1]),
        (tensors, [None, *kinds[1:]]),
        (tensors, swapped),
        ({**tensors, name: tensors[name].double()}, kinds),
        ({**tensors, name: tensors[name][:, :1]}, kinds),
    ):
        with pytest.raises(ArgumentError):
            CodecState.unpack(bad_tensors, bad_kinds, like)


def test_shapes_are_known_without_computing(modules: torch.nn.Module) -> None:
    vae = WanVAE(modules)
    _, decoder = vae.decode(torch.zeros(4, 4, 2, 2), CodecState())
    _, encoder = vae.encode(torch.zeros(9, 3, 16, 16), CodecState())
    for shapes, state in zip(vae.slot_shapes(16, 16), (encoder, decoder), strict=True):
        real = [slot.nbytes if isinstance(slot, torch.Tensor) else 0 for slot in state.slots]
        assert [shape.nbytes if shape else 0 for shape in shapes] == real
        assert sum(real) > 0


def test_encoding_in_pieces_is_encoding_the_clip(modules: torch.nn.Module) -> None:
    vae = WanVAE(modules)
    clip = torch.rand(9, 3, 16, 16) * 2 - 1
    at_once, _ = vae.encode(clip, CodecState())
    first, state = vae.encode(clip[:5], CodecState())
    second, _ = vae.encode(clip[5:], state)
    assert torch.equal(torch.cat((first, second)), at_once)
    with torch.no_grad():
        mode = modules.encode(clip.transpose(0, 1)[None]).latent_dist.mode()[0].transpose(0, 1)
    config = modules.config
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (config.latents_mean, config.latents_std))
    assert torch.allclose(at_once, (mode - mean) / std, atol=1e-6)


@pytest.mark.parametrize(("count", "fresh"), [(4, True), (0, True), (5, False), (3, False)])
def test_pictures_that_are_no_whole_latent_frames_are_refused(
    modules: torch.nn.Module, count: int, fresh: bool
) -> None:
    vae = WanVAE(modules)
    state = CodecState() if fresh else vae.encode(torch.zeros(1, 3, 16, 16), CodecState())[1]
    with pytest.raises(ValueError, match="latent frames"):
        vae.encode(torch.zeros(count, 3, 16, 16), state)


def test_the_image_condition_becomes_constant_and_is_then_what_encoding_on_would_give(
    modules: torch.nn.Module,
) -> None:
    vae, size = WanVAE(modules), (16, 16)
    condition, picture, seen = ImageCondition.start(), torch.rand(3, 16, 16) * 2 - 1, []
    for block in range(16):
        latents, condition = next_condition(vae, condition, 3, picture if block == 0 else None, size)
        seen.append(latents)
        if condition.constant is not None:
            break
    else:
        pytest.fail("no fixed point within 16 blocks")
    assert block > 1
    onward, _ = next_condition(vae, condition, 3, None, size)
    clip = torch.zeros(4 * 3 * (block + 2) - 3, 3, 16, 16)
    clip[0] = picture
    at_once, _ = vae.encode(clip, CodecState())
    assert torch.equal(torch.cat((*seen, onward)), at_once)


def test_what_a_codec_remembers_goes_to_where_it_computes() -> None:
    state = CodecState((torch.zeros(2), "Rep", None))
    assert state.on(torch.device("cpu")) is state
    moved = state.on(torch.device("meta"))
    assert isinstance(moved.slots[0], torch.Tensor)
    assert moved.slots[0].is_meta
    assert moved.slots[1:] == ("Rep", None)
